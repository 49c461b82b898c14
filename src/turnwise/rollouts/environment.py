"""Environments: the problem of a row of data, the tools to solve it with, and the reward.

`Environment` is what users write against. The functions after it load an environment and read its
attributes. An environment is user code of any class, so these functions turn a mistake in its code
into one sentence that names the row. The module `episode` runs one episode in an environment.

To add an environment: write a class with `problem`, `tools` and `reward`, and set `environment:
package.module:Class`. For the environments of another system, see `compat`.
"""

import inspect
import math
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import SupportsFloat, SupportsIndex, TypeGuard, cast

from turnwise.chat.images import read_parts
from turnwise.core.json_types import JsonObject
from turnwise.core.optional import Foreign
from turnwise.core.optional import load_object as load_object
from turnwise.errors import (
    InputError,
    TrajectoryError,
    describe_error,
    ordinary_error,
)
from turnwise.rollouts.problems import Row
from turnwise.tools import AnyTool, Tool, ToolFunction, Toolset
from turnwise.tools.foreign import adopted
from turnwise.tools.tool import is_toolset, is_toolset_factory
from turnwise.trajectory import MAX_REWARD, Message, Trajectory

REPLY = "environment_reply"
"""Reason of a trajectory whose environment's process, or server, sent a wrong answer."""
SUMMARISED = "summarised"  # event: a turn was a summary (`rollout.context`)
BEYOND_LIMIT = f"beyond the limit of ±{MAX_REWARD:g}; scale it down"

Reply = str | Sequence[Message] | None
"""An environment's answer to the model: a text (one message of the user), messages, or None."""
Move = Mapping[str, str | Sequence[Message]]
"""In a game, `{player: reply}`: the player who moves next, and the reply that this player reads
first. An empty reply adds no message."""


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
    """Reward of each turn of the model, in the order of `trajectory.turns`; missing rewards at the
    end count as 0. If some turns are summaries (`rollout.context`), give a reward for every turn,
    or give none at all."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Further rewards of the whole trajectory, by name; metrics show the mean of each."""
    players: Mapping[str, float] = field(default_factory=dict)
    """With `Environment.players`: each player's own reward. It is added to `final` and `parts`,
    which all players share, and to the rewards of the player's own `turns`."""

    @property
    def total(self) -> float:
        """The sum of all fields except `players`."""
        return self.final + sum(self.turns) + sum(self.parts.values())


class Environment:
    """A problem, the tools to solve it with, and its reward; one instance for each trajectory.

    Only `__init__` and `problem` are required. A class with these methods and attributes need not
    inherit from `Environment`. Every method may be plain or `async`: plain methods run in threads,
    and coroutines run on one event loop that all user code shares. `rollout.stall_timeout` limits
    each call of `reward`, and `rollout.environment_timeout` limits each call of another method.

    Attributes:
        problem: The messages that the model answers; a string becomes one user message. Read
            after `setup`.
        tools: Functions, `Tool` objects, toolsets, tools of other frameworks, or descriptions in
            OpenAI's format of tools that `call_tool` runs. Read after `setup`.
        players: For the loop `self_play`, where the policy plays all sides of a game: the opening
            messages of each player by name, in place of `problem`. The first player begins.
        policies: In a run with several policies (`rollout.policies`): the policy of each player, by
            the player's name. `base` is the model without an adapter, which is not trained. A
            player whose name is also a policy's name needs no entry.
        done: Set to True, for example by a tool, to end the trajectory after the turn's tool calls.
        current_turn: Index of the model's latest turn, to which tool calls and `step` respond; -1
            before the first turn. Loops set it; use it to reward turns.

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
    policies: Mapping[str, str] = MappingProxyType({})
    done: bool = False
    current_turn: int = -1

    def __init__(self, row: Row) -> None:
        """Keep the row's values; open files, databases and processes in `setup`."""

    @classmethod
    def prompt(cls, row: Row) -> Reply:
        """Return the problem of a row if it depends only on the row, otherwise None.

        If this returns the problem, a row whose prompt is too long is left out before its
        environment is built.
        """
        return None

    @classmethod
    def rows(cls, split: str) -> Sequence[Row]:
        """Return rows that the environment makes itself; used with `data.path: environment`.

        Args:
            split: `train` for data.path, or `eval` for data.eval_path (held-out rows).
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

        With `players`, the message's `name` is the player who wrote the message, and the answer is
        `{player: reply}`: the player who moves next, and the reply that this player reads first.

        The loop `tool_calling` calls this method also after the last turn that
        `rollout.max_turns` allows.
        Without this method, a turn that calls no tool ends the trajectory.
        """
        return None

    def reward(self, trajectory: Trajectory) -> float | Rewards | Awaitable[float | Rewards]:
        """Return the reward of the finished trajectory.

        Not needed if `rollout.rewards` lists only other kinds of rewards.
        """
        raise NotImplementedError(f"{type(self).__name__} has no reward")

    def metrics(
        self, trajectory: Trajectory
    ) -> Mapping[str, float] | Awaitable[Mapping[str, float]]:
        """Return numbers for metrics.jsonl, where `env` holds their means over trajectories."""
        return {}

    def close(self) -> Awaitable[None] | None:
        """Release what `setup` opened; called once for each environment that was built.

        This is also called after a failure, a timeout or Ctrl-C. If a plain method missed its
        deadline, it may still be running in its thread during `close`.
        """
        return None

    def _plain_text(self, trajectory: Trajectory) -> str | None:
        """For adapters: return the whole text of a trajectory that is not a chat."""
        return None

    def _group_ended(self) -> None:
        """For adapters: release what a group's trajectories share, once the group is rewarded."""


class AgentTask(Environment):
    """A row that only the agent understands, such as the number of one of its tasks.

    The agent reports the reward, so `rollout.agent_rewards` must be true. If the row has a field
    `prompt`, logs and pictures show it as the problem.

    Example:
        environment: turnwise:AgentTask
        rollout: {loop: agent, agent: "http://127.0.0.1:9000/run", agent_rewards: true}
    """

    def __init__(self, row: Row) -> None:
        self.problem = row.get("prompt") or "The task is the agent's."

    def reward(self, trajectory: Trajectory) -> float:
        """Fail: this runs only if the agent reported no reward."""
        raise TrajectoryError(
            "reward_error", "the agent reported no reward, or rollout.agent_rewards is false"
        )


EnvironmentType = Callable[[Row], Foreign]
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
    "verifiers": "turnwise.compat.verifiers:VerifiersEnvironments",
}
"""Environments of other systems, written `NAME:ADDRESS` in the configuration. For each NAME: the
path of the function that returns the environment at an ADDRESS."""


def load_environment(path: str | None) -> EnvironmentType:
    if path is None:
        raise InputError("environment must be set: package.module:Class")
    name, _, address = path.partition(":")
    found = load_object(ADAPTERS.get(name, path), "environment")
    environment: EnvironmentType = found(address) if name in ADAPTERS else found
    return environment


def with_arguments(
    environment: EnvironmentType, arguments: Mapping[str, object]
) -> EnvironmentType:
    """Return an environment type with `environment_args` bound to it; raise InputError that names
    an argument which the type does not take."""
    if not arguments:
        return environment
    taken = _keywords_of(environment)
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


def reward_functions_of(environment: EnvironmentType | None) -> Mapping[str, Foreign]:
    """Return a program's reward functions by path; its environment type carries them."""
    # A user's class may have an unrelated attribute `reward_functions`.
    return {} if isinstance(environment, type) else getattr(environment, "reward_functions", {})


def name_of(environment: EnvironmentType) -> str:
    kind = type_of(environment)
    return str(getattr(kind, "__name__", type(kind).__name__))


def _keywords_of(function: Callable[..., object]) -> list[str] | None:
    """Return the names of a function's arguments that can be passed by name; None if any can."""
    with suppress(ValueError, TypeError):  # some builtin types have no signature
        parameters = inspect.signature(function).parameters.values()
        if all(p.kind is not p.VAR_KEYWORD for p in parameters):
            by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
            return [p.name for p in parameters if p.kind in by_name]
    return None


def make_rows(factory: EnvironmentType, split: str) -> Sequence[Row]:
    """Return the rows that an environment makes itself for a split, `train` or `eval`. Its method
    `rows` gets only the `environment_args` that the method takes. Runs user code."""
    kind, name = type_of(factory), name_of(factory)
    rows = own_method(kind, "rows")
    if rows is None:
        raise InputError(
            f"data.path: {name} makes no rows: give it a classmethod rows(split), or name a file "
            "or dataset instead of `environment`"
        )
    if inspect.isclass(kind) and inspect.isfunction(inspect.getattr_static(kind, "rows")):
        raise InputError(f"{name}.rows must be a classmethod: it is called before any environment")
    taken = _keywords_of(rows)
    given = factory.keywords if isinstance(factory, partial) else {}
    given = {key: value for key, value in given.items() if taken is None or key in taken}
    try:
        made: object = rows(split, **given)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{name}.rows({split!r}) failed: {describe_error(error)}") from error
    if not isinstance(made, Sequence) or isinstance(made, str):
        raise InputError(f"{name}.rows({split!r}) must return a list of rows, not {shown(made)}")
    return made


@contextmanager
def naming_row(where: str, row: Row, passing: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turn an error of an environment's code into one sentence that names its row; errors of the
    types in `passing` are raised unchanged."""
    try:
        yield
    except passing:
        raise
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
    except BaseException as error:  # SystemExit too
        failure = ordinary_error(error)
        message = f"{where}: the environment failed: {describe_error(failure)}"
        if isinstance(error, KeyError) and error.args and error.args[0] not in row:
            message += f"; the row has: {', '.join(map(str, row))}"  # it may lack this field
        raise InputError(message) from failure


def own_method(environment: object, name: str) -> Callable[..., Foreign] | None:
    """Return a method that an environment or its class defines; None if the method is missing or is
    the default of `Environment`."""
    method: Callable[..., Foreign] | None = getattr(environment, name, None)
    default = getattr(Environment, name)
    plain, default = (getattr(each, "__func__", each) for each in (method, default))
    return None if not callable(method) or plain is default else method


def read_problem(environment: object) -> tuple[list[Message], dict[str, list[Message]]]:
    """Return an environment's problem and, if it is a game, the opening messages of each player;
    in a game, the first player's opening messages are the problem."""
    kind = type(environment).__name__
    given = _attribute(environment, "players")
    if not given:
        return read_messages(_attribute(environment, "problem"), f"{kind}.problem"), {}
    if not isinstance(given, Mapping) or len(given) < 2:
        raise InputError(
            f'{kind}.players must be a dictionary of at least two players, such as {{"asker": '
            f'"...", "guesser": "..."}}, not {shown(given)}'
        )
    players = {str(name): read_messages(said, f"{kind}.players") for name, said in given.items()}
    return next(iter(players.values())), players


def read_policies(environment: object) -> dict[str, str]:
    """Return the name of the policy that a game gives each player, by the player's name."""
    given = _attribute(environment, "policies") or {}
    named = isinstance(given, Mapping) and all(isinstance(n, str) for n in given.values())
    if not named:
        raise InputError(
            f'{type(environment).__name__}.policies must be a dictionary such as {{"asker": '
            f'"asker", "guesser": "base"}}, not {shown(given)}'
        )
    return {str(player): str(name) for player, name in cast("Mapping[str, str]", given).items()}


def read_move(move: object, players: Collection[str], what: str) -> tuple[str, list[Message]]:
    """Return the player who moves next, and the messages that this player reads first."""
    if isinstance(move, Mapping) and len(move) == 1:
        ((name, reply),) = move.items()
        if name in players:
            return str(name), [] if reply in ("", [], ()) else read_messages(reply, what)
    raise InputError(
        f"{what} must return the next player and what this player reads, such as "
        f'{{"{next(iter(players))}": "..."}}, not {shown(move)}; players: {", ".join(players)}'
    )


def read_messages(value: object, what: str) -> list[Message]:
    """Return a text or messages from user code as messages; errors call the value `what`."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    given = value if is_list(value) else []
    messages = [dict(one) for one in given if isinstance(one, Mapping)]
    messages = [message for message in messages if isinstance(message.get("role"), str)]
    if not messages or len(messages) < len(given):
        raise InputError(
            f'{what} must be a string, or a list of messages such as {{"role": "user", '
            f'"content": "..."}}, not {shown(value)}'
        )
    return [read_parts(message, what) for message in messages]


def read_tools(environment: object) -> tuple[list[ToolFunction | Tool], list[Toolset]]:
    """Return an environment's tools, and its toolsets, which the caller must open."""
    owner, given = type(environment).__name__, _attribute(environment, "tools")
    if given is None:
        return [], []
    if not is_list(given):
        raise InputError(f"{owner}.tools must be a list of functions, not {shown(given)}")
    tools: list[ToolFunction | Tool] = []
    toolsets: list[Toolset] = []
    for tool in given:
        if not isinstance(tool, type) and is_toolset_factory(tool):
            made: object = tool.toolset()
        else:
            made = adopted(tool, environment)  # converts tools of other frameworks
        if not isinstance(made, type) and is_toolset(made):
            toolsets.append(made)
        elif isinstance(made, Tool):
            tools.append(made)
        elif isinstance(made, Mapping):  # a description in OpenAI's format, for `call_tool`
            function = made.get("function")
            name = function.get("name") if isinstance(function, Mapping) else None
            if not isinstance(function, Mapping) or not isinstance(name, str):
                raise InputError(
                    f'a description in {owner}.tools must be {{"type": "function", "function": '
                    f'{{"name": ...}}}}, not {shown(made)}'
                )
            if (call := own_method(environment, "call_tool")) is None:
                raise InputError(
                    f"{owner}.tools describes {name}, which {owner}.call_tool(name, arguments) "
                    "must run: define that method"
                )
            schema = function.get("parameters") or {"type": "object", "properties": {}}
            described = str(function.get("description", ""))
            tools.append(Tool(name, described, schema, partial(call, name)))
        elif callable(made) and isinstance(getattr(made, "__name__", None), str):
            tools.append(made)
        else:
            raise InputError(
                f"a tool in {owner}.tools must be a function or method with type hints, a "
                "turnwise.Tool, a toolset, a tool of openai-agents, pydantic-ai, LangChain or "
                f"smolagents, or a description in OpenAI's format, not {shown(made)}"
            )
    names = [tool.name if isinstance(tool, Tool) else tool.__name__ for tool in tools]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"{owner}.tools has two functions named {twice[0]}")
    return tools, toolsets


def _attribute(environment: object, name: str) -> object:
    """Return an attribute, or None if it is missing; an error inside a property is raised."""
    try:
        return getattr(environment, name)
    except AttributeError as error:
        if error.obj is environment and error.name == name:
            return None
        raise


def is_list(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def read_rewards(value: object, who: str, trajectory: Trajectory) -> Rewards:
    """Return a reward of any type, given by `who`, as `Rewards` with plain numbers."""
    if not isinstance(value, Rewards):
        return Rewards(read_reward(value, who))
    given, turns = len(value.turns), len(trajectory.turns)
    summaries = trajectory.events[SUMMARISED]
    if given > turns or (given < turns and given and summaries):  # they shift the turns
        why = f"{who} gave {given} turn rewards for {turns} turns"
        if summaries:
            why += f", {summaries} of them summaries: give one for each, by its `current_turn`"
        raise TrajectoryError("reward_error", why)
    return Rewards(
        read_reward(value.final, who),
        [read_reward(reward, who) for reward in value.turns],
        {str(name): read_reward(number, who) for name, number in value.parts.items()},
        {str(name): read_reward(number, who) for name, number in value.players.items()},
    )


def read_reward(value: object, who: str) -> float:
    """Return a number of any type (bool, NumPy number, tensor of one value) as a float. Raise
    TrajectoryError `reward_error` if it is not finite, or its absolute value is above
    `MAX_REWARD`."""
    number = finite_number(value)
    if number is not None and abs(number) <= MAX_REWARD:
        return number
    why = "not a finite number" if number is None else BEYOND_LIMIT
    raise TrajectoryError("reward_error", f"{who} gave {shown(value)} as reward, which is {why}")


def read_metrics(values: object, what: str) -> dict[str, float]:
    if not isinstance(values, Mapping):
        raise InputError(f"{what} must return a dictionary, not {shown(values)}")
    numbers: dict[str, float] = {}
    for name, value in values.items():
        if (number := finite_number(value)) is None:
            raise InputError(f"{what}: {name} must be a finite number")
        numbers[str(name)] = number
    return numbers


def finite_number(value: object) -> float | None:
    """Return a number of any type as a float; None if it is not finite, or not a number."""
    number = math.nan
    if isinstance(value, SupportsFloat | SupportsIndex):  # not text, which float() would read
        # An integer may be too large for a float; a tensor of many values raises RuntimeError.
        with suppress(TypeError, ValueError, OverflowError, RuntimeError):
            number = float(value)
    return number if math.isfinite(number) else None


def shown(value: object) -> str:
    try:
        return repr(value)[:80]
    except Exception:
        return f"a {type(value).__name__}"
