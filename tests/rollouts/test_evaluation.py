"""pass@k and mean@k against all subsets, the summary of groups, and how groups are run."""

import asyncio
import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from turnwise.config import Config, RolloutConfig
from turnwise.config.rollout import EvalConfig
from turnwise.core.aio import for_each, is_cancelled, task_group, together
from turnwise.errors import DeadlineError, InputError
from turnwise.observe.metrics import StepMetrics
from turnwise.rollouts import Group, Problem
from turnwise.rollouts.evaluation import (
    GroupLog,
    Scores,
    compare,
    evaluate,
    groups_at_once,
    interval,
    pass_at_k,
    run_groups,
)
from turnwise.rollouts.problems import JoinedProblems, Lazy, Problems
from turnwise.trajectory import Outcome, Trajectory, read_jsonl, write_jsonl

CASES = [(n, c, k) for n in range(1, 7) for c in range(n + 1) for k in range(1, n + 1)]


def test_pass_at_k_is_the_share_of_subsets_with_a_right_attempt() -> None:
    for n, c, k in CASES:
        subsets = list(combinations([True] * c + [False] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets)), (n, c, k)


def test_mean_at_k_is_unbiased_over_the_order_of_attempts() -> None:
    for n, c in {case[:2] for case in CASES if case[0] < 6}:
        orders = permutations([1.0] * c + [0.0] * (n - c))
        results = summarize([group(list(order)) for order in orders], n, 1.0)
        for name in (name for name in results if name.startswith("mean@")):
            assert results[name] == pytest.approx(c / n), (n, c, name)


def test_pass_at_k_stays_exact_for_many_attempts() -> None:
    assert pass_at_k(2000, 1, 1000) == pytest.approx(0.5)
    assert pass_at_k(2000, 1, 1) == pytest.approx(1 / 2000)


def limits(config: Config) -> tuple[EvalConfig, RolloutConfig, int]:
    """Return the arguments of `evaluate` that a configuration has."""
    return config.eval, config.rollout, groups_at_once(config, config.eval.sampling.n)


def group(rewards: list[float | None]) -> Group:
    """An attempt that was dropped is None."""
    made = [
        Trajectory("p", index, outcome=Outcome(reward))
        for index, reward in enumerate(rewards)
        if reward is not None
    ]
    return Group("p", made)


def summarize(groups: list[Group], n: int, success_reward: float) -> dict[str, float]:
    """Return the results without the bounds of their intervals."""
    scores = Scores(n, success_reward)
    for each in groups:
        scores.add(each)
    found = scores.summary()
    return {name: found[name] for name in found if not name.endswith(("_low", "_high"))}


def test_95_of_100_intervals_contain_the_true_share() -> None:
    """Rows of 4 attempts, whose chances differ by row; the mean chance is 0.6."""
    draw = np.random.default_rng(1)
    for count, fewest in ((25, 0.90), (200, 0.93)):
        hits = 0
        for _ in range(400):
            chances = draw.beta(3, 2, size=count)
            rights = draw.binomial(4, chances)
            low, high = interval(Counter((float(right), 4) for right in rights))
            hits += low <= 0.6 <= high
        assert fewest <= hits / 400 <= 0.985


def test_an_interval_of_equal_rows_is_exact() -> None:
    """A share p with p ** 20 = 0.025 is the smallest that 20 of 20 right rows leave likely."""
    low, high = interval(Counter({(1.0, 1): 20}))
    assert (low**20, high) == (pytest.approx(0.025), 1.0)
    assert interval(Counter({(0.0, 4): 20})) == (0.0, pytest.approx(1 - low))
    assert interval(Counter({(2.0, 4): 20})) == (0.5, 0.5)


def test_an_interval_is_over_rows_and_not_over_attempts() -> None:
    """Eight equal attempts at a row say no more than one of them."""
    one, eight = ({(1.0 * n, n): 80, (0.0, n): 20} for n in (1, 8))
    assert interval(Counter(one)) == interval(Counter(eight))
    assert interval(Counter(one)) == (pytest.approx(0.72, abs=0.01), pytest.approx(0.88, abs=0.01))


def test_two_evaluations_are_compared_by_row() -> None:
    """Rows 0 and 1 changed by one attempt of two, row 2 did not; row 3 failed the second time, and
    row 4 both times."""

    def attempts(rights: dict[int, list[float]]) -> list[Trajectory]:
        return [
            Trajectory(f"rows:{row}", index, outcome=Outcome(reward))
            for row, rewards in rights.items()
            for index, reward in enumerate(rewards)
        ]

    first = attempts({0: [0.0, 1.0], 1: [1.0, 1.0], 2: [1.0, 0.0], 3: [1.0, 1.0]})
    second = attempts({0: [1.0, 1.0], 1: [0.0, 1.0], 2: [0.0, 1.0]})
    found = compare(first, second, 2, 1.0)
    assert found.rows == 4
    assert found.difference == pytest.approx((0.5 - 0.5 + 0.0 - 1.0) / 4)
    assert found.better == ["rows:0"]
    assert found.worse == ["rows:1", "rows:3"]
    low, high = found.bounds
    assert low < found.difference < high
    same = compare(first, first, 2, 1.0)
    assert (same.difference, same.bounds, same.better) == (0.0, (0.0, 0.0), [])
    with pytest.raises(InputError, match="no row in common"):
        compare(first, attempts({9: [1.0]}), 2, 1.0)


def test_a_paired_difference_has_the_narrower_interval() -> None:
    """Of 200 rows, 100 are always right and 90 never; ten are right only the second time."""
    rows = [Outcome(float(number < 100)) for number in range(200)]
    better = [Outcome(float(number < 110)) for number in range(200)]
    first, second = (
        [Trajectory(f"rows:{number}", 0, outcome=each) for number, each in enumerate(outcomes)]
        for outcomes in (rows, better)
    )
    low, high = compare(first, second, 1, 1.0).bounds
    assert 0.01 < low < 0.05 < high < 0.09
    one_low, one_high = interval(Counter({(1.0, 1): 100, (0.0, 1): 100}))
    assert high - low < (one_high - one_low) / 2


def test_a_target_may_ask_for_the_lower_bound() -> None:
    heldout = {"accuracy": 0.92, "accuracy_low": 0.87}
    assert EvalConfig(target=0.9).reached(heldout)
    assert not EvalConfig.model_validate({"target": {"lower": 0.9}}).reached(heldout)
    assert EvalConfig.model_validate({"target": {"lower": 0.87}}).reached(heldout)
    assert not EvalConfig().reached(heldout)
    assert not EvalConfig(target=0.1).reached(None)
    with pytest.raises(ValueError, match="target"):
        EvalConfig.model_validate({"target": {"upper": 0.9}})


@pytest.mark.parametrize(("n", "missing"), [(1, 0), (1, 1), (3, 2), (5, 0), (5, 1), (5, 4), (5, 5)])
def test_an_attempt_without_a_reward_is_neither_right_nor_wrong(n: int, missing: int) -> None:
    """The summary is as if such attempts had not been made."""
    rewards: list[float | None] = [1.0, 0.0, 1.0, 0.0, 0.0][: n - missing]
    with_them, without = group([None] * missing + rewards), group(rewards)
    with_them.dropped["no_reward"] = missing
    summary = summarize([with_them], n, 1.0)
    right = [reward == 1.0 for reward in rewards]
    assert summary["accuracy"] == pytest.approx(sum(right) / max(1, len(right)))
    assert (f"pass@{n}" in summary) == (not missing)
    if rewards:
        same = summarize([without], len(rewards), 1.0)
        shared = summary.keys() & same.keys()
        assert {key: summary[key] for key in shared} == {key: same[key] for key in shared}
    failed = group([*rewards, *[None] * missing])
    failed.dropped["tool_error"] = missing
    assert summarize([failed], n, 1.0)["accuracy"] == pytest.approx(sum(right) / n)


def test_a_summary_counts_dropped_attempts_as_wrong_in_place() -> None:
    summary = summarize([group([1.0, 0.5, None]), group([None, 1.5, 2.0])], 3, 1.0)
    assert summary == {
        "accuracy": pytest.approx(3 / 6),
        "reward_mean": pytest.approx(5.0 / 4),
        "pass@1": pytest.approx(3 / 6),
        "mean@1": pytest.approx(1 / 2),
        "pass@2": pytest.approx((2 / 3 + 1) / 2),
        "mean@2": pytest.approx((1 / 2 + 1 / 2) / 2),
        "pass@3": pytest.approx(1.0),
        "mean@3": pytest.approx((1 / 3 + 2 / 3) / 2),
    }


@pytest.mark.parametrize(("n", "ks"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_k_runs_over_powers_of_two_and_the_number_of_attempts(n: int, ks: list[int]) -> None:
    summary = summarize([group([0.0] * n)], n, 1.0)
    assert [key for key in summary if key.startswith("pass")] == [f"pass@{k}" for k in ks]
    assert set(summary.values()) == {0.0}


def test_groups_of_which_nothing_came_through_are_wrong() -> None:
    assert set(summarize([group([None, None])], 2, 1.0).values()) == {0.0}


@pytest.mark.parametrize(
    ("success_reward", "accuracy"), [(-5.0, 1.0), (0.0, 0.75), (0.5, 0.5), (1.0, 0.5), (3.0, 0.0)]
)
def test_the_threshold_decides_which_attempts_are_right(
    success_reward: float, accuracy: float
) -> None:
    rewards: list[float | None] = [-1.0, 0.2, 0.7 + 0.2 + 0.1, 2.0]  # the third is just below 1
    assert summarize([group(rewards)], 4, success_reward)["accuracy"] == accuracy


async def test_each_held_out_set_has_results_of_its_own(
    make_config: Callable[..., Config],
) -> None:
    rows = {"easy": [{"n": 1}, {"n": 1}], "hard": [{"n": 0}]}
    problems = JoinedProblems({of: Problems("rows", each, "", of) for of, each in rows.items()})
    assert [one.id for one in problems] == ["easy/rows:1", "easy/rows:2", "hard/rows:1"]

    async def play(problem: Problem, tag: str) -> Group:
        return Group(problem.id, [Trajectory(problem.id, 0, outcome=Outcome(problem.row["n"]))])

    evaluation = await evaluate(play, problems, *limits(make_config()))
    assert evaluation.accuracy == pytest.approx(2 / 3)
    assert {of: each["accuracy"] for of, each in evaluation.sets.items()} == {"easy": 1, "hard": 0}
    assert evaluation.environments == {}
    metrics = StepMetrics(step=1)
    metrics.add_evaluation(evaluation)
    assert metrics.to_json()["heldout_sets"]["easy"]["reward_mean"] == 1.0
    single = await evaluate(play, Problems("rows", rows["easy"]), *limits(make_config()))
    assert single.sets == {}


class Play:
    """Plays groups of one trajectory when the test lets it; counts rows, groups and the most."""

    def __init__(self, rows: int) -> None:
        self.read: list[int] = []
        self.running = self.most = self.ended = 0
        self.gate = asyncio.Event()
        self.bad: str | None = None
        self.problems = Problems("rows.jsonl", Lazy(rows, self._read))

    def _read(self, index: int) -> dict[str, int]:
        self.read.append(index)
        return {"n": index}

    async def group(self, problem: Problem, tag: str) -> Group:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if problem.id == self.bad:
                raise InputError(f"{problem.id} cannot be used")
            if self.bad is not None or not self.gate.is_set():
                await self.gate.wait()
            return Group(
                problem.id, [Trajectory(problem.id, 0, outcome=Outcome(problem.row["n"] % 2))]
            )
        finally:
            self.running -= 1
            self.ended += 1


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not done():
            await asyncio.sleep(0.001)


def begun_since(before: set[asyncio.Task[Any]]) -> list[str]:
    """Tasks of groups; those of the session's engines come and go."""
    named = [str(task.get_coro()) for task in asyncio.all_tasks() - before]
    return [name for name in named if "for_each" in name or "Play" in name or "run_groups" in name]


async def test_rows_are_read_and_groups_begun_as_places_become_free() -> None:
    play, before = Play(500), asyncio.all_tasks()
    work = asyncio.ensure_future(run_groups(play.group, play.problems, "eval", at_once=7))
    await until(lambda: play.running == 7)
    assert len(play.read) == 7
    assert len(begun_since(before)) < 20
    play.gate.set()
    outcomes = await work
    assert (outcomes.finished, play.most, sorted(play.read)) == (500, 7, list(range(500)))


async def test_an_error_ends_all_groups_and_saves_the_finished_ones(tmp_path: Path) -> None:
    before = asyncio.all_tasks()
    play, log = Play(100), GroupLog(tmp_path / "eval.jsonl", tmp_path / "timeline" / "eval.jsonl")
    play.gate.set()
    play.bad = "rows.jsonl:40"
    with pytest.raises(InputError, match=r"rows\.jsonl:40 cannot be used"):
        await run_groups(play.group, play.problems, "eval", log.keep, at_once=4)
    assert play.running == 0
    assert begun_since(before) == []
    done = {trajectory.problem_id for trajectory in read_jsonl(tmp_path / "eval.jsonl")}
    assert {f"rows.jsonl:{n}" for n in range(1, 37)} <= done
    assert "rows.jsonl:40" not in done
    assert len((tmp_path / "timeline" / "eval.jsonl").read_text().splitlines()) == len(done)


async def test_a_row_that_cannot_be_read_in_time_is_named() -> None:
    stuck = threading.Event()

    def read(index: int) -> dict[str, int]:
        stuck.wait(60)
        return {}

    problems = Problems("rows.jsonl", Lazy(3, read))
    with pytest.raises(DeadlineError, match=r"row \d of the data did not answer within 0.1 s"):
        await run_groups(Play(3).group, problems, "eval", row_seconds=0.1)
    stuck.set()


async def test_an_evaluation_keeps_its_trajectories_in_their_file(
    make_config: Callable[..., Config], tmp_path: Path
) -> None:
    config = make_config(eval={"sampling": {"n": 1}}, rollout={"concurrency": 16})
    play, path = Play(50), tmp_path / "eval.jsonl"
    path.write_text("of an earlier evaluation\n")
    slow = asyncio.Event()

    async def slow_at_first(problem: Problem, tag: str) -> Group:
        if problem.row["n"] < 5:
            await slow.wait()
        return await play.group(problem, tag)

    play.gate.set()
    work = asyncio.ensure_future(
        evaluate(slow_at_first, play.problems, *limits(config), kept=GroupLog(path))
    )
    await until(lambda: len(path.read_text().splitlines()) == 45)  # all that is finished
    slow.set()
    evaluation = await work
    assert (evaluation.finished, evaluation.accuracy) == (50, 0.5)
    names = [f"rows.jsonl:{n}" for n in range(1, 51)]
    assert [trajectory.problem_id for trajectory in evaluation.trajectories] == names
    assert [t.problem_id for t in evaluation.trajectories[-2:]] == names[-2:]
    assert evaluation.trajectories[3].problem_id == names[3]
    assert [t.problem_id for t in read_jsonl(path)] != names


MEMORY = """
import asyncio, resource, sys
from pathlib import Path
from turnwise.config import parse_config
from turnwise.rollouts import Group
from turnwise.rollouts.data import load_heldout
from turnwise.rollouts.evaluation import GroupLog, evaluate, groups_at_once
from turnwise.trajectory import Outcome, Trajectory

async def answer(problem, tag):
    trajectory = Trajectory(problem.id, 0, outcome=Outcome(problem.row["n"] % 2))
    ids = list(range(64))
    trajectory.add_turn(ids, ids[:8], [-1.0] * 8, [0] * 8, "stop")
    return Group(problem.id, [trajectory])

folder = Path(sys.argv[1])
data = {"path": str(folder / "rows.jsonl")}
tree = {"environment": "package:Class", "model": {"path": "model"}, "data": data}
config = parse_config({**tree, "eval": {"sampling": {"n": 1}}})
log = GroupLog(folder / "eval.jsonl", folder / "timeline" / "eval.jsonl")
limits = config.eval, config.rollout, groups_at_once(config, 1)
evaluation = asyncio.run(evaluate(answer, load_heldout(config), *limits, kept=log))
print(evaluation.finished, evaluation.accuracy, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow  # minutes
def test_a_million_rows_take_little_more_memory_than_a_thousand(tmp_path: Path) -> None:
    peaks = {}
    for count in (1_000, 1_000_000):
        folder = tmp_path / str(count)
        folder.mkdir()
        with (folder / "rows.jsonl").open("w") as file:
            file.writelines(json.dumps({"n": n, "question": "a" * 50}) + "\n" for n in range(count))
        done = subprocess.run(
            [sys.executable, "-c", MEMORY, str(folder)], capture_output=True, text=True, check=True
        )
        finished, accuracy, kib = done.stdout.split()
        assert (int(finished), float(accuracy)) == (count, 0.5)
        peaks[count] = int(kib) * 1024
    assert peaks[1_000_000] - peaks[1_000] < 300e6, peaks


async def test_an_evaluation_has_the_means_of_the_environments_metrics(
    make_config: Callable[..., Config],
) -> None:
    config = make_config(eval={"sampling": {"n": 1}})

    async def run_group(problem: Problem, tag: str) -> Group:
        number = problem.row["n"]
        metrics = {"steps": float(number), **({"rare": 5.0} if number == 3 else {})}
        return Group(
            problem.id,
            [Trajectory(problem.id, 0, outcome=Outcome(0.0, metrics=metrics))],
        )

    problems = [Problem(f"rows:{n}", {"n": n}) for n in range(5)]
    evaluation = await evaluate(run_group, problems, *limits(config))
    assert evaluation.env == {"rare": 5.0, "steps": 2.0}


@pytest.mark.parametrize(
    ("n", "concurrency", "groups"), [(8, 256, 128), (1, 4, 16), (64, 16, 2), (4, None, 320)]
)
def test_as_many_groups_begin_as_may_be_open(
    make_config: Callable[..., Config], n: int, concurrency: int | None, groups: int
) -> None:
    assert groups_at_once(make_config(rollout={"concurrency": concurrency}), n) == groups


async def test_the_first_error_ends_the_work_on_all_items() -> None:
    begun: list[int] = []
    ended: list[int] = []

    async def work(item: int) -> None:
        begun.append(item)
        if item == 5:
            raise ValueError("five")
        try:
            await asyncio.sleep(0 if item < 5 else 600)
        finally:
            ended.append(item)

    with pytest.raises(ValueError, match="five"):
        await for_each(iter(range(10**9)), work, at_once=3)
    assert begun == list(range(len(begun)))
    assert sorted([*ended, 5]) == begun

    async def cancelled(item: int) -> None:
        raise asyncio.CancelledError

    with pytest.raises(RuntimeError, match="raised CancelledError"):
        await for_each([1, 2], cancelled, at_once=1)


async def test_the_first_error_ends_what_runs_together() -> None:
    ended: list[str] = []

    async def slow() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            ended.append("slow")

    async def fails() -> None:
        await asyncio.sleep(0)
        raise ValueError("it")

    with pytest.raises(ValueError, match="it"):
        await together([slow(), fails()])
    assert ended == ["slow"]
    assert not is_cancelled()  # nobody has cancelled this task

    async def in_a_group() -> None:
        async with task_group() as tasks:
            tasks.create_task(slow())
            tasks.create_task(fails())

    with pytest.raises(ValueError, match="it"):
        await in_a_group()
    assert not is_cancelled()
    assert await together(asyncio.sleep(0, number) for number in range(3)) == [0, 1, 2]


def test_a_last_line_that_was_never_completed_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "eval.jsonl"
    write_jsonl(path, [Trajectory("rows:1"), Trajectory("rows:1", 1)])
    whole = path.read_text()
    path.write_text(whole[:-5])
    assert [trajectory.sample_index for trajectory in read_jsonl(path)] == [0]
    path.write_text(whole[:-5] + "\n")
    with pytest.raises(json.JSONDecodeError):
        list(read_jsonl(path))
    path.write_text(whole[:-1])
    assert len(list(read_jsonl(path))) == 2
