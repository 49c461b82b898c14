"""Environments that fail, hang or are cancelled: each is counted, and closed as often as built."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

import turnwise
from tests.blocking import new_gate
from tests.rollouts.test_episode import Talking, play
from turnwise.config import Config
from turnwise.core.aio import task_group
from turnwise.rollouts import Group, GroupProducer, Problem, ProblemStream, Runner
from turnwise.rollouts.problems import Problems
from turnwise.trajectory import Trajectory

__all__ = ["play"]


class Rough(turnwise.Environment):
    """Fails as its row says; counts what was opened and closed."""

    problem = "Go."
    opened: ClassVar[Counter[str]] = Counter()

    def __init__(self, row: dict[str, Any]) -> None:
        self.how = row["how"]
        Rough.opened["built"] += 1

    async def setup(self) -> None:
        Rough.opened["set up"] += 1
        await self.misbehave("setup")

    async def step(self, message: Any) -> None:
        await self.misbehave("step")

    def reward(self, trajectory: Trajectory) -> float:
        if self.how == "reward raises":
            raise ValueError("no judge")
        return 1.0

    async def metrics(self, trajectory: Trajectory) -> Any:
        await self.misbehave("metrics")
        return {"n": "many"} if self.how == "metrics text" else {}

    async def close(self) -> None:
        Rough.opened["closed"] += 1
        await self.misbehave("close")

    async def misbehave(self, place: str) -> None:
        if self.how == f"{place} raises":
            raise ValueError("no luck")
        if self.how == f"{place} hangs":
            await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("how", "dropped", "events"),
    [
        ("setup raises", "environment_error", {}),
        ("setup hangs", "environment_timeout", {}),
        ("step raises", "environment_error", {}),
        ("step hangs", "environment_timeout", {}),
        ("reward raises", "reward_error", {}),
        ("metrics raises", None, {"metrics_error": 1}),
        ("metrics text", None, {"metrics_error": 1}),
        ("metrics hangs", None, {"metrics_error": 1}),
        ("close raises", None, {"close_error": 1}),
        ("close hangs", None, {"close_error": 1}),
    ],
)
async def test_an_environment_that_fails_is_counted_and_closed(
    play: Callable[..., Any], how: str, dropped: str | None, events: dict[str, int]
) -> None:
    Rough.opened.clear()
    seconds = 0.5 if "hangs" in how else 60
    group = await play(Rough, row={"how": how}, environment_timeout=seconds)
    assert group.dropped == ({dropped: 1} if dropped else {})
    assert [t.events for t in group.trajectories] == ([] if dropped else [events])
    assert Rough.opened == {"built": 1, "set up": 1, "closed": 1}
    if dropped:
        assert "rows:1" in group.causes[dropped] or dropped == "reward_error"


async def test_a_blocked_setup_misses_its_deadline_and_is_closed(play: Callable[..., Any]) -> None:
    gate = new_gate()

    class Blocked(Rough):
        def setup(self) -> None:  # type: ignore[override]
            gate.wait()

    Rough.opened.clear()
    group = await play(Blocked, row={"how": ""}, environment_timeout=0.3)
    gate.set()
    assert group.dropped == {"environment_timeout": 1}
    assert Rough.opened == {"built": 1, "closed": 1}


async def test_a_cancelled_group_closes_its_environments(play: Callable[..., Any]) -> None:
    Rough.opened.clear()
    running = asyncio.create_task(play(Rough, 5, {"how": "step hangs"}))
    while Rough.opened["set up"] < 5 and not running.done():
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert Rough.opened == {"built": 5, "set up": 5, "closed": 5}


async def test_only_rows_that_are_played_have_environments(
    make_config: Callable[..., Config], tokenizer: Any
) -> None:
    """64 of 10,000 rows are played, and a third of those fail or time out."""
    Rough.opened.clear()
    hows = ["", "step raises", "", "setup hangs", "", ""]
    problems = Problems("rows.jsonl", [{"how": hows[i % 6]} for i in range(10_000)])
    config = make_config(
        rollout={
            "loop": "tool_calling",
            "prompts_per_step": 16,
            "environment_timeout": 0.5,
            "max_failed_fraction": 1.0,
        },
        sampling={"n": 4, "max_tokens": 8},
        training={"steps": 1},
    )
    runner = Runner(config, tokenizer, Rough)
    engine = Talking(vocab_size=256)
    groups: list[Group] = []

    async def run_group(problem: Problem, tag: str) -> Group:
        if len(groups) >= 16:
            await asyncio.Event().wait()
        number = len(groups)
        groups.append(Group(problem.id))
        groups[number] = await runner.run_group(engine, problem, config.sampling, tag)
        return groups[number]

    async def has_signal(_: Group) -> bool:
        return True

    producer = GroupProducer(config, run_group, ProblemStream(problems, 0), has_signal)
    async with asyncio.timeout(60), task_group() as tasks:
        producing = tasks.create_task(producer.run())
        while len(groups) < 16 or any(not g.trajectories and not g.dropped for g in groups):
            await asyncio.sleep(0.05)
        producing.cancel()
    assert Rough.opened == {"built": 64, "set up": 64, "closed": 64}
    dropped = sum((group.dropped for group in groups), Counter[str]())
    assert set(dropped) == {"environment_error", "environment_timeout"}
    assert sum(len(group.trajectories) for group in groups) + dropped.total() == 64
