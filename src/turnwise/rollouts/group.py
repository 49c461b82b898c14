"""A group: the trajectories of one problem, and reasons of failures."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from math import isclose
from pathlib import Path

from turnwise.core.json_types import JsonObject
from turnwise.engine.protocol import FORCED, TurnTimes
from turnwise.errors import StepError, translate_unwritable
from turnwise.rollouts.problems import Problem
from turnwise.trajectory import Trajectory

TOO_LONG = "prompt_too_long"  # reason of a trajectory, and of a group
OTHER_WEIGHTS = "other_weights"  # reason of a trajectory of an evaluation
_COUNTERS = ("dropped", "retried", "dropped_tokens", "judging")
NO_REWARD = "no_reward"
"""Reason of a trajectory to which no reward applies (all are None): it is no failure."""


@dataclass(slots=True)
class Group:
    """The finished trajectories of one problem, and counts of those that failed, by reason."""

    problem_id: str
    trajectories: list[Trajectory] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    """Number of trajectories whose last attempt failed, by reason."""
    retried: Counter[str] = field(default_factory=Counter)
    """Number of failed attempts that were retried, by reason."""
    dropped_tokens: Counter[str] = field(default_factory=Counter)
    """Number of tokens sampled in all failed attempts, by reason."""
    causes: dict[str, str] = field(default_factory=dict)
    """Message of the first failure for each reason in `dropped` or `retried`."""
    judging: Counter[str] = field(default_factory=Counter)
    """Work of judges, also for trajectories that failed: requests, retries, cached, prompt_tokens,
    completion_tokens."""
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds by phase, summed over the trajectories: generate, tools, reward, agent,
    teacher."""
    elapsed: float = 0.0
    """Seconds from the group's start to its end, including the wait for a free slot."""
    calls: dict[int, list[TurnTimes]] = field(default_factory=dict)
    """Times of the turns of each trajectory, by its `sample_index`."""
    prompt: str | None = None  # text of a prompt that was given as token ids, otherwise None
    appended: list[tuple[str, str]] = field(default_factory=list)
    """Names of files in the run folder, and texts for their ends, on the way to the driver."""
    environment: str = ""
    """Name of the environment in `environments`; "" if the run has one environment."""
    left_out: str = ""
    """Reason why the problem cannot be used and is left out from now on, a key of `causes`."""

    @classmethod
    def of(cls, problem: Problem) -> "Group":
        return cls(problem.id, environment=problem.environment)

    @property
    def judged(self) -> int:
        """The number of trajectories that did not fail, also of those without any reward."""
        return len(self.trajectories) + self.dropped[NO_REWARD]

    def drop(self, trajectories: Sequence[Trajectory], reason: str, cause: str) -> None:
        """Take out finished trajectories, and count them as failed."""
        if trajectories:
            self.dropped[reason] += len(trajectories)
            self.dropped_tokens[reason] += sum(t.sampled_tokens for t in trajectories)
            self.causes.setdefault(reason, cause)
            gone = {id(trajectory) for trajectory in trajectories}
            self.trajectories = [t for t in self.trajectories if id(t) not in gone]

    def pin(self, version: int) -> None:
        """Drop the trajectories that not only the weights of one version have sampled."""
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
        calls = tree.get("calls", {}).items()  # JSON has no numbers as keys
        made["calls"] = {int(index): [TurnTimes(*one) for one in of] for index, of in calls}
        return cls(**made)


def is_right(reward: float, success_reward: float) -> bool:
    """Return whether a reward is a correct trajectory's, up to rounding (`eval.success_reward`)."""
    return reward >= success_reward or isclose(reward, success_reward)


def turn_times(groups: Sequence[Group]) -> list[list[TurnTimes]]:
    """Return the times of the turns of each finished trajectory, in the groups' order."""
    return [g.calls.get(t.sample_index, []) for g in groups for t in g.trajectories]


def write_times(path: Path, calls: Iterable[Sequence[TurnTimes]], *, new: bool = True) -> None:
    with translate_unwritable(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w" if new else "a") as file:
            file.write("".join(f"{json.dumps(each)}\n" for each in calls))


@dataclass(slots=True)
class Outcomes:
    """The number of finished trajectories of many groups, and of dropped ones by reason."""

    finished: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    causes: dict[str, str] = field(default_factory=dict)
    """Message of the last group with each reason."""
    judging: Counter[str] = field(default_factory=Counter)
    """Work of judges for them all."""

    def add(self, group: Group) -> None:
        self.judging.update(group.judging)
        self.finished += len(group.trajectories)
        self.dropped.update(group.dropped)
        self.causes.update(group.causes)

    def check(self, max_failed_fraction: float, who: str) -> Counter[str]:
        """Return the number of dropped trajectories by reason, as `check_failures` does."""
        dropped, causes = self.dropped, self.causes
        total, failed = dropped.total() + self.finished, dropped.total() - dropped[NO_REWARD]
        if failed > max_failed_fraction * total:
            reasons = "; ".join(f"{count} {r}: {causes[r]}" for r, count in dropped.most_common())
            raise StepError(f"{who}: {failed} of {total} trajectories failed ({reasons})")
        return dropped


def check_failures(groups: Sequence[Group], max_failed_fraction: float, who: str) -> Counter[str]:
    """Return the number of dropped trajectories by reason; StepError, whose message begins with
    `who`, when more than `max_failed_fraction` of all were dropped."""
    outcomes = Outcomes()
    for group in groups:
        outcomes.add(group)
    return outcomes.check(max_failed_fraction, who)
