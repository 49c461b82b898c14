"""The producer with groups that take as long as a test says."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from turnwise.config import Config, parse_config
from turnwise.errors import InputError, StepError
from turnwise.rollouts import Group, GroupProducer, Problem, ProblemStream
from turnwise.trajectory import Trajectory

PROBLEMS = [Problem(f"p{number}", {"number": number}) for number in range(40)]


def config(staleness: int = 0, per_step: int = 4, **rollout: Any) -> Config:
    return parse_config(
        {
            "environment": "a:B",
            "model": {"path": "m"},
            "data": {"path": "d"},
            "sampling": {"n": 2},
            "rollout": {"prompts_per_step": per_step, **rollout},
            "training": {"max_staleness": staleness},
            "algorithm": {"dynamic_sampling": True},
        }
    )


def group_of(problem: Problem, *rewards: float) -> Group:
    group = Group(problem.id)
    for index, reward in enumerate(rewards):
        trajectory = Trajectory(problem.id, index)
        trajectory.set_outcome(reward=reward)
        group.trajectories.append(trajectory)
    return group


async def has_signal(group: Group) -> bool:
    return len({trajectory.reward for trajectory in group.trajectories}) > 1


class Groups:
    """Makes groups; those that are told to wait do so until they are let go."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.gates: dict[str, asyncio.Event] = {}
        self.rewards: Callable[[str], tuple[float, ...]] = lambda name: (0.0, 1.0)

    async def __call__(self, problem: Problem, tag: str) -> Group:
        self.started.append(tag)
        await self.gates.setdefault(tag, asyncio.Event()).wait()
        return group_of(problem, *self.rewards(tag))

    async def let_go(self, *numbers: int) -> None:
        for number in numbers:
            self.gates.setdefault(f"group{number}", asyncio.Event()).set()
        await settled()


async def settled() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


@asynccontextmanager
async def producing(settings: Config, groups: Groups) -> AsyncIterator[GroupProducer]:
    producer = GroupProducer(settings, groups, ProblemStream(PROBLEMS, 0), has_signal)
    running = asyncio.create_task(producer.run())
    await settled()
    try:
        yield producer
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def names(groups: list[Group]) -> list[str]:
    return [group.problem_id for group in groups]


@pytest.mark.parametrize("staleness", [0, 1])
async def test_a_wait_for_all_groups_to_begin_ends_in_every_step(staleness: int) -> None:
    """Also at the end of a run, where steps allow no further groups."""
    settings, groups = config(staleness), Groups()
    settings = settings.model_copy(
        update={"training": settings.training.model_copy(update={"steps": 3})}
    )
    async with producing(settings, groups) as producer:
        for step in range(1, 4):
            async with asyncio.timeout(10):
                await producer.all_begun()
            assert len(groups.started) == 4 * min(3, step + staleness)
            await groups.let_go(*range(4 * step))
            await producer.next_batch()
            await producer.advance(step)


@pytest.mark.parametrize("staleness", [0, 1, 3])
async def test_no_more_groups_begin_than_could_still_be_trained(staleness: int) -> None:
    groups = Groups()
    async with producing(config(staleness), groups) as producer:
        for step in range(1, 4):
            assert len(groups.started) == 4 * (step + staleness)
            await groups.let_go(*range(4 * (step + staleness)))
            batch = await producer.next_batch()
            assert len(batch.groups) == 4
            await settled()
            assert len(groups.started) == 4 * (step + staleness)  # the trainer is not done yet
            await producer.advance(step)
            await settled()


async def test_nothing_begins_for_steps_after_the_last() -> None:
    groups, settings = Groups(), config(3)
    training = settings.training.model_copy(update={"steps": 2})
    async with producing(settings.model_copy(update={"training": training}), groups) as producer:
        assert len(groups.started) == 8
        await producer.advance(1)
        await settled()
        assert len(groups.started) == 8


async def test_a_step_takes_its_groups_in_the_order_of_their_start() -> None:
    """By `rollout.prompts_per_step`."""
    groups = Groups()
    expected = [problem.id for problem in ProblemStream(PROBLEMS, 0).take(8)]
    async with producing(config(1), groups) as producer:
        await groups.let_go(7, 3, 1, 0, 2)
        assert names((await producer.next_batch()).groups) == expected[:4]


async def test_a_straggler_holds_up_nobody_if_groups_may_run_ahead() -> None:
    groups = Groups()
    async with producing(config(1), groups) as producer:
        await groups.let_go(*range(1, 8))
        expected = [problem.id for problem in ProblemStream(PROBLEMS, 0).take(8)]
        assert names((await producer.next_batch()).groups) == expected[1:5]
        await groups.let_go(0)
        await producer.advance(1)
        await settled()
        await groups.let_go(*range(8, 12))
        assert names((await producer.next_batch()).groups)[0] == expected[0]


async def test_a_synchronous_step_ends_the_groups_it_does_not_need() -> None:
    groups = Groups()
    async with producing(config(oversample=0.5), groups) as producer:
        assert len(groups.started) == 6
        await groups.let_go(1, 2, 4, 5, 3)
        batch = await producer.next_batch()
        assert len(batch.groups) == 4
        assert batch.discarded_by_reason == {"oversampled": 2}
        assert producer.waiting_for() == []
        await producer.advance(1)
        await settled()
        assert len(groups.started) == 12


async def test_other_groups_replace_failed_and_signalless_ones() -> None:
    groups = Groups()
    groups.rewards = lambda tag: {"group0": (1.0, 1.0), "group2": (1.0,)}.get(tag, (0.0, 1.0))
    async with producing(config(), groups) as producer:
        await groups.let_go(*range(6))
        batch = await producer.next_batch()
        assert batch.discarded_by_reason == {"failed": 1, "no_signal": 1}
        assert len(batch.groups) == 4
        assert len(groups.started) == 6


async def test_a_group_without_any_reward_has_not_failed() -> None:
    settings = config()
    settings = settings.model_copy(
        update={"algorithm": settings.algorithm.model_copy(update={"dynamic_sampling": False})}
    )
    groups = Groups()

    async def run(problem: Problem, tag: str) -> Group:
        group = await groups(problem, tag)
        if tag == "group1":
            group.drop(group.trajectories, "no_reward", "every reward is None")
        return group

    producer = GroupProducer(settings, run, ProblemStream(PROBLEMS, 0), has_signal)
    running = asyncio.create_task(producer.run())
    await groups.let_go(*range(4))
    async with asyncio.timeout(60):
        batch = await producer.next_batch()
    assert [len(group.trajectories) for group in batch.groups] == [2, 0, 2, 2]
    assert batch.discarded == []
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_group_that_is_cancelled_from_within_has_failed() -> None:
    groups = Groups()

    async def run(problem: Problem, tag: str) -> Group:
        if tag == "group1":
            raise asyncio.CancelledError
        return await groups(problem, tag)

    producer = GroupProducer(config(), run, ProblemStream(PROBLEMS, 0), has_signal)
    running = asyncio.create_task(producer.run())
    await groups.let_go(*range(5))
    async with asyncio.timeout(60):
        batch = await producer.next_batch()
    assert batch.discarded_by_reason == {"failed": 1}
    assert batch.discarded[0][1].dropped == {"cancelled": 2}
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_problems_that_never_give_a_signal_end_the_run() -> None:
    groups = Groups()
    groups.rewards = lambda tag: (1.0, 1.0)
    await groups.let_go(*range(100))
    producer = GroupProducer(config(), groups, ProblemStream(PROBLEMS, 0), has_signal)
    with pytest.raises(StepError, match=r"40 groups in a row .* \(40 no_signal\): the problems"):
        await producer.run()


async def test_a_producer_goes_on_where_its_state_was_taken() -> None:
    groups = Groups()
    async with producing(config(1), groups) as producer:
        await groups.let_go(0, 1, 2, 3, 5)
        await producer.next_batch()
        state = json.loads(json.dumps(producer.state()))
    expected = [problem.id for problem in ProblemStream(PROBLEMS, 0).take(12)]
    assert [ready["problem"] for ready in state["ready"]] == [expected[5]]
    assert state["under_way"] == [expected[4], expected[6], expected[7]]

    resumed = Groups()
    producer = GroupProducer(config(1), resumed, ProblemStream(PROBLEMS, 0), has_signal)
    producer.restore(state, trained=1)
    running = asyncio.create_task(producer.run())
    await settled()
    assert len(resumed.started) == 7  # two steps' worth, of which one group is ready
    assert producer.waiting_for() == [*state["under_way"], *expected[8:12]]
    assert resumed.started[:4] == ["group4", "group6", "group7", "group8"]
    await resumed.let_go(4, 6, *range(7, 12))
    batch = await producer.next_batch()
    assert names(batch.groups) == expected[4:8], "as without the stop"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    del state["numbers"]  # as in a checkpoint of an older version
    older = Groups()
    producer = GroupProducer(config(1), older, ProblemStream(PROBLEMS, 0), has_signal)
    producer.restore(state, trained=1)
    running = asyncio.create_task(producer.run())
    await settled()
    assert producer.waiting_for() == [*state["under_way"], *expected[8:12]]
    assert older.started[0] == "group8"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_data_that_changed_since_is_refused() -> None:
    state = GroupProducer(config(), Groups(), ProblemStream(PROBLEMS, 0), has_signal).state()
    fewer = GroupProducer(config(), Groups(), ProblemStream(PROBLEMS[1:], 0), has_signal)
    with pytest.raises(InputError, match="give it the same data"):
        fewer.restore(state, trained=0)
    state["under_way"] = ["gone"]
    same = GroupProducer(config(), Groups(), ProblemStream(PROBLEMS, 0), has_signal)
    with pytest.raises(InputError, match="no longer has gone, which was in progress"):
        same.restore(state, trained=0)


async def test_a_batch_that_was_ready_before_took_no_time() -> None:
    groups = Groups()
    async with producing(config(staleness=1, per_step=2), groups) as producer:
        await groups.let_go(0, 1, 2, 3)
        first, second = await producer.next_batch(), await producer.next_batch()
    assert first.seconds > 0
    assert second.seconds == 0
