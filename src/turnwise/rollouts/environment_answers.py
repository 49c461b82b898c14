"""Answers of an environment's process: their types by method, and what its errors may say.

The model's code may run in that process and write any answer. So an answer can fail its own
trajectory under one of a few reasons, and nothing else: an `InputError`, which ends a run, comes
only from a process that was started for one question and has run no code of the model.
"""

from typing import Annotated, Literal, NotRequired, TypeVar

from pydantic import Field, TypeAdapter, with_config
from typing_extensions import TypedDict

from turnwise.core.json_types import JsonObject
from turnwise.core.untrusted import AnswerError, Number, checked, read_answer
from turnwise.errors import InputError, TrajectoryError
from turnwise.tools.toolbox import ToolOutcome

REPLY = "environment_reply"
"""Reason of a trajectory whose environment's process sent a wrong answer."""
_REASONS = {"environment_error", "environment_timeout", "reward_error", "close_error"}
"""Reasons that a process may give. The environment's own are counted under the first: their number
is not limited, and some of a run's reasons do more than to fail one trajectory."""

_T = TypeVar("_T")
_Name = Annotated[str, Field(max_length=200)]
_Text = Annotated[str, Field(max_length=100_000)]
_Numbers = Annotated[dict[_Name, Number], Field(max_length=1_000)]


@with_config(extra="allow")
class _Message(TypedDict):
    role: str


@with_config(extra="allow")
class _Function(TypedDict):
    name: _Name


@with_config(extra="allow")
class _Schema(TypedDict):
    type: Literal["function"]
    function: _Function


class Opened(TypedDict):
    """The part of the episode that the driver must know."""

    name: _Name
    problem: list[_Message]
    players: dict[_Name, list[_Message]]
    schemas: list[_Schema]
    steps: bool
    measures: bool


class _Called(TypedDict):
    text: str
    outcome: ToolOutcome
    error: _Text | None
    """The tool's traceback."""


class _Rewarded(TypedDict):
    final: Number
    turns: list[Number]
    parts: _Numbers
    players: _Numbers


class Failure(TypedDict):
    """An error of the process, with its cause's traceback."""

    input: bool
    reason: _Name
    message: _Text
    cause: _Text


class _Reply(TypedDict):
    value: NotRequired[object]
    error: NotRequired[Failure]


_Move = Annotated[dict[_Name, list[_Message]], Field(min_length=1, max_length=1)] | None
"""The next player's name, with the messages that this player reads before."""
_ENVELOPE = TypeAdapter(Annotated[list[int | JsonObject], Field(min_length=2, max_length=2)])
_REPLY = TypeAdapter(_Reply)

PROMPT = TypeAdapter(list[_Message] | None)
PREVIEW = TypeAdapter(Opened | None)
OPENED = TypeAdapter(Opened)
CALLED = TypeAdapter(_Called)
STEPPED = TypeAdapter(list[_Message] | None)
MOVED: TypeAdapter[dict[str, list[_Message]] | None] = TypeAdapter(_Move)
DONE = TypeAdapter(bool)
REWARDED = TypeAdapter(_Rewarded)
METRICS = TypeAdapter(_Numbers)
CLOSED = TypeAdapter(Annotated[list[Failure], Field(max_length=100)])


def read_reply(body: bytes) -> tuple[int, JsonObject]:
    """Return the number of a request, and its reply, whose value is not checked yet."""
    number, reply = read_answer(body, _ENVELOPE)
    if not isinstance(number, int) or not isinstance(reply, dict):
        raise AnswerError("sent a wrong answer (it must be a number and an object)")
    return number, reply


def value_of(reply: JsonObject, kind: TypeAdapter[_T], *, alone: bool = False) -> _T:
    """Return a reply's value, or raise its error; AnswerError where it is of another type.

    The error may be an InputError if the process was started for this question only (`alone`).
    """
    tree = checked(reply, _REPLY)
    if "error" in tree:
        failure = error_of(tree["error"], alone=alone)
        raise failure from failure.__cause__
    return checked(tree.get("value"), kind)


def error_of(failure: Failure, *, alone: bool = False) -> InputError | TrajectoryError:
    """Return the error that a process reports, with its traceback as the cause."""
    message, reason = failure["message"], failure["reason"]
    error: InputError | TrajectoryError
    if alone and failure["input"]:
        error = InputError(message)
    elif reason in _REASONS:
        error = TrajectoryError(reason, message)
    else:
        error = TrajectoryError("environment_error", f"{reason}: {message}")
    error.__cause__ = RuntimeError(failure["cause"]) if failure["cause"] else None
    return error
