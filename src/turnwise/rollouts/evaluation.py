"""Results of an evaluation: accuracy, pass@k and mean@k.

A trajectory is correct if its reward is at least `eval.success_reward`, up to rounding; a dropped
trajectory counts as wrong. If rewards are not 0 or 1, set `eval.success_reward` to the lowest
reward of a correct answer; `reward_mean` does not depend on this key.
"""

import asyncio
import logging
import math
import time
from array import array
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from math import comb
from pathlib import Path

import numpy as np

from turnwise.config import Config, RolloutConfig
from turnwise.config.rollout import EvalConfig
from turnwise.core.admission import OPEN
from turnwise.core.aio import for_each, run_in_thread
from turnwise.core.json_types import JsonObject
from turnwise.errors import InputError, translate_unwritable
from turnwise.rollouts.group import NO_REWARD, Group, Outcomes, is_right, turn_times, write_times
from turnwise.rollouts.problems import JoinedProblems, Lazy, Problem, problem_at
from turnwise.rollouts.producer import RunGroup
from turnwise.serving.seats import limits_of
from turnwise.trajectory import Trajectory
from turnwise.trajectory.images import FOLDER, save_images

logger = logging.getLogger(__name__)

_TAIL = 0.05
_DRAWS = 2000


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the probability that `k` of `n` attempts, drawn without replacement, include at least
    one of the `c` correct attempts: the unbiased estimator of Chen et al., arXiv 2107.03374,
    equation 1."""
    assert 0 <= c <= n
    assert 1 <= k <= n
    return 1.0 - comb(n - c, k) / comb(n, k)


Shares = Counter[tuple[float, int]]
"""Number of rows for each pair of a part and a whole, such as right attempts and all attempts."""


def share_of(rows: Shares) -> float:
    """Return the sum of all rows' parts, divided by the sum of their wholes."""
    whole = sum(whole * count for (_, whole), count in rows.items())
    return sum(part * count for (part, _), count in rows.items()) / whole


def interval(rows: Shares) -> tuple[float, float]:
    """Return the bounds of a share's 95 % interval: the percentile bootstrap over rows (Efron 1979)
    with 2,000 draws, always the same for the same rows.

    If every row has the same share, all draws are equal. A share of 0 or 1 then gets the exact
    bound of Clopper and Pearson (1934): with 20 rows that are all right, the interval begins at
    0.83.

    Example:
        interval(Counter({(1, 1): 80, (0, 1): 20}))  # 80 of 100 rows are right: (0.72, 0.88)
    """
    kinds, count = np.array(list(rows), dtype=float), sum(rows.values())
    shares = {part / whole for part, whole in rows}
    if shares in ({0.0}, {1.0}):
        bound = (_TAIL / 2) ** (1 / count)
        return (bound, 1.0) if shares == {1.0} else (0.0, 1.0 - bound)
    odds = np.array(list(rows.values())) / count
    drawn = np.random.default_rng(0).multinomial(count, odds, size=_DRAWS) @ kinds
    low, high = np.quantile(drawn[:, 0] / drawn[:, 1], (_TAIL / 2, 1 - _TAIL / 2))
    return float(low), float(high)


class Scores:
    """Means over groups of `n` attempts each; groups are added one by one.

    An attempt to which no reward applies is left out; a failed attempt counts as wrong.
    """

    def __init__(self, n: int, success_reward: float) -> None:
        self._n, self._success_reward = n, success_reward
        self._ks = [2**i for i in range(n.bit_length()) if 2**i < n] + [n]
        self._finished, self._reward = 0, 0.0
        self._rows = defaultdict[str, Shares](Shares)
        """The rows' parts of accuracy, pass@k and mean@k, by the name of the result."""

    def add(self, group: Group) -> None:
        by_index = dict.fromkeys(range(self._n), False)
        for trajectory in group.trajectories:
            reward = trajectory.reward or 0.0
            by_index[trajectory.sample_index] = is_right(reward, self._success_reward)
            self._reward += reward
        missing = sorted(by_index.keys() - {t.sample_index for t in group.trajectories})
        for index in missing[: group.dropped[NO_REWARD]]:
            del by_index[index]
        right = list(by_index.values())
        self._finished += len(group.trajectories)
        if right:
            self._rows["accuracy"][sum(right), len(right)] += 1
        for k in (k for k in self._ks if k <= len(right)):
            self._rows[f"pass@{k}"][pass_at_k(len(right), sum(right), k), 1] += 1
            self._rows[f"mean@{k}"][sum(right[:k]), k] += 1

    def summary(self) -> dict[str, float]:
        """Return `accuracy` over all attempts, `reward_mean` over the attempts that were not
        dropped, and `pass@k` and `mean@k` over the groups with at least k attempts. k is each power
        of two below `n`, and `n` itself; a k for which no group has enough attempts is left out.
        The bounds of their 95 % intervals follow: `accuracy_low`, `accuracy_high`, and so on.
        `accuracy` and `reward_mean` are 0 if there are no attempts."""
        rewards = {"reward_mean": self._reward / max(1, self._finished)}
        shares = {name: share_of(rows) for name, rows in self._rows.items()}
        bounds = {
            f"{name}_{end}": bound
            for name, rows in self._rows.items()
            for end, bound in zip(("low", "high"), interval(rows), strict=True)
        }
        return {"accuracy": 0.0, **rewards, **shares, **bounds}


@dataclass(slots=True)
class Comparison:
    """The difference between two evaluations of the same rows, paired by row."""

    rows: int
    difference: float
    """Accuracy of the second evaluation minus accuracy of the first one."""
    bounds: tuple[float, float]
    """95 % interval of the difference (`interval`)."""
    better: list[str]
    """Ids of the problems that the second evaluation solved more often."""
    worse: list[str]
    """Ids of the problems that the second evaluation solved less often."""


def compare(
    first: Sequence[Trajectory], second: Sequence[Trajectory], n: int, success_reward: float
) -> Comparison:
    """Compare the trajectories of two evaluations with `n` attempts at each row.

    A failed attempt counts as wrong. A row of which neither evaluation has a trajectory is left
    out.

    Raises:
        InputError: when no row has a trajectory in both evaluations.
    """
    shares = [Counter[str](), Counter[str]()]
    for right, trajectories in zip(shares, (first, second), strict=True):
        for each in trajectories:
            right[each.problem_id] += is_right(each.reward or 0.0, success_reward)
    before, after = shares
    if not before.keys() & after.keys():
        raise InputError("the two evaluations have no row in common")
    changes = {row: after[row] - before[row] for row in sorted(before.keys() | after.keys())}
    rows = Shares((float(change), n) for change in changes.values())
    return Comparison(
        len(changes),
        share_of(rows),
        interval(rows) if any(changes.values()) else (0.0, 0.0),
        [row for row, change in changes.items() if change > 0],
        [row for row, change in changes.items() if change < 0],
    )


@dataclass(slots=True)
class Evaluation:
    """The results of the model on held-out problems."""

    trajectories: Sequence[Trajectory]
    """The finished trajectories, in the order of the problems; if a file holds them, each is read
    on access."""
    finished: int
    dropped: Counter[str]  # number of dropped trajectories, by reason
    sampled_tokens: int  # number of sampled tokens of the finished trajectories
    seconds: float
    summary: dict[str, float]  # results as `Scores.summary` returns them
    env: dict[str, float] = field(default_factory=dict)
    """Mean of each number that the environments' `metrics` return, over the finished trajectories
    for which it was returned."""
    environments: dict[str, dict[str, float]] = field(default_factory=dict)
    """Summary of each environment by name if the run has several environments, otherwise empty."""
    sets: dict[str, dict[str, float]] = field(default_factory=dict)
    """Summary of each held-out set by name if there are several sets, otherwise empty."""
    judging: Counter[str] = field(default_factory=Counter, kw_only=True)
    """Counts of the judges' work: requests, retries, cached, prompt_tokens, completion_tokens."""

    @property
    def accuracy(self) -> float:
        return self.summary["accuracy"]

    @property
    def tokens_per_s(self) -> float:
        return self.sampled_tokens / self.seconds

    def to_json(self) -> JsonObject:
        """Return all results as plain values, without the trajectories."""
        names = (item.name for item in fields(self))
        return {name: getattr(self, name) for name in names if name != "trajectories"}


class GroupLog:
    """Keeps groups in a file, so that no group is lost if the run ends early; without a path, keeps
    them in memory.

    Existing files are replaced when the first group is kept. `times` is the file for the times of
    turns.
    """

    def __init__(self, path: Path | None = None, times: Path | None = None) -> None:
        self._path, self._times = path, times
        self._groups: dict[int, Group] = {}
        self._starts, self._places, self._counts = array("Q"), array("Q"), array("Q")
        """For each group: its byte position in the file, the index of its problem, and the number
        of its trajectories."""
        self._lock = asyncio.Lock()
        self._begun = False

    @property
    def trajectories(self) -> Sequence[Trajectory]:
        """The trajectories so far, in the order of the problems; if a file holds them, each is read
        on access."""
        if (path := self._path) is None:
            return [t for _, group in sorted(self._groups.items()) for t in group.trajectories]
        order = np.argsort(np.array(self._places), kind="stable")
        ends = np.cumsum(np.array(self._counts, dtype=np.int64)[order])

        def read(index: int) -> Trajectory:
            place = int(np.searchsorted(ends, index, side="right"))
            before = int(ends[place - 1]) if place else 0
            with path.open("rb") as file:
                file.seek(self._starts[int(order[place])])
                line = next(islice(file, index - before, None)).decode()
                return Trajectory.from_json(line, path.parent / FOLDER)

        return Lazy(sum(self._counts), read)

    async def keep(self, place: int, group: Group) -> None:
        """Keep a finished group of the problem with index `place`, even if the caller is cancelled
        meanwhile; raise TurnwiseError if the group cannot be written."""
        if self._path is None:
            self._groups[place] = group
            return

        def append(path: Path) -> None:
            lines = [f"{trajectory.to_json()}\n".encode() for trajectory in group.trajectories]
            new = not self._begun
            with translate_unwritable(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                for trajectory in group.trajectories:
                    save_images(path.parent / FOLDER, trajectory.images.values())
                with path.open("wb" if new else "ab") as file:
                    start = file.tell()
                    file.write(b"".join(lines))
            self._begun = True
            self._starts.append(start)
            self._places.append(place)
            self._counts.append(len(lines))
            if self._times is not None:
                write_times(self._times, turn_times([group]), new=new)

        async def write(path: Path) -> None:
            async with self._lock:  # both files have the same order
                await run_in_thread(append, path)

        writing = asyncio.ensure_future(write(self._path))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await writing
            raise


async def run_groups(
    run_group: RunGroup,
    problems: Sequence[Problem],
    tag: str,
    keep: Callable[[int, Group], Awaitable[None]] | None = None,
    on_group: Callable[[Group], None] = lambda _: None,
    *,
    at_once: int = 64,
    row_seconds: float = 120.0,
) -> Outcomes:
    """Run the groups of all problems, `at_once` at a time; read a row just before its group runs.

    `keep` gets each group that was run, with the index of its problem. `on_group` also gets the
    groups that are left out because their prompt is too long. Raises InputError if all groups are
    left out, or a row cannot be used.
    """
    outcomes, left_out, why = Outcomes(), 0, ""

    async def one(place: int) -> None:
        nonlocal left_out, why
        problem = await problem_at(problems, place, row_seconds)
        group = await run_group(problem, tag)
        if group.left_out:
            left_out, why = left_out + 1, why or group.causes[group.left_out]
        else:
            outcomes.add(group)
            if keep is not None:
                await keep(place, group)
        on_group(group)

    await for_each(range(len(problems)), one, min(at_once, len(problems)))
    if left_out:
        number = f"{left_out} of {len(problems)} rows"
        if left_out == len(problems):
            raise InputError(f"{number} have too long a prompt, and none is left: {why}")
        logger.warning("%s have too long a prompt and are left out: %s", number, why)
    return outcomes


def groups_at_once(config: Config, n: int) -> int:
    """Return how many groups of `n` trajectories keep the engines of a run busy, also while a row
    is read or a group is written: enough groups for the maximum number of open trajectories."""
    limits = limits_of(config, config.serving.max_workers)
    return max(2, math.ceil(OPEN * limits.at_once / n))


async def evaluate(
    run_group: RunGroup,
    problems: Sequence[Problem],
    held_out: EvalConfig,
    rollout: RolloutConfig,
    at_once: int,
    tag: str = "eval",
    on_group: Callable[[Group], None] = lambda _: None,
    kept: GroupLog | None = None,
) -> Evaluation:
    """Evaluate the model on problems, with the groups of `at_once` problems in progress;
    `run_group` runs a group with `eval.sampling`. Raise StepError when more than
    `rollout.max_failed_fraction` of the trajectories fail."""
    n, right, kept = held_out.sampling.n, held_out.success_reward, kept or GroupLog()
    scores, tokens, started = Scores(n, right), 0, time.perf_counter()
    of_each, of_sets = (defaultdict[str, Scores](lambda: Scores(n, right)) for _ in range(2))
    sums, counts = defaultdict[str, float](float), Counter[str]()

    async def keep(place: int, group: Group) -> None:
        nonlocal tokens
        scores.add(group)
        if group.environment:
            of_each[group.environment].add(group)
        part = problems.name_of_part(place) if isinstance(problems, JoinedProblems) else ""
        if part != group.environment:
            of_sets[part].add(group)
        for trajectory in group.trajectories:
            tokens += trajectory.sampled_tokens
            for name, value in trajectory.metrics.items():
                sums[name] += value
                counts[name] += 1
        await kept.keep(place, group)

    row_seconds = rollout.environment_timeout
    outcomes = await run_groups(
        run_group, problems, tag, keep, on_group, at_once=at_once, row_seconds=row_seconds
    )
    seconds = time.perf_counter() - started
    dropped = outcomes.check(rollout.max_failed_fraction, "evaluation")
    return Evaluation(
        kept.trajectories,
        outcomes.finished,
        dropped,
        tokens,
        seconds,
        scores.summary(),
        {name: sums[name] / counts[name] for name in sorted(sums)},
        *({name: of[name].summary() for name in sorted(of)} for of in (of_each, of_sets)),
        judging=outcomes.judging,
    )
