"""Environments: what a row of data asks, the tools at hand, and what an answer is worth."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from turnwise.errors import InputError
from turnwise.rollout.problems import Row
from turnwise.trajectory import Message, Trajectory


class Environment(Protocol):
    """One attempt's world, made of one row; each trajectory gets an instance of its own.

    A class with this shape is named in the configuration as `package.module:Class`. Tools may be
    bound methods and share state through the instance.
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


def make_environment(factory: EnvironmentType, row: Row, where: str) -> Environment:
    """Build an environment; a row that lacks a field raises `InputError` naming `where`."""
    try:
        return factory(row)
    except KeyError as error:
        raise InputError(
            f"{where} has no field {error}; it has: {', '.join(map(str, row))}"
        ) from error
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
