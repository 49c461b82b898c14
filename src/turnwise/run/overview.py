"""An overview of many trajectories in bounded memory: rewards, lengths, outcomes, best, worst."""

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count, groupby
from typing import TYPE_CHECKING

from turnwise.trajectory import Trajectory

if TYPE_CHECKING:
    from turnwise.rollout.group import Group

_TOOL = "tool_"
"""Beginning of the events that are outcomes of tool calls."""


@dataclass(slots=True)
class _Numbers:
    """Mean, deviation and range of numbers that are added one by one (Welford's algorithm)."""

    count: int = 0
    mean: float = 0.0
    _squares: float = 0.0
    least: float = math.inf
    most: float = -math.inf

    def add(self, value: float) -> None:
        self.count += 1
        before = value - self.mean
        self.mean += before / self.count
        self._squares += before * (value - self.mean)
        self.least, self.most = min(self.least, value), max(self.most, value)

    @property
    def deviation(self) -> float:
        """The population's standard deviation."""
        return math.sqrt(self._squares / self.count) if self.count else 0.0


_Ranked = tuple[float, int, Trajectory]


@dataclass(slots=True)
class Overview:
    """The summary that is shown of trajectories, to which groups are added as they come.

    Example:
        overview = Overview()
        for group in groups:
            overview.add_group(group)
        print("\\n".join(overview.lines()))
    """

    best: int = 1
    """Number of trajectories with the highest reward to keep."""
    worst: int = 1
    """Number of those with the lowest to keep."""
    rewards: _Numbers = field(default_factory=_Numbers)
    _problems: int = 0
    _turns: _Numbers = field(default_factory=_Numbers)
    _tokens: _Numbers = field(default_factory=_Numbers)
    _parts: dict[str, _Numbers] = field(default_factory=dict)
    _environments: dict[str, _Numbers] = field(default_factory=dict)
    _spreads: _Numbers = field(default_factory=_Numbers)
    _equal: int = 0
    _ended: Counter[str] = field(default_factory=Counter)
    _events: Counter[str] = field(default_factory=Counter)
    _forks: Counter[str] = field(default_factory=Counter)
    _high: list[_Ranked] = field(default_factory=list)
    _low: list[_Ranked] = field(default_factory=list)
    _number: "count[int]" = field(default_factory=count)

    @classmethod
    def of(cls, trajectories: Iterable[Trajectory], best: int = 1, worst: int = 1) -> "Overview":
        """Return the overview of trajectories; the groups of a sequence need not be adjacent."""
        overview = cls(best, worst)
        if isinstance(trajectories, Sequence):
            trajectories = sorted(trajectories, key=lambda trajectory: trajectory.problem_id)
        for _, group in groupby(trajectories, key=lambda trajectory: trajectory.problem_id):
            overview.add(list(group))
        return overview

    def add_group(self, group: "Group") -> None:
        """Add the finished trajectories of a group."""
        self.add(group.trajectories)

    def add(self, group: Sequence[Trajectory]) -> None:
        """Add the trajectories of one problem."""
        spread = _Numbers()
        for trajectory in group:
            reward = trajectory.reward or 0.0
            spread.add(reward)
            self.rewards.add(reward)
            self._turns.add(len(trajectory.turns))
            self._tokens.add(trajectory.sampled_tokens)
            for name, value in trajectory.reward_parts.items():
                self._parts.setdefault(name, _Numbers()).add(value)
            if trajectory.environment:
                self._environments.setdefault(trajectory.environment, _Numbers()).add(reward)
            self._ended[trajectory.status] += 1
            self._events.update(trajectory.events)
            self._forks.update(turn.fork_reason for turn in trajectory.turns if turn.fork_reason)
            self._rank(trajectory, reward)
        self._problems += bool(group)
        if len(group) > 1:
            self._spreads.add(spread.deviation)
            self._equal += spread.least == spread.most

    def _rank(self, trajectory: Trajectory, reward: float) -> None:
        number = next(self._number)
        both = self.best + self.worst  # one may be among the best and among the worst
        for heap, key in ((self._high, reward), (self._low, -reward)):
            heapq.heappush(heap, (key, -number, trajectory))
            if len(heap) > both:
                heapq.heappop(heap)

    def best_and_worst(self) -> dict[str, list[Trajectory]]:
        """Return the trajectories of the highest and of the lowest reward, none of them twice."""
        best = [one for _, _, one in sorted(self._high, key=_rank, reverse=True)][: self.best]
        taken = {id(one) for one in best}
        low = [one for _, _, one in sorted(self._low, key=_rank, reverse=True)]
        worst = [one for one in low if id(one) not in taken][: self.worst]
        return {"best": best, "worst": worst}

    def lines(self) -> list[str]:
        """Return the rewards, lengths and outcomes, in a few lines."""
        rewards, tokens = self.rewards, self._tokens
        if not rewards.count:
            return ["no trajectories"]
        spread = f" ± {rewards.deviation:.3f}" if rewards.count > 1 else ""
        between = f" ({tokens.least:,} to {tokens.most:,})" if tokens.least < tokens.most else ""
        lines = [
            f"{counted(rewards.count, 'trajectory', 'trajectories')} of "
            f"{counted(self._problems, 'problem', 'problems')}  "
            f"reward {rewards.mean:.3f}{spread} ({rewards.least:g} to {rewards.most:g})  "
            f"{self._turns.mean:.1f} turns, {tokens.mean:,.0f} tokens{between}"
        ]
        if self._spreads.count:
            lines.append(
                f"groups: spread of rewards {self._spreads.mean:.3f} on average, "
                f"{self._equal:,} of {self._spreads.count:,} with equal rewards"
            )
        if self._environments:
            each = (
                f"{name} {values.mean:.3f} ({counted(values.count, 'trajectory', 'trajectories')})"
                for name, values in sorted(self._environments.items())
            )
            lines.append(f"environments: {', '.join(each)}")
        if len(self._parts) > 1:
            means = (f"{name} {values.mean:.3f}" for name, values in sorted(self._parts.items()))
            lines.append(f"reward parts: {', '.join(means)}")
        events = self._events
        tools = Counter({k[len(_TOOL) :]: n for k, n in events.items() if k.startswith(_TOOL)})
        others = Counter({k: n for k, n in events.items() if not k.startswith(_TOOL)})
        for name, counts in (
            ("ended", self._ended),
            ("tools", tools),
            ("events", others),
            ("branches", self._forks),
        ):
            if counts:
                shown = ", ".join(f"{reason} {number:,}" for reason, number in counts.most_common())
                lines.append(f"{name}: {shown}")
        return lines


def _rank(ranked: _Ranked) -> tuple[float, int]:
    return ranked[:2]


def counted(number: int, one: str, several: str) -> str:
    """Return a number with its noun."""
    return f"{number:,} {one if number == 1 else several}"
