"""The curriculum: when rows without signal come back, also where groups end in any order."""

import asyncio
import itertools
import json
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rollouts.test_producer import PROBLEMS, Groups, config, has_signal, names, settled
from turnwise.config import Config
from turnwise.rollouts import GroupProducer, Problem, ProblemStream
from turnwise.rollouts.problems import Lazy, Pool, Problems

POOLS: tuple[Pool, ...] = ("mixed", "mastered", "hopeless")


def problems(count: int) -> list[Problem]:
    return [Problem(f"rows:{number}", {"n": number}) for number in range(1, count + 1)]


def teaching(**keys: Any) -> Config:
    settings = config(**keys)
    return settings.model_copy(
        update={
            "data": settings.data.model_copy(update={"curriculum": True}),
            "algorithm": settings.algorithm.model_copy(update={"dynamic_sampling": False}),
        }
    )


def epochs_of(stream: ProblemStream, index: int) -> list[int]:
    return [epoch for epoch in range(240) if not stream.rests(index, epoch)]


def many(count: int) -> Problems:
    return Problems("rows", Lazy(count, lambda index: {"n": index}))


@pytest.mark.parametrize("index", [0, 1, 5, 1000, 999_999])
def test_each_group_without_signal_doubles_the_rest_to_a_limit(index: int) -> None:
    stream, name, numbers = ProblemStream(many(index + 1), 0, 12), f"rows:{index + 1}", []
    for number in range(5):
        stream.learn(name, "mastered" if number % 2 else "hopeless")
        epochs = epochs_of(stream, index)
        numbers.append(len(epochs))
        (distance,) = {later - sooner for sooner, later in itertools.pairwise(epochs)}
        assert distance == 240 / len(epochs)
    assert numbers == [120, 60, 30, 20, 20]
    stream.learn(name, "mixed")
    assert len(epochs_of(stream, index)) == 240
    stream.learn(name, "mastered")
    assert len(epochs_of(stream, index)) == 120, "a signal ends the row of groups without one"


@pytest.mark.parametrize("indices", [range(800), range(0, 1600, 2), range(7, 8000, 10)])
def test_rows_come_back_in_different_epochs(indices: range) -> None:
    stream = ProblemStream(many(indices[-1] + 1), 0, max_rest=8)
    for index in indices:
        for _ in range(3):
            stream.learn(f"rows:{index + 1}", "mastered")
    for epoch in range(16):
        back = sum(not stream.rests(index, epoch) for index in indices)
        assert 60 < back < 140, "of 800, an eighth each"


def test_a_row_that_was_always_right_comes_less_often() -> None:
    stream = ProblemStream(problems(4), 0, max_rest=4)
    counts = Counter[str]()
    for _ in range(130):
        (problem,) = stream.take(1)
        counts[problem.id] += 1
        stream.learn(problem.id, "mastered" if problem.id == "rows:1" else "mixed")
    assert 10 <= counts.pop("rows:1") <= 13, "one of four epochs, and the first two"
    assert max(counts.values()) - min(counts.values()) <= 1


def test_rows_that_all_rest_are_asked_all_the_same() -> None:
    stream = ProblemStream(problems(5), 0, max_rest=8)
    counts = Counter[str]()
    for _ in range(50):
        (problem,) = stream.take(1)
        counts[problem.id] += 1
        stream.learn(problem.id, "hopeless")
    assert set(counts.values()) == {10}


def test_pools_count_every_row_that_may_come() -> None:
    stream = ProblemStream(problems(9), 0, max_rest=8)
    for number, pool in enumerate(("mixed", "mastered", "mastered", "hopeless", "mixed"), 1):
        stream.learn(f"rows:{number}", pool)
    stream.leave_out(Problem("rows:5", {}), "too long")
    stream.leave_out(Problem("rows:9", {}), "too long")
    counts = stream.pools()[""]
    assert 0 <= counts.pop("resting") <= 3
    assert counts == {"fresh": 3, "mixed": 1, "mastered": 2, "hopeless": 1}
    assert ProblemStream(problems(9), 0).pools() == {}


@given(
    count=st.integers(1, 6),
    before=st.lists(st.sampled_from(POOLS), max_size=30),
    after=st.lists(st.sampled_from(POOLS), max_size=30),
)
def test_a_restored_stream_goes_on_where_the_first_stopped(
    count: int, before: list[Pool], after: list[Pool]
) -> None:
    first = ProblemStream(problems(count), 7, 4)
    for pool in before:
        first.learn(first.take(1)[0].id, pool)
    state = json.loads(json.dumps(first.state()))
    second = ProblemStream(problems(count), 7, 4)
    second.restore(state)
    assert second.state() == state
    for pool in after:
        taken = [stream.take(1)[0].id for stream in (first, second)]
        assert taken[0] == taken[1]
        for stream in (first, second):
            stream.learn(taken[0], pool)
    assert first.pools() == second.pools()


def test_a_stream_without_a_curriculum_loads_a_state_with_one() -> None:
    plain, taught = (ProblemStream(problems(4), 3, each) for each in (None, 4))
    assert plain.take(8) == taught.take(8)
    taught.learn("rows:1", "mastered")
    plain.restore(taught.state())
    assert "curriculum" not in plain.state()
    assert Counter(p.id for p in plain.take(40)) == Counter(p.id for p in problems(4) * 10)


async def played(order: list[int], steps: int, settings: Config) -> tuple[list[list[str]], Any]:
    """Names of the problems of each step, whose groups end in this order, and the last state."""
    groups, batches = Groups(), []
    rewards = {"p1": (1.0, 1.0), "p2": (0.0, 0.0), "p3": (1.0, 1.0)}
    by_tag: dict[str, str] = {}

    async def run(problem: Problem, tag: str) -> Any:
        by_tag[tag] = problem.id
        groups.rewards = lambda tag: rewards.get(by_tag[tag], (0.0, 1.0))
        return await groups(problem, tag)

    producer = GroupProducer(settings, run, ProblemStream(PROBLEMS[:6], 0, 8), has_signal)
    running = asyncio.create_task(producer.run())
    for step in range(1, steps + 1):
        await settled()
        for number in order:
            await groups.let_go(4 * (step - 1) + number)
        batch = await producer.next_batch()
        batches.append(names(batch.groups))
        state = json.loads(json.dumps(producer.state()))
        await producer.advance(step)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return batches, state


async def test_the_order_does_not_depend_on_which_group_ends_first() -> None:
    first, state = await played([0, 1, 2, 3], 6, teaching())
    second, same = await played([3, 1, 0, 2], 6, teaching())
    assert (first, state) == (second, same)
    asked = Counter(name for batch in first for name in batch)
    assert max(asked[name] for name in ("p1", "p2", "p3")) <= 3
    assert min(asked[name] for name in ("p0", "p4", "p5")) >= 5


async def test_a_step_reports_the_pools_after_its_groups() -> None:
    groups = Groups()
    groups.rewards = lambda tag: {"group0": (1.0, 1.0), "group1": (0.0, 0.0)}.get(tag, (0.0, 1.0))
    stream = ProblemStream(PROBLEMS[:10], 0, 8)
    producer = GroupProducer(teaching(), groups, stream, has_signal)
    running = asyncio.create_task(producer.run())
    await groups.let_go(*range(4))
    batch = await producer.next_batch()
    counts = batch.pools[""]
    assert 0 <= counts.pop("resting") <= 2
    assert counts == {"fresh": 6, "mixed": 2, "mastered": 1, "hopeless": 1}
    assert len(batch.groups) == 4, "without dynamic sampling they are taken all the same"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_ahead_what_waits_keeps_its_outcome_through_a_checkpoint() -> None:
    settings, groups = teaching(staleness=1), Groups()
    groups.rewards = lambda tag: (1.0, 1.0) if tag in ("group1", "group5") else (0.0, 1.0)
    stream = ProblemStream(PROBLEMS, 0, 8)
    producer = GroupProducer(settings, groups, stream, has_signal)
    running = asyncio.create_task(producer.run())
    await groups.let_go(0, 1, 2, 3, 5)
    await producer.next_batch()
    state = json.loads(json.dumps(producer.state()))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    waits = ProblemStream(PROBLEMS, 0).take(6)[5].id
    assert state["outcomes"] == [[5, waits, "mastered"]]

    resumed = GroupProducer(settings, again := Groups(), ProblemStream(PROBLEMS, 0, 8), has_signal)
    resumed.restore(state, trained=1)
    running = asyncio.create_task(resumed.run())
    await again.let_go(*range(8, 15))
    batch = await resumed.next_batch()
    assert waits in names(batch.groups)
    assert batch.pools[""]["mastered"] == 2
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_what_is_replaced_rests_too_and_what_failed_says_nothing() -> None:
    settings = teaching()
    dynamic = settings.algorithm.model_copy(update={"dynamic_sampling": True})
    settings, groups = settings.model_copy(update={"algorithm": dynamic}), Groups()
    groups.rewards = lambda tag: {"group0": (0.0, 0.0), "group2": (1.0,)}.get(tag, (0.0, 1.0))
    producer = GroupProducer(settings, groups, ProblemStream(PROBLEMS, 0, 8), has_signal)
    running = asyncio.create_task(producer.run())
    await groups.let_go(*range(6))
    batch = await producer.next_batch()
    assert batch.discarded_by_reason == {"failed": 1, "no_signal": 1}
    pools = batch.pools[""]
    assert (pools["mixed"], pools["hopeless"], pools["fresh"]) == (4, 1, len(PROBLEMS) - 5)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize("seed", range(5))
def test_steps_without_signal_become_a_third_of_what_they_were(seed: int) -> None:
    """Half of the rows always right, three in ten never: the others are what can be learned."""
    chances = {f"rows:{n}": 1.0 if n <= 20 else 0.0 if n <= 32 else 0.5 for n in range(1, 41)}

    def silent(max_rest: int | None) -> int:
        draw = random.Random(seed)
        stream, steps = ProblemStream(problems(40), seed, max_rest), 0
        for _ in range(200):
            taken = [problem.id for problem in stream.take(4)]
            right = [[draw.random() < chances[name] for _ in range(8)] for name in taken]
            steps += all(len(set(each)) == 1 for each in right)
            for name, each in zip(taken, right, strict=True):
                pool: Pool = "mastered" if all(each) else "mixed" if any(each) else "hopeless"
                stream.learn(name, pool)
        return steps

    without, with_one = silent(None), silent(8)
    assert without > 50
    assert with_one <= without / 3
