"""Environments: the problem of a row of data, the tools to solve it with, and the reward."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

from turnwise.errors import InputError, describe_error, ordinary_error, where_in_user_code
from turnwise.rollout.problems import Row
from turnwise.trajectory import Message, Trajectory

Tool = Callable[..., object]
"""A function that the model may call, sync or async, with type hints and a docstring."""


class Environment(Protocol):
    """A problem, the tools to solve it with, and its reward; one instance for each trajectory.

    A class of this shape is enough; it need not inherit from this one. The configuration names it
    as `package.module:Class`. Tools may be bound methods and share state through the instance. The
    class is built, and its plain functions run, in threads; its coroutines run on one event loop
    that all user code shares.

    Example:
        class Weather:
            def __init__(self, row: dict[str, str]) -> None:
                self.problem = f"How is the weather in {row['city']}?"
                self.tools = [self.look_up]
                self._expected = row["weather"]

            def look_up(self, city: str) -> str:
                '''Look up the weather of a city.

                Args:
                    city: Name of the city.
                '''
                return self._expected

            def reward(self, trajectory: Trajectory) -> float:
                return float(self._expected in trajectory.final_text)
    """

    problem: Sequence[Message]
    """The messages that the model answers; a string is one message of the user."""
    tools: Sequence[Tool]
    """Functions that the model may call; optional."""

    def __init__(self, row: Row) -> None: ...

    def reward(self, trajectory: Trajectory) -> float:
        """Return the reward of the finished trajectory; may be `async`."""
        ...


EnvironmentType = Callable[[Row], Environment]
"""An environment class, or a function that makes an environment from a row."""


def load_object(path: str, key: str) -> Any:
    """Import `package.module:Name`.

    Raises:
        InputError: naming the configuration key and the module or name that is missing.

    Example:
        >>> load_object("turnwise.trajectory:Trajectory", "environment").__name__
        'Trajectory'
    """
    module_name, separator, name = path.partition(":")
    if not separator:
        raise InputError(f"{key} must be package.module:Name, not {path!r}")
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
    """An environment with its problem and tools, which are read only once."""

    environment: Environment
    problem: list[Message]
    tools: list[Tool]


def open_environment(factory: EnvironmentType, row: Row, where: str) -> OpenEnvironment:
    """Build an environment and read its problem and tools; all of this runs user code.

    Args:
        where: Name of the row, for errors.

    Raises:
        InputError: naming `where`, and either the error with its line of the user's code, or the
            invalid attribute and its allowed values.
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
    problem = _attribute(environment, "problem")
    if isinstance(problem, str):
        return [{"role": "user", "content": problem}]
    if _is_list(problem) and problem:
        messages = [dict(message) for message in problem if _is_message(message)]
        if len(messages) == len(problem):
            return messages
    raise InputError(
        f'{name}.problem must be a string, or a list of messages such as {{"role": "user", '
        f'"content": "..."}}, not {repr(problem)[:80]}'
    )


def _tools(environment: Environment, name: str) -> list[Tool]:
    tools = _attribute(environment, "tools")
    if tools is None:
        return []
    if not _is_list(tools):
        raise InputError(f"{name}.tools must be a list of functions, not {repr(tools)[:80]}")
    functions = [_checked_tool(tool, name) for tool in tools]
    names = [function.__name__ for function in functions]
    for tool_name in names:
        if names.count(tool_name) > 1:
            raise InputError(f"{name}.tools has two functions named {tool_name}")
    return functions


def _checked_tool(tool: object, owner: str) -> Tool:
    """Return a tool that is a function with a name, by which the model calls it."""
    if callable(tool) and isinstance(getattr(tool, "__name__", None), str):
        return tool
    hint = " whose description is made from them" if isinstance(tool, Mapping) else ""
    raise InputError(
        f"a tool in {owner}.tools must be a function or method with type hints and a docstring"
        f"{hint}, not {repr(tool)[:80]}"
    )


def _attribute(environment: Environment, name: str) -> object:
    """Return an attribute, None if it is missing; an error inside a property is raised."""
    try:
        return getattr(environment, name)
    except AttributeError as error:
        if error.obj is environment and error.name == name:
            return None
        raise


def _is_list(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _is_message(value: object) -> TypeGuard[Mapping[str, object]]:
    return isinstance(value, Mapping) and isinstance(value.get("role"), str)
