"""Environments: what a row of data asks, the tools at hand, and what an answer is worth."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from turnwise.errors import InputError, describe_error, ordinary_error, where_in_user_code
from turnwise.rollout.problems import Row
from turnwise.trajectory import Message, Trajectory


class Environment(Protocol):
    """One attempt's world, made of one row; each trajectory gets an instance of its own.

    A class with this shape is named in the configuration as `package.module:Class`. Tools may be
    bound methods and share state through the instance. It is built, and its plain functions run, in
    threads of their own; its coroutines run on one event loop that all user code shares.
    """

    problem: Sequence[Message]
    """The messages that the model answers; a text is one message of the user's."""
    tools: Sequence[Callable[..., Any]]
    """Plain functions, sync or async, typed and documented; without this attribute there are
    none."""

    def __init__(self, row: Row) -> None: ...

    def reward(self, trajectory: Trajectory) -> float:
        """What the finished trajectory earns; may be `async`."""
        ...


EnvironmentType = Callable[[Row], Environment]


def load_object(path: str, key: str) -> Any:
    """Import `package.module:Name`.

    Raises:
        InputError: naming the configuration key and what is missing.
    """
    module_name, separator, name = path.partition(":")
    if not separator:
        raise InputError(f"{key} reads package.module:Name, not {path!r}")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the module's own code may raise anything
        raise InputError(
            f"{key}: {module_name} cannot be imported: {describe_error(error)}"
        ) from error
    try:
        return getattr(module, name)
    except AttributeError:
        raise InputError(f"{key}: {module_name} has no {name}") from None


@dataclass(frozen=True, slots=True)
class OpenEnvironment:
    """An environment, and what its properties gave when they were read, once."""

    environment: Environment
    problem: list[Message]
    tools: list[Callable[..., Any]]


def open_environment(factory: EnvironmentType, row: Row, where: str) -> OpenEnvironment:
    """Build an environment and read its problem and tools. All of it is user code.

    Raises:
        InputError: naming `where`, and what was raised with the line of the user's code, or the
            attribute that cannot be used and what it may be.
    """
    try:
        environment = factory(row)
        name = type(environment).__name__
        return OpenEnvironment(environment, _problem(environment, name), _tools(environment, name))
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
    except BaseException as error:  # SystemExit too
        if isinstance(error, KeyError) and error.args and error.args[0] not in row:
            place = where_in_user_code(error)
            raise InputError(
                f"{where} has no field {error}; it has: {', '.join(map(str, row))}"
                + (f" ({place})" if place else "")
            ) from error
        failure = ordinary_error(error)
        raise InputError(f"{where}: the environment failed: {describe_error(failure)}") from failure


def _problem(environment: Environment, name: str) -> list[Message]:
    problem: Any = _attribute(environment, "problem")
    if isinstance(problem, str):
        problem = [{"role": "user", "content": problem}]
    if not (_is_list(problem) and problem and all(map(_is_message, problem))):
        raise InputError(
            f'{name}.problem is a text, or a list of messages such as {{"role": "user", '
            f'"content": "..."}}, not {repr(problem)[:80]}'
        )
    return [dict(message) for message in problem]


def _tools(environment: Environment, name: str) -> list[Callable[..., Any]]:
    tools: Any = _attribute(environment, "tools")
    if tools is None:
        return []
    if not _is_list(tools):
        raise InputError(f"{name}.tools is a list of functions, not {repr(tools)[:80]}")
    names = [_tool_name(tool, name) for tool in tools]
    for tool in names:
        if names.count(tool) > 1:
            raise InputError(f"{name}.tools has two functions named {tool}")
    return list(tools)


def _tool_name(tool: Any, owner: str) -> str:
    """The name by which the model calls a tool."""
    name = getattr(tool, "__name__", None)
    if not callable(tool) or not isinstance(name, str):
        hint = " whose description is made from them" if isinstance(tool, Mapping) else ""
        raise InputError(
            f"a tool in {owner}.tools is a function or method with type hints and a docstring"
            f"{hint}, not {repr(tool)[:80]}"
        )
    return name


def _attribute(environment: Environment, name: str) -> Any:
    """An attribute, None where there is none; what a property raises is raised."""
    try:
        return getattr(environment, name)
    except AttributeError as error:
        if error.obj is environment and error.name == name:
            return None
        raise


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("role"), str)
