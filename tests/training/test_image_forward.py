"""The trainer's log-probs of samples with images are those of the model itself."""

import numpy as np
import pytest
import torch
from PIL import Image as Pictures
from transformers import AutoModelForImageTextToText, AutoProcessor

from tests.vision import asked, picture, vision_config
from turnwise.chat.images import read_parts
from turnwise.chat.template import load_template, load_tokenizer
from turnwise.errors import InputError, TrajectoryError
from turnwise.training.batching import Columns, plan_micro_batches
from turnwise.training.rank import TrainerRank
from turnwise.training.sample import Sample
from turnwise.training.supervised import demonstrate
from turnwise.trajectory import audit
from turnwise.trajectory.images import extended, placed

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def rank(vision_path: str) -> TrainerRank:
    return TrainerRank(vision_config(vision_path))


def sample_of(vision_path: str, *parts: object, answer: list[int], number: int = 0) -> Sample:
    config = vision_config(vision_path)
    template = load_template(config, load_tokenizer(config))
    prompt = template.render([read_parts(asked(*parts), "a message")])
    ids = extended(prompt, answer)
    mask = [0] * len(prompt) + [1] * len(answer)
    return Sample.to_score(ids, mask, number, placed(ids))


def by_the_model(vision_path: str, sample: Sample, pictures: list[Pictures.Image]) -> np.ndarray:
    """Return the log-probs by the model's own processor and its own logits."""
    model = AutoModelForImageTextToText.from_pretrained(vision_path, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(vision_path)
    given = processor.image_processor(images=pictures, return_tensors="pt") if pictures else {}
    ids = torch.from_numpy(sample.token_ids_T)[None]
    if pictures:
        given["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False, **given).logits[0, :-1].float()
    scores = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    return scores.numpy()[sample.response_mask_T[1:]]


def test_rows_with_and_without_images_are_scored_as_the_model_does(
    rank: TrainerRank, vision_path: str
) -> None:
    pictures = [[picture()], [picture(84, 56, 1), picture(28, 28, 2)], []]
    samples = [
        sample_of(vision_path, "Look: ", *shown, "?", answer=[5, 6, 7 + row], number=row)
        for row, shown in enumerate(pictures)
    ]
    columns = Columns.of(samples, "padded", CPU)
    with torch.no_grad():
        found, _ = rank._models.score("policy", columns)
    rows = zip(samples, pictures, strict=True)
    expected = np.concatenate([by_the_model(vision_path, *row) for row in rows])
    assert np.abs(found.numpy() - expected).max() < 1e-5


def test_the_tower_learns(rank: TrainerRank, vision_path: str) -> None:
    sample = sample_of(vision_path, picture(), "?", answer=[5, 6])
    found, _ = rank._models.score("policy", Columns.of([sample], "padded", CPU))
    found.sum().backward()  # type: ignore[no-untyped-call]
    parameters = dict(rank._models.policy.model.named_parameters())
    gradients = [p.grad for name, p in parameters.items() if ".visual." in name]
    assert len(gradients) > 10
    assert all(gradient is not None for gradient in gradients)
    for parameter in parameters.values():
        parameter.grad = None


def test_a_sampled_marker_is_a_token_as_any_other(rank: TrainerRank, vision_path: str) -> None:
    marker: int = rank._models.policy.model.config.image_token_id
    sample = sample_of(vision_path, picture(), "?", answer=[5, marker, 6])
    with torch.no_grad():
        found, _ = rank._models.score("policy", Columns.of([sample], "padded", CPU))
    # Up to the marker, nothing depends on it.
    shorter = sample_of(vision_path, picture(), "?", answer=[5])
    with torch.no_grad():
        first, _ = rank._models.score("policy", Columns.of([shorter], "padded", CPU))
    assert found[0] == pytest.approx(float(first[0]), abs=1e-5)
    assert "get_placeholder_mask" not in vars(rank._models.policy.model.model)


def test_images_that_cannot_be_trained_cost_no_text_and_are_named(
    vision_path: str, policy_path: str
) -> None:
    sample = sample_of(vision_path, picture(), "?", answer=[5])
    for path, sections, named in (
        (vision_path, {"engine": {"images_per_prompt": 0}}, r"engine\.images_per_prompt is 0"),
        (policy_path, {}, "trained as a model of text alone"),
    ):
        blind = TrainerRank(vision_config(path, **sections))
        (share,) = plan_micro_batches([sample], 1, 1, 512, "padded")[0]
        with pytest.raises(InputError, match=named):
            blind.score("policy", share)


def test_a_written_conversation_with_images_is_a_trajectory(vision_path: str) -> None:
    config = vision_config(vision_path)
    template = load_template(config, load_tokenizer(config))
    said = {"role": "assistant", "content": "a cat"}
    rows = [asked("What is it?", picture()), said, asked(picture(28, 28, 1), "and this?"), said]
    trajectory = demonstrate(template, rows)
    assert [[one.length for one in turn.images] for turn in trajectory.turns] == [[6], [1]]
    assert [turn.fork_reason for turn in trajectory.turns] == [None, None]
    assert audit(trajectory).violations == 0
    part = {"type": "image", "image": "http://somewhere/x.png"}
    with pytest.raises(TrajectoryError, match="is a URL") as refused:
        demonstrate(template, [{"role": "user", "content": [part]}, said])
    assert refused.value.reason == "image_refused"
