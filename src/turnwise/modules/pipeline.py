"""A pipeline: engines and trainer behind plain calls, for as long as a `with` block lasts.

All of it runs in a thread of its own. Every call waits with a deadline and raises what went wrong
there; leaving the block, by Ctrl-C too, ends everything that it started. The engines are at the
trainer's weights whenever a call returns: before the first one, and after each that trained.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from turnwise.config import Config, load_config, make_config
from turnwise.engine.protocol import Generator
from turnwise.errors import InputError
from turnwise.machinery import (
    Machinery,
    load_heldout,
    load_training,
    mean,
    open_machinery,
)
from turnwise.modules.companions import CompanionModule
from turnwise.modules.conversation import Conversation
from turnwise.modules.loop_thread import LoopThread, Work
from turnwise.modules.model_file import Settings, as_overrides
from turnwise.modules.module import Outputs, VLLMModule
from turnwise.modules.pipeline_file import is_pipeline_file, read_pipeline_file
from turnwise.rollout import Group, Problem, Runner, check_failures
from turnwise.tasks import task_group
from turnwise.training import checkpoint
from turnwise.training.policy import ModelName, missing_model
from turnwise.training.remote import RemotePolicy
from turnwise.training.samples import make_samples
from turnwise.training_step import UNTRAINED, TrainingStep, check_exactness, describe
from turnwise.trajectory import MAX_REWARD, ExactnessReport, Trajectory
from turnwise.watchdog import Watchdog, waiting

logger = logging.getLogger(__name__)

Module = VLLMModule | CompanionModule
_Result = TypeVar("_Result")
_REWARDS = "rollout.rewards"
_STOP_SECONDS = 60.0
_NOT_RUNNING = "the pipeline does not run: use it inside its with block"
_NO_DATA: dict[str, Any] = {
    "environment": f"{Conversation.__module__}:{Conversation.__name__}",
    "data": {"path": "none"},
}
"""What a configuration may leave out: a pipeline's prompts are given by the program."""


@dataclass(frozen=True, slots=True)
class _Opened:
    machinery: Machinery
    policy: RemotePolicy
    step: TrainingStep


class Pipeline:
    """Runs modules, and trains the policy that those which sample share; a context manager.

    Modules are given before it starts, because their model files are part of the configuration
    that the engines start with. One that comes later must ask for nothing else than what runs.

    Args:
        config: A YAML file of a pipeline (see `pipeline_file`) or a configuration, or a `Config`;
            `environment` and `data` may be left out of a file.
        modules: To bind; their model files apply over `config`, in this order.
        overrides: `key.sub=value` changes, over all of that.
        resume: A checkpoint that `save` or `turnwise train` wrote, to start from.

    Raises:
        InputError: when any of it cannot be used, or two modules' files disagree.
    """

    def __init__(
        self,
        config: str | Path | Config,
        *modules: Module,
        overrides: Sequence[str] = (),
        resume: str | Path | None = None,
    ) -> None:
        self._given = config
        self._overrides = list(overrides)
        self._resume = None if resume is None else _whole(resume)
        self._modules: list[Module] = []
        self._thread: LoopThread[_Opened] | None = None
        self._running: _Opened | None = None
        self.exactness = ExactnessReport()
        """Of all that was trained so far."""
        self.iteration = 0
        """How often `train` was called so far, before what was resumed too."""
        self.state: dict[str, Any] = {}
        """What the program gave to `save`, after a checkpoint was loaded."""
        for module in modules:
            self._check_name(module)
            self._modules.append(module)
        self.config = self._resolve(self._modules)

    def add(self, module: Module) -> None:
        """Bind a module; in a running pipeline its `setup` is called at once.

        Raises:
            InputError: when its name is taken, or its model file contradicts another's or, in a
                running pipeline, changes anything.
        """
        self._check_name(module)
        modules = [*self._modules, module]
        if self._running is None:
            self.config = self._resolve(modules)
        elif _resolved(self._given, self._changes(modules)) != self.config:
            raise InputError(
                f"the model file of {module.name} changes the configuration, and the pipeline "
                "runs already: give the module to Pipeline(...)"
            )
        self._modules = modules
        if self._running is not None:
            self._set_up(module)

    def __enter__(self) -> Self:
        """Start the engines and the trainer, hand its weights over, and set the modules up."""
        if self._thread is not None:
            raise InputError("a pipeline runs once: make another")
        training, engine = self.config.training, self.config.engine
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"the run folder cannot be made: {error}") from error
        self._thread = LoopThread(self._open, "the pipeline")
        try:
            self._running = self._thread.start(
                engine.start_timeout + training.step_timeout + self._update_seconds
            )
            for module in self._modules:
                self._set_up(module)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._thread is not None
        self._running = None
        self._thread.leave(_STOP_SECONDS, error)

    def rows(self, is_eval: bool = False) -> list[dict[str, Any]]:
        """The rows of data.path, or of data.eval_path, for a module's `build_dataset`.

        Raises:
            InputError: when they cannot be read.
        """
        problems = load_heldout(self.config) if is_eval else load_training(self.config)
        return [problem.row for problem in problems]

    def train(self, *outputs: Outputs) -> dict[str, Any]:
        """Train on the groups of one `forward_step` or several, then update the engines.

        `rewards` in the outputs, one number for each trajectory, are what is trained on.

        Returns:
            The step's metrics, as in metrics.jsonl; `weight_version` is what the engines serve.

        Raises:
            InputError: when the outputs hold no groups, or other than one reward a trajectory.
            ExactnessError: when a token is not as it was sampled; nothing is trained then.
            StepError: when most trajectories failed.
            TrainerError, WeightUpdateError, DeadlineError: naming who failed.
        """
        groups = [group for each in outputs for group in _rewarded_groups(each)]
        seconds = self.config.training.step_timeout + self._update_seconds
        return self._call(lambda: self._train(groups), seconds, "the training step")

    def score(
        self, name: ModelName, token_ids: Sequence[Sequence[int]], masks: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        """What a model in the trainer's processes says of sequences of T tokens.

        Args:
            name: The policy as it is trained, the reference or the value model.
            masks: For each sequence T times 1 (a token to be scored) or 0.

        Returns:
            For each sequence T floats, 0.0 where a token is not scored: its log-prob under
            `sampling`, or, of the value model, the return that it expects before the token.

        Raises:
            InputError: when the trainer has no such model.
            TrainerError, DeadlineError: naming who failed.
        """
        self.check_model(name)
        seconds = self.config.training.step_timeout
        return self._call(
            lambda: self._opened.step.score(name, token_ids, masks), seconds, f"the {name} model"
        )

    def check_model(self, name: ModelName) -> None:
        """Raises `InputError` when the trainer has no such model."""
        if why := missing_model(self.config.algorithm, name):
            raise InputError(why)

    def judge(self, name: str, trajectories: Sequence[Trajectory]) -> list[float]:
        """What one entry of `rollout.rewards` gives each trajectory, before its weight.

        Raises:
            InputError: when no entry has this name, or it can judge no finished trajectory.
            TrajectoryError: naming what gave no reward, and why.
        """
        rewards = self.runner.rewards

        async def score() -> list[float]:
            return await asyncio.gather(*(rewards.score(name, t) for t in trajectories))

        seconds = self.config.rollout.trajectory_timeout + self.config.engine.start_timeout
        return self._call(score, seconds, f"the rewards of {name}")

    def load(self, folder: str | Path) -> int:
        """Go on from a checkpoint that `save` or `turnwise train` wrote, engines included: model,
        optimizer and weight version, `iteration`, `exactness`, and `state`; returns the version.

        Raises:
            InputError: when it is not whole, or does not fit this model.
            TrainerError, WeightUpdateError, DeadlineError: naming who failed.
        """
        place = _whole(folder)
        seconds = self.config.training.step_timeout + self._update_seconds
        return self._call(lambda: self._load(self._opened, place), seconds, f"{place} to be loaded")

    def save(self, folder: str | Path, state: Mapping[str, Any] | None = None) -> Path:
        """Write a checkpoint: the model in Hugging Face's format, and state/ to go on from.

        It appears whole or not at all; returns its absolute path.

        Args:
            state: Plain values of the program's own, such as `ProblemStream.state()`; a pipeline
                that loads the checkpoint has them as its `state`.

        Raises:
            InputError: when the folder holds anything but an earlier checkpoint.
            TurnwiseError: when the disk is full.
        """
        place = Path(folder).expanduser().resolve()
        taken = place.exists() and (not place.is_dir() or any(place.iterdir()))
        if taken and (flaw := checkpoint.flaw(place)):
            raise InputError(f"{place} exists and is no checkpoint to replace: {flaw}")
        seconds = self.config.training.step_timeout
        self._call(lambda: self._save(place, state or {}), seconds, f"{place} to be saved")
        return place

    @property
    def generator(self) -> Generator:
        """What samples: the scheduler before all engines."""
        return self._opened.machinery.generator

    @property
    def runner(self) -> Runner:
        """Makes the groups of the configured environment."""
        return self._opened.machinery.runner

    @property
    def weight_version(self) -> int:
        """The trainer's, which the engines serve."""
        return self._opened.policy.version

    def submit(self, work: Work[_Result]) -> "Future[_Result]":
        """Call a coroutine function in the pipeline's thread; returns its future."""
        return self._open_thread.submit(work)

    def wait(
        self, requests: "Sequence[Future[_Result]]", seconds: float, who: str
    ) -> list[_Result]:
        """The results of what was submitted.

        Whatever ends the wait early (an error in one of them, the deadline, Ctrl-C) cancels them.

        Raises:
            DeadlineError: naming `who`.
        """
        try:
            return self._call(lambda: _all(requests), seconds, who)
        finally:
            for request in requests:
                request.cancel()

    @property
    def _folder(self) -> Path:
        """The run's; disk transport, for one, writes there."""
        return Path(self.config.output_dir, self.config.name)

    @property
    def _opened(self) -> _Opened:
        if self._running is None:
            raise InputError(_NOT_RUNNING)
        return self._running

    @property
    def _open_thread(self) -> LoopThread[_Opened]:
        if self._thread is None or self._running is None:
            raise InputError(_NOT_RUNNING)
        return self._thread

    @property
    def _update_seconds(self) -> float:
        """For an update, and for a worker that is started anew meanwhile."""
        return 2 * self.config.weights.update_timeout + self.config.engine.start_timeout

    def _check_name(self, module: Module) -> None:
        if any(module.name == other.name for other in self._modules):
            raise InputError(f"the pipeline has a module {module.name} already")

    def _resolve(self, modules: Sequence[Module]) -> Config:
        """The configuration that all modules share."""
        config = _resolved(self._given, self._changes(modules))
        for module in modules:
            if _resolved(self._given, self._changes([*modules, module])) != config:
                raise InputError(
                    f"the model file of {module.name} contradicts that of a module after it; the "
                    "modules of a pipeline share one model and its engines"
                )
        return config

    def _changes(self, modules: Sequence[Module]) -> list[str]:
        """What applies over the configuration that was given, the last word last."""
        settings: Settings = {}
        rewards: list[Any] = []
        for module in modules:
            settings |= module.settings
            rewards += [r for r in module.settings.get(_REWARDS, []) if r not in rewards]
        if rewards:  # each of several rewards counts
            settings[_REWARDS] = rewards
        return [*as_overrides(settings), *self._overrides]

    def _set_up(self, module: Module) -> None:
        module.join(self)
        module.setup()

    def _call(self, work: Work[_Result], seconds: float, who: str) -> _Result:
        async def watched() -> _Result:
            async with Watchdog(self.config.watchdog, logger.warning):
                return await work()

        return self._open_thread.call(watched, seconds, who)

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[_Opened]:
        problems: Sequence[Problem] = ()  # modules check theirs when they build them
        async with open_machinery(self.config, problems, folder=self._folder) as machinery:
            assert machinery.policy is not None
            async with task_group() as tasks:
                watching = tasks.create_task(machinery.policy.watch())
                step = TrainingStep(self.config, machinery)
                opened = _Opened(machinery, machinery.policy, step)
                if self._resume is None:
                    await step.update_weights()
                else:
                    await self._load(opened, self._resume)
                yield opened
                watching.cancel()

    async def _train(self, groups: Sequence[Group]) -> dict[str, Any]:
        opened, failed = self._opened, self.config.rollout.max_failed_fraction
        dropped = check_failures(groups, failed, "training")
        made = await asyncio.to_thread(make_samples, groups, self.config, opened.policy.version)
        self.exactness += made.report
        check_exactness(made.report, self.config)
        trajectories = [t for group in groups for t in group.trajectories]
        metrics: dict[str, Any] = {
            "reward_mean": mean([t.reward or 0.0 for t in trajectories]),
            "trajectories": len(trajectories),
            "dropped": dict(sorted(dropped.items())),
            "sampled_tokens": sum(t.sampled_tokens for t in trajectories),
            **UNTRAINED,
            **describe(made),
        }
        if made.samples:
            metrics |= await opened.step.train(made.samples)
        self.iteration += 1
        return metrics | await opened.step.update_weights()

    async def _save(self, folder: Path, state: Mapping[str, Any]) -> None:
        loop = {
            "step": self.iteration,
            "exactness": self.exactness.to_dict(),
            "program": dict(state),
        }
        with waiting(f"the trainer to save {folder}"):
            place = await asyncio.to_thread(checkpoint.begin, folder)
            await self._opened.policy.save(place)
            await asyncio.to_thread(checkpoint.write_loop, folder, loop)
            await asyncio.to_thread(checkpoint.commit, folder)

    async def _load(self, opened: _Opened, folder: Path) -> int:
        with waiting(f"the trainer to load {folder}"):
            loop = await asyncio.to_thread(checkpoint.read_loop, folder)
            version = await opened.policy.load(folder)
        await opened.step.update_weights()
        self.iteration = loop["step"]
        self.exactness = ExactnessReport.from_dict(loop["exactness"])
        self.state = loop.get("program", {})
        return version


def _resolved(config: str | Path | Config, overrides: Sequence[str]) -> Config:
    if isinstance(config, Config):
        return make_config(config.model_dump(), overrides)
    if is_pipeline_file(config):
        return read_pipeline_file(config, overrides).config
    return load_config(config, overrides, _NO_DATA)


def _whole(folder: str | Path) -> Path:
    """A checkpoint's absolute path.

    Raises:
        InputError: when there is none, or it is not whole.
    """
    place = Path(folder).expanduser().resolve()
    if flaw := checkpoint.flaw(place):
        raise InputError(f"{place} is no checkpoint to go on from: {flaw}")
    return place


async def _all(requests: "Sequence[Future[_Result]]") -> list[_Result]:
    return await asyncio.gather(*map(asyncio.wrap_future, requests))


def _rewarded_groups(outputs: Mapping[str, Any]) -> list[Group]:
    """The groups of a forward_step's outputs, their trajectories with the outputs' rewards."""
    groups = outputs.get("groups") if isinstance(outputs, Mapping) else None
    if groups is None or not all(isinstance(group, Group) for group in groups):
        raise InputError("train takes what forward_step returned: a dictionary with its groups")
    trajectories = [t for group in groups for t in group.trajectories]
    rewards = outputs.get("rewards")
    if rewards is None:
        return list(groups)
    numbers = [_number(reward) for reward in rewards]
    if len(numbers) != len(trajectories) or not all(abs(n) <= MAX_REWARD for n in numbers):
        raise InputError(
            f"rewards must be one finite number for each of {len(trajectories)} trajectories, "
            f"±{MAX_REWARD:g} at most, and are {len(numbers)}: {repr(list(rewards))[:80]}"
        )
    for trajectory, number in zip(trajectories, numbers, strict=True):
        trajectory.reward = number
    return list(groups)


def _number(value: Any) -> float:
    """NaN where it is none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan
