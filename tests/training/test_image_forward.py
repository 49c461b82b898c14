"""The trainer's log-probs of samples with images are those of the model itself."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pictures
from transformers import AutoModelForImageTextToText, AutoProcessor

from tests.simulated import SimulatedEngine
from tests.vision import asked, picture, vision_config
from turnwise.chat.images import read_parts
from turnwise.chat.template import load_template, load_tokenizer
from turnwise.errors import InputError, TrajectoryError, WeightUpdateError
from turnwise.training.batching import Columns, Costs, Layout, Layouts, plan_micro_batches
from turnwise.training.export import merge_adapter
from turnwise.training.layout_check import check_run
from turnwise.training.memory import model_size
from turnwise.training.rank import TrainerRank
from turnwise.training.sample import Sample
from turnwise.training.supervised import demonstrate
from turnwise.training.vision import vision_parameters
from turnwise.trajectory import Prompt, audit
from turnwise.weights.sync import check_canary

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def rank(vision_path: str) -> TrainerRank:
    return TrainerRank(vision_config(vision_path))


def sample_of(vision_path: str, *parts: object, answer: list[int], number: int = 0) -> Sample:
    config = vision_config(vision_path)
    template = load_template(
        config.model, config.sampling, config.engine, load_tokenizer(config.model)
    )
    prompt = template.render([read_parts(asked(*parts), "a message")])
    ids = Prompt.joined(prompt, answer)
    mask = [0] * len(prompt) + [1] * len(answer)
    return Sample.to_score(ids, mask, number)


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


def test_rows_with_and_without_images_score_as_in_the_model(
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
    assert not rank._models.policy.model.get_input_embeddings()._forward_pre_hooks


@pytest.mark.parametrize("layout", ["packed", "shared"])
def test_packed_rows_are_scored_as_padded_ones(
    rank: TrainerRank, vision_path: str, layout: Layout
) -> None:
    marker: int = rank._models.policy.model.config.image_token_id
    big, small, other = picture(), picture(28, 28, 2), picture(seed=7)
    rows: list[tuple[list[object], list[int]]] = [
        (["Look: ", big, small, "?"], [5, 6, 7]),
        (["Look: ", big, small, "?"], [5, 6, 8, marker, 9]),  # with a sampled marker
        (["Look: ", other, small, "?"], [5, 6, 7]),  # the same ids as the first
        (["Look: ", big, " and ", other], [5, 9]),
        (["no picture"], [5, marker, 6]),
    ]
    samples = [
        sample_of(vision_path, *parts, answer=answer, number=number)
        for number, (parts, answer) in enumerate(rows)
    ]
    assert (samples[0].token_ids_T == samples[2].token_ids_T).all()
    columns = Columns.of(samples, layout, CPU)
    assert len(columns.images) == (5 if layout == "shared" else 8)
    with torch.no_grad():
        expected, _ = rank._models.score("policy", Columns.of(samples, "padded", CPU))
        found, _ = rank._models.score("policy", columns)
    assert (found - expected).abs().max() < 1e-5
    assert (expected[:3] - expected[8:11]).abs().max() > 1e-3  # the image counts


def test_an_image_is_read_once_however_many_samples_have_it(
    rank: TrainerRank, vision_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone, read = rank._models.policy.model.model, list[int]()
    own = backbone.get_image_features

    def count(pixel_values: torch.Tensor, image_grid_thw: torch.Tensor, **more: Any) -> Any:
        read.append(len(image_grid_thw))
        return own(pixel_values, image_grid_thw, **more)

    monkeypatch.setattr(backbone, "get_image_features", count)
    shown = [[picture()], [picture()], [picture(seed=1)], [picture(28, 28)]]
    samples = [
        sample_of(vision_path, *pictures, "?", answer=[5, 6], number=number)
        for number, pictures in enumerate(shown)
    ]
    with torch.no_grad():
        found, _ = rank._models.score("policy", Columns.of(samples, "padded", CPU))
    assert read == [1, 1, 1]
    assert torch.equal(found[:2], found[2:4])
    assert not torch.allclose(found[:2], found[4:6])


def test_every_layout_is_exact_with_images_at_the_start(rank: TrainerRank) -> None:
    config, layouts = rank._config, ("padded", "packed", "shared")
    assert rank.layouts.patches > 0
    assert rank.layouts.allowed == layouts
    for layout in layouts:
        own = config.training.changed({"packing": layout})
        found, said, why = check_run(rank._models, config.model, own, config.engine)
        assert (found.allowed, found.patches, why) == ((layout,), rank.layouts.patches, "")
        assert said == f"micro-batches are {layout}"


def test_micro_batches_have_a_budget_of_images(rank: TrainerRank, vision_path: str) -> None:
    samples = [
        sample_of(vision_path, picture(280, 280, seed), "?", answer=[5], number=number)
        for number, seed in enumerate((1, 2, 1, 2))
    ]
    each = samples[0].length
    (share,) = plan_micro_batches(samples, 1, 1, 4 * each, "padded")[0]
    assert list(map(len, share.micro_batches)) == [4]
    assert share.images
    (share,) = plan_micro_batches(samples, 1, 1, 4 * each, Layouts(patches=0.5))[0]
    assert sorted(map(len, share.micro_batches)) == [1, 3]  # an image counts once
    (share,) = plan_micro_batches(samples, 1, 1, 4 * each, Layouts(patches=9.0))[0]
    assert list(map(len, share.micro_batches)) == [1, 1, 1, 1]


def test_a_step_with_images_takes_the_layout_that_costs_least(vision_path: str) -> None:
    layouts = Layouts(("padded", "packed", "shared"), 1.0, Costs(1e-4, 1e-4, 30.0))
    for seeds, layout in (((1, 1, 1, 1), "shared"), ((1, 2, 3, 4), "padded")):
        samples = [  # the same ids but for the answers, and 64 tokens of an image
            sample_of(vision_path, picture(280, 280, seed), "?", answer=[5 + number], number=number)
            for number, seed in enumerate(seeds)
        ]
        (share,) = plan_micro_batches(samples, 1, 1, 4096, layouts)[0]
        assert share.layout == layout


def test_samples_share_what_is_before_a_different_image_alone(vision_path: str) -> None:
    one, two = (
        sample_of(vision_path, "Look: ", picture(seed=seed), "?", answer=[5, 6], number=seed)
        for seed in (1, 2)
    )
    (first,) = one.images
    columns = Columns.of([one, two], "shared", CPU)
    assert columns.token_ids_BT.shape == (1, 2 * one.length - first.start)
    budget = 2 * one.length - first.start + one.length // 12
    (share,) = plan_micro_batches([one, two], 1, 1, budget, "shared")[0]
    assert len(share.micro_batches) == 1


def step(rank: TrainerRank, vision_path: str) -> dict[str, torch.Tensor]:
    """Take a step on a sample with an image, and return what has changed."""
    prompt = sample_of(vision_path, picture(), "?", answer=[5, 6, 7])
    mask, zeros = prompt.response_mask_T.tolist(), [0] * prompt.length
    sample = Sample.of(prompt.ids, mask, zeros, zeros, 1.0, 0)
    model = rank._models.policy.get_submodule("model")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    rank.train(plan_micro_batches([sample], 1, 1, 512, rank.layouts)[0])
    return {n: p for n, p in model.named_parameters() if not torch.equal(p, before[n])}


def test_the_part_that_reads_images_may_stay_as_it_is(vision_path: str, tmp_path: Path) -> None:
    for learns in (True, False):
        model = {"path": vision_path, "max_length": 512, "train_vision": learns}
        config = vision_config(vision_path, model=model)
        changed = step(TrainerRank(config, tmp_path), vision_path)
        assert any("language_model" in name for name in changed)
        assert any("visual" in name for name in changed) is learns
        size = model_size(config.model)
        assert (size.learning < size.parameters) is not learns


def test_adapters_are_in_the_layers_of_text_alone(vision_path: str, tmp_path: Path) -> None:
    model = {"path": vision_path, "max_length": 512, "lora": {"rank": 4}}
    rank = TrainerRank(vision_config(vision_path, model=model), tmp_path)
    changed = step(rank, vision_path)
    assert changed
    assert all("language_model" in name and "lora_" in name for name in changed)
    sent = [name for name, _ in rank._tensors()]
    assert all("visual" not in name for name in sent)
    rank.save(tmp_path / "saved")
    merge_adapter(tmp_path / "saved", tmp_path / "merged", rank._config.model)
    whole = TrainerRank(vision_config(str(tmp_path / "merged")))
    sample = sample_of(vision_path, picture(), "?", answer=[5, 6, 7])
    columns = Columns.of([sample], "padded", CPU)
    with torch.no_grad():
        ours, theirs = (each._models.score("policy", columns)[0] for each in (rank, whole))
    assert (ours - theirs).abs().max() < 1e-5


def test_an_exported_model_reads_images_as_the_trainer(vision_path: str, tmp_path: Path) -> None:
    rank = TrainerRank(vision_config(vision_path), tmp_path)
    step(rank, vision_path)
    rank.save(tmp_path / "saved")
    shown = [picture(84, 56, 3)]
    sample = sample_of(vision_path, "Look: ", *shown, "?", answer=[5, 6, 7])
    with torch.no_grad():
        found, _ = rank._models.score("policy", Columns.of([sample], "padded", CPU))
    expected = by_the_model(str(tmp_path / "saved"), sample, shown)
    assert np.abs(found.numpy() - expected).max() < 1e-5


async def test_the_canary_has_an_image_and_skips_its_tokens(
    rank: TrainerRank,
) -> None:
    published = rank.publish()
    (image,) = published.prompt.images
    assert len(published.prompt) == 32 + image.length
    assert len(published.logprobs) == 31
    assert 0 < image.start < 32
    engine = SimulatedEngine()  # its log-prob of a token is a thousandth of its number
    outside = (published.prompt[1 : image.start] + published.prompt[image.end :]).tolist()
    wrong, right = (([token * -1e-3 for token in ids]) for ids in (outside[::-1], outside))
    assert (await check_canary(engine, published.prompt, right, 1e-6, 0))[1] < 1e-9
    with pytest.raises(WeightUpdateError, match="not the trainer's"):
        await check_canary(engine, published.prompt, wrong, 1e-6, 0)
    blind = TrainerRank(vision_config(rank._config.model.path, engine={"images_per_prompt": 0}))
    assert not blind.publish().prompt.images


def test_a_reference_model_reads_images_with_its_own_processor(
    vision_path: str, tmp_path: Path
) -> None:
    kl = {"kl": {"coef": 0.1}}
    rank = TrainerRank(vision_config(vision_path, algorithm=kl), tmp_path)
    sample = sample_of(vision_path, picture(), "?", answer=[5, 6])
    (share,) = plan_micro_batches([sample], 1, 1, 512, "padded")[0]
    (_, ours), (_, theirs) = (rank.forward(name, share)[0] for name in ("policy", "reference"))
    assert ours == pytest.approx(theirs, abs=1e-5)
    other = tmp_path / "other"
    shutil.copytree(vision_path, other)
    settings = json.loads((other / "preprocessor_config.json").read_text())
    settings["size"] = {"shortest_edge": 8 * 28**2, "longest_edge": 8 * 28**2}
    (other / "preprocessor_config.json").write_text(json.dumps(settings))
    kl = {"kl": {"coef": 0.1, "model": {"path": str(other)}}}
    rank = TrainerRank(vision_config(vision_path, algorithm=kl), tmp_path)
    with pytest.raises(InputError, match="makes different tokens of an image"):
        rank.forward("reference", share)


def test_ranks_without_images_add_nothing_to_the_gradient(
    rank: TrainerRank, vision_path: str
) -> None:
    sample = sample_of(vision_path, "no picture", answer=[5, 6])
    columns = Columns.of([sample], "padded", CPU, others_see=True)
    found, _ = rank._models.score("policy", columns)
    found.sum().backward()  # type: ignore[no-untyped-call]
    tower = vision_parameters(rank._models.policy)
    assert len(tower) > 10
    assert all(p.grad is not None and not p.grad.any() for p in tower)
    for parameter in rank._models.policy.parameters():
        parameter.grad = None


def test_untrainable_images_are_refused_with_a_reason(vision_path: str, model_path: str) -> None:
    sample = sample_of(vision_path, picture(), "?", answer=[5])
    for path, sections, named in (
        (vision_path, {"engine": {"images_per_prompt": 0}}, r"engine\.images_per_prompt is 0"),
        (model_path, {}, "trained as a model of text alone"),
    ):
        blind = TrainerRank(vision_config(path, **sections))
        (share,) = plan_micro_batches([sample], 1, 1, 512, "padded")[0]
        with pytest.raises(InputError, match=named):
            blind.forward("policy", share)


def test_a_written_conversation_with_images_is_a_trajectory(vision_path: str) -> None:
    config = vision_config(vision_path)
    template = load_template(
        config.model, config.sampling, config.engine, load_tokenizer(config.model)
    )
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
