"""Groups beyond a step's need: which are trained, how old they are, and the shares of environments.

Groups take virtual seconds, and are sampled by the weights of the moment at which they begin.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.virtual_time import run_virtually
from turnwise.config import Config, parse_config
from turnwise.rollouts import Group, GroupProducer, Problem, ProblemStream
from turnwise.rollouts.problems import MixedStream, Problems, Stream
from turnwise.training.samples import make_samples
from turnwise.trajectory import Outcome, Trajectory

PER_STEP = 8


@dataclass
class Played:
    """The record of a run of the producer."""

    trained: list[str] = field(default_factory=list)
    """Ids of the problems whose groups were trained, in order."""
    began: list[str] = field(default_factory=list)
    discarded: Counter[str] = field(default_factory=Counter)
    sampled_tokens: int = 0
    stale_tokens: int = 0
    while_training: int = 0
    """Groups that began between a step's batch and its end."""

    @property
    def shares(self) -> dict[str, float]:
        counts = Counter(name.partition("/")[0] for name in self.trained)
        return {name: count / len(self.trained) for name, count in counts.items()}


def config(oversample: float, staleness: int = 0, steps: int = 30, **algorithm: Any) -> Config:
    return parse_config(
        {
            "environment": "a:B",
            "model": {"path": "m"},
            "data": {"path": "d"},
            "sampling": {"n": 2},
            "rollout": {"prompts_per_step": PER_STEP, "oversample": oversample},
            "training": {"steps": steps, "max_staleness": staleness},
            "algorithm": algorithm,
        }
    )


def one_stream() -> ProblemStream:
    return ProblemStream([Problem(f"p:{number}", {}) for number in range(1, 2001)], 0)


def two_streams(**weights: float) -> MixedStream:
    rows = [{"n": number} for number in range(2000)]
    parts = {name: ProblemStream(Problems("rows", rows, name), 0) for name in weights}
    return MixedStream(parts, weights)


async def played(
    made: Config,
    stream: Stream,
    seconds: Callable[[Problem], float],
    train_seconds: float = 1.0,
    has_signal: Callable[[Problem], bool] = lambda problem: True,
) -> Played:
    done, version, versions, training = Played(), 0, made.recent_versions(), False

    async def run(problem: Problem, tag: str) -> Group:
        begun_with = version
        done.began.append(problem.id)
        done.while_training += training
        await asyncio.sleep(seconds(problem))
        group = Group.of(problem)
        for index in range(2):
            reward = float(index if has_signal(problem) else 1)
            one = Trajectory(problem.id, index, status="completed", outcome=Outcome(reward))
            one.add_turn([1], [2 + index, 3], [-0.1] * 2, [begun_with] * 2, "stop")
            group.trajectories.append(one)
        return group

    async def signal(group: Group) -> bool:
        return len({one.reward for one in group.trajectories}) > 1

    producer = GroupProducer(made, run, stream, signal)
    running = asyncio.create_task(producer.run())
    for step in range(1, made.training.steps + 1):
        batch = await producer.next_batch()
        training = True
        samples = make_samples(batch.groups, made, version, None, versions[0])
        done.trained += [group.problem_id for group in batch.groups]
        done.discarded.update(batch.discarded_by_reason)
        done.sampled_tokens += samples.report.tokens_sampled
        done.stale_tokens += samples.stale_tokens
        await asyncio.sleep(train_seconds)
        version += 1
        versions.append(version)
        training = False
        await producer.advance(step)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return done


@settings(deadline=None, max_examples=40)
@given(
    staleness=st.integers(0, 4),
    oversample=st.sampled_from([0.0, 0.1, 0.25, 0.34, 0.5, 1.0, 2.5]),
    rollout_seconds=st.floats(0.1, 10),
    train_seconds=st.floats(0.1, 10),
)
def test_spare_groups_never_make_what_is_trained_too_old(
    staleness: int, oversample: float, rollout_seconds: float, train_seconds: float
) -> None:
    """All groups take the same time, so that only spare ones could be late."""
    made = config(oversample, staleness, steps=12)
    run = run_virtually(played(made, one_stream(), lambda _: rollout_seconds, train_seconds))
    assert run.sampled_tokens == 12 * PER_STEP * 4
    assert run.stale_tokens == 0
    assert len(run.trained) == len({*run.trained})
    assert bool(run.discarded["oversampled"]) == (oversample > 0)


@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
@pytest.mark.parametrize("train_seconds", [0.1, 1.0, 4.0])
def test_spare_groups_leave_fewer_stale_tokens_if_some_are_slow(
    staleness: int, train_seconds: float
) -> None:
    stale = []
    for oversample in (0.0, 0.25, 1.0):
        draw, made = random.Random(0), config(oversample, staleness, steps=60)
        run = run_virtually(
            played(made, one_stream(), lambda _, d=draw: d.uniform(0.5, 3), train_seconds)
        )
        stale.append(run.stale_tokens)
    assert stale == sorted(stale, reverse=True)


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("oversample", [0.25, 0.5, 1.0])
def test_environments_keep_their_shares_where_one_is_slow(
    staleness: int, oversample: float
) -> None:
    def seconds(problem: Problem) -> float:
        return 6.0 if problem.environment == "tools" else 1.0

    made, stream = config(oversample, staleness, steps=40), two_streams(sums=1.0, tools=1.0)
    run = run_virtually(played(made, stream, seconds))
    lacking = (oversample + staleness + 1) * PER_STEP  # those that have begun
    assert run.shares["tools"] >= 0.5 - lacking / len(run.trained)
    assert run.discarded["oversampled"]


@pytest.mark.parametrize("oversample", [0.25, 1.0])
def test_every_begun_row_is_trained_except_the_spare_ones(oversample: float) -> None:
    def seconds(problem: Problem) -> float:
        return 5.0 if int(problem.id.partition(":")[2]) % 4 == 0 else 1.0

    run = run_virtually(played(config(oversample), one_stream(), seconds))
    left = {*run.began} - {*run.trained}
    assert len(left) <= oversample * PER_STEP
    assert len(run.trained) == len({*run.trained})


class SlowRows(ProblemStream):
    async def take_one(self, seconds: float) -> Problem:
        await asyncio.sleep(0.3)
        return await super().take_one(seconds)


@pytest.mark.parametrize("oversample", [0.0, 0.5, 1.0])
def test_slow_rows_begin_no_group_during_synchronous_training(
    oversample: float,
) -> None:
    stream = SlowRows([Problem(f"p:{number}", {}) for number in range(1, 2001)], 0)
    run = run_virtually(played(config(oversample), stream, lambda _: 0.5, 5.0))
    assert run.while_training == 0
    assert run.stale_tokens == 0


@pytest.mark.parametrize("staleness", [0, 1])
def test_environments_keep_their_shares_when_groups_are_replaced(
    staleness: int,
) -> None:
    def has_signal(problem: Problem) -> bool:
        number = int(problem.id.partition(":")[2])
        return problem.environment == "hard" or number % 4 == 0

    made = config(0.0, staleness, steps=40, dynamic_sampling=True)
    stream = two_streams(easy=1.0, hard=1.0)
    run = run_virtually(played(made, stream, lambda _: 1.0, has_signal=has_signal))
    assert run.shares["easy"] == pytest.approx(0.5, abs=0.05)


def test_an_environment_without_signal_still_lets_steps_fill() -> None:
    made, stream = config(0.0, steps=30, dynamic_sampling=True), two_streams(easy=3.0, hard=1.0)
    run = run_virtually(
        played(made, stream, lambda _: 1.0, has_signal=lambda one: one.environment == "hard")
    )
    assert run.shares == {"hard": 1.0}
    assert run.discarded["no_signal"] < 5 * len(run.trained)
