"""Prompts that are no rows of an environment: a text, or messages, answered in one turn."""

from typing import Any

from turnwise.rollout import Problem
from turnwise.trajectory import Trajectory


class Conversation:
    """The environment of such a prompt: its messages, no tools, and 0 as reward."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.problem = row["messages"]
        self.tools: list[Any] = []

    def reward(self, trajectory: Trajectory) -> float:
        return 0.0


class ConversationProblem(Problem):
    """A problem whose row is `{"messages": [...]}`, for `Conversation`."""

    __slots__ = ()
