"""What a finished trajectory earns: the weighted sum of the parts that `rollout.rewards` names.

A part is the environment's own reward, a function, or a reward model. All parts of a trajectory
are computed at once. A trajectory of which one part fails, or is no finite number, has no reward:
it is dropped under `reward_error`, and the message names the part.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from turnwise.config import RewardConfig
from turnwise.deadlines import StallClock
from turnwise.errors import InputError, TrajectoryError
from turnwise.rollout.environment import Environment, load_object
from turnwise.rollout.problems import Row
from turnwise.tasks import call_user_code, describe_user_error, task_group
from turnwise.trajectory import MAX_REWARD, Trajectory
from turnwise.watchdog import waiting

if TYPE_CHECKING:
    from turnwise.rollout.reward_model import RemoteRewardModel

_OWN = "the environment's reward"


@dataclass(frozen=True, slots=True)
class _Part:
    """One entry of the configuration."""

    name: str
    """Its function's or model's; `environment`."""
    kind: Literal["environment", "function", "model"]
    weight: float
    function: Callable[[Trajectory, Row], Any] | None = None
    model: str = ""
    """Path of the reward model."""

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
        paths = [part.model for part in self._parts if part.model]
        for path in paths:
            if paths.count(path) > 1:
                raise InputError(f"rollout.rewards has the model {path} twice; add the weights up")

    async def judge(
        self,
        environment: Environment,
        trajectory: Trajectory,
        row: Row,
        clock: StallClock | None = None,
    ) -> None:
        """Set the trajectory's `reward` and `reward_parts`.

        A reward that the trajectory already has, because its agent told it, takes the place of
        the environment's own.

        Args:
            clock: The trajectory's; it stands still while a reward model is asked, whose own clock
                knows of all that wait for it.

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
            raise TrajectoryError("reward_error", f"the weighted sum of rewards is {_out(reward)}")
        trajectory.reward = reward

    async def score(self, name: str, trajectory: Trajectory) -> float:
        """What one part gives a trajectory, before its weight: what it has given already, or what
        a reward model says of the messages.

        Args:
            name: The part's; another name stands for the only part there is.

        Raises:
            InputError: when no part is meant, or one that judges rows as they are answered.
            TrajectoryError: `reward_error`, when it gives no number.
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
                f"{part} judges a trajectory together with its row, when it is made; a reward "
                "model can judge any"
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
            value = await call_user_code(environment.reward, trajectory, name=_OWN)
        if type(value) in (bool, int, float):
            return _number(value, part)
        # Whatever else it is: making a number of it is the user's code too.
        number: float = await call_user_code(_number, value, part, name=str(part))
        return number


def _load(part: RewardConfig) -> _Part:
    if part.function:
        function = load_object(part.function, "rollout.rewards.function")
        return _Part(part.name or part.function, "function", part.weight, function)
    if part.model:
        return _Part(part.name or part.model, "model", part.weight, model=part.model)
    return _Part(part.name or "environment", "environment", part.weight)


def _number(value: Any, part: _Part) -> float:
    """A number of any kind (bool, NumPy's, a tensor of one) as a float.

    Raises:
        TrajectoryError: when it is none, or beyond `MAX_REWARD`.
    """
    number = math.nan
    if not isinstance(value, str | bytes | bytearray):  # float() would read it
        # An integer may be too large for a float; a tensor of many raises RuntimeError.
        with suppress(TypeError, ValueError, OverflowError, RuntimeError):
            number = float(value)
    if abs(number) <= MAX_REWARD:
        return number
    what = _out(number) if math.isfinite(number) else "not a finite number"
    raise TrajectoryError("reward_error", f"{part} gave {_shown(value)} as reward, which is {what}")


def _shown(value: Any) -> str:
    try:
        return repr(value)[:80]
    except Exception:
        return f"a {type(value).__name__}"


def _out(number: float) -> str:
    return f"beyond the limit of ±{MAX_REWARD:g}; scale it down"
