"""Tools: plain Python functions, sync or async, offered to the model and called safely.

A call never raises for what the model did: an unknown name, wrong arguments, an exception, a
missed deadline come back as a text for the model and an outcome for the count. Knows nothing of
tokens or of the format in which a model writes its calls.
"""

import asyncio
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from transformers.utils import get_json_schema

from turnwise.errors import InputError
from turnwise.tasks import run_in_thread

Outcome = Literal["ok", "unknown", "bad_arguments", "error", "timeout", "truncated"]


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What the model gets to read, and how the call went."""

    text: str
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class _Signature:
    schema: dict[str, Any]
    """The OpenAI-style description: {"type": "function", "function": {...}}."""
    arguments: type[BaseModel]


class Toolbox:
    """The tools of one trajectory.

    Args:
        functions: Plain functions or bound methods. Type hints and a docstring with an `Args:`
            section describe them to the model.
        timeout: Seconds for one call.
        max_chars: Characters of one result that the model gets to see.

    Raises:
        InputError: when an argument has no type hint or no description.
    """

    def __init__(
        self, functions: Sequence[Callable[..., Any]], *, timeout: float, max_chars: int
    ) -> None:
        self._functions = {function.__name__: function for function in functions}
        self._signatures = {
            name: _describe(getattr(function, "__func__", function))
            for name, function in self._functions.items()
        }
        self._timeout = timeout
        self._max_chars = max_chars

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return [signature.schema for signature in self._signatures.values()]

    async def call(self, name: str, arguments_json: str) -> ToolResult:
        """Call a tool by name with its arguments as a JSON object."""
        if name not in self._functions:
            names = ", ".join(self._functions) or "none"
            return ToolResult(f"Error: there is no tool {name!r}; tools: {names}", "unknown")
        function, signature = self._functions[name], self._signatures[name]
        try:
            arguments = signature.arguments.model_validate_json(arguments_json)
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(map(str, e['loc'])) or 'arguments'}: {e['msg']}" for e in error.errors()
            )
            return ToolResult(
                f"Error: {name} cannot take these arguments: {problems}", "bad_arguments"
            )
        values = {key: getattr(arguments, key) for key in type(arguments).model_fields}
        try:
            async with asyncio.timeout(self._timeout) as deadline:
                if inspect.iscoroutinefunction(function):
                    value = await function(**values)
                else:
                    value = await run_in_thread(lambda: function(**values))
            text = value if isinstance(value, str) else _to_json(value)
        except Exception as error:
            if deadline.expired():
                text = f"Error: {name} did not answer within {self._timeout:g} s"
                return ToolResult(text, "timeout")
            return ToolResult(f"Error: {name} failed: {type(error).__name__}: {error}", "error")
        if len(text) > self._max_chars:
            left_out = len(text) - self._max_chars
            return ToolResult(
                f"{text[: self._max_chars]}\n[{left_out} more characters left out]", "truncated"
            )
        return ToolResult(text, "ok")


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


@lru_cache(maxsize=1024)
def _describe(function: Callable[..., Any]) -> _Signature:
    name = function.__name__
    try:
        schema = get_json_schema(_without_self(function))
    except Exception as error:
        raise InputError(
            f"tool {name} cannot be offered to the model: {str(error).rstrip('.')}; give each "
            "argument a type hint and a line under Args: in the docstring"
        ) from error
    hints = get_type_hints(function)
    fields: dict[str, Any] = {
        key: (hints[key], ... if p.default is inspect.Parameter.empty else p.default)
        for key, p in inspect.signature(function).parameters.items()
        if key != "self"
    }
    arguments = create_model(f"{name}_arguments", __config__=ConfigDict(extra="forbid"), **fields)
    return _Signature(schema, arguments)


def _without_self(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as the model calls it: `get_json_schema` would ask for the type of `self`."""
    signature = inspect.signature(function)
    parameters = [p for key, p in signature.parameters.items() if key != "self"]
    if len(parameters) == len(signature.parameters):
        return function

    def described(*args: Any, **kwargs: Any) -> Any: ...

    described.__name__, described.__doc__ = function.__name__, function.__doc__
    described.__annotations__ = {
        key: value for key, value in function.__annotations__.items() if key != "self"
    }
    described.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return described
