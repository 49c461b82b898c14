"""Rewards of finished trajectories: the weighted sum of the parts in `rollout.rewards`.

A part is the environment's own reward, a function, a reward model or a judge. The parts of one
trajectory are computed concurrently. Some functions and judges instead compare all finished
trajectories of a group (`REWARD_KINDS`). If a part fails or is not a finite number, the trajectory
is dropped with the reason `reward_error` (a judge has its own reasons), and the message names the
part.

To add a reward: write a function `(trajectory, row) -> number`, and name it in `rollout.rewards`.
To add a kind of reward: write a key of `RewardConfig` in `config/rollout.py`, count it in the sum
of its `mistakes`, call it here, and register it in `REWARD_KINDS`.
"""

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from turnwise.config import LOOP_NAMES, RewardConfig, RolloutConfig
from turnwise.core.admission import Admission
from turnwise.core.aio import together
from turnwise.core.deadlines import StallClock
from turnwise.core.optional import Foreign, load_object
from turnwise.core.run_files import RunFiles
from turnwise.core.user_code import call_user_code, user_errors
from turnwise.core.watchdog import waiting
from turnwise.errors import InputError, TrajectoryError, defined_at
from turnwise.rollouts.environment import (
    BEYOND_LIMIT,
    EnvironmentType,
    Rewards,
    is_list,
    name_of,
    read_reward,
    shown,
    type_of,
)
from turnwise.rollouts.episode import STALL_KEY, Episode, rewards_of
from turnwise.rollouts.judge import Judge
from turnwise.rollouts.problems import Row
from turnwise.trajectory import MAX_REWARD, Trajectory

if TYPE_CHECKING:
    from turnwise.rollouts.reward_model import RemoteRewardModel

_T = TypeVar("_T")
UserCall = Callable[[Callable[..., object]], Awaitable[object]]
"""Calls a user's function, plain or async, within the deadline for rewards."""


class RewardKind(NamedTuple):
    label: str
    compares: bool = False  # whether it needs all finished trajectories of a group
    optional: bool = False
    """Whether None is allowed: it means that the entry does not apply to the trajectory."""
    adapter: str | None = None
    """Path of a function with the parameters of `_call_group_function` that calls the user's
    function; None means `_call_group_function`. Used only by kinds that compare."""


REWARD_KINDS = {  # by key of an entry; an entry without these keys is the environment's
    "function": RewardKind("function"),
    "group_function": RewardKind("group function", compares=True),
    "trl": RewardKind(
        "TRL function", True, True, "turnwise.compat.trl.environment:call_trl_function"
    ),
    "model": RewardKind("model"),
    "judge": RewardKind("judge"),  # compares if the judge's `compare` is set
    "environment": RewardKind("environment"),
}


class _Part(NamedTuple):
    name: str  # the configured name, or else the path of function or model, or `environment`
    kind: RewardKind
    weight: float
    function: Callable[..., Foreign] | None
    """The user's function, which takes a trajectory and its row. For a kind that compares: a
    function with the parameters of `_call_group_function` after `files`."""
    model: str  # path of the reward model; "" for the other kinds
    judge: Judge | None

    def __str__(self) -> str:
        label = self.kind.label
        return f"the reward {label} {self.name}" if label != self.name else "the environment"

    @asynccontextmanager
    async def judging(self, problem_id: str) -> AsyncIterator[None]:
        """Show the wait for this part under its name; if the part raises an error, the trajectory
        fails with the reason `reward_error`."""
        said = f"{self} gave no reward: "
        async with user_errors("reward_error", said, (TrajectoryError,)):
            with waiting(f"{self.name} of {problem_id}", "reward"):
                yield


class RewardManager:
    """The rewards that `rollout.rewards` lists; if it is empty, the environment's own reward.
    `functions` holds functions of the calling program by path; all other paths are imported."""

    def __init__(
        self,
        parts: Sequence[RewardConfig],
        functions: Mapping[str, Callable[..., object]] | None = None,
        *,
        rollout: RolloutConfig | None = None,
        max_steps: int = 0,
        files: RunFiles | None = None,
    ) -> None:
        self._rollout = rollout or RolloutConfig()
        self._seconds = self._rollout.stall_timeout
        self._parts: list[_Part] = []
        for entry in parts or [RewardConfig()]:
            key = next((key for key in REWARD_KINDS if getattr(entry, key, None)), "environment")
            kind, path = REWARD_KINDS[key], str(getattr(entry, key, key))
            function: Callable[..., Foreign] | None = None
            judge: Judge | None = None
            if entry.judge is not None:
                judge = Judge(entry.judge, entry.label, files)
                kind = kind._replace(compares=entry.judge.compare)
            elif key not in ("model", "environment"):
                setting = f"rollout.rewards.{key}"
                function = (functions or {}).get(path) or load_object(path, setting)
                if kind.compares:
                    call = _call_group_function
                    if kind.adapter is not None:
                        call = load_object(kind.adapter, setting)
                    function = partial(call, function, max_steps, files)
            scorers = function, entry.model or "", judge
            self._parts.append(_Part(entry.label, kind, entry.weight, *scorers))
        self._of_group = [part for part in self._parts if part.kind.compares]
        self._single = [part for part in self._parts if not part.kind.compares]
        self.models: Mapping[str, RemoteRewardModel] = {}
        """Reward models by path; set after the models were started."""
        for what, names in (
            ("names", [part.name for part in self._parts]),
            ("has the model", [part.model for part in self._parts if part.model]),
        ):
            if twice := [name for name in names if names.count(name) > 1]:
                what = f"{what} {twice[0]} twice; add up the weights, or name each"
                raise InputError(f"rollout.rewards {what}")

    @property
    def admissions(self) -> dict[str, Admission]:
        """The admissions of the judges, by the names of their parts."""
        judges = ((str(part), part.judge) for part in self._parts)
        return {name: judge.admission for name, judge in judges if judge is not None}

    def end_models(self) -> None:
        """End the processes of the reward models."""
        for model in self.models.values():
            model.kill()

    async def reward(
        self,
        episode: Episode,
        trajectory: Trajectory,
        row: Row,
        clock: StallClock | None = None,
        counts: Counter[str] | None = None,
    ) -> None:
        """Set the trajectory's `reward`, `reward_parts` and `turn_rewards`. A reward that the agent
        reported replaces the environment's own reward. Judges add their work to `counts`."""
        counts = Counter() if counts is None else counts

        async def judged(part: _Part) -> Rewards:
            # Do not apply the trajectory's deadline here: a reward model has one clock for its
            # whole queue, and a judge has its own deadlines.
            bounded = clock.held() if clock and (part.model or part.judge) else nullcontext()
            async with part.judging(trajectory.problem_id):
                with bounded:
                    if part.function is not None:
                        value = await self._call(part, part.function, trajectory, row)
                    elif part.model:
                        value = await self.models[part.model].score(episode.read(trajectory))
                    elif part.judge is not None:
                        read = [episode.read(trajectory)]
                        (value,) = await part.judge.judge(read, row, [trajectory], counts)
                    elif trajectory.reward is not None:
                        value = trajectory.reward
                    else:
                        return await episode.reward(trajectory)
                    return await rewards_of(value, str(part), trajectory, self._seconds)

        values = await together(map(judged, self._single))
        total, turns = 0.0, [0.0] * len(trajectory.turns)
        parts, players = dict[str, float](), dict.fromkeys(episode.players, 0.0)
        for part, rewards in zip(self._single, values, strict=True):
            parts[part.name] = rewards.total
            if taken := parts.keys() & rewards.parts.keys():
                message = f"{part} gave a part named {min(taken)}, the name of another reward"
                raise TrajectoryError("reward_error", message)
            parts.update(rewards.parts)
            total += part.weight * rewards.total
            for player, value in rewards.players.items():
                if player not in players:
                    known = f"players of the environment: {', '.join(players) or 'none'}"
                    message = f"{part} gave a reward to {player}; {known}"
                    raise TrajectoryError("reward_error", message)
                players[player] += part.weight * value
                parts[player] = value
            for turn, value in enumerate(rewards.turns):
                turns[turn] += part.weight * value
        if players:
            for value, player in zip(turns, trajectory.turn_players, strict=True):
                players[player] += value
            common = total - sum(turns)
            players = {player: _within_limit(own + common) for player, own in players.items()}
            total = sum(players.values()) / len(players)
        turns = turns if any(turns) else []
        made = {"reward": _within_limit(total), "parts": parts, "turns": turns, "players": players}
        trajectory.set_outcome(**made)

    async def reward_group(
        self,
        trajectories: Sequence[Trajectory],
        row: Row,
        episodes: Mapping[int, Episode],
        counts: Counter[str],
    ) -> None:
        """Compute the parts that compare a group's trajectories, and add them to the rewards."""
        if not trajectories:
            return

        async def judged(part: _Part) -> Sequence[float | None]:
            async with part.judging(trajectories[0].problem_id):
                if part.judge is not None:
                    reads = [episodes[t.sample_index].read(t) for t in trajectories]
                    return await part.judge.judge(reads, row, trajectories, counts)
                assert part.function is not None
                call = partial(self._call, part)
                values = await part.function(call, trajectories, row, episodes)
                return await self._call(part, _numbers, values, part, len(trajectories))

        values = await together(map(judged, self._of_group))
        for part, numbers in zip(self._of_group, values, strict=True):
            for trajectory, value in zip(trajectories, numbers, strict=True):
                if value is not None:
                    more, before = part.weight * value, trajectory.outcome
                    trajectory.set_outcome(
                        reward=_within_limit((before.reward or 0.0) + more),
                        parts={**before.parts, part.name: value},
                        players={name: own + more for name, own in before.players.items()},
                    )

    def check_row(self, where: str, row: Row) -> None:
        """Raise InputError, which calls the row `where`, if it lacks a field that a judge reads."""
        for part in self._parts:
            if part.judge is not None and (why := part.judge.lacks(row)):
                raise InputError(f"{where}: {why}; it has: {', '.join(map(str, row))}")

    def check_environment(self, episode: Episode, environment: EnvironmentType) -> None:
        """Raise InputError if the environment's own reward is needed but the previewed episode does
        not have one, unless the agent or a user's loop may set the reward."""
        rollout = self._rollout
        if episode.rewards or rollout.agent_rewards or rollout.loop not in LOOP_NAMES:
            return
        if any(part.kind is REWARD_KINDS["environment"] for part in self._single):
            where = defined_at(type_of(environment))
            raise InputError(
                f"{episode.where}: the environment {name_of(environment)}{where and f' ({where})'} "
                "has no reward: give it a method reward(self, trajectory), or list other rewards "
                "only in rollout.rewards"
            )

    def lacks(self, trajectory: Trajectory) -> bool:
        """Return whether no part applies to a rewarded trajectory: all parts returned None."""
        return any(part.kind.optional for part in self._parts) and not trajectory.reward_parts

    @property
    def compares(self) -> bool:
        return bool(self._of_group)

    async def _call(self, part: _Part, function: Callable[..., _T], *arguments: object) -> _T:
        value: _T = await call_user_code(
            function, *arguments, name=str(part), seconds=self._seconds, key=STALL_KEY
        )
        return value

    async def score(self, name: str, trajectory: Trajectory) -> float:
        """Return the unweighted reward that the part `name` gives a trajectory: the recorded
        reward, or else its reward model's score. If there is only one part, any name selects it."""
        named = [part for part in self._parts if part.name == name] or self._parts
        if len(named) != 1:
            names = ", ".join(part.name for part in self._parts)
            raise InputError(f"rollout.rewards has no entry with name {name}, but {names}")
        (part,) = named
        if part.name in trajectory.reward_parts:
            return trajectory.reward_parts[part.name]
        if not part.model:
            raise InputError(
                f"{part} needs a trajectory's row, and so scores it only when it is made; a reward "
                "model can score any trajectory"
            )
        async with part.judging(trajectory.problem_id):
            return read_reward(await self.models[part.model].score(trajectory.messages), str(part))


async def _call_group_function(
    function: Callable[..., object],
    max_steps: int,
    files: RunFiles | None,
    call: UserCall,
    trajectories: Sequence[Trajectory],
    row: Row,
    episodes: Mapping[int, Episode],
) -> object:
    """Return the result of a `group_function` for a group's finished trajectories. The adapters of
    other kinds also use `max_steps`, `files`, and the `episodes` by `sample_index`."""
    return await call(partial(function, list(trajectories), row))


def _numbers(values: object, part: _Part, count: int) -> list[float | None]:
    """Return the numbers that a group function returned; runs user code if their types are defined
    by the user."""
    given = list(values) if isinstance(values, Iterable) and not is_list(values) else values
    if not is_list(given) or len(given) != count:
        what = f"{part} must return a list of {count} numbers, one for each trajectory"
        raise TrajectoryError("reward_error", f"{what}, not {shown(values)}")
    return [
        None if value is None and part.kind.optional else read_reward(value, str(part))
        for value in given
    ]


def _within_limit(reward: float) -> float:
    if not abs(reward) <= MAX_REWARD:
        raise TrajectoryError("reward_error", f"the weighted sum of rewards is {BEYOND_LIMIT}")
    return reward
