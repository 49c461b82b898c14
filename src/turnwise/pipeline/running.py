"""A running pipeline: the coroutines behind its plain calls, on engines and trainer.

Everything here runs on the pipeline's event loop; `pipeline` calls it from the program's thread.
"""

import logging
import math
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from turnwise.config import Config
from turnwise.core.aio import run_in_thread, task_group, together
from turnwise.core.json_types import JsonObject
from turnwise.core.watchdog import waiting
from turnwise.errors import InputError
from turnwise.observe.metrics import StepMetrics, mean
from turnwise.rollouts import Group, check_failures
from turnwise.run.runtime import Runtime, open_runtime
from turnwise.run.step import TrainingStep
from turnwise.training import checkpoint
from turnwise.training.trainer_group import TrainerGroup
from turnwise.trajectory import MAX_REWARD, ExactnessReport, Trajectory

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Progress:
    """The state of a pipeline's training, as checkpoints keep it."""

    iteration: int = 0
    """Number of training steps so far, those before a resumed checkpoint included."""
    exactness: ExactnessReport = field(default_factory=ExactnessReport)
    """Audit of everything trained so far."""
    state: JsonObject = field(default_factory=dict)
    """The program's own values, from the checkpoint that was loaded last."""


@dataclass(frozen=True, slots=True)
class RunningPipeline:
    """An open runtime, and training steps on it."""

    config: Config
    runtime: Runtime
    trainer: TrainerGroup
    step: TrainingStep
    progress: Progress

    async def train(self, groups: Sequence[Group]) -> JsonObject:
        """Train one step on groups and update the engines; see `Pipeline.train`."""
        dropped = check_failures(groups, self.config.rollout.max_failed_fraction, "training")
        made = await self.step.make_samples(groups)
        self.progress.exactness += made.report
        trajectories = [t for group in groups for t in group.trajectories]
        metrics = StepMetrics(
            reward_mean=mean([t.reward or 0.0 for t in trajectories]),
            trajectories=len(trajectories),
            dropped=dict(sorted(dropped.items())),
            sampled_tokens=sum(t.sampled_tokens for t in trajectories),
        )
        metrics.add_samples(made)
        training = self.config.training
        if self.progress.iteration == training.steps and training.lr_schedule == "linear":
            logger.warning(
                "training.lr_schedule linear ended with step %d (training.steps), and the program "
                "goes on: the learning rate stays at its last value",
                training.steps,
            )
        metrics.add(await self.step.learn(made))
        self.progress.iteration += 1
        metrics.add(await self.step.update_weights())
        return metrics.to_json()

    async def score(self, reward: str, trajectories: Sequence[Trajectory]) -> list[float]:
        rewards = self.runtime.runner.rewards
        return await together(rewards.score(reward, t) for t in trajectories)

    async def save(self, folder: Path, state: Mapping[str, object]) -> None:
        loop = {
            "step": self.progress.iteration,
            "exactness": self.progress.exactness.to_dict(),
            "versions": self.step.versions.state(),
            "program": dict(state),
        }
        with waiting(f"the trainer to save {folder}"):
            place = await run_in_thread(checkpoint.begin, folder)
            await self.trainer.save(place)
            await run_in_thread(checkpoint.write_loop, folder, loop)
            await run_in_thread(checkpoint.commit, folder)

    async def load(self, folder: Path) -> int:
        with waiting(f"the trainer to load {folder}"):
            loop = await run_in_thread(checkpoint.read_loop, folder)
            version = await self.trainer.load(folder)
        self.step.versions.restore(loop.get("versions"), version)
        await self.step.update_weights()
        self.progress.iteration = loop["step"]
        self.progress.exactness = ExactnessReport.from_dict(loop["exactness"])
        self.progress.state = loop.get("program", {})
        return version


@asynccontextmanager
async def open_pipeline(
    config: Config, folder: Path, progress: Progress, resume: Path | None
) -> AsyncIterator[RunningPipeline]:
    """Start the engines and the trainer, and bring its weights to the engines.

    Args:
        progress: Updated by every training step.
        resume: A whole checkpoint to start from; None starts from the model's own weights.
    """
    # Modules check theirs when they build them.
    async with open_runtime(config, None, folder=folder) as runtime:
        trainer = runtime.policy
        assert trainer is not None
        async with task_group() as tasks:
            watching = tasks.create_task(trainer.watch())
            step = TrainingStep(config, runtime)
            running = RunningPipeline(config, runtime, trainer, step, progress)
            if resume is None:
                await step.update_weights()
            else:
                await running.load(resume)
            yield running
            watching.cancel()


def rewarded_groups(outputs: Mapping[str, object]) -> list[Group]:
    """Return the groups of a `forward_step`'s outputs, their trajectories with its `rewards`.

    Raises:
        InputError: when there are no groups, or `rewards` is not one finite number for each
            trajectory; for a game, a dictionary with one for each player.
    """
    groups = outputs.get("groups") if isinstance(outputs, Mapping) else None
    if not isinstance(groups, Sequence) or not all(isinstance(group, Group) for group in groups):
        raise InputError("train takes what forward_step returned: a dictionary with its groups")
    trajectories = [t for group in groups for t in group.trajectories]
    rewards = outputs.get("rewards")
    if rewards is None:
        return list(groups)
    if not isinstance(rewards, Iterable):
        raise InputError(f"rewards must be a list of numbers, not {rewards!r}")
    given = list(rewards)
    if len(given) != len(trajectories) or not all(map(_is_reward, trajectories, given)):
        raise InputError(
            f"rewards must be one finite number for each of {len(trajectories)} trajectories, "
            f"±{MAX_REWARD:g} at most, not {len(given)}: {repr(given)[:80]}"
        )
    for trajectory, reward in zip(trajectories, given, strict=True):
        players = trajectory.player_rewards
        if isinstance(reward, Mapping):
            trajectory.player_rewards = {player: _number(reward[player]) for player in players}
            reward = sum(trajectory.player_rewards.values()) / len(players)
        elif players and _number(reward) != trajectory.reward:
            names = ", ".join(players)
            raise InputError(
                f"rewards: {reward!r} is one number for a game, whose players are compared each "
                f"with itself: give a dictionary with a number for each of {names}"
            )
        trajectory.reward = _number(reward)
    return list(groups)


def _is_reward(trajectory: Trajectory, reward: object) -> bool:
    """Return whether a reward is a number within the limit, or one for each player."""
    if not isinstance(reward, Mapping):
        return abs(_number(reward)) <= MAX_REWARD
    if not trajectory.player_rewards or reward.keys() != trajectory.player_rewards.keys():
        return False
    return all(abs(_number(value)) <= MAX_REWARD for value in reward.values())


def _number(value: object) -> float:
    """Return a reward as a float, NaN where it is not a number."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return math.nan
