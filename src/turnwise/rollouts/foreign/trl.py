"""TRL's environments and tools as an environment of ours; TRL is not imported.

`environment: trl:package.module:Name` names an `environment_factory`: a class or a function without
arguments, or a dictionary of them, from which a row's `environment` chooses by name. An instance
has `reset(**row)`, whose text is appended to the prompt's last message, and optionally
`get_reward()`. Its other public methods are tools; their result reaches the model as `str(result)`.

As in TRL, instances are reused: each trajectory has one of its own until its group has been
rewarded. An instance whose trajectory failed, or a call of which has not returned, is not.
"""

import inspect
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from turnwise.errors import InputError
from turnwise.rollouts.agent_loop import RolloutContext
from turnwise.rollouts.environment import Environment, EnvironmentType, load_object, read_messages
from turnwise.rollouts.loops.tool_calling import SingleTurnLoop
from turnwise.rollouts.problems import Row
from turnwise.tools import ToolFunction
from turnwise.trajectory import Message, Trajectory

_NO_PROMPT: list[Message] = [{"role": "user", "content": ""}]
_NOT_TOOLS = ("reset", "get_reward")


def load_trl(path: str) -> EnvironmentType:
    """Import the environment factory `package.module:Name`.

    Raises:
        InputError: when it cannot be imported, or is no environment of TRL's.

    Example:
        environments = load_trl("my_module:MyEnv")
    """
    return TrlEnvironments(load_object(path, "environment"))


class TrlEnvironments:
    """An environment type made of an `environment_factory` and tools that need no instance.

    Args:
        factory: A class or function without arguments, a dictionary of them, or None.
        tools: Functions that every row offers, before the methods of its instance.

    Raises:
        InputError: when the factory is something else, or a class without `reset`.

    Example:
        environments = TrlEnvironments(MyEnv)
        turnwise.train(model="...", environment=environments, data=rows)
    """

    def __init__(self, factory: object = None, tools: Sequence[ToolFunction] = ()) -> None:
        self.chooses = isinstance(factory, Mapping)
        """Whether a row's `environment` names its factory."""
        named = factory if isinstance(factory, Mapping) else {None: factory}
        self._factories: dict[object, Callable[[], Any] | None] = {
            name: _checked(one) for name, one in named.items()
        }
        self.tools = tuple(tools)
        self._free: dict[object, deque[Any]] = {name: deque() for name in self._factories}

    def __call__(self, row: Row) -> "TrlEnvironment":
        """Return the environment of a row.

        Raises:
            InputError: when the row names no environment of the dictionary.
        """
        return TrlEnvironment(row, self)

    @property
    def rewards(self) -> bool:
        """Whether an instance has a `get_reward`; makes the first instance of each factory."""
        return any(
            hasattr(type(self._first(name)), "get_reward")
            for name, factory in self._factories.items()
            if factory is not None
        )

    def _first(self, name: object) -> Any:
        instance = self.take(name)
        self.give_back(name, instance)
        return instance

    def name_for(self, row: Row) -> object:
        """Return the name of a row's factory."""
        name = row.get("environment") if self.chooses else None
        if name not in self._factories:
            names = ", ".join(map(repr, self._factories))
            raise InputError(f"environment is {name!r}; the environment factory has {names}")
        return name

    def take(self, name: object) -> Any:
        """Return a free instance, or a new one; runs user code."""
        try:
            return self._free[name].pop()
        except IndexError:
            factory = self._factories[name]
        instance = None if factory is None else factory()
        if factory is not None and not callable(getattr(instance, "reset", None)):
            raise InputError(
                f"{type(instance).__name__} has no reset, which TRL's environments need"
            )
        return instance

    def give_back(self, name: object, instance: object) -> None:
        """Let another trajectory have an instance."""
        self._free[name].append(instance)


class TrlEnvironment(Environment):
    """The environment of one trajectory: a row's prompt, and an instance of its factory."""

    def __init__(self, row: Row, environments: TrlEnvironments) -> None:
        self._row = row
        self._environments = environments
        self._name = environments.name_for(row)
        self._calls = _Calls()
        self.instance: Any = None
        """The user's object; None before `setup`, and without a factory."""
        prompt = row.get("prompt", _NO_PROMPT)
        self.text: str | None = prompt if isinstance(prompt, str) else None
        """The prompt, if it is a plain text, which no chat template renders."""
        self.problem = prompt

    def setup(self) -> None:
        """Take an instance, reset it with the row, and read its observation and tools."""
        given = self._environments
        self.instance = given.take(self._name)
        methods: list[ToolFunction] = []
        if self.instance is not None:
            hidden = {"environment"} if given.chooses else set[str]()
            row = {key: value for key, value in self._row.items() if key not in hidden}
            self._observe(self.instance.reset(**row))
            methods = _methods(self.instance)
        self.tools = [_Tool(tool, self._calls) for tool in (*given.tools, *methods)]
        if self.text is not None and self.tools:
            raise InputError("prompt must be a list of messages where there are tools, not a text")

    def _observe(self, observation: object) -> None:
        """Append what `reset` returned to the last message of the prompt."""
        if observation is None:
            return
        if self.text is not None:
            raise InputError("prompt must be a list of messages if reset returns an observation")
        *before, last = read_messages(self.problem, "prompt")
        content = last.get("content")
        joined: object = None
        if isinstance(observation, str) and isinstance(content, str):
            joined = content + observation
        elif isinstance(observation, str | list) and isinstance(content, str | list):
            joined = [*_parts(content), *_parts(observation)]
        if joined is None:
            name = type(self.instance).__name__
            raise InputError(f"{name}.reset must return a text or None, not {observation!r:.80}")
        self.problem = [*before, {**last, "content": joined}]

    def reward(self, trajectory: Trajectory) -> float | Awaitable[float]:
        """Return what the instance's `get_reward` returns."""
        if not hasattr(type(self.instance), "get_reward"):
            if self._environments.chooses:
                return 0.0  # another environment of the dictionary may have one
            name = "the data" if self.instance is None else type(self.instance).__name__
            raise InputError(f"{name} has no get_reward: list reward functions in rollout.rewards")
        reward: float | Awaitable[float] = self.instance.get_reward()
        return reward

    def _group_ended(self) -> None:
        """Give the instance back."""
        if self.instance is not None and not self._calls.running:
            self._environments.give_back(self._name, self.instance)


class TextLoop(SingleTurnLoop):
    """Continues a plain text, without a chat template, as TRL does if `prompt` is a string.

    Example:
        rollout:
          loop: turnwise.rollouts.foreign.trl:TextLoop
    """

    async def run(self, environment: Environment, context: RolloutContext) -> None:
        """Sample the continuation and record it."""
        await super().run(environment, context)
        if context.trajectory.turns:
            tokens = context.trajectory.turns[-1].completion_token_ids
            content = context.template.tokenizer.decode(
                tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            context.trajectory.messages[-1]["content"] = content

    async def prompt(self, context: RolloutContext) -> list[int]:
        """Return the ids of the row's `prompt`, after those that begin any text."""
        return await context.encode(str(context.row["prompt"]), add_special_tokens=True)


class _Calls:
    """The number of an instance's calls that have not returned."""

    def __init__(self) -> None:
        self.running = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            self.running += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.running -= 1


class _Tool:
    """A function or method of TRL's as a tool of ours: it returns a text."""

    def __init__(self, function: ToolFunction, calls: _Calls) -> None:
        self.__name__ = function.__name__
        self.__func__ = getattr(function, "__func__", function)  # describes it to the model
        self._function = function
        self._calls = calls

    def __call__(self, **arguments: object) -> object:
        with self._calls:
            result = self._function(**arguments)
            return self._finish(result) if inspect.isawaitable(result) else _shown(result)

    async def _finish(self, result: Awaitable[object]) -> object:
        with self._calls:
            return _shown(await result)


def _shown(result: object) -> object:
    """Return a result as TRL shows it; of a list of text parts, their texts."""
    if not isinstance(result, list):
        return str(result)
    texts = [part.get("text") for part in result if isinstance(part, Mapping)]
    if len(texts) == len(result) and all(isinstance(text, str) for text in texts):
        return "".join(map(str, texts))
    return result


def _parts(content: str | list[object]) -> list[object]:
    """Return a message's content as parts."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _checked(factory: object) -> Callable[[], Any] | None:
    if isinstance(factory, type) and not callable(getattr(factory, "reset", None)):
        raise InputError(f"{factory.__name__} has no reset, which TRL's environments need")
    if factory is None or callable(factory):
        return factory
    raise InputError(
        f"environment_factory must be a class, a function or a dictionary of them, not "
        f"{factory!r:.80}"
    )


def _methods(instance: object) -> list[ToolFunction]:
    """Return the tools of an instance: its public methods, in the order of their names."""
    return [
        getattr(instance, name)
        for name, _ in inspect.getmembers(type(instance), inspect.isfunction)
        if name not in _NOT_TOOLS and not name.startswith("_")
    ]
