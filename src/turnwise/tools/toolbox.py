"""Tools: functions and `Tool` objects, sync or async, offered to the model and called safely.

A call does not raise for mistakes of the model or errors of the tool: an unknown name, wrong
arguments, an exception and a missed deadline become a text for the model and an outcome to count.
Every text is limited in length and can be encoded, whatever the tool returns or raises.
`core.images` checks images; a broken image counts as an error of the call that returned it.
"""

import asyncio
import contextlib
import inspect
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, is_dataclass
from enum import Enum
from typing import Literal, NamedTuple, TypeVar

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from turnwise.chat.images import parts_of, read_parts
from turnwise.config import RolloutConfig
from turnwise.core.json_types import JsonObject
from turnwise.core.optional import Foreign
from turnwise.core.user_code import STR_SECONDS, UserThread, call_user_code
from turnwise.errors import DeadlineError, InputError, TrajectoryError, TurnwiseError
from turnwise.tools.foreign import adopted
from turnwise.tools.json_schema import check_parameters
from turnwise.tools.schema import ArgumentsError, function_schema
from turnwise.tools.tool import Tool, ToolFunction

_T = TypeVar("_T")
ToolOutcome = Literal["ok", "unknown", "bad_arguments", "error", "timeout", "truncated"]
_MAX_COUNTED = 1_000_000
"""Maximum number of characters of a result's JSON that are made only to be counted."""
_ARRAYS = ("numpy", "torch", "jaxlib")
_PLAIN = (str, int, float, bool, type(None))


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of one call: the text for the model, and the outcome."""

    text: str
    """The text, with `[image left out]` in place of each image."""
    outcome: ToolOutcome
    error: Exception | None = None
    """The tool's exception, for people and not for the model; None if the tool did not raise."""
    parts: list[JsonObject] | None = None
    """The result as parts of a message, `{"type": "image", "image": Image}` and texts, for a model
    that takes images; None if the result has no image."""


class _Callable(NamedTuple):
    """A tool in the form in which the toolbox calls it."""

    schema: JsonObject
    """Description in OpenAI's format: {"type": "function", "function": {...}}."""
    call: Callable[[str], object]
    """Calls the tool with its arguments, given as JSON; may raise `ArgumentsError`. The whole call
    is treated as user code, because the user's own types may parse the arguments."""
    in_order: bool = False
    hidden: bool = False
    own: bool = False
    """Whether the toolbox calls the tool in the environment's thread; see `is_plain`."""


class Toolbox:
    """The tools of one trajectory.

    Args:
        tools: Plain functions, bound methods, `Tool` objects, or tools of other frameworks.
        timeout: Seconds for one call.
        max_chars: Maximum number of a result's characters that the model reads.
        thread: The environment's thread. It runs calls of the tools in `own` one after another,
            except plain tools (`is_plain`), which cannot use the environment's objects.
        own: The tools among `tools` that belong to the environment.

    Raises:
        InputError: when an entry is not a tool, an argument lacks a type hint or has a type that
            JSON cannot hold, or two tools have the same name.
    """

    def __init__(
        self,
        tools: Sequence[ToolFunction | Tool],
        *,
        timeout: float,
        max_chars: int,
        thread: UserThread | None = None,
        own: Sequence[ToolFunction | Tool] = (),
    ) -> None:
        self._tools: dict[str, _Callable] = {}
        self._turn = asyncio.Lock()
        """Held during a call of a tool whose calls run one after another."""
        for tool in tools:
            name, entry = _prepare(tool)
            if name in self._tools:
                raise InputError(f"two tools are named {name}")
            if any(tool is one for one in own) and not is_plain(tool):
                entry = entry._replace(own=True)
            self._tools[name] = entry
        self._thread = thread
        self._timeout = timeout
        self._max_chars = max_chars

    @property
    def names(self) -> list[str]:
        """Names of the tools, without hidden tools."""
        return [name for name, tool in self._tools.items() if not tool.hidden]

    @property
    def schemas(self) -> list[JsonObject]:
        """Descriptions of the tools in OpenAI's format, without hidden tools, for the chat
        template."""
        return [tool.schema for tool in self._tools.values() if not tool.hidden]

    async def call(self, name: str, arguments_json: str) -> ToolResult:
        """Call a tool by name, with its arguments as a JSON object, and return the result.

        Raises:
            TrajectoryError: when the tool raises it.
            CancelledError: when the call is cancelled.
        """
        if (tool := self._tools.get(name)) is None:
            names = ", ".join(self.names) or "none"
            shown = repr(name[: self._max_chars])
            return self._failed(f"there is no tool {shown}; tools: {names}", "unknown")
        thread = self._thread if tool.own else None
        in_order = tool.in_order or thread is not None
        async with self._turn if in_order else contextlib.nullcontext():
            ends = time.monotonic() + self._timeout

            async def run(step: Callable[..., _T], *given: object) -> _T:
                left = max(0.0, ends - time.monotonic())
                what = f"the tool {name}"
                value: _T = await call_user_code(
                    step, *given, name=what, seconds=left, thread=thread
                )
                return value

            try:
                value = await run(tool.call, arguments_json)
                if type(value) in _PLAIN:
                    result = read_result(value, self._max_chars)
                else:  # off the event loop, because it may take long, or call the user's __str__
                    result = await run(read_result, value, self._max_chars)
            except DeadlineError:
                return self._failed(f"{name} did not answer within {self._timeout:g} s", "timeout")
            except TrajectoryError:  # ends the trajectory, because the model cannot correct it
                raise
            except ArgumentsError as error:
                text = f"{name} cannot take these arguments: {error}"
                return self._failed(text, "bad_arguments")
            except Exception as error:
                message, unseen = await _message(error, self._max_chars)
                text = f"{name} failed: {type(error).__name__}: {message}"
                return self._failed(text, "error", error, unseen)
        return result

    def _failed(
        self, text: str, outcome: ToolOutcome, error: Exception | None = None, unseen: int = 0
    ) -> ToolResult:
        """Return an error for the model. `unseen` characters of its text are left out already."""
        text = f"Error: {text}"
        left_out = max(0, len(text) - self._max_chars) + unseen
        more = f"\n[{left_out} more characters left out]" if left_out else ""
        return ToolResult(encodable(text[: self._max_chars]) + more, outcome, error)


def make_toolbox(
    tools: Sequence[ToolFunction | Tool],
    rollout: RolloutConfig,
    thread: UserThread | None = None,
    own: Sequence[ToolFunction | Tool] = (),
) -> Toolbox:
    """Return a toolbox with the configured limits."""
    return Toolbox(
        tools,
        timeout=rollout.tool_timeout,
        max_chars=rollout.tool_max_chars,
        thread=thread,
        own=own,
    )


def is_plain(tool: ToolFunction | Tool) -> bool:
    """Return whether calls of a tool may run at the same time, in any thread. Coroutine functions
    and plain functions may. Other methods and closures may not, because they may share an
    environment's objects."""
    function = tool.call if isinstance(tool, Tool) else tool
    if inspect.iscoroutinefunction(function):
        return True
    function = inspect.unwrap(function)
    return inspect.isfunction(function) and function.__closure__ is None


def encodable(text: str) -> str:
    """Return the text with surrogate pairs joined, and lone surrogates replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


async def _message(error: Exception, longest: int) -> tuple[str, int]:
    """Return the beginning of an error's message, and the number of remaining characters. The
    error's `__str__` may be user code that takes any time."""
    if isinstance(error, TurnwiseError):
        return str(error), 0

    def read() -> tuple[str, int]:
        message = str(error)
        return message[:longest], max(0, len(message) - longest)

    try:
        message: tuple[str, int] = await call_user_code(
            read, name=f"the __str__ of {type(error).__name__}", seconds=STR_SECONDS
        )
    except Exception as failure:
        return f"(its message cannot be read: {type(failure).__name__})", 0
    return message


def read_result(value: object, longest: int) -> ToolResult:
    """Convert the value that a tool returned to a result with at most `longest` characters of text;
    a note gives the number of characters left out. Raise InputError if an image cannot be read."""
    given = None if type(value) in _PLAIN else parts_of(value)
    if given is None:
        text, left_out = _shown(value, longest)
        if left_out:
            return ToolResult(f"{text}\n[{left_out} more characters left out]", "truncated")
        return ToolResult(text, "ok")
    parts, room = list[JsonObject](), longest
    for part in read_parts({"content": given}, "the result", files=False)["content"]:
        if part["type"] == "text":
            text = str(part.get("text") or "")
            part = {"type": "text", "text": encodable(text[: max(0, room)])}
            room -= len(text)
        parts.append(part)
    if room < 0:
        parts.append({"type": "text", "text": f"\n[{-room} more characters left out]"})
    said = "\n".join(part.get("text", "[image left out]") for part in parts)
    return ToolResult(said, "truncated" if room < 0 else "ok", parts=parts)


def _shown(value: object, longest: int) -> tuple[str, str]:
    """Return a tool's value as text of at most `longest` characters, and the number of characters
    left out."""
    parts: Iterable[str] = [value] if isinstance(value, str) else _JSON.iterencode(value)
    text, length = "", 0
    # In parts, because a single call would hold the GIL until its end, and so block the event loop.
    for part in parts:
        text += part[: max(0, longest - length)]
        length += len(part)
        if length > longest + _MAX_COUNTED and not isinstance(value, str):
            return encodable(text), f"at least {length - longest}"
    return encodable(text), str(length - longest) if length > longest else ""


def _jsonable(value: object) -> object:
    """Convert a value whose type JSON lacks: objects with fields become JSON objects, numbers and
    arrays of numpy and torch become numbers and lists, and all other values become text."""
    if (package := type(value).__module__.partition(".")[0]) in _ARRAYS:
        array: Foreign = value
        if package == "numpy" and array.dtype.kind == "f" and array.dtype.itemsize < 8:
            array = array.astype(str).astype(float)  # 0.1 instead of 0.10000000149011612
        return array.tolist() if hasattr(array, "tolist") else str(array)
    fielded = is_dataclass(value) and not isinstance(value, type)
    if fielded or isinstance(value, BaseModel | Enum):
        return to_jsonable_python(value, fallback=str)
    return str(value)


_JSON = json.JSONEncoder(ensure_ascii=False, default=_jsonable)


def _prepare(tool: ToolFunction | Tool) -> tuple[str, _Callable]:
    """Return a tool's name, and the tool in the form in which the toolbox calls it. The arguments
    of a `Tool` are validated against its own JSON schema."""
    tool = adopted(tool)
    if isinstance(tool, Tool):
        parameters, own = check_parameters(tool.parameters, tool.name), tool.call

        def checked(arguments_json: str) -> object:
            """Validate and call, in a thread: a schema from outside can take long."""
            return own(parameters.read(arguments_json))

        names = ("name", "description", "parameters")
        described = {"type": "function", "function": {key: getattr(tool, key) for key in names}}
        return tool.name, _Callable(described, checked, tool.in_order, tool.hidden)
    if not callable(tool) or not hasattr(tool, "__name__"):
        raise InputError(
            f"a tool must be a function with type hints and a docstring, or a turnwise.Tool, not "
            f"{repr(tool)[:80]}"
        )
    schema = function_schema(getattr(tool, "__func__", tool))

    def call(arguments_json: str) -> object:
        arguments, keywords = schema.read(arguments_json)
        return tool(*arguments, **keywords)

    async def call_async(arguments_json: str) -> object:
        answer = call(arguments_json)
        assert inspect.isawaitable(answer)
        return await answer

    asynchronous = inspect.iscoroutinefunction(tool)
    return tool.__name__, _Callable(schema.description, call_async if asynchronous else call)
