"""Prompts without an environment: texts, messages and token ids, answered in one turn."""

from collections.abc import Callable, Sequence

from turnwise.core.json_types import JsonObject
from turnwise.errors import InputError
from turnwise.rollouts import Problem, RolloutContext
from turnwise.rollouts.loops.tool_calling import SingleTurnLoop
from turnwise.trajectory import Message, Trajectory


class Conversation:
    """The environment of such a prompt: its messages, no tools, and 0 as reward.

    Args:
        row: `messages`, or `prompt`, the text of a user's message.

    Raises:
        InputError: when it has neither.
    """

    problem: Sequence[Message]
    tools: Sequence[Callable[..., object]] = ()

    def __init__(self, row: JsonObject) -> None:
        if "messages" in row:
            self.problem = row["messages"]
        elif isinstance(row.get("prompt"), str):
            self.problem = [{"role": "user", "content": row["prompt"]}]
        else:
            raise InputError(
                "without an environment a row needs prompt, a text, or messages; set environment "
                "to read rows of another kind"
            )

    def reward(self, trajectory: Trajectory) -> float:
        return 0.0


class ConversationProblem(Problem):
    """A problem whose row holds `messages`, for people, and the engine's `input_ids`."""

    __slots__ = ()


class TokenProblem(ConversationProblem):
    """A problem whose ids the program gave, with their text in `prompt`."""

    __slots__ = ()


class PromptLoop(SingleTurnLoop):
    """A loop that answers exactly the row's `input_ids`."""

    async def prompt(self, context: RolloutContext) -> list[int]:
        return list(context.row["input_ids"])
