"""Environments of SkyRL-Gym. Rows have the format of SkyRL's data: a `prompt`, and fields for the
environment."""

import dataclasses
import inspect
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import ClassVar, get_args

from turnwise.compat.package import adapter, turn_rewards
from turnwise.core.optional import Foreign, required
from turnwise.errors import InputError
from turnwise.rollouts.environment import Environment, Rewards, finite_number, is_list
from turnwise.rollouts.problems import Row
from turnwise.trajectory import Message, Trajectory

_package = partial(required, "skyrl_gym", "skyrl-gym", "environment: skyrl_gym")


class SkyRLGym(Environment):
    """An environment of SkyRL-Gym: its `step` reads each answer and replies with observations.

    Each reward belongs to the turn that earned it. As in SkyRL, an answer that
    `sampling.max_tokens` cut off is also passed to `step`. A `postprocessed_action` is ignored,
    because only sampled tokens are trained.

    Args:
        row: `prompt` (messages), and further fields, which are the environment's `extras`.
        name: Name of the environment; "" uses the class attribute.
        max_turns: The environment's maximum number of turns; None uses the row's value or the
            environment's default.
        config: Keys of the environment's own configuration, such as `search_url`.

    Example:
        class Math(SkyRLGym):
            name = "gsm8k"
    """

    name: ClassVar[str] = ""

    def __init__(
        self, row: Row, name: str = "", *, max_turns: int | None = None, **config: object
    ) -> None:
        if not is_list(row.get("prompt")):
            raise InputError("a row of SkyRL's data has a prompt, a list of messages")
        self._prompt = row["prompt"]
        self._extras = {key: value for key, value in row.items() if key != "prompt"}
        if max_turns is not None:
            self._extras["max_turns"] = max_turns
        self._name, self._config = name or self.name, config
        self._earned = defaultdict[int, float](float)
        self.env: Foreign = None
        """SkyRL's environment; None before `setup`."""

    def setup(self) -> None:
        package = _package()
        kind = package.spec(self._name).entry_point
        if isinstance(kind, str):
            kind = package.envs.registration.load_env_creator(kind)
        config: object = SimpleNamespace(**self._config)
        parameter = inspect.signature(kind).parameters.get("env_config")
        for known in get_args(parameter.annotation) if parameter else ():
            if dataclasses.is_dataclass(known) and isinstance(known, type):  # it has defaults
                try:
                    config = known(**self._config)
                    break
                except TypeError as error:
                    raise InputError(f"environment_args: {error}") from error
        self.env = package.make(self._name, env_config=config, extras=self._extras)
        self.problem, _ = self.env.init([dict(message) for message in self._prompt])

    def step(self, message: Message) -> Sequence[Message] | None:
        output = self.env.step(str(message.get("content") or ""))
        self._earned[self.current_turn] += float(output["reward"])
        self.done = bool(output["done"])
        if self.done:
            return None
        return output["observations"] or [{"role": "user", "content": ""}]

    def reward(self, trajectory: Trajectory) -> Rewards:
        turns = len(trajectory.turns)
        if turns and turns - 1 not in self._earned and not self.done:  # `step` was not called
            self.current_turn = turns - 1
            self.step({"role": "assistant", "content": trajectory.final_text})
        return turn_rewards(self._earned, turns)

    def metrics(self, trajectory: Trajectory) -> dict[str, float]:
        """Return the environment's own metrics; omit values that are not finite numbers."""
        numbers = {name: finite_number(value) for name, value in self.env.get_metrics().items()}
        return {name: number for name, number in numbers.items() if number is not None}

    def close(self) -> None:
        if self.env is not None:
            self.env.close()


at = adapter("skyrl_gym", SkyRLGym, "name", lambda: _package().registry)
