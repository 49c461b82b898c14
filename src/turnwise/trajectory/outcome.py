"""The outcome of a trajectory: its rewards, metrics and verdicts, set after it has ended."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from turnwise.core.json_types import JsonObject

MAX_REWARD = 1e6
"""Maximum absolute reward, so that squares and sums of rewards cannot overflow."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A reward, its parts, metrics and verdicts; `Trajectory.set_outcome` replaces the outcome by a
    copy with some values changed."""

    reward: float | None = None
    """Weighted sum of the parts; None until the trajectory has been judged."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Value of each part of the reward, before its weight."""
    turns: Sequence[float] = field(default_factory=list)
    """Part of the reward that each turn earned; empty if no turn earned any. The trajectory's end
    earned the rest of the reward."""
    players: Mapping[str, float] = field(default_factory=dict)
    """Reward of each player of a game; `reward` is their mean."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers that the environment or an agent reported, by name."""
    verdicts: Sequence[JsonObject] = field(default_factory=list)
    """Verdicts of judges: the name of the `judge`, its `score` from 0 to 1, the reason in the
    judge's words (`why`), and the key of its `request` in the run's judge.jsonl."""
