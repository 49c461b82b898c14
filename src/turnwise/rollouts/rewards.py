"""Rewards of finished trajectories: the weighted sum of the parts in `rollout.rewards`.

A part is the environment's own reward, a function, or a reward model, whose parts of one trajectory
are computed concurrently; or a function of all finished trajectories of a group (`REWARD_KINDS`).
If a part fails or is not a finite number, the trajectory has no reward: it is dropped under
`reward_error`, and the message names the part.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from turnwise.config import RewardConfig, RolloutConfig
from turnwise.core.aio import task_group
from turnwise.core.deadlines import StallClock
from turnwise.core.user_code import call_user_code, describe_user_error
from turnwise.core.watchdog import waiting
from turnwise.errors import InputError, TrajectoryError
from turnwise.rollouts.environment import Rewards, load_object
from turnwise.rollouts.episode import STALL_KEY, Episode, rewards_of
from turnwise.rollouts.problems import Row
from turnwise.rollouts.reading import BEYOND_LIMIT, is_list, read_reward, shown
from turnwise.rollouts.run_files import RunFiles
from turnwise.trajectory import MAX_REWARD, Trajectory

if TYPE_CHECKING:
    from turnwise.rollouts.reward_model import RemoteRewardModel

_T = TypeVar("_T")
UserCall = Callable[[Callable[..., object]], Awaitable[object]]
"""Calls a function of the user, plain or async, within the deadline of rewards."""


class GroupFunction(Protocol):
    """Gives the finished trajectories of a group their numbers."""

    async def __call__(
        self,
        call: UserCall,
        trajectories: Sequence[Trajectory],
        row: Row,
        episodes: Mapping[int, Episode],
    ) -> object: ...


@dataclass(frozen=True, slots=True)
class RewardKind:
    """A kind of entry of `rollout.rewards`."""

    label: str
    """Its name in errors."""
    compares: bool = False
    """Whether it needs all finished trajectories of a group."""
    optional: bool = False
    """Whether None may stand for a number: the entry does not apply to the trajectory."""
    adapter: str | None = None
    """`package.module:Name`, which makes a `GroupFunction` of the user's function, the run's
    optimizer steps and its files; None calls the user's with the trajectories and the row."""


REWARD_KINDS = {
    "function": RewardKind("function"),
    "group_function": RewardKind("group function", compares=True),
    "trl": RewardKind(
        "TRL function",
        compares=True,
        optional=True,
        adapter="turnwise.compat.trl.environment:TrlReward",
    ),
    "model": RewardKind("model"),
    "environment": RewardKind("environment"),
}
"""Kinds by the key that an entry has; one without any of them is the environment's own reward."""


@dataclass(frozen=True, slots=True)
class _Part:
    """One entry of `rollout.rewards`."""

    name: str
    """Configured name, or else the function, the model's path, or `environment`."""
    kind: RewardKind
    weight: float
    function: Callable[..., object] | None = None
    of_group: GroupFunction | None = None
    model: str = ""
    """Path of the reward model; "" for the other kinds."""

    def __str__(self) -> str:
        label = self.kind.label
        return f"the reward {label} {self.name}" if label != self.name else "the environment"


class RewardManager:
    """The configured rewards.

    Args:
        parts: Entries of `rollout.rewards`; if empty, only the environment's reward.
        functions: Functions of a program, by the path that an entry has for them; other paths are
            imported.
        rollout: Its `stall_timeout` is the deadline of each call of a function.
        max_steps: Optimizer steps of the run, which functions of other systems are given.
        files: Files of the run, for what such functions log; None writes nothing.

    Raises:
        InputError: when a function cannot be loaded, or a part is named twice.
    """

    def __init__(
        self,
        parts: Sequence[RewardConfig],
        functions: Mapping[str, Callable[..., object]] | None = None,
        *,
        rollout: RolloutConfig | None = None,
        max_steps: int = 0,
        files: RunFiles | None = None,
    ) -> None:
        self._seconds = (rollout or RolloutConfig()).stall_timeout
        run = (max_steps, files)
        self._parts = [_load(part, functions or {}, run) for part in parts or [RewardConfig()]]
        self._of_group = [part for part in self._parts if part.kind.compares]
        self._own = [part for part in self._parts if not part.kind.compares]
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
        episode: Episode,
        trajectory: Trajectory,
        row: Row,
        clock: StallClock | None = None,
    ) -> None:
        """Set the trajectory's `reward`, `reward_parts` and `turn_rewards`.

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
                part: tasks.create_task(self._value(part, episode, trajectory, row, clock))
                for part in self._own
            }
        total, turns = 0.0, [0.0] * len(trajectory.turns)
        players = dict.fromkeys(episode.players, 0.0)
        for part, task in values.items():
            rewards = task.result()
            trajectory.reward_parts[part.name] = rewards.total
            if taken := trajectory.reward_parts.keys() & rewards.parts.keys():
                raise TrajectoryError(
                    "reward_error",
                    f"{part} gave a part named {min(taken)}, which another reward is named",
                )
            trajectory.reward_parts.update(rewards.parts)
            total += part.weight * rewards.total
            for player, value in rewards.players.items():
                if player not in players:
                    names = ", ".join(players) or "none"
                    raise TrajectoryError(
                        "reward_error",
                        f"{part} gave a reward to {player}; players of the environment: {names}",
                    )
                players[player] += part.weight * value
                trajectory.reward_parts[player] = value
            for turn, value in enumerate(rewards.turns):
                turns[turn] += part.weight * value
        trajectory.turn_rewards = turns if any(turns) else []
        if players:
            common = total - sum(turns)
            trajectory.player_rewards = {
                player: _within_limit(own + common + _of_player(trajectory, player, turns))
                for player, own in players.items()
            }
            total = sum(trajectory.player_rewards.values()) / len(players)
        trajectory.reward = _within_limit(total)

    async def judge_group(
        self, trajectories: Sequence[Trajectory], row: Row, episodes: Mapping[int, Episode]
    ) -> None:
        """Add the rewards of the group functions to those of a group's finished trajectories.

        Args:
            episodes: The trajectories' episodes, by their position in the group.

        Raises:
            TrajectoryError: `reward_error`, naming the first function that failed.
        """
        if not trajectories:
            return
        async with task_group() as tasks:
            values = {
                part: tasks.create_task(self._of_all(part, trajectories, row, episodes))
                for part in self._of_group
            }
        for part, task in values.items():
            for trajectory, value in zip(trajectories, task.result(), strict=True):
                if value is not None:
                    trajectory.reward_parts[part.name] = value
                    total = (trajectory.reward or 0.0) + part.weight * value
                    trajectory.reward = _within_limit(total)
                    for player in trajectory.player_rewards:
                        trajectory.player_rewards[player] += part.weight * value

    def lacks(self, trajectory: Trajectory) -> bool:
        """Return whether no part applies to a judged trajectory: all optional ones were None."""
        return any(part.kind.optional for part in self._parts) and not trajectory.reward_parts

    @property
    def compares(self) -> bool:
        """Whether a part needs all finished trajectories of a group."""
        return bool(self._of_group)

    async def _of_all(
        self,
        part: _Part,
        trajectories: Sequence[Trajectory],
        row: Row,
        episodes: Mapping[int, Episode],
    ) -> list[float | None]:
        """Return a group function's numbers; None where an optional one does not apply."""
        try:
            with waiting(f"{part.name} of {trajectories[0].problem_id}", "reward"):
                if part.of_group is not None:
                    call = partial(self._call, part)
                    values = await part.of_group(call, trajectories, row, episodes)
                else:
                    assert part.function is not None
                    values = await self._call(part, part.function, list(trajectories), row)
                numbers = await self._call(part, _numbers, values, part, len(trajectories))
        except (InputError, TrajectoryError):
            raise
        except Exception as error:
            raise await _failed(part, error) from error
        return numbers

    async def _call(self, part: _Part, function: Callable[..., _T], *arguments: object) -> _T:
        """Call a function of the user within `rollout.stall_timeout`."""
        value: _T = await call_user_code(
            function, *arguments, name=str(part), seconds=self._seconds, key=STALL_KEY
        )
        return value

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
        if not part.model:
            raise InputError(
                f"{part} scores a trajectory together with its row, when it is made; a reward "
                "model can score any"
            )
        try:
            return read_reward(await self.models[part.model].score(trajectory.messages), str(part))
        except TrajectoryError:
            raise
        except Exception as error:
            raise await _failed(part, error) from error

    async def _value(
        self,
        part: _Part,
        episode: Episode,
        trajectory: Trajectory,
        row: Row,
        clock: StallClock | None,
    ) -> Rewards:
        bounded = clock.held() if clock is not None and part.model else nullcontext()
        try:
            with waiting(f"{part.name} of {trajectory.problem_id}", "reward"), bounded:
                value = await self._compute(part, episode, trajectory, row)
        except (InputError, TrajectoryError):
            raise
        except Exception as error:
            raise await _failed(part, error) from error
        return value

    async def _compute(
        self, part: _Part, episode: Episode, trajectory: Trajectory, row: Row
    ) -> Rewards:
        if part.function is not None:
            value = await self._call(part, part.function, trajectory, row)
        elif part.model:
            value = await self.models[part.model].score(trajectory.messages)
        elif trajectory.reward is not None:
            value = trajectory.reward
        else:
            return await episode.reward(trajectory)
        return await rewards_of(value, str(part), len(trajectory.turns), self._seconds)


async def _failed(part: _Part, error: Exception) -> TrajectoryError:
    described = await describe_user_error(error)
    return TrajectoryError("reward_error", f"{part} gave no reward: {described}")


def _of_player(trajectory: Trajectory, player: str, turns: Sequence[float]) -> float:
    """Return the sum of a player's own turn rewards."""
    return sum(
        reward for reward, who in zip(turns, trajectory.turn_players, strict=True) if who == player
    )


def _numbers(values: object, part: _Part, count: int) -> list[float | None]:
    """Return the numbers of a group function; runs user code where they have types of their own."""
    given = list(values) if isinstance(values, Iterable) and not is_list(values) else values
    if not is_list(given) or len(given) != count:
        raise TrajectoryError(
            "reward_error",
            f"{part} must return a list of {count} numbers, one for each trajectory, not "
            f"{shown(values)}",
        )
    return [
        None if value is None and part.kind.optional else read_reward(value, str(part))
        for value in given
    ]


def _load(
    part: RewardConfig,
    functions: Mapping[str, Callable[..., object]],
    run: tuple[int, RunFiles | None],
) -> _Part:
    key = next((key for key in REWARD_KINDS if getattr(part, key, None)), "environment")
    kind, path = REWARD_KINDS[key], str(getattr(part, key, key))
    name = part.name or path
    if key in ("model", "environment"):
        return _Part(name, kind, part.weight, model=part.model or "")
    setting = f"rollout.rewards.{key}"
    function = functions.get(path) or load_object(path, setting)
    of_group = None
    if kind.adapter is not None:
        of_group = load_object(kind.adapter, setting)(function, *run)
    return _Part(name, kind, part.weight, function, of_group)


def _within_limit(reward: float) -> float:
    if not abs(reward) <= MAX_REWARD:
        raise TrajectoryError("reward_error", f"the weighted sum of rewards is {BEYOND_LIMIT}")
    return reward
