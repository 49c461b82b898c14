"""Environments: the problem of a row of data, the tools to solve it with, and the reward.

This module holds what users write against. `rollout.episode` plays an environment.
"""

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

from turnwise.config import Config
from turnwise.core.json_types import JsonObject
from turnwise.core.optional import load_object as load_object
from turnwise.errors import InputError
from turnwise.rollouts.problems import Row
from turnwise.tools import AnyTool
from turnwise.trajectory import Message, Trajectory

Reply = str | Sequence[Message] | None
"""An environment's answer to the model: a text (one message of the user), messages, or None."""
Move = Mapping[str, str | Sequence[Message]]
"""The player who moves next in a game, and what this player reads before; an empty reply adds
nothing."""


@dataclass(frozen=True, slots=True)
class Rewards:
    """A trajectory's reward in detail; its total is the sum of all fields.

    Example:
        def reward(self, trajectory: Trajectory) -> Rewards:
            return Rewards(float(self.solved), turns=self.progress, parts={"brevity": -0.1})
    """

    final: float = 0.0
    """Reward of the whole trajectory, earned at its end."""
    turns: Sequence[float] = ()
    """Reward of each turn of the model, in the order of `trajectory.turns`; missing ones are 0."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Further rewards of the whole trajectory, by name; metrics show their means."""
    players: Mapping[str, float] = field(default_factory=dict)
    """With `Environment.players`: each player's own reward, added to `final` and `parts`, which
    are common to all, and to the player's own `turns`."""

    @property
    def total(self) -> float:
        """The sum of all fields but `players`."""
        return self.final + sum(self.turns) + sum(self.parts.values())


class Environment:
    """A problem, the tools to solve it with, and its reward; one instance for each trajectory.

    Only `__init__` and `problem` are required, and a class of this shape need not inherit from
    this one. Every method may be plain or `async`: plain ones run in threads, coroutines on one
    event loop that all user code shares. `rollout.environment_timeout` limits each call.

    Attributes:
        problem: The messages that the model answers; a string is one message of the user. Read
            after `setup`.
        tools: Functions, `Tool` objects, toolsets, tools of other frameworks, or descriptions in
            OpenAI's format, which `call_tool` answers. Read after `setup`.
        players: The opening messages of each player by name, in place of `problem`, where the
            policy plays all sides of a game: the loop `self_play`. The first player begins.
        done: Set to True, for example by a tool, to end the trajectory after the turn's tool calls.
        current_turn: Index of the model's latest turn, which tool calls and `step` answer; -1
            before the first. Loops set it, for rewards of turns.

    Example:
        class Weather(turnwise.Environment):
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

    problem: str | Sequence[Message]
    tools: Sequence[AnyTool] = ()
    players: Mapping[str, str | Sequence[Message]] = MappingProxyType({})
    done: bool = False
    current_turn: int = -1

    def __init__(self, row: Row) -> None:
        """Keep what the row says; open files, databases and processes in `setup`."""

    @classmethod
    def prompt(cls, row: Row) -> Reply:
        """Return the problem of a row, if it depends on the row alone; None if it does not.

        With it, rows whose prompt is too long are left out before an environment is built.
        """
        return None

    @classmethod
    def rows(cls, split: str) -> Sequence[Row]:
        """Return rows that the environment makes itself: `data.path: environment`.

        Args:
            split: `train` for data.path, `eval` for data.eval_path: rows that are not trained on.
        """
        raise NotImplementedError(f"{cls.__name__} makes no rows")

    def setup(self) -> Awaitable[None] | None:
        """Open what the trajectory needs; called once, before `problem` and `tools` are read."""
        return None

    def call_tool(self, name: str, arguments: JsonObject) -> object:
        """Run a tool that `tools` describes in OpenAI's format; the result is shown to the model.

        The arguments match the description's schema.
        """
        raise NotImplementedError(f"{type(self).__name__} has no call_tool to run {name}")

    def step(self, message: Message) -> Reply | Move | Awaitable[Reply | Move]:
        """Answer a turn of the model that called no tool; None ends the trajectory.

        With `players`, the message's `name` is the player who wrote it, and the answer is
        `{player: reply}`: who moves next, and what this player reads before.

        Called by the loop `tool_calling`, also after the last turn that `rollout.max_turns` allows.
        Without this method such a turn ends the trajectory.
        """
        return None

    def reward(self, trajectory: Trajectory) -> float | Rewards | Awaitable[float | Rewards]:
        """Return the reward of the finished trajectory.

        Not needed if `rollout.rewards` lists other rewards only.
        """
        raise NotImplementedError(f"{type(self).__name__} has no reward")

    def metrics(
        self, trajectory: Trajectory
    ) -> Mapping[str, float] | Awaitable[Mapping[str, float]]:
        """Return numbers for metrics.jsonl, where `env` holds their means over trajectories."""
        return {}

    def close(self) -> Awaitable[None] | None:
        """Release what `setup` opened; called once for each environment that was built.

        Also after a failure, a timeout and Ctrl-C, and then possibly while a plain method that
        missed its deadline is still running in its thread.
        """
        return None

    def _group_ended(self) -> None:
        """For adapters: take back what trajectories share; called once the group is rewarded."""


EnvironmentType = Callable[[Row], Any]
"""An environment class, or a function that makes an environment from a row."""


ADAPTERS = {
    "bfcl": "turnwise.compat.bfcl:at",
    "gymnasium": "turnwise.compat.gymnasium:at",
    "nemo_gym": "turnwise.compat.nemo_gym:at",
    "openenv": "turnwise.compat.openenv:at",
    "reasoning_gym": "turnwise.compat.reasoning_gym:at",
    "skyrl_gym": "turnwise.compat.skyrl_gym:at",
    "textarena": "turnwise.compat.textarena:at",
    "trl": "turnwise.compat.trl.environment:load_trl",
}
"""Environments of other systems, `NAME:ADDRESS`: functions that return the environment of an
address."""


def load_environment(path: str | None) -> EnvironmentType:
    """Import `package.module:Class`, or adapt another system's environment.

    Raises:
        InputError: when there is none of that name, its address is wrong, or its package is not
            installed.
    """
    if path is None:
        raise InputError("environment must be set: package.module:Class")
    name, _, address = path.partition(":")
    if name in ADAPTERS:
        adapt = load_object(ADAPTERS[name], "environment")
        environment: EnvironmentType = adapt(address)
    else:
        environment = load_object(path, "environment")
    return environment


def configured_environment(config: Config) -> EnvironmentType:
    """Return the environment that `environment` and `environment_args` configure.

    Raises:
        InputError: as `load_environment` and `with_arguments` do.
    """
    return with_arguments(load_environment(config.environment), config.environment_args)


def with_arguments(
    environment: EnvironmentType, arguments: Mapping[str, object]
) -> EnvironmentType:
    """Return an environment type that is made with `environment_args`.

    Raises:
        InputError: when it does not take one of them.

    Example:
        >>> class Count:
        ...     def __init__(self, row, start=0):
        ...         self.problem = f"Continue: {start}, {start + row['step']}"
        >>> with_arguments(Count, {"start": 2})({"step": 3}).problem
        'Continue: 2, 5'
    """
    if not arguments:
        return environment
    taken = keywords_of(environment)
    unknown = [] if taken is None else [name for name in arguments if name not in taken[1:]]
    if unknown:
        takes = f"it takes {', '.join(taken[1:])}" if taken and taken[1:] else "it takes none"
        raise InputError(
            f"environment_args: {name_of(environment)} takes no argument {unknown[0]} ({takes})"
        )
    return partial(environment, **arguments)


def type_of(environment: EnvironmentType) -> EnvironmentType:
    """Return the class or function that an environment type with arguments calls."""
    return environment.func if isinstance(environment, partial) else environment


def name_of(environment: EnvironmentType) -> str:
    """Return the name of an environment's class or function."""
    kind = type_of(environment)
    return str(getattr(kind, "__name__", type(kind).__name__))


def keywords_of(function: Callable[..., object]) -> list[str] | None:
    """Return the names of a function's arguments that can be passed by name; None if any can."""
    with suppress(ValueError, TypeError):  # some builtin types have no signature
        parameters = inspect.signature(function).parameters.values()
        if all(p.kind is not p.VAR_KEYWORD for p in parameters):
            by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
            return [p.name for p in parameters if p.kind in by_name]
    return None
