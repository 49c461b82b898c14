"""Rewards of finished trajectories: the weighted sum of the parts in `rollout.rewards`.

A part is the environment's own reward, a function, or a reward model. All parts of a trajectory
are computed concurrently. If a part fails or is not a finite number, the trajectory has no reward:
it is dropped under `reward_error`, and the message names the part.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, SupportsFloat, SupportsIndex

from turnwise.config import RewardConfig
from turnwise.core.aio import task_group
from turnwise.core.deadlines import StallClock
from turnwise.core.user_code import call_user_code, describe_user_error
from turnwise.core.watchdog import waiting
from turnwise.errors import InputError, TrajectoryError
from turnwise.rollout.environment import Environment, load_object
from turnwise.rollout.problems import Row
from turnwise.trajectory import MAX_REWARD, Trajectory

if TYPE_CHECKING:
    from turnwise.rollout.reward_model import RemoteRewardModel

_ENVIRONMENT_REWARD = "the environment's reward"


@dataclass(frozen=True, slots=True)
class _Part:
    """One entry of `rollout.rewards`."""

    name: str
    """Configured name, or else the function, the model's path, or `environment`."""
    kind: Literal["environment", "function", "model"]
    weight: float
    function: Callable[[Trajectory, Row], object] | None = None
    model: str = ""
    """Path of the reward model; "" for the other kinds."""

    def __str__(self) -> str:
        return (
            f"the reward {self.kind} {self.name}" if self.kind != self.name else "the environment"
        )


class Rewards:
    """The configured rewards.

    Args:
        parts: Entries of `rollout.rewards`; if empty, only the environment's reward.

    Raises:
        InputError: when a function cannot be loaded, or a part is named twice.

    Example:
        rewards = Rewards([RewardConfig(), RewardConfig(function="rewards:brevity", weight=0.1)])
        await rewards.judge(environment, trajectory, row)
        print(trajectory.reward, trajectory.reward_parts)
    """

    def __init__(self, parts: Sequence[RewardConfig]) -> None:
        self._parts = [_load(part) for part in parts or [RewardConfig()]]
        self.models: Mapping[str, RemoteRewardModel] = {}
        """Reward models by their paths; set when they have been started."""
        names = [part.name for part in self._parts]
        for name in names:
            if names.count(name) > 1:
                raise InputError(f"rollout.rewards names {name} twice; add up the weights")
        paths = [part.model for part in self._parts if part.model]
        for path in paths:
            if paths.count(path) > 1:
                raise InputError(f"rollout.rewards has the model {path} twice; add up the weights")

    async def judge(
        self,
        environment: Environment,
        trajectory: Trajectory,
        row: Row,
        clock: StallClock | None = None,
    ) -> None:
        """Set the trajectory's `reward` and `reward_parts`.

        A reward that the trajectory already has, because its agent reported it, replaces the
        environment's own.

        Args:
            clock: The trajectory's clock. It is held while a reward model scores, because the
                model has its own clock for its whole queue.

        Raises:
            TrajectoryError: `reward_error`, naming the first part that failed.
        """
        async with task_group() as tasks:
            values = {
                part: tasks.create_task(self._value(part, environment, trajectory, row, clock))
                for part in self._parts
            }
        trajectory.reward_parts = {part.name: value.result() for part, value in values.items()}
        reward = sum(part.weight * value.result() for part, value in values.items())
        if not abs(reward) <= MAX_REWARD:
            raise TrajectoryError(
                "reward_error", f"the weighted sum of rewards is {_beyond_limit(reward)}"
            )
        trajectory.reward = reward

    async def score(self, name: str, trajectory: Trajectory) -> float:
        """Return one part's reward of a trajectory, before its weight.

        A part that the trajectory already has is not computed again.

        Args:
            name: Name of the part; if there is only one part, any name selects it.

        Raises:
            InputError: when there is no such part, or it needs the row.
            TrajectoryError: `reward_error`, when it returns no finite number.
        """
        named = [part for part in self._parts if part.name == name] or self._parts
        if len(named) != 1:
            names = ", ".join(part.name for part in self._parts)
            raise InputError(f"rollout.rewards has no entry with name {name}, but {names}")
        (part,) = named
        if part.name in trajectory.reward_parts:
            return trajectory.reward_parts[part.name]
        if part.kind != "model":
            raise InputError(
                f"{part} scores a trajectory together with its row, when it is made; a reward "
                "model can score any"
            )
        try:
            return _number(await self.models[part.model].score(trajectory.messages), part)
        except TrajectoryError:
            raise
        except Exception as error:
            described = await describe_user_error(error)
            raise TrajectoryError("reward_error", f"{part} gave no reward: {described}") from error

    async def _value(
        self,
        part: _Part,
        environment: Environment,
        trajectory: Trajectory,
        row: Row,
        clock: StallClock | None,
    ) -> float:
        bounded = clock.held() if clock is not None and part.kind == "model" else nullcontext()
        try:
            with waiting(f"{part.name} of {trajectory.problem_id}", "reward"), bounded:
                value = await self._compute(part, environment, trajectory, row)
        except (InputError, TrajectoryError):
            raise
        except Exception as error:
            described = await describe_user_error(error)
            raise TrajectoryError("reward_error", f"{part} gave no reward: {described}") from error
        return value

    async def _compute(
        self, part: _Part, environment: Environment, trajectory: Trajectory, row: Row
    ) -> float:
        if part.function is not None:
            value = await call_user_code(part.function, trajectory, row, name=str(part))
        elif part.kind == "model":
            value = await self.models[part.model].score(trajectory.messages)
        elif trajectory.reward is not None:
            value = trajectory.reward
        else:
            value = await call_user_code(environment.reward, trajectory, name=_ENVIRONMENT_REWARD)
        if type(value) in (bool, int, float):
            return _number(value, part)
        # Converting any other type to a number may run user code.
        number: float = await call_user_code(_number, value, part, name=str(part))
        return number


def _load(part: RewardConfig) -> _Part:
    if part.function:
        function = load_object(part.function, "rollout.rewards.function")
        return _Part(part.name or part.function, "function", part.weight, function)
    if part.model:
        return _Part(part.name or part.model, "model", part.weight, model=part.model)
    return _Part(part.name or "environment", "environment", part.weight)


def _number(value: object, part: _Part) -> float:
    """Return a number of any kind (bool, NumPy's, a tensor of one) as a float.

    Raises:
        TrajectoryError: when it is not a finite number, or beyond `MAX_REWARD`.
    """
    number = math.nan
    if isinstance(value, SupportsFloat | SupportsIndex):  # not text, which float() would read
        # An integer may be too large for a float; a tensor of many raises RuntimeError.
        with suppress(TypeError, ValueError, OverflowError, RuntimeError):
            number = float(value)
    if abs(number) <= MAX_REWARD:
        return number
    problem = _beyond_limit(number) if math.isfinite(number) else "not a finite number"
    raise TrajectoryError(
        "reward_error", f"{part} gave {_shown(value)} as reward, which is {problem}"
    )


def _shown(value: object) -> str:
    try:
        return repr(value)[:80]
    except Exception:
        return f"a {type(value).__name__}"


def _beyond_limit(number: float) -> str:
    return f"beyond the limit of ±{MAX_REWARD:g}; scale it down"
