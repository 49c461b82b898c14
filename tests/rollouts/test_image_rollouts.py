"""Trajectories whose problem and `step` show images, without an engine of vLLM's."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import turnwise
from tests.simulated import Latency, SimulatedEngine
from tests.vision import asked, picture, vision_config
from turnwise.chat.template import load_tokenizer
from turnwise.config import Config
from turnwise.rollouts import Environment, Group
from turnwise.rollouts.sampler import TrajectorySampler
from turnwise.training.samples import SampleBatch, add_trajectory
from turnwise.trajectory import Message, Trajectory, audit, read_jsonl, write_jsonl
from turnwise.trajectory.images import images_in

HERE = __name__
QUICK = Latency(prefill_token=0.0, step=1e-4, step_request=0.0)


class Gallery(Environment):
    """Shows a picture, and another one after the first answer."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.seed: int = row["seed"]
        self.problem = [asked("What is it?", picture(seed=self.seed))]
        self.shown = False

    def step(self, message: Message) -> list[Message] | None:
        if self.shown:
            return None
        self.shown = True
        return [asked(picture(84, 56, self.seed + 1), "And this?")]

    def reward(self, trajectory: Trajectory) -> float:
        return 1.0


def gallery(vision_path: str) -> Config:
    return vision_config(
        vision_path,
        environment="tests.rollouts.test_image_rollouts:Gallery",
        rollout={"loop": "tool_calling", "max_turns": 2},
    )


async def play(vision_path: str) -> tuple[list[Trajectory], list[Group]]:
    config = gallery(vision_path)
    tokenizer = load_tokenizer(config.model)
    engine = SimulatedEngine(vocab_size=1000, mean_tokens=4, latency=QUICK)
    sampler = TrajectorySampler(
        engine, [{"seed": 0}, {"seed": 10}], {"n": 2}, config=config, tokenizer=tokenizer
    )
    return [trajectory async for trajectory in sampler], sampler.groups


async def test_images_are_in_turns_files_checkpoints_and_samples(
    vision_path: str, tmp_path: Path
) -> None:
    trajectories, groups = await play(vision_path)
    two_turns = [t for t in trajectories if len(t.turns) == 2]
    assert two_turns
    for trajectory in two_turns:
        assert [len(turn.images) for turn in trajectory.turns] == [1, 1]
        assert [turn.fork_reason for turn in trajectory.turns] == [None, None]
        report = audit(trajectory)
        assert (report.violations, report.percent, report.bridged) == (0, 100.0, 1)
    path = tmp_path / "trajectories" / "step-0001.jsonl"
    write_jsonl(path, trajectories)
    assert [*read_jsonl(path)] == trajectories
    assert len([*(path.parent / "images").iterdir()]) <= 4
    for group in groups:
        again = Group.from_dict(group.to_dict())
        assert again.trajectories == group.trajectories
        shown = again.trajectories[0].turns[0].images[0].image
        assert shown.read() == group.trajectories[0].turns[0].images[0].image.read()
    batch = SampleBatch()
    for trajectory in two_turns:
        add_trajectory(batch, trajectory, [1.0, 1.0], 0)
    assert [len(sample.images) for sample in batch.samples] == [2] * len(two_turns)
    assert batch.report.percent == 100.0


class Judged(Gallery):
    """A gallery that rewards every other answer."""

    def reward(self, trajectory: Trajectory) -> float:
        return float(trajectory.sample_index % 2)


def backwards(llm: Any, prompts: list[Any], sampling_params: Any) -> list[Any]:
    """Asks for all answers at once, the last ones first."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [pool.submit(llm.chat, prompt, sampling_params) for prompt in reversed(prompts)]
        return [call.result()[0] for call in reversed(asked)]


@pytest.mark.slow
def test_a_samplers_answers_are_trained_with_their_own_images(
    vision_path: str, tmp_path: Path
) -> None:
    """Though the ids of all prompts are equal, and those of most answers, which are one token."""
    config = vision_config(
        vision_path,
        environment=f"{HERE}:Judged",
        rollout={"sampler": f"{HERE}:backwards", "prompts_per_step": 4},
        sampling={"n": 2, "max_tokens": 1, "temperature": 0.05},
        training={"steps": 1},
        eval={"every": 0},
        output_dir=str(tmp_path),
    )
    rows = [{"seed": seed} for seed in (0, 10, 20, 30)]
    result = turnwise.train(config=config, environment=Judged, data=rows, name="backwards")
    (metrics,) = [row for row in result.metrics if row["step"]]
    assert metrics["dropped"] == {}
    assert (metrics["trained_tokens"], metrics["exact_percent"]) == (8, 100.0)
    assert metrics["logprob_diff_max"] < 1e-4
    made = [*read_jsonl(Path(result.folder) / "trajectories" / "step-0001.jsonl")]
    assert len(made) == 8
    for trajectory in made:
        (shown,) = images_in(trajectory.messages)
        assert [each.image for turn in trajectory.turns for each in turn.images] == [shown]
    assert len({tuple(t.turns[0].added_token_ids) for t in made}) == 1
    assert len({tuple(t.turns[0].completion_token_ids) for t in made}) < len(made)
