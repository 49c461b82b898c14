"""A group: what became of the trajectories of one problem."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from turnwise.errors import StepError
from turnwise.trajectory import Trajectory


@dataclass(slots=True)
class Group:
    """The trajectories of one problem that came through, and why others did not."""

    problem_id: str
    trajectories: list[Trajectory] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    """Those whose last try failed, by its reason."""
    retried: Counter[str] = field(default_factory=Counter)
    """Tries that failed and were followed by another, by reason."""
    dropped_tokens: Counter[str] = field(default_factory=Counter)
    """What all tries that failed had sampled, by the same reasons."""
    causes: dict[str, str] = field(default_factory=dict)
    """For each reason in `dropped` or `retried`, what the first such failure said."""
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """What its trajectories waited for, summed over them: generate, tools, reward; agent for
    agents of their own."""
    elapsed: float = 0.0
    """Seconds from its start to its end, the wait for a free slot included."""
    prompt: str | None = None
    """The prompt's text, where it came with its ids."""

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values."""
        tree = {item.name: getattr(self, item.name) for item in fields(self)}
        return tree | {
            "trajectories": [trajectory.to_json() for trajectory in self.trajectories],
            "seconds": dict(self.seconds),
        }

    @classmethod
    def from_dict(cls, tree: dict[str, Any]) -> "Group":
        """What `to_dict` made."""
        group = cls(tree["problem_id"], causes=tree["causes"], elapsed=tree["elapsed"])
        group.prompt = tree.get("prompt")
        group.trajectories = [Trajectory.from_json(text) for text in tree["trajectories"]]
        for name in ("dropped", "retried", "dropped_tokens"):
            setattr(group, name, Counter(tree[name]))
        group.seconds.update(tree["seconds"])
        return group


def check_failures(groups: Sequence[Group], max_failed_fraction: float, what: str) -> Counter[str]:
    """Count the dropped trajectories by reason.

    Raises:
        StepError: when more than the allowed fraction were dropped.
    """
    dropped = sum((group.dropped for group in groups), Counter[str]())
    total = dropped.total() + sum(len(group.trajectories) for group in groups)
    if dropped.total() > max_failed_fraction * total:
        causes = {reason: text for group in groups for reason, text in group.causes.items()}
        reasons = "; ".join(f"{count} {r}: {causes[r]}" for r, count in dropped.most_common())
        raise StepError(f"{what}: {dropped.total()} of {total} trajectories failed ({reasons})")
    return dropped
