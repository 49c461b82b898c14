"""A group: the trajectories of one problem, and the reasons why trajectories failed."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from math import isclose
from pathlib import Path

from turnwise.core.json_types import JsonObject
from turnwise.engine.protocol import TurnTimes
from turnwise.errors import StepError, translate_unwritable, without_numbers
from turnwise.rollouts.problems import Problem
from turnwise.trajectory import FORCED, Trajectory

TOO_LONG = "prompt_too_long"  # reason of a trajectory, and of a group
OTHER_WEIGHTS = "other_weights"  # reason: unexpected versions of the weights sampled tokens
ENOUGH = 20
"""Minimum number of an environment's trajectories to check which fraction of them failed."""
_MAX_CAUSES, _SHOWN_CAUSES = 100, 2  # maximum number of causes that a reason counts, and shows
_OTHERS = "(others)"
_COUNTERS = ("dropped", "retried", "dropped_tokens", "judging")
NO_REWARD = "no_reward"
"""Reason of a trajectory to which no reward applies (all are None); this is not a failure."""


@dataclass(slots=True)
class Group:
    """The finished trajectories of one problem, and counts of failed trajectories by reason."""

    problem_id: str
    trajectories: list[Trajectory] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    """Number of trajectories whose last attempt failed, by reason."""
    retried: Counter[str] = field(default_factory=Counter)
    """Number of failed attempts that were retried, by reason."""
    dropped_tokens: Counter[str] = field(default_factory=Counter)
    """Number of tokens sampled in all failed attempts, by reason."""
    failures: dict[str, Counter[str]] = field(default_factory=dict)
    """Messages of failed attempts by reason, with the number of times that each occurred."""
    judging: Counter[str] = field(default_factory=Counter)
    """Counts of the judges' work, also for trajectories that failed: requests, retries, cached,
    prompt_tokens, completion_tokens."""
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds by phase, summed over the trajectories: generate, tools, reward, agent,
    teacher."""
    elapsed: float = 0.0
    """Seconds from the group's start to its end, including the wait for a free slot."""
    calls: dict[int, list[TurnTimes]] = field(default_factory=dict)
    """Times of the turns of each trajectory, by its `sample_index`."""
    prompt: str | None = None  # text of a prompt given as token ids, else None
    appended: list[tuple[str, str]] = field(default_factory=list)
    """Names of files in the run folder, each with a text that the driver appends to the file."""
    environment: str = ""
    """Name of the environment in `environments`; "" if the run has one environment."""
    left_out: str = ""
    """Reason why the problem is left out from now on (a key of `failures`); "" if it is used."""

    @classmethod
    def of(cls, problem: Problem) -> "Group":
        return cls(problem.id, environment=problem.environment)

    def note(self, reason: str, cause: str, count: int = 1) -> None:
        """Count the cause of failed attempts."""
        self.failures.setdefault(reason, Counter())[cause] += count

    @property
    def causes(self) -> dict[str, str]:
        """The message of the first failure for each reason."""
        return {reason: next(iter(messages)) for reason, messages in self.failures.items()}

    @property
    def not_failed(self) -> int:
        """The number of trajectories that did not fail, including those without any reward."""
        return len(self.trajectories) + self.dropped[NO_REWARD]

    def drop(self, trajectories: Sequence[Trajectory], reason: str, cause: str) -> None:
        """Remove finished trajectories, and count them as failed."""
        if trajectories:
            self.dropped[reason] += len(trajectories)
            self.dropped_tokens[reason] += sum(t.sampled_tokens for t in trajectories)
            self.note(reason, cause, len(trajectories))
            gone = {id(trajectory) for trajectory in trajectories}
            self.trajectories = [t for t in self.trajectories if id(t) not in gone]

    def pin(self, version: int) -> None:
        """Drop the trajectories with tokens that were sampled by a different version of the weights
        than `version`."""
        own = {version, FORCED}
        others = [
            t for t in self.trajectories if any({*one.weight_versions} - own for one in t.turns)
        ]
        why = f"not only version {version} of the weights sampled it: an engine was restarted"
        self.drop(others, OTHER_WEIGHTS, why)

    def to_dict(self) -> JsonObject:
        """Return all fields as plain values, for checkpoints."""
        tree = {item.name: getattr(self, item.name) for item in fields(self)}
        return tree | {
            "trajectories": [t.to_json(whole=True) for t in self.trajectories],
            "seconds": dict(self.seconds),
        }

    @classmethod
    def from_dict(cls, tree: JsonObject) -> "Group":
        made = tree | {
            "trajectories": [Trajectory.from_json(text) for text in tree["trajectories"]],
            "seconds": defaultdict(float, tree["seconds"]),
        }
        made |= {name: Counter(tree.get(name)) for name in _COUNTERS}
        older = {reason: {cause: 1} for reason, cause in made.pop("causes", {}).items()}
        failures = made.get("failures", older).items()
        made["failures"] = {reason: Counter(messages) for reason, messages in failures}
        calls = tree.get("calls", {}).items()  # JSON keys are strings
        made["calls"] = {int(index): [TurnTimes(*one) for one in of] for index, of in calls}
        return cls(**made)


def is_right(reward: float, success_reward: float) -> bool:
    """Return whether a reward is at least `success_reward`, up to rounding."""
    return reward >= success_reward or isclose(reward, success_reward)


def turn_times(groups: Sequence[Group]) -> list[list[TurnTimes]]:
    """Return the times of the turns of each finished trajectory, in the groups' order."""
    return [g.calls.get(t.sample_index, []) for g in groups for t in g.trajectories]


def write_times(path: Path, calls: Iterable[Sequence[TurnTimes]], *, new: bool = True) -> None:
    with translate_unwritable(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w" if new else "a") as file:
            file.write("".join(f"{json.dumps(each)}\n" for each in calls))


class Causes:
    """Counts of failures by cause. Messages that differ only in numbers and ids have one cause."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[str]] = {}  # by reason
        self._said: dict[str, str] = {}  # the first message of each cause

    def add(self, reason: str, message: str, count: int) -> None:
        cause, counts = without_numbers(message), self._counts.setdefault(reason, Counter())
        if cause not in counts and len(counts) >= _MAX_CAUSES:
            cause = _OTHERS
        counts[cause] += count
        self._said.setdefault(cause, message)

    def __getitem__(self, reason: str) -> str:
        """Return the most frequent causes of a reason, each with its count if there are several."""
        counts = self._counts.get(reason, Counter[str]())
        shown = counts.most_common(_SHOWN_CAUSES)
        if len(counts) < 2:
            return "".join(self._said[cause] for cause, _ in shown)
        parts = [f"{number} times {self._said[cause]}" for cause, number in shown]
        if others := counts.total() - sum(number for _, number in shown):
            parts.append(f"{others} times something else")
        return ", ".join(parts)


@dataclass(slots=True)
class Outcomes:
    """The number of finished trajectories of many groups, and of dropped trajectories by reason."""

    finished: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    causes: Causes = field(default_factory=Causes)
    judging: Counter[str] = field(default_factory=Counter)
    """Counts of the judges' work for all groups, as in `Group.judging`."""
    environments: "dict[str, Outcomes]" = field(default_factory=dict)
    """Outcomes of each environment by name, if the run has several environments."""

    @property
    def failed(self) -> int:
        return self.dropped.total() - self.dropped[NO_REWARD]

    @property
    def total(self) -> int:
        return self.finished + self.dropped.total()

    def add(self, group: Group) -> None:
        self._add(group, f"{group.environment}: " if group.environment else "")
        if group.environment:
            self.environments.setdefault(group.environment, Outcomes())._add(group)

    def _add(self, group: Group, prefix: str = "") -> None:
        self.judging.update(group.judging)
        self.finished += len(group.trajectories)
        self.dropped.update(group.dropped)
        for reason, messages in group.failures.items():
            for message, count in messages.items():
                self.causes.add(reason, f"{prefix}{message}", count)

    def check(self, max_failed_fraction: float, who: str) -> Counter[str]:
        """Return the number of dropped trajectories by reason, as `check_failures` does."""
        if self.failed > max_failed_fraction * self.total:
            reasons = "; ".join(
                f"{count} {reason}: {self.causes[reason]}"
                for reason, count in self.dropped.most_common()
            )
            raise StepError(f"{who}: {self.failed} of {self.total} trajectories failed ({reasons})")
        for name, own in self.environments.items():
            if own.total >= ENOUGH:
                own.check(max_failed_fraction, f"{who} of the environment {name}")
        return self.dropped


def check_failures(groups: Sequence[Group], max_failed_fraction: float, who: str) -> Counter[str]:
    """Return the number of dropped trajectories by reason.

    Raise StepError when more than `max_failed_fraction` of all trajectories failed. In a run with
    several environments, raise it also when this holds for the trajectories of one environment that
    has at least `ENOUGH` of them. The error message begins with `who`.
    """
    outcomes = Outcomes()
    for group in groups:
        outcomes.add(group)
    return outcomes.check(max_failed_fraction, who)
