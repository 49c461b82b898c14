"""Environments: what a row of data asks, the tools at hand, and what an answer is worth."""

import importlib
from collections.abc import Callable, Sequence
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
    """The messages that the model answers."""
    tools: Sequence[Callable[..., Any]]
    """Plain functions, sync or async, typed and documented."""

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
    except ImportError as error:
        raise InputError(f"{key}: {module_name} cannot be imported: {error}") from error
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
        InputError: naming `where`, what was raised, and the line of the user's code.
    """
    try:
        environment = factory(row)
        problem: Any = environment.problem
        tools = environment.tools
        if isinstance(problem, str):
            raise InputError(
                "the environment's `problem` is a text; it is a list of messages: "
                '[{"role": "user", "content": ...}]'
            )
        return OpenEnvironment(environment, [dict(message) for message in problem], list(tools))
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
