"""Images on several ranks, of which some have none, and in the families of `vision_models`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.training.test_trainer_group import EXACT
from tests.training.vision_models import FAMILIES, LAYOUTS, trained_row
from tests.vision import asked, picture, vision_config
from turnwise.chat.images import read_parts
from turnwise.chat.template import load_template, load_tokenizer
from turnwise.config import Config
from turnwise.training import Sample, checkpoint
from turnwise.training.trainer_group import TrainerGroup
from turnwise.trajectory import Prompt


def batch_of(config: Config) -> list[Sample]:
    """Samples of which two have an image: in most micro-batches, one rank reads none."""
    template = load_template(
        config.model, config.sampling, config.engine, load_tokenizer(config.model)
    )
    samples = []
    for number in range(6):
        shown = [picture(84, 56, number)] if number in (1, 4) else []
        prompt = template.render([read_parts(asked("Look: " * number, *shown), "a message")])
        ids = Prompt.joined(prompt, [5, 6, 7 + number])
        mask, zeros = [0] * len(prompt) + [1] * 3, [0] * len(ids)
        logprobs = [-5.0 if trained else 0.0 for trained in mask]
        made = Sample.of(ids, mask, logprobs, zeros, number - 2.5, number)
        samples.append(made)
    return samples


@pytest.mark.slow
@pytest.mark.parametrize("learns", [True, False])
async def test_ranks_without_images_do_their_part(
    ray_started: None, vision_path: str, tmp_path: Path, learns: bool
) -> None:
    metrics, scored, exported = dict[int, Any](), dict[int, Any](), dict[int, Any]()
    for ranks in (1, 2):
        training = {"ranks": ranks, "threads": 1, "learning_rate": 1e-3, "micro_batch_tokens": 64}
        training |= {"activation_checkpointing": True, "updates_per_step": 2}
        model = {"path": vision_path, "max_length": 512, "train_vision": learns}
        config = vision_config(vision_path, model=model, training=training)
        batch = batch_of(config)
        ids = [sample.ids for sample in batch]
        masks = [s.response_mask_T.tolist() for s in batch]
        policy = await TrainerGroup.start(config, tmp_path / str(ranks))
        try:
            metrics[ranks] = [await policy.train(batch) for _ in range(2)]
            metrics[ranks].append(await policy.train([s for s in batch if not s.images]))
            scored[ranks] = await policy.forward("policy", [*map(Sample.to_score, ids, masks)])
            assert (await policy.publish()).prompt.images
            folder = tmp_path / f"step-000{ranks}"
            await policy.save(checkpoint.begin(folder))
            checkpoint.commit(folder)
            exported[ranks] = AutoModelForImageTextToText.from_pretrained(folder).eval()
        finally:
            policy.kill()
    for one, two in zip(metrics[1], metrics[2], strict=True):
        for key in EXACT:
            assert two.get(key, 0) == pytest.approx(one.get(key, 0), abs=1e-4, rel=1e-4), key
    for ours, theirs in zip(scored[1], scored[2], strict=True):
        assert theirs == pytest.approx(ours, abs=1e-3)
    first = AutoModelForImageTextToText.from_pretrained(vision_path).state_dict()
    for name, tensor in exported[1].state_dict().items():
        assert (exported[2].state_dict()[name] - tensor).abs().mean() < 1e-4, name
        if "visual" in name and not learns:
            assert torch.equal(tensor, first[name])


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_exact_in_the_layouts_that_it_is_trained_in(
    family: str, tmp_path: Path
) -> None:
    if family == "SmolVLM":
        pytest.importorskip("num2words")  # of its processor
    row, rank = trained_row(family, tmp_path)
    assert "why" not in row, row
    assert row["own"] < 1e-4  # type: ignore[operator]
    assert row["padded"] < 1e-4  # type: ignore[operator]
    assert all(row[layout] < 1e-4 for layout in rank.layouts.allowed)  # type: ignore[operator]
    assert row["export"] < 1e-4  # type: ignore[operator]
    assert row["moved"] > 0  # type: ignore[operator]
    exact = [layout for layout in LAYOUTS if row[layout] < 1e-4]  # type: ignore[operator]
    # The tokens of Gemma's images see each other, which Transformers' masks say of whole samples.
    assert exact == [each for each in LAYOUTS if family != "Gemma 3" or each != "shared"]
