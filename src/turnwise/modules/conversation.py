"""Prompts that are no rows of an environment: texts, messages, token ids, answered in one turn."""

from typing import Any

from turnwise.errors import InputError
from turnwise.rollout import Problem, RolloutContext
from turnwise.rollout.loops.single_turn import SingleTurnLoop
from turnwise.trajectory import Trajectory


class Conversation:
    """The environment of such a prompt: its messages, no tools, and 0 as reward.

    Args:
        row: `messages`, or `prompt`, the text of a user's message.

    Raises:
        InputError: when it has neither.
    """

    def __init__(self, row: dict[str, Any]) -> None:
        if "messages" in row:
            self.problem = row["messages"]
        elif isinstance(row.get("prompt"), str):
            self.problem = [{"role": "user", "content": row["prompt"]}]
        else:
            raise InputError(
                "without an environment a row needs prompt, a text, or messages; set environment "
                "to read rows of another kind"
            )
        self.tools: list[Any] = []

    def reward(self, trajectory: Trajectory) -> float:
        return 0.0


class ConversationProblem(Problem):
    """A problem whose row holds `messages`, a view for people and rewards, and `input_ids`, what
    the engine is asked with."""

    __slots__ = ()


class TokenProblem(ConversationProblem):
    """One whose ids the program gave, with their text in `prompt`."""

    __slots__ = ()


class PromptLoop(SingleTurnLoop):
    """Answers exactly the row's `input_ids`."""

    async def prompt(self, context: RolloutContext) -> list[int]:
        return list(context.row["input_ids"])
