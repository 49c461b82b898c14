"""Rows of TRL's scripts with a column `image` or `images`."""

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, Features, Image, Value
from transformers import AutoModelForImageTextToText, AutoProcessor

from tests.simulated import Latency, SimulatedEngine
from tests.trl_maze import ones
from tests.vision import PATCH, asked, encoded, picture, vision_config
from turnwise.chat.template import load_tokenizer
from turnwise.compat.trl.environment import TrlEnvironments
from turnwise.config import SamplingConfig
from turnwise.errors import InputError
from turnwise.rollouts import Problem, Runner
from turnwise.rollouts.environment import read_problem
from turnwise.trajectory import audit, read_jsonl
from turnwise.trl import GRPOConfig, GRPOTrainer

QUESTION = [{"role": "user", "content": "What is it?"}]
CALLS: list[dict[str, Any]] = []


def scored(**given: Any) -> list[float]:
    """A reward function that looks at the pictures, as TRL's users write it."""
    CALLS.append(given)
    parts = [part for prompt in given["prompts"] for part in prompt[-1]["content"]]
    pictures = [part["image"] for part in parts if part["type"] == "image"]
    return [float(one.size[0] == 56) for one in pictures]


def content(row: dict[str, Any]) -> list[str]:
    """Return the types of the parts of a row's last message."""
    problem, _ = read_problem(TrlEnvironments()({"prompt": QUESTION, **row}))
    parts = problem[-1]["content"]
    return [part["type"] for part in parts] if isinstance(parts, list) else ["plain"]


def test_images_come_first_or_in_their_places_as_in_trl() -> None:
    one, other = picture(), picture(28, 28, 1)
    assert content({"image": one}) == ["image", "text"]
    assert content({"images": [one, other]}) == ["image", "image", "text"]
    assert content({"image": {"bytes": encoded(one), "path": None}}) == ["image", "text"]
    assert content({"image": None}) == content({"images": []}) == content({}) == ["plain"]
    placed = [asked("Is ", None, " like ", None, "?")]
    problem, _ = read_problem(TrlEnvironments()({"prompt": placed, "images": [one, other]}))
    seen = [part["image"].width for part in problem[0]["content"] if part["type"] == "image"]
    assert seen == [56, 28]
    assert placed[0]["content"][1]["image"] is None, "the row is as it was"
    system = {"role": "system", "content": "Look."}
    problem, _ = read_problem(TrlEnvironments()({"prompt": [system, *QUESTION], "image": one}))
    assert problem[0] == system
    assert QUESTION == [{"role": "user", "content": "What is it?"}]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": "What?", "image": picture()}, "prompt must be a list of messages where a row"),
        (
            {"prompt": [asked("Is ", None, "?")], "images": [picture()] * 2},
            "the row has 2 images, and its prompt has 1 places for them",
        ),
        ({"prompt": [asked("a")], "image": picture()}, "has 1 images, and its prompt has 0 places"),
    ],
)
def test_images_without_a_place_are_an_error(row: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        TrlEnvironments()(row)


async def test_reward_functions_get_pictures(vision_path: str) -> None:
    CALLS.clear()
    config = vision_config(
        vision_path,
        environment="turnwise.compat.trl.environment:TrlEnvironments",
        rollout={"loop": "single_turn", "rewards": [{"trl": f"{__name__}:scored"}]},
    )
    engine = SimulatedEngine(
        vocab_size=1000,
        mean_tokens=4,
        latency=Latency(prefill_token=0.0, step=1e-4, step_request=0.0),
    )
    runner = Runner(config, load_tokenizer(config.model), TrlEnvironments())
    problem = Problem("rows:1", {"prompt": QUESTION, "image": picture(), "answer": 1})
    group = await runner.run_group(engine, problem, SamplingConfig(n=2, max_tokens=8), "t")
    assert group.dropped == {}, group.causes
    for trajectory in group.trajectories:
        assert trajectory.reward == 1.0
        assert len(trajectory.turns[0].images) == 1
        assert audit(trajectory).violations == 0
    (call,) = CALLS
    shown = [prompt[0]["content"][0]["image"] for prompt in call["prompts"]]
    assert [one.tobytes() for one in shown] == [picture().tobytes()] * 2
    assert call["image"] == [problem.row["image"]] * 2


def test_a_dataset_is_not_decoded_as_a_whole() -> None:
    features = Features({"prompt": [{"role": Value("string"), "content": Value("string")}]})
    features["image"] = Image()
    rows = [{"prompt": QUESTION, "image": picture(seed=seed)} for seed in range(8)]
    args = GRPOConfig(num_generations=2, per_device_train_batch_size=2)
    dataset = Dataset.from_list(rows, features=features)
    made = GRPOTrainer("/no/such/model", ones, args, train_dataset=dataset)
    assert made._inputs.rows is not None
    assert not isinstance(made._inputs.rows, list)
    assert content(dict(made._inputs.rows[0])) == ["image", "text"]


def test_a_processor_is_that_of_the_model(vision_path: str, tmp_path: Path) -> None:
    rows = [{"prompt": QUESTION, "image": picture()}] * 8
    processor = AutoProcessor.from_pretrained(vision_path)
    args = GRPOConfig(output_dir=str(tmp_path / "run"))
    made = GRPOTrainer(vision_path, ones, args, rows, processing_class=processor)
    assert made.settings["model.path"] == vision_path
    assert (Path(str(made.settings["model.tokenizer"])) / "tokenizer.json").is_file()
    model = AutoModelForImageTextToText.from_pretrained(vision_path)
    made = GRPOTrainer(model, ones, args, rows)
    saved = AutoProcessor.from_pretrained(made.settings["model.path"])
    assert saved.image_processor.size == processor.image_processor.size
    size = {"shortest_edge": PATCH**2, "longest_edge": 4 * PATCH**2}
    changed = AutoProcessor.from_pretrained(vision_path, size=size)
    with pytest.raises(InputError, match="its image processor has other settings than the model"):
        GRPOTrainer(vision_path, ones, args, rows, processing_class=changed)


def told_apart(**given: Any) -> list[float]:
    """Rewards that differ within a group, by the first letter of the answer."""
    assert scored(**given)
    texts = [completion[0]["content"] for completion in given["completions"]]
    return [float(ord(text[0]) if text else 0) for text in texts]


@pytest.mark.slow
def test_a_script_with_a_column_of_images_trains(vision_path: str, tmp_path: Path) -> None:
    args = GRPOConfig(
        output_dir=str(tmp_path / "run"),
        per_device_train_batch_size=4,
        num_generations=2,
        max_steps=2,
        max_completion_length=8,
        report_to="none",
        turnwise={"engine.kv_cache_gib": 0.0625, "model.max_length": 256},
    )
    rows = [{"prompt": QUESTION, "image": picture(seed=seed)} for seed in range(4)]
    made = GRPOTrainer(vision_path, told_apart, args, Dataset.from_list(rows))
    before = {name: tensor.clone() for name, tensor in made.model.named_parameters()}
    made.train()
    assert any(not tensor.equal(before[name]) for name, tensor in made.model.named_parameters())
    for path in sorted((tmp_path / "run" / "trajectories").glob("step-*.jsonl")):
        for trajectory in read_jsonl(path):
            assert len(trajectory.turns[0].images) == 1
            assert audit(trajectory).violations == 0
    made.save_model(str(tmp_path / "saved"))
    assert AutoProcessor.from_pretrained(tmp_path / "saved").image_processor is not None
