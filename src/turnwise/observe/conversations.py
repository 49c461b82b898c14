"""Readable conversations of a run, for `turnwise show` and the end of rollout and eval."""

import heapq
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby, islice
from pathlib import Path
from statistics import pstdev

from rich.console import Console
from rich.text import Text

from turnwise.chat.messages import said
from turnwise.core.files import number_of, numbered
from turnwise.errors import InputError, TrajectoryError, visible
from turnwise.trajectory import Trajectory, read_jsonl

_STYLES = {"system": "dim", "user": "cyan", "assistant": "green", "tool": "magenta"}
_INDENT = " " * 11
_MAX_SHOWN = 20  # maximum of trajectories shown, and of images of each
_TOOL = "tool_"  # beginning of the events that are outcomes of tool calls
NO_TRAJECTORY = (TrajectoryError, ValueError, LookupError, TypeError, AttributeError)
"""Errors of a line that is not a trajectory."""


def trajectory_file(source: Path, step: int | None = None, heldout: bool = False) -> Path:
    """Return a run's file of trajectories, by default of the newest step, or else what `turnwise
    rollout` or `eval` wrote into the folder. If `source` is a file, return it."""
    if source.is_file():
        return source
    if not source.is_dir():
        raise InputError(f"there is no run folder {source}")
    folder, kind = source / "trajectories", "eval" if heldout else "step"
    found = numbered(folder, kind, ".jsonl")
    if step is not None:
        found = [path for path in found if number_of(path) == step]
    elif not found:
        names = ("eval.jsonl",) if heldout else ("eval.jsonl", "rollouts.jsonl")
        found = [source / name for name in names if (source / name).is_file()]
    if not found:
        which = "trajectories" if step is None else f"trajectories of step {step}"
        raise InputError(f"{source} has no {'held-out ' if heldout else ''}{which} (in {folder})")
    return found[-1]


def select(
    trajectories: Iterable[Trajectory], problem: str | None = None, pattern: str | None = None
) -> list[Trajectory]:
    """Return the trajectories of a problem (by its name, or by its end, such as `17` for `rows:17`)
    in which a regular expression is found; None selects all."""
    try:
        found = re.compile(pattern or "")
    except re.error as error:
        raise InputError(f"--grep {pattern}: not a regular expression: {error}") from error

    def matches(trajectory: Trajectory) -> bool:
        name = trajectory.problem_id
        spoken = (trajectory.messages, *(turn.messages for turn in trajectory.turns))
        return problem in (None, name, name.rpartition(":")[2]) and (
            pattern is None or any(found.search(said(each)) for each in chain(*spoken))
        )

    return list(filter(matches, trajectories))


def read_trajectories(path: Path) -> Iterator[Trajectory]:
    line = 1
    try:
        for trajectory in read_jsonl(path):
            yield trajectory
            line += 1
    except NO_TRAJECTORY as error:
        raise InputError(f"{path}, line {line} is no trajectory: {error}") from error


def show(console: Console, overview: "Overview") -> None:
    """Print an overview of trajectories, and the trajectories of the highest and the lowest
    reward."""
    for line in overview.lines():
        console.print(visible(line), highlight=False, markup=False, soft_wrap=True)
    for label, chosen in overview.best_and_worst().items():
        for trajectory in chosen:
            console.print(conversation(trajectory, label), soft_wrap=True)


def show_all(console: Console, trajectories: Sequence[Trajectory]) -> None:
    if not trajectories:
        console.print("no trajectory matches")
    for trajectory in trajectories[:_MAX_SHOWN]:
        console.print(conversation(trajectory), soft_wrap=True)
    if len(trajectories) > _MAX_SHOWN:
        console.print(f"{len(trajectories) - _MAX_SHOWN:,} more match", highlight=False)


def conversation(trajectory: Trajectory, label: str = "") -> Text:
    """Return a trajectory's result and messages as readable text. Control characters are escaped,
    so that a model's answer cannot control the terminal."""
    reward = "no reward" if trajectory.reward is None else f"reward {trajectory.reward:.3g}"
    if len(trajectory.reward_parts) > 1:
        each = (f"{name} {value:.3g}" for name, value in trajectory.reward_parts.items())
        reward += f" ({', '.join(each)})"
    turns = len(trajectory.turns)
    head = [
        f"{trajectory.problem_id} #{trajectory.sample_index}",
        reward,
        trajectory.status,
        f"{counted(turns, 'turn', 'turns')}, {trajectory.sampled_tokens:,} tokens",
    ]
    title = visible("  ".join(head))
    text = Text(f"── {f'{label}: ' if label else ''}{title}\n", style="bold")
    text.stylize("not bold", 0, 3)
    for name, value in trajectory.row.items():
        shown = visible(f"{name}: {value}").replace("\n", f"\n{_INDENT}")
        text.append(f"row        {shown}\n", "not bold dim")
    for message in trajectory.messages:
        role = visible(str(message.get("role")))
        text.append(f"{role:<10} ", style=f"not bold {_STYLES.get(role, 'yellow')}")
        text.append(f"{visible(said(message)).replace(chr(10), chr(10) + _INDENT)}\n", "not bold")
    lengths = {each.image: each.length for turn in trajectory.turns for each in turn.added.images}
    for image, length in islice(lengths.items(), _MAX_SHOWN):
        place = (image.folder or Path()) / image.name
        size = f"{image.width} x {image.height} pixels, {counted(length, 'token', 'tokens')}"
        text.append(f"image      {visible(str(place))}, {size}\n", "not bold dim")
    for judged in trajectory.judgements:
        verdict = f"{judged['judge']} {judged['score']:.3g}: {judged['why']}"
        text.append(f"judge      {visible(verdict)}\n", "not bold yellow")
    reasons = [turn.fork_reason for turn in trajectory.turns if turn.fork_reason]
    if reasons:
        why = visible(", ".join(reasons))
        text.append(f"{len(trajectory.branches())} branches: {why}\n", "yellow")
    return text


@dataclass(slots=True)
class Numbers:
    """Mean, spread and bounds of numbers, without keeping them (Welford, Technometrics 4, 1962)."""

    count: int = 0
    mean: float = 0.0
    minimum: float = math.inf
    maximum: float = -math.inf
    _squares: float = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        change = value - self.mean
        self.mean += change / self.count
        self._squares += change * (value - self.mean)
        self.minimum, self.maximum = min(self.minimum, value), max(self.maximum, value)

    @property
    def spread(self) -> float:
        """The population standard deviation."""
        return math.sqrt(self._squares / max(1, self.count))


def _reward(trajectory: Trajectory) -> float:
    return trajectory.reward or 0.0


@dataclass(slots=True)
class Overview:
    """A summary of many trajectories. It keeps only numbers (rewards, lengths, outcomes), and the
    best and the worst trajectories."""

    best: int = 1  # number of trajectories with the highest reward to keep
    worst: int = 1  # number of trajectories with the lowest reward to keep
    rewards: Numbers = field(default_factory=Numbers)
    spreads: Numbers = field(default_factory=Numbers)  # of rewards in groups
    problems: int = 0
    _equal: int = 0  # number of groups whose rewards are equal
    _turns: Numbers = field(default_factory=Numbers)
    _tokens: Numbers = field(default_factory=Numbers)
    _parts: dict[str, Numbers] = field(default_factory=lambda: defaultdict(Numbers))
    _environments: dict[str, Numbers] = field(default_factory=lambda: defaultdict(Numbers))
    _counts: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """Outcomes by kind: how trajectories ended, tools, other events, and branches."""
    _high: list[Trajectory] = field(default_factory=list)
    _low: list[Trajectory] = field(default_factory=list)

    @classmethod
    def of(cls, trajectories: Iterable[Trajectory], best: int = 1, worst: int = 1) -> "Overview":
        """Return the overview of trajectories; in a sequence, the trajectories of a group need not
        be adjacent."""
        overview = cls(best, worst)
        if isinstance(trajectories, Sequence):
            trajectories = sorted(trajectories, key=lambda trajectory: trajectory.problem_id)
        for _, group in groupby(trajectories, key=lambda trajectory: trajectory.problem_id):
            overview.add(list(group))
        return overview

    def add(self, group: Sequence[Trajectory]) -> None:
        both = self.best + self.worst  # a trajectory may be in both lists
        self._high = heapq.nlargest(both, [*self._high, *group], key=_reward)
        self._low = heapq.nsmallest(both, [*self._low, *group], key=_reward)
        for trajectory in group:
            self.rewards.add(_reward(trajectory))
            self._turns.add(len(trajectory.turns))
            self._tokens.add(trajectory.sampled_tokens)
            for name, value in trajectory.reward_parts.items():
                self._parts[name].add(value)
            if trajectory.environment:
                self._environments[trajectory.environment].add(_reward(trajectory))
            self._counts["ended"][trajectory.status] += 1
            for event, count in trajectory.events.items():
                kind = "tools" if event.startswith(_TOOL) else "events"
                self._counts[kind][event.removeprefix(_TOOL)] += count
            reasons = (turn.fork_reason for turn in trajectory.turns if turn.fork_reason)
            self._counts["branches"].update(reasons)
        self.problems += bool(group)
        if len(group) > 1:
            spread = pstdev(map(_reward, group))
            self.spreads.add(spread)
            self._equal += spread == 0

    def best_and_worst(self) -> dict[str, list[Trajectory]]:
        """Return the trajectories with the highest and the lowest reward, none of them twice."""
        best = self._high[: self.best]
        worst = [one for one in self._low if not any(one is other for other in best)]
        return {"best": best, "worst": worst[: self.worst]}

    def lines(self) -> list[str]:
        rewards, tokens = self.rewards, self._tokens
        if not rewards.count:
            return ["no trajectories"]
        spread = f" ± {rewards.spread:.3f}" if rewards.count > 1 else ""
        minimum, maximum = tokens.minimum, tokens.maximum
        between = f" ({minimum:,.0f} to {maximum:,.0f})" if minimum < maximum else ""
        lines = [
            f"{counted(rewards.count, 'trajectory', 'trajectories')} of "
            f"{counted(self.problems, 'problem', 'problems')}  "
            f"reward {rewards.mean:.3f}{spread} ({rewards.minimum:g} to {rewards.maximum:g})  "
            f"{self._turns.mean:.1f} turns, {tokens.mean:,.0f} tokens{between}"
        ]
        if groups := self.spreads.count:
            lines.append(
                f"groups: spread of rewards {self.spreads.mean:.3f} on average, "
                f"{self._equal:,} of {groups:,} with equal rewards"
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
        for name in ("ended", "tools", "events", "branches"):
            if counts := self._counts[name]:
                shown = ", ".join(f"{reason} {number:,}" for reason, number in counts.most_common())
                lines.append(f"{name}: {shown}")
        return lines


def counted(number: int, one: str, several: str) -> str:
    return f"{number:,} {one if number == 1 else several}"
