"""Adapters for TRL's environments, tools and reward functions; TRL is not imported.

docs/how-to/trl.md describes them. As in TRL, instances are reused: a trajectory keeps its instance
until its group has been rewarded. An instance is not reused if its trajectory failed, or if one of
its tool calls has not returned.
"""

import inspect
import json
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import deepcopy
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

from turnwise.core.aio import run_in_thread
from turnwise.core.images import decode
from turnwise.core.run_files import RunFiles
from turnwise.errors import InputError
from turnwise.rollouts.agent_loop import RolloutContext
from turnwise.rollouts.environment import (
    Environment,
    EnvironmentType,
    finite_number,
    load_object,
    read_messages,
)
from turnwise.rollouts.episode import Episode
from turnwise.rollouts.loops import SingleTurnLoop
from turnwise.rollouts.problems import Row
from turnwise.rollouts.rewards import UserCall
from turnwise.tools import ToolFunction
from turnwise.trajectory import Message, PromptLike, Trajectory
from turnwise.trajectory.images import image_parts, replaced

RewardFunction = Callable[..., object]
"""A reward function with TRL's signature, sync or async."""
_NO_PROMPT: list[Message] = [{"role": "user", "content": ""}]
_NO_ANSWER: Message = {"role": "assistant", "content": ""}
_NOT_TOOLS = ("reset", "get_reward")
_NOT_COLUMNS = ("prompt", "completion", "completion_ids")


def load_trl(path: str) -> EnvironmentType:
    """Import the environment factory `package.module:Name`."""
    return TrlEnvironments(load_object(path, "environment"))


class TrlEnvironments:
    """An environment type made from an `environment_factory` and tools.

    Args:
        factory: A class or function without arguments, a dictionary of such factories, or None.
        tools: Functions that the model may call in every row, listed before the methods of the
            row's instance.
    """

    def __init__(self, factory: object = None, tools: Sequence[ToolFunction] = ()) -> None:
        self.chooses = isinstance(factory, Mapping)
        """Whether a row's `environment` names its factory."""
        named: Mapping[object, Any] = factory if isinstance(factory, Mapping) else {None: factory}
        for one in named.values():
            if isinstance(one, type) and not callable(getattr(one, "reset", None)):
                raise InputError(f"{one.__name__} has no reset, which TRL's environments need")
            if one is not None and not callable(one):
                raise InputError(
                    "environment_factory must be a class, a function or a dictionary of them, not "
                    f"{one!r:.80}"
                )
        self.factories: dict[object, Callable[[], Any] | None] = dict(named)
        self.tools = tuple(tools)
        self.reward_functions: dict[str, RewardFunction] = {}
        """Reward functions of a program, by their paths in `rollout.rewards`."""
        self.free: dict[object, deque[Any]] = {name: deque() for name in self.factories}
        """Unused instances for the next trajectories, by their factories' names."""

    def __call__(self, row: Row) -> "TrlEnvironment":
        """Return the environment of a row."""
        return TrlEnvironment(row, self)

    def first_instances(self) -> list[Any]:
        """Return an instance of each factory; the first trajectories will use these instances."""
        made = []
        for name, factory in self.factories.items():
            if factory is not None:
                made.append(self.take(name))
                self.free[name].append(made[-1])
        return made

    def take(self, name: object) -> Any:
        """Return a free instance, or a new instance from the user's factory; None if there is no
        factory."""
        factory = self.factories[name]
        if factory is None:
            return None
        try:
            return self.free[name].pop()
        except IndexError:
            instance = factory()
        if not callable(getattr(instance, "reset", None)):
            kind = type(instance).__name__
            raise InputError(f"{kind} has no reset, which TRL's environments need")
        return instance


class TrlEnvironment(Environment):
    """The environment of one trajectory: a row's prompt, and an instance from the row's factory."""

    def __init__(self, row: Row, environments: TrlEnvironments) -> None:
        self._row = row
        self._environments = environments
        self._name = row.get("environment") if environments.chooses else None
        if self._name not in environments.factories:
            names = ", ".join(map(repr, environments.factories))
            raise InputError(
                f"the row's environment {self._name!r} is not among the environments {names}"
            )
        self._calls: list[object] = []
        """One entry for each tool call that has not returned, in any thread."""
        self.instance: Any = None
        """The user's object; None before `setup`, and without a factory."""
        prompt = _with_images(row.get("prompt", _NO_PROMPT), row)
        self.text: str | None = prompt if isinstance(prompt, str) else None
        """The prompt, if it is a plain text; no chat template is applied to it."""
        self.problem = prompt

    def setup(self) -> None:
        given = self._environments
        self.instance = given.take(self._name)
        tools = list(given.tools)
        if self.instance is not None:
            hidden = "environment" if given.chooses else None
            row = {key: value for key, value in self._row.items() if key != hidden}
            self._observe(self.instance.reset(**row))
            tools += methods_of(self.instance)
        self.tools = [_counted(tool, self._calls) for tool in tools]
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
        joined: object
        if isinstance(observation, str) and isinstance(content, str):
            joined = content + observation
        elif isinstance(observation, str | list) and isinstance(content, str | list):
            both = (content, observation)
            parts = ([{"type": "text", "text": p}] if isinstance(p, str) else p for p in both)
            joined = [part for each in parts for part in each]
        else:
            name = type(self.instance).__name__
            raise InputError(f"{name}.reset must return a text or None, not {observation!r:.80}")
        self.problem = [*before, {**last, "content": joined}]

    def reward(self, trajectory: Trajectory) -> float | Awaitable[float]:
        if not hasattr(type(self.instance), "get_reward"):
            if self._environments.chooses:
                return 0.0  # another class of the dictionary may have a get_reward
            name = "the data" if self.instance is None else type(self.instance).__name__
            raise InputError(f"{name} has no get_reward: list reward functions in rollout.rewards")
        reward: float | Awaitable[float] = self.instance.get_reward()
        return reward

    def _plain_text(self, trajectory: Trajectory) -> str | None:
        return None if self.text is None else self.text + trajectory.final_text

    def _group_ended(self) -> None:
        if self.instance is not None and not self._calls:
            self._environments.free[self._name].append(self.instance)


def _with_images(prompt: Any, row: Row) -> Any:
    """Put the images of a row's column `images`, or else `image`, into the row's prompt.

    The images fill the placeholders `{"type": "image"}` of the prompt, in order. If the prompt has
    no placeholders, the images are inserted before the text of the first user message.
    """
    given = row["images"] if "images" in row else [row.get("image")]
    images = [image for image in given or () if image is not None]
    if not images:
        return prompt
    if isinstance(prompt, str):
        raise InputError("prompt must be a list of messages where a row has images, not a text")
    messages: list[Message] = deepcopy(list(prompt))
    asked = [message for message in messages if message.get("role") != "tool"]
    parts = (part for part in image_parts(asked) if part.get("type") == "image")
    places = [part for part in parts if part.get("image") is None]
    texts = (m for m in asked if m.get("role") == "user" and isinstance(m.get("content"), str))
    if not places and (first := next(texts, None)) is not None:
        places = [{"type": "image"} for _ in images]
        first["content"] = [*places, {"type": "text", "text": first["content"]}]
    if len(places) != len(images):
        raise InputError(
            f"the row has {len(images)} images, and its prompt has {len(places)} places for them"
        )
    for place, image in zip(places, images, strict=True):
        place["image"] = image
    return messages


def methods_of(instance: Any) -> list[ToolFunction]:
    """Return the methods of a TRL environment that the model may call."""
    return [
        getattr(instance, name)
        for name, _ in inspect.getmembers(type(instance), inspect.isfunction)
        if name not in _NOT_TOOLS and not name.startswith("_")
    ]


def reward_of(kind: Any) -> RewardFunction:
    """Return a reward function that calls `get_reward` of environments of one class; environments
    of other classes get the reward None, so that this reward does not apply to them."""

    def get_reward(environments: Sequence[Any], **_: object) -> list[object]:
        return [each.get_reward() if type(each) is kind else None for each in environments]

    async def awaited(environments: Sequence[Any], **_: object) -> list[object]:
        return [await each.get_reward() if type(each) is kind else None for each in environments]

    return awaited if inspect.iscoroutinefunction(kind.get_reward) else get_reward


class TextLoop(SingleTurnLoop):
    """Continues a plain text without a chat template, as TRL does for a `prompt` of type str."""

    def text(self, context: RolloutContext, token_ids: list[int]) -> str:
        decode = context.template.tokenizer.decode
        return str(decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    async def prompt(self, context: RolloutContext) -> PromptLike:
        """Return the ids of the row's `prompt`, with the tokenizer's special tokens (BOS)."""
        return await context.encode(str(context.row["prompt"]), add_special_tokens=True)


def _counted(function: ToolFunction, calls: list[object]) -> ToolFunction:
    """Wrap a function or method of a TRL script as a tool that returns `_shown` of its result.

    While a call runs, `calls` has an entry for it.
    """

    async def finish(result: Awaitable[object]) -> object:
        calls.append(function)
        try:
            return _shown(await result)
        finally:
            calls.pop()

    def call(**arguments: object) -> object:
        calls.append(function)
        try:
            result = function(**arguments)
            return finish(result) if inspect.isawaitable(result) else _shown(result)
        finally:
            calls.pop()

    call.__name__ = function.__name__
    # The tool's description for the model is read from the original function.
    vars(call)["__func__"] = getattr(function, "__func__", function)
    return call


def _shown(result: object) -> object:
    """Return a tool's result as TRL shows it to the model: a list of text parts is joined to one
    text, any other list is returned unchanged, and any other result is converted to a text."""
    if not isinstance(result, list):
        return str(result)
    texts = [part.get("text") for part in result if isinstance(part, Mapping)]
    if len(texts) == len(result) and all(isinstance(text, str) for text in texts):
        return "".join(map(str, texts))
    return result


async def call_trl_function(
    function: RewardFunction,
    max_steps: int,
    files: RunFiles | None,
    call: UserCall,
    trajectories: Sequence[Trajectory],
    row: Row,
    episodes: Mapping[int, Episode],
) -> object:
    """Call a reward function with TRL's signature for the finished trajectories of a group.

    Return its result, and keep its logs: `log_metric` adds metrics to the trajectories, `log_extra`
    writes to extra.jsonl. A metric that is not a finite number is counted as `metrics_error`.
    """
    metrics: dict[str, list[float]] = defaultdict(list)
    extra: list[dict[str, object]] = [{} for _ in trajectories]

    def log_metric(name: str, value: float) -> None:
        number = finite_number(value)
        if number is None:
            trajectories[0].events["metrics_error"] += 1
        else:
            metrics[name].append(number)

    def log_extra(column: str, values: Sequence[object]) -> None:
        if len(values) != len(trajectories):
            raise InputError(
                f"log_extra: {column} needs {len(trajectories)} values, one for each "
                f"completion, not {len(values)}"
            )
        for columns, value in zip(extra, values, strict=True):
            columns[column] = value

    def write(files: RunFiles) -> None:
        lines = []
        for t, columns in zip(trajectories, extra, strict=True):
            known = {"problem_id": t.problem_id, "sample_index": t.sample_index}
            known["weight_version"] = _newest_version(t)
            lines.append(json.dumps(known | columns, default=str))
        files.append("extra.jsonl", "".join(f"{line}\n" for line in lines))

    # In a thread, because decoding images takes time.
    arguments = await run_in_thread(_arguments, max_steps, trajectories, row, episodes)
    arguments |= {"log_extra": log_extra, "log_metric": log_metric}
    values = await call(partial(function, **arguments))
    for name, numbers in metrics.items():
        for trajectory in trajectories:
            own = {name: sum(numbers) / len(numbers)}
            trajectory.set_outcome(metrics={**trajectory.metrics, **own})
    if any(extra) and files is not None:
        await call(partial(write, files))
    return values


def _arguments(
    max_steps: int, trajectories: Sequence[Trajectory], row: Row, episodes: Mapping[int, Episode]
) -> dict[str, object]:
    """Return the keyword arguments of a reward function, with images as PIL images."""
    picture = cache(lambda image: decode(image.read(), str(image)))
    with_pictures = partial(replaced, change=picture)
    played = [episodes[trajectory.sample_index] for trajectory in trajectories]
    prompts, completions, completion_ids = list[object](), list[object](), list[list[int]]()
    for trajectory, episode in zip(trajectories, played, strict=True):
        environment, turns = episode.environment, trajectory.turns
        if isinstance(environment, TrlEnvironment) and environment.text is not None:
            prompts.append(environment.text)
            completions.append(trajectory.final_text)
        else:
            messages = with_pictures(trajectory.messages[len(episode.problem) :])
            for message in messages:  # in TRL, tool calls have no ids
                message.pop("tool_call_id", None)
                for call in message.get("tool_calls", ()):
                    call.pop("id", None)
            prompts.append(with_pictures(episode.problem))
            completions.append(messages or [dict(_NO_ANSWER)])
        ids: list[int] = []
        if turns:  # all ids after the first prompt, tool results included
            last = len(turns) - 1
            whole = trajectory.prompt(last) + turns[last].completion_token_ids
            ids = whole.tolist()[turns[0].prompt_length :]
        completion_ids.append(ids)
    steps = max(map(_newest_version, trajectories))  # training steps that led to the newest weights
    state = SimpleNamespace(global_step=steps, max_steps=max_steps)
    arguments: dict[str, object] = {
        "prompts": prompts,
        "completions": completions,
        "completion_ids": completion_ids,
        **{key: [v] * len(played) for key, v in row.items() if key not in _NOT_COLUMNS},
        "trainer_state": state,
    }
    theirs = [e.environment for e in played if isinstance(e.environment, TrlEnvironment)]
    instances = [each.instance for each in theirs]
    if len(theirs) == len(played) and any(each is not None for each in instances):
        arguments["environments"] = instances
    return arguments


def _newest_version(trajectory: Trajectory) -> int:
    return max((v for turn in trajectory.turns for v in turn.weight_versions), default=0)
