"""Reading and checking what an environment offers: its problem, tools, methods and numbers.

Environments are user code of any class; mistakes become one sentence that names the row.
"""

import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, SupportsFloat, SupportsIndex, TypeGuard

from turnwise.errors import (
    InputError,
    TrajectoryError,
    describe_error,
    ordinary_error,
    where_in_user_code,
)
from turnwise.rollouts.environment import (
    Environment,
    EnvironmentType,
    Rewards,
    keywords_of,
    name_of,
    type_of,
)
from turnwise.rollouts.problems import Row
from turnwise.tools import Tool, ToolFunction, Toolset
from turnwise.tools.foreign import adopted
from turnwise.tools.tool import is_toolset, is_toolset_factory
from turnwise.trajectory import MAX_REWARD, Message

BEYOND_LIMIT = f"beyond the limit of ±{MAX_REWARD:g}; scale it down"


def make_rows(factory: EnvironmentType, split: str) -> Sequence[Row]:
    """Return the rows that an environment makes itself; runs user code.

    Those of `environment_args` that its `rows` takes are passed too.

    Args:
        split: `train` or `eval`.

    Raises:
        InputError: when it makes none.
    """
    kind, name = type_of(factory), name_of(factory)
    rows = own_method(kind, "rows")
    if rows is None:
        raise InputError(
            f"data.path: {name} makes no rows: give it a classmethod rows(split), or name a file "
            "or dataset instead of `environment`"
        )
    if inspect.isclass(kind) and inspect.isfunction(inspect.getattr_static(kind, "rows")):
        raise InputError(f"{name}.rows must be a classmethod: it is called before any environment")
    given = factory.keywords if isinstance(factory, partial) else {}
    taken = keywords_of(rows)
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
def naming_row(where: str, row: Row) -> Iterator[None]:
    """Turn an error of an environment's code into one sentence that names its row."""
    try:
        yield
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


def own_method(environment: object, name: str) -> Callable[..., Any] | None:
    """Return a method that an environment, or its class, defines; None for `Environment`'s own."""
    method: Callable[..., Any] | None = getattr(environment, name, None)
    default = getattr(Environment, name)
    plain, default = (getattr(each, "__func__", each) for each in (method, default))
    return None if not callable(method) or plain is default else method


def read_problem(environment: object) -> tuple[list[Message], dict[str, list[Message]]]:
    """Return an environment's problem, and the opening messages of each player if it is a game.

    The first player's are the problem.

    Raises:
        InputError: when `players` is no mapping of at least two names to messages, or the problem
            is neither a string nor a list of messages.
    """
    kind = type(environment).__name__
    given = _attribute(environment, "players")
    if not given:
        return read_messages(_attribute(environment, "problem"), f"{kind}.problem"), {}
    if not isinstance(given, Mapping) or len(given) < 2:
        raise InputError(
            f'{kind}.players must be a dictionary of at least two players, such as {{"asker": '
            f'"...", "guesser": "..."}}, not {repr(given)[:80]}'
        )
    players = {str(name): read_messages(said, f"{kind}.players") for name, said in given.items()}
    return next(iter(players.values())), players


def read_move(move: object, players: Collection[str], what: str) -> tuple[str, list[Message]]:
    """Return the player who moves next, and the messages that this player reads before.

    Raises:
        InputError: when it is no dictionary of one player to a reply.
    """
    if isinstance(move, Mapping) and len(move) == 1:
        ((name, reply),) = move.items()
        if name in players:
            return str(name), [] if reply in ("", [], ()) else read_messages(reply, what)
    raise InputError(
        f"{what} must return the next player and what this player reads, such as "
        f'{{"{next(iter(players))}": "..."}}, not {repr(move)[:80]}; players: {", ".join(players)}'
    )


def read_messages(value: object, what: str) -> list[Message]:
    """Return a text or messages of user code as messages.

    Args:
        what: Name of the value, for errors.

    Raises:
        InputError: when it is neither, or holds an image.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if is_list(value) and value:
        messages = [dict(message) for message in value if isinstance(message, Mapping)]
        if len(messages) == len(value) and all(isinstance(m.get("role"), str) for m in messages):
            _check_text_only(messages, what)
            return messages
    raise InputError(
        f'{what} must be a string, or a list of messages such as {{"role": "user", '
        f'"content": "..."}}, not {repr(value)[:80]}'
    )


def _check_text_only(messages: Sequence[Message], what: str) -> None:
    for content in (message.get("content") for message in messages):
        for part in content if is_list(content) else ():
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind not in (None, "text"):
                raise InputError(f"{what} has a part of type {kind}; only text is supported")


def read_tools(environment: object) -> tuple[list[ToolFunction | Tool], list[Toolset]]:
    """Return an environment's tools, and its toolsets, which are not open yet.

    Raises:
        InputError: when `tools` holds anything else, or one name twice.
    """
    name = type(environment).__name__
    given = _attribute(environment, "tools")
    if given is None:
        return [], []
    if not is_list(given):
        raise InputError(f"{name}.tools must be a list of functions, not {repr(given)[:80]}")
    tools: list[ToolFunction | Tool] = []
    toolsets: list[Toolset] = []
    for tool in given:
        if not isinstance(tool, type) and is_toolset_factory(tool):
            made: object = tool.toolset()
        else:
            made = adopted(tool, environment)  # of other frameworks
        if not isinstance(made, type) and is_toolset(made):
            toolsets.append(made)
        else:
            tools.append(_checked_tool(made, environment))
    names = [tool.name if isinstance(tool, Tool) else tool.__name__ for tool in tools]
    for tool_name in names:
        if names.count(tool_name) > 1:
            raise InputError(f"{name}.tools has two functions named {tool_name}")
    return tools, toolsets


def _checked_tool(tool: object, environment: object) -> ToolFunction | Tool:
    """Return a function with a name, by which the model calls it, or a tool with a schema."""
    owner = type(environment).__name__
    if isinstance(tool, Tool):
        return tool
    if isinstance(tool, Mapping):
        return _described_tool(tool, environment, owner)
    if callable(tool) and isinstance(getattr(tool, "__name__", None), str):
        return tool
    raise InputError(
        f"a tool in {owner}.tools must be a function or method with type hints, a turnwise.Tool, a "
        f"toolset, a tool of openai-agents, pydantic-ai, LangChain or smolagents, or a description "
        f"in OpenAI's format, not {repr(tool)[:80]}"
    )


def _described_tool(tool: Mapping[str, Any], environment: object, owner: str) -> Tool:
    """Return a tool that `call_tool` runs, from its description in OpenAI's format."""
    function = tool.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str):
        raise InputError(
            f'a description in {owner}.tools must be {{"type": "function", "function": {{"name": '
            f"...}}}}, not {repr(tool)[:80]}"
        )
    call = own_method(environment, "call_tool")
    if call is None:
        raise InputError(
            f"{owner}.tools describes {name}, which {owner}.call_tool(name, arguments) must run: "
            "define that method"
        )
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    return Tool(name, str(function.get("description", "")), parameters, partial(call, name))


def _attribute(environment: object, name: str) -> object:
    """Return an attribute, None if it is missing; an error inside a property is raised."""
    try:
        return getattr(environment, name)
    except AttributeError as error:
        if error.obj is environment and error.name == name:
            return None
        raise


def is_list(value: object) -> TypeGuard[Sequence[object]]:
    """Return whether a value is a sequence other than text."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def read_rewards(value: object, who: str, turns: int) -> Rewards:
    """Return any reward with plain numbers.

    Args:
        who: Source of the reward, for errors.
        turns: Number of turns of the trajectory.

    Raises:
        TrajectoryError: as `read_reward` does, and for more turn rewards than turns.
    """
    if not isinstance(value, Rewards):
        return Rewards(read_reward(value, who))
    if len(value.turns) > turns:
        raise TrajectoryError(
            "reward_error", f"{who} gave {len(value.turns)} turn rewards for {turns} turns"
        )
    return Rewards(
        read_reward(value.final, who),
        [read_reward(reward, who) for reward in value.turns],
        {str(name): read_reward(number, who) for name, number in value.parts.items()},
        {str(name): read_reward(number, who) for name, number in value.players.items()},
    )


def read_reward(value: object, who: str) -> float:
    """Return a number of any kind (bool, NumPy's, a tensor of one) as a float.

    Raises:
        TrajectoryError: `reward_error`, when it is not a finite number, or beyond `MAX_REWARD`.
    """
    number = finite_number(value)
    if number is not None and abs(number) <= MAX_REWARD:
        return number
    problem = "not a finite number" if number is None else BEYOND_LIMIT
    raise TrajectoryError(
        "reward_error", f"{who} gave {shown(value)} as reward, which is {problem}"
    )


def shown(value: object) -> str:
    """Return the beginning of a user's value as text, for errors."""
    try:
        return repr(value)[:80]
    except Exception:
        return f"a {type(value).__name__}"


def finite_number(value: object) -> float | None:
    """Return a number of any kind (bool, NumPy's, a tensor of one) as a float; None if it is not
    finite, or no number."""
    number = math.nan
    if isinstance(value, SupportsFloat | SupportsIndex):  # not text, which float() would read
        # An integer may be too large for a float; a tensor of many raises RuntimeError.
        with suppress(TypeError, ValueError, OverflowError, RuntimeError):
            number = float(value)
    return number if math.isfinite(number) else None
