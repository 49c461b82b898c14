"""Gymnasium's environments as conversations: the model reads observations as texts, and its answers
are actions."""

import importlib
import inspect
import json
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import ClassVar

from turnwise.compat.package import seed_rows, turn_rewards
from turnwise.core.json_types import JsonObject
from turnwise.core.optional import Foreign, required
from turnwise.errors import InputError, describe_error
from turnwise.rollouts.environment import Environment, EnvironmentType, Rewards
from turnwise.rollouts.problems import Row
from turnwise.tools import Tool
from turnwise.trajectory import Message, Trajectory

_package = partial(required, "gymnasium", "gymnasium", "environment: gymnasium")

_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_COLOURED = re.compile(rf"{_COLOUR.pattern}(.*?)\x1b\[0m", re.DOTALL)
_NAMED_ACTION = re.compile(r"^\s*[-*] (\d+): (.+?)\s*$", re.MULTILINE)
_WORD = re.compile(r"[^\W\d_]+")
_IN_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_RULES = {
    "FrozenLakeEnv": "Cross the frozen lake from S to G over the ice (F). A hole (H) ends the "
    "game. You are at the place in brackets.",
    "CliffWalkingEnv": "Walk from the lower left corner to the target (T). You are at x. A step "
    "into the cliff (C) takes you back to the start.",
    "TaxiEnv": "Drive the taxi to the passenger, pick the passenger up, drive to the destination, "
    "and drop the passenger off there. No step leads through a wall (|).",
    "BlackjackEnv": "Play Blackjack: come closer to 21 than the dealer, but not above it. Picture "
    "cards count 10, an ace 1 or 11.",
}
"""Rules of the toy-text environments, by class; for any other environment its docstring is used."""


class Gymnasium(Environment):
    """An environment of Gymnasium: the model reads observations, and answers with actions.

    The trajectory ends when the environment terminates or truncates (`max_episode_steps`), or at
    `rollout.max_turns`. Each turn gets the rewards of its own steps.

    Args:
        row: `seed`, for the environment's `reset`.
        id: Name of the environment; "" uses the class attribute.
        tool: Offer the actions as a tool, `act`, instead of reading them from answers.
        rules: Beginning of the problem; None uses the environment's own description.
        rows: Number of rows that the method `rows` returns.
        arguments: Arguments of `gymnasium.make`, such as `max_episode_steps`, and of the
            environment.

    Example:
        class Lake(Gymnasium):
            id = "FrozenLake-v1"

            def describe(self, observation):
                return f"You are at place {observation}."
    """

    id: ClassVar[str] = ""

    def __init__(
        self,
        row: Row,
        id: str = "",
        *,
        tool: bool = False,
        rules: str | None = None,
        rows: int = 1000,
        **arguments: object,
    ) -> None:
        self._id, self._seed, self._arguments = id or self.id, row.get("seed"), arguments
        self._by_tool, self._rules = tool, rules
        self._earned = defaultdict[int, float](float)
        self._steps = self._unreadable = 0
        self.env: Foreign = None
        """Gymnasium's environment; None before `setup`."""

    @classmethod
    def rows(cls, split: str, *, rows: int = 1000) -> Sequence[Row]:
        return seed_rows(split, rows)

    def setup(self) -> None:
        gym, arguments = _package(), dict(self._arguments)
        maker = gym.spec(self._id).entry_point
        if isinstance(maker, str):
            maker = gym.envs.registration.load_env_creator(maker)
        if "ansi" in getattr(maker, "metadata", {}).get("render_modes", ()):
            arguments.setdefault("render_mode", "ansi")
        try:
            self.env = env = gym.make(self._id, disable_env_checker=True, **arguments)
        except TypeError as error:  # an unknown argument
            said = str(error).partition(" was raised from")[0]
            raise InputError(f"environment_args: {said}") from error
        if env.action_space.shape is None or len(env.action_space.shape) > 1:
            raise InputError(f"gymnasium:{self._id}: actions of {env.action_space} are no numbers")
        observation, _ = env.reset(seed=self._seed)
        described = inspect.getdoc(type(env.unwrapped)) or ""
        listed = _NAMED_ACTION.findall(_section(described, "Action Space"))
        self._names = {int(number): name for number, name in listed}
        actions = ", ".join(f"{number} ({name})" for number, name in self._names.items())
        parts = [
            self._rules or _RULES.get(type(env.unwrapped).__name__) or _section(described),
            f"Actions: {actions or env.action_space}.",
            self.describe(observation),
        ]
        if self._by_tool:
            space = env.action_space
            kind: JsonObject = {"type": "array", "items": {"type": "number"}}
            if space.shape == ():
                first = int(space.start)
                kind = {"type": "integer", "minimum": first, "maximum": first + int(space.n) - 1}
            names = (f"{number}: {name}" for number, name in self._names.items())
            kind["description"] = ", ".join(names) or str(space)
            schema = {"type": "object", "properties": {"action": kind}, "required": ["action"]}

            def act(arguments: JsonObject) -> str:
                if self.done:
                    return "The episode has ended."
                action = _from_json(arguments["action"], self.env.action_space)
                if action is None:
                    said = arguments["action"]
                    raise ValueError(f"{said} is no action of {self.env.action_space}")
                return self._act(action)

            self.tools = [Tool("act", "Act in the environment.", schema, act, in_order=True)]
        else:
            parts.append(_how_to_answer(env.action_space))
        self.problem = "\n\n".join(parts)

    def describe(self, observation: object) -> str:
        """Return an observation as the model reads it: as text that the environment renders, or
        else as the value's text."""
        env = self.env.unwrapped
        text = str(self.env.render()) if self.env.render_mode == "ansi" else str(observation)
        words = _WORDS.get(type(env).__name__)
        if words is None:
            text = _COLOURED.sub(r"[\1]", text)
        text = _COLOUR.sub("", text).strip("\n")
        return text if words is None else words(env, text, observation)

    def step(self, message: Message) -> str | None:
        if self._by_tool:
            return None
        action = read_action(str(message.get("content") or ""), self.env.action_space, self._names)
        if action is None:
            self._unreadable += 1
            return f"There is no action in your answer. {_how_to_answer(self.env.action_space)}"
        text = self._act(action)
        return None if self.done else text

    def reward(self, trajectory: Trajectory) -> Rewards:
        return turn_rewards(self._earned, len(trajectory.turns))

    def metrics(self, trajectory: Trajectory) -> dict[str, float]:
        return {"steps": self._steps, "answers_without_action": self._unreadable}

    def close(self) -> None:
        if self.env is not None:
            self.env.close()

    def _act(self, action: object) -> str:
        observation, reward, terminated, truncated, _ = self.env.step(action)
        self._steps += 1
        self._earned[self.current_turn] += float(reward)
        self.done = bool(terminated or truncated)
        return self.describe(observation)


def at(name: str) -> EnvironmentType:
    """Return the environment with a name such as `FrozenLake-v1`; the name `my_module:MyGame-v0`
    first imports `my_module`, which registers the environment."""
    module, _, id = name.rpartition(":")
    gym = _package()
    try:
        if module:
            importlib.import_module(module)
        gym.spec(id)
    except Exception as error:  # Gymnasium's error, with the closest name, or the module's error
        raise InputError(f"environment: gymnasium:{name}: {describe_error(error)}") from error
    return partial(Gymnasium, id=id)


def read_action(text: str, space: Foreign, names: dict[int, str]) -> object:
    """Return the action in an answer; None if the answer has no action.

    The action is read from the last brackets. Without brackets, it is read from the whole text, or
    else from its last number. It may be a value, or words that occur in exactly one of `names`.
    """
    bracketed = _IN_BRACKETS.findall(text)
    for said in bracketed[-1:] or [text, *re.findall(r"-?\d+", text)[-1:]]:
        meant = [number for number, name in names.items() if _words(said) in _words(name)]
        if len(meant) == 1:
            return _from_json(meant[0], space)
        for form in (said, f"[{said}]"):
            with suppress(ValueError):
                action = _from_json(json.loads(form), space)
                if action is not None:
                    return action
    return None


def _words(text: str) -> str:
    """Return the words of a text, with spaces around each, so that `in` only finds whole words."""
    return f" {' '.join(re.findall(_WORD, text.casefold()))} "


def _from_json(value: object, space: Foreign) -> object:
    """Return a JSON value as an action of a space; None if the space does not contain it."""
    try:
        (action,) = space.from_jsonable([value])
    except Exception:  # the error depends on the kind of space
        return None
    return action if space.contains(action) else None


def _section(described: str, title: str = "Description") -> str:
    """Return a section of an environment's docstring. A missing description is replaced by the
    first paragraph; any other missing section is ""."""
    found = re.search(rf"^\s*#+ {title}\s*$(.*?)(?=^\s*#|\Z)", described, re.DOTALL | re.MULTILINE)
    if found is None:
        return described.partition("\n\n")[0] if title == "Description" else ""
    return inspect.cleandoc(found[1])


def _how_to_answer(space: Foreign) -> str:
    if space.shape == ():
        return f"Answer with one action in square brackets, such as [{space.start}]."
    return f"Answer with one action in square brackets, a list of {space.shape[0]}."


def _taxi(env: Foreign, drawn: str, observation: object) -> str:
    row, column, passenger, destination = env.decode(observation)
    waits = "is in the taxi" if passenger == 4 else f"waits at {'RGYB'[passenger]}"
    return (
        f"{drawn}\nThe taxi is in row {row}, column {column}, counted from 0. The passenger "
        f"{waits}, and goes to {'RGYB'[destination]}."
    )


def _blackjack(env: Foreign, drawn: str, observation: tuple[int, int, int]) -> str:
    total, dealer, ace = observation
    counted = ", with an ace that counts 11" if ace else ""
    return f"Your cards: {total}{counted}. The dealer shows {'an ace' if dealer == 1 else dealer}."


_WORDS: dict[str, Callable[..., str]] = {"TaxiEnv": _taxi, "BlackjackEnv": _blackjack}
"""Functions that describe observations, by the classes whose own text is incomplete."""
