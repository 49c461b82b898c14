"""What a finished trajectory earns: the weighted sum of the parts that `rollout.rewards` names.

A part is the environment's own reward, a function, or a reward model. All parts of a trajectory
are computed at once. A trajectory of which one part fails, or is no finite number, has no reward:
it is dropped under `reward_error`, and the message names the part.
"""

import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from turnwise.config import RewardConfig
from turnwise.errors import InputError, TrajectoryError, TurnwiseError
from turnwise.rollout.environment import Environment, load_object
from turnwise.rollout.problems import Row
from turnwise.tasks import run_in_thread, task_group
from turnwise.trajectory import Trajectory
from turnwise.watchdog import waiting

if TYPE_CHECKING:
    from turnwise.rollout.reward_model import RemoteRewardModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Part:
    """One entry of the configuration."""

    name: str
    """Its function's or model's; `environment`."""
    kind: Literal["environment", "function", "model"]
    weight: float
    function: Callable[[Trajectory, Row], Any] | None = None

    def __str__(self) -> str:
        return (
            f"the reward {self.kind} {self.name}" if self.kind != self.name else "the environment"
        )


class Rewards:
    """The reward of a configuration.

    Args:
        parts: None is the environment's own reward alone.

    Raises:
        InputError: when a function cannot be loaded, or a part is named twice.
    """

    def __init__(self, parts: Sequence[RewardConfig]) -> None:
        self._parts = [_load(part) for part in parts or [RewardConfig()]]
        self.models: Mapping[str, RemoteRewardModel] = {}
        """The reward models by their names; set by whoever starts them."""
        names = [part.name for part in self._parts]
        for name in names:
            if names.count(name) > 1:
                raise InputError(f"rollout.rewards names {name} twice; add the weights up")

    async def judge(self, environment: Environment, trajectory: Trajectory, row: Row) -> None:
        """Set the trajectory's `reward` and `reward_parts`.

        A reward that the trajectory already has, because its agent told it, takes the place of
        the environment's own.

        Raises:
            TrajectoryError: `reward_error`, naming the first part that failed.
        """
        async with task_group() as tasks:
            values = {
                part: tasks.create_task(self._value(part, environment, trajectory, row))
                for part in self._parts
            }
        trajectory.reward_parts = {part.name: value.result() for part, value in values.items()}
        trajectory.reward = sum(part.weight * value.result() for part, value in values.items())

    async def _value(
        self, part: _Part, environment: Environment, trajectory: Trajectory, row: Row
    ) -> float:
        try:
            with waiting(f"{part.name} of {trajectory.problem_id}", "reward"):
                value = await self._compute(part, environment, trajectory, row)
        except (InputError, TrajectoryError):
            raise
        except TurnwiseError as error:
            raise TrajectoryError("reward_error", f"{part} gave no reward: {error}") from error
        except Exception as error:
            logger.debug("reward_error", exc_info=True)
            raise TrajectoryError(
                "reward_error", f"{part} gave no reward: {type(error).__name__}: {error}"
            ) from error
        number = _number(value)
        if number is None:
            raise TrajectoryError(
                "reward_error",
                f"{part} gave {repr(value)[:80]} as reward, which is not a finite number",
            )
        return number

    async def _compute(
        self, part: _Part, environment: Environment, trajectory: Trajectory, row: Row
    ) -> Any:
        if part.function is not None:
            return await _call(part.function, trajectory, row)
        if part.kind == "model":
            return await self.models[part.name].score(trajectory.messages)
        if trajectory.reward is not None:
            return trajectory.reward
        return await _call(environment.reward, trajectory)


def _load(part: RewardConfig) -> _Part:
    if part.function:
        function = load_object(part.function, "rollout.rewards.function")
        return _Part(part.function, "function", part.weight, function)
    if part.model:
        return _Part(part.model, "model", part.weight)
    return _Part("environment", "environment", part.weight)


async def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    """A plain function runs in a thread, an async one here."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments)
    value = await run_in_thread(lambda: function(*arguments))
    return await value if inspect.isawaitable(value) else value


def _number(value: Any) -> float | None:
    """A number of any kind (bool, NumPy's, a tensor of one); None where it is not finite."""
    if isinstance(value, str | bytes | bytearray):
        return None  # float() would read it
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # a tensor of many raises the last
        return None
    return number if math.isfinite(number) else None
