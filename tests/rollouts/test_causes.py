"""Causes of failures, with their numbers and places, where a run ends and in errors.log."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from turnwise.config import RolloutConfig, parse_config
from turnwise.core.run_files import RunFiles
from turnwise.errors import StepError, TrajectoryError
from turnwise.observe.alarms import find_alarms
from turnwise.observe.metrics import StepMetrics
from turnwise.rollouts import Batch, Group, GroupProducer, ProblemStream, check_failures
from turnwise.rollouts.episode import Episode
from turnwise.rollouts.problems import Problem
from turnwise.trajectory import Outcome, Trajectory

DIVIDED = "ZeroDivisionError: division by zero (shop.py:12)"


def group(environment: str, *failures: str, finished: int = 0) -> Group:
    made = Group("rows:1", environment=environment)
    made.trajectories = [Trajectory("rows:1", n, outcome=Outcome(1.0)) for n in range(finished)]
    for failure in failures:
        made.dropped["reward_error"] += 1
        made.note("reward_error", failure)
    return made


def test_the_error_names_the_two_commonest_causes_with_counts() -> None:
    failed = [f"row {n} gave {n / 8}" for n in range(8)] + [DIVIDED] * 24 + ["nan"] * 3 + ["'1.0'"]
    groups = [group("shop", *failed), group("sums", finished=10)]
    words = (
        "36 of 46 trajectories failed (36 reward_error: "
        f"24 times shop: {DIVIDED}, 8 times shop: row 0 gave 0.0, 4 times something else)"
    )
    with pytest.raises(StepError) as caught:
        check_failures(groups, 0.5, "rollouts")
    assert str(caught.value) == f"rollouts: {words}"


def test_an_environment_that_always_fails_is_judged_alone() -> None:
    groups = [group("shop", *[DIVIDED] * 4), group("sums", finished=40)]
    assert check_failures(groups, 0.5, "rollouts") == {"reward_error": 4}  # too few to judge
    words = r"^rollouts of the environment shop: 20 of 20 trajectories failed .*shop\.py:12"
    with pytest.raises(StepError, match=words):
        check_failures([*groups[:1] * 5, *groups[1:]], 0.5, "rollouts")


def test_causes_survive_a_checkpoint() -> None:
    made = group("shop", DIVIDED, DIVIDED, "nan")
    again = Group.from_dict(json.loads(json.dumps(made.to_dict())))
    assert again.failures == {"reward_error": Counter({DIVIDED: 2, "nan": 1})}
    older = made.to_dict() | {"causes": {"reward_error": "nan"}}
    del older["failures"]
    assert Group.from_dict(older).causes == {"reward_error": "nan"}


def test_groups_that_failed_are_counted_and_raise_an_alarm() -> None:
    keys = {"environment": "e:E", "model": {"path": "m"}, "data": {"path": "d"}}
    config = parse_config(keys)
    lost = group("shop", *[DIVIDED] * 4)
    batch = Batch([group("sums", finished=4)] * 4, [("failed", lost), ("failed", lost)], 1.0)
    metrics = StepMetrics(step=1)
    metrics.add_rollouts(batch, check_failures(batch.ended, 0.5, "rollouts"))
    assert metrics.dropped == {"reward_error": 8}
    assert metrics.environments is not None
    assert metrics.environments["shop"] == {
        "trajectories": 0,
        "dropped": 8,
        "groups": 0,
        "groups_discarded": {"failed": 2},
        "trajectories_discarded": 0,
    }
    rows = [metrics.to_json() | {"step": step} for step in range(1, config.alarms.steps + 1)]
    alarms = [alarm.message for alarm in find_alarms(rows, config) if alarm.name == "dropped"]
    assert any("100% of the trajectories of the environment shop fail" in said for said in alarms)


class Shop:
    problem = "?"
    tools = ()

    def __init__(self, row: dict[str, Any]) -> None:
        self.given = row["given"]

    def reward(self, trajectory: Trajectory) -> Any:
        return self.given


async def test_a_reward_that_is_none_names_the_class_and_the_line() -> None:
    episode = Episode(Shop, Problem("rows:1", {"given": None}), RolloutConfig())
    await episode.open()
    line = Shop.reward.__code__.co_firstlineno
    words = rf"the environment Shop \(tests/rollouts/test_causes.py:{line}\) gave None as reward"
    with pytest.raises(TrajectoryError, match=words):
        await episode.reward(Trajectory("rows:1", 0))


async def test_errors_log_has_each_cause_once_with_user_frames_first(
    tmp_path: Path,
) -> None:
    files = RunFiles(tmp_path)
    for environment, divisor, text in (("a", 0, ""), ("a", 0, ""), ("b", 0, ""), ("a", 1, "x")):
        try:
            int(text or "1") / divisor
        except Exception as error:
            await files.log_error("reward_error", "group1-rows:1-0", error, environment)
    log = (tmp_path / "errors.log").read_text()
    assert log.count("ZeroDivisionError") == 2
    assert log.count("first reward_error of a:") == 2
    assert log.count("first reward_error of b:") == 1
    head, described, frame = log.splitlines()[:3]
    assert head.endswith("first reward_error of a: group1-rows:1-0")
    assert described.startswith("ZeroDivisionError: division by zero (tests/rollouts/test_causes")
    assert "tests/rollouts/test_causes.py" in frame


async def test_one_environment_that_always_fails_ends_the_run() -> None:
    keys = {"environment": "e:E", "model": {"path": "m"}, "data": {"path": "d"}}
    config = parse_config({**keys, "sampling": {"n": 4}, "rollout": {"prompts_per_step": 12}})
    names = ["shop", "sums", "maps", "mail"]
    problems = [Problem(f"rows:{n}", {}, names[n % 4]) for n in range(48)]

    async def run_group(problem: Problem, tag: str) -> Group:
        if problem.environment == "shop":
            return group("shop", *[DIVIDED] * 4)
        return group(problem.environment, finished=4)

    async def has_signal(_: Group) -> bool:
        return True

    stream = ProblemStream(problems, 0, shuffle=False)
    producer = GroupProducer(config, run_group, stream, has_signal)
    words = r"^rollouts of the environment shop: 20 of 20 trajectories failed \(20 reward_error"

    async def train() -> None:
        for step in range(1, 4):
            await producer.next_batch()
            await producer.advance(step)

    training = asyncio.create_task(train())
    with pytest.raises(StepError, match=words):
        await asyncio.wait_for(producer.run(), 60)
    training.cancel()
