"""A pipeline: engines and trainer behind plain calls, for as long as a `with` block lasts.

Everything runs in a separate thread. Every call waits with a deadline and raises the errors of that
thread; leaving the block, also by Ctrl-C, ends all processes that it started. Whenever a call
returns, the engines have the trainer's weights.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from turnwise.compat.chatlearn.model_file import Settings
from turnwise.config import Config
from turnwise.core.json_types import JsonObject
from turnwise.core.loop_thread import EventLoopThread, Work
from turnwise.core.watchdog import Watchdog
from turnwise.engine.protocol import Generator
from turnwise.errors import InputError
from turnwise.pipeline.merged_config import merge_config, merge_settings, resolve_config
from turnwise.pipeline.running import Progress, RunningPipeline, open_pipeline, rewarded_groups
from turnwise.rollouts import Runner
from turnwise.rollouts.data import load_heldout, load_training
from turnwise.training import checkpoint
from turnwise.training.model import ModelName
from turnwise.training.rank import missing_model
from turnwise.trajectory import ExactnessReport, Trajectory

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")
_STOP_SECONDS = 60.0
_NOT_RUNNING = "the pipeline does not run: use it inside its with block"


class Module:
    """A model of a pipeline; the base class of all modules.

    Args:
        name: Appears in errors; unique among the modules of a pipeline.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._pipeline: Pipeline | None = None

    @property
    def settings(self) -> Settings:
        """Values that the module needs in the configuration, by dotted key."""
        return {}

    def join(self, pipeline: "Pipeline") -> None:
        """Bind the module to a running pipeline, which calls this before `setup`."""
        self._pipeline = pipeline

    def setup(self) -> None:
        """Prepare the module; called once, inside the running pipeline."""

    @property
    def pipeline(self) -> "Pipeline":
        """The running pipeline.

        Raises:
            InputError: when the module is not in a running pipeline.
        """
        if self._pipeline is None:
            raise InputError(
                f"the module {self.name} is in no running pipeline: give it to Pipeline(...) and "
                "use it inside its with block"
            )
        return self._pipeline

    @property
    def config(self) -> Config:
        """The pipeline's configuration, this module's file included."""
        return self.pipeline.config


class Pipeline:
    """Runs modules, and trains the policy that the sampling ones share; a context manager.

    Modules are given before it starts, because their model files are part of the configuration
    that the engines start with. A module that is added later must not change the configuration.

    Args:
        config: A YAML file of a pipeline (see `pipeline_file`) or a configuration, or a `Config`;
            a file may leave out `environment` and `data`.
        modules: Their model files apply over `config`, in this order.
        overrides: `key.sub=value` changes, with the highest precedence.
        resume: A checkpoint to start from, written by `save` or `turnwise train`; None starts
            from the model's own weights.

    Raises:
        InputError: when any of it cannot be used, or two modules' files disagree.

    Example:
        policy = VLLMModule("policy", "policy.yaml")
        with Pipeline("config.yaml", policy, overrides=["training.learning_rate=1e-5"]) as pipeline:
            problems = ProblemStream(policy.build_dataset(pipeline.rows()), seed=0)
            for _ in range(100):
                outputs = policy.forward_step(problems.take(8))
                metrics = pipeline.train(outputs)
            pipeline.save("checkpoint", state=problems.state())
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
        self._thread: EventLoopThread[RunningPipeline] | None = None
        self._opened: RunningPipeline | None = None
        self._progress = Progress()
        for module in modules:
            self._check_name(module)
            self._modules.append(module)
        self.config = merge_config(config, self._modules, self._overrides)

    @property
    def iteration(self) -> int:
        """Number of calls of `train` so far, including those before a resumed checkpoint."""
        return self._progress.iteration

    @property
    def exactness(self) -> ExactnessReport:
        """Audit of everything trained so far."""
        return self._progress.exactness

    @property
    def state(self) -> JsonObject:
        """The values that the program gave to `save`, once a checkpoint is loaded."""
        return self._progress.state

    def add(self, module: Module) -> None:
        """Bind a module; in a running pipeline its `setup` is called at once.

        Raises:
            InputError: when its name is taken, or its model file contradicts another's or, in a
                running pipeline, changes anything.
        """
        self._check_name(module)
        modules = [*self._modules, module]
        if self._opened is None:
            self.config = merge_config(self._given, modules, self._overrides)
        elif resolve_config(self._given, merge_settings(modules), self._overrides) != self.config:
            raise InputError(
                f"the model file of {module.name} changes the configuration, and the pipeline "
                "runs already: give the module to Pipeline(...)"
            )
        self._modules = modules
        if self._opened is not None:
            self._set_up(module)

    def __enter__(self) -> Self:
        """Start the engines and the trainer, send its weights, and set up the modules."""
        if self._thread is not None:
            raise InputError("a pipeline can run only once: create another")
        config, folder = self.config, Path(self.config.output_dir, self.config.name)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"the run folder cannot be made: {error}") from error
        self._thread = EventLoopThread(
            lambda: open_pipeline(config, folder, self._progress, self._resume), "the pipeline"
        )
        try:
            self._opened = self._thread.start(
                config.engine.start_timeout + config.training.step_timeout + self._update_seconds
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
        self._opened = None
        self._thread.leave(_STOP_SECONDS, error)

    def rows(self, is_eval: bool = False) -> list[JsonObject]:
        """Return the rows of `data.path`, or of `data.eval_path`, for a module's `build_dataset`.

        Raises:
            InputError: when they cannot be read.
        """
        problems = load_heldout(self.config) if is_eval else load_training(self.config)
        return [problem.row for problem in problems]

    def train(self, *outputs: Mapping[str, object]) -> JsonObject:
        """Train on the groups of one `forward_step` or several, then update the engines.

        Args:
            outputs: Dictionaries with `groups`; `rewards`, one number for each trajectory, replace
                those that the environment gave.

        Returns:
            The step's metrics, as in metrics.jsonl; `weight_version` is the engines' new version.

        Raises:
            InputError: when the outputs hold no groups, or other than one reward a trajectory.
            ExactnessError: when a token is not as it was sampled; nothing is trained then.
            StepError: when most trajectories failed.
            TrainerError, WeightUpdateError, DeadlineError: naming who failed.
        """
        groups = [group for each in outputs for group in rewarded_groups(each)]
        seconds = self.config.training.step_timeout + self._update_seconds
        return self._call(lambda: self._running.train(groups), seconds, "the training step")

    def score(
        self, name: ModelName, token_ids: Sequence[Sequence[int]], masks: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        """Score sequences of T tokens with one of the models in the trainer's processes.

        Args:
            name: `policy` (as it is trained now), `reference` or `value`.
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
            lambda: self._running.step.score(name, token_ids, masks), seconds, f"the {name} model"
        )

    def check_model(self, name: ModelName) -> None:
        """Check that the trainer has a model.

        Raises:
            InputError: when it has none, naming the key that adds it.
        """
        if why := missing_model(self.config.algorithm, name):
            raise InputError(why)

    def judge(self, name: str, trajectories: Sequence[Trajectory]) -> list[float]:
        """Return the value that one entry of `rollout.rewards` gives each trajectory, unweighted.

        Raises:
            InputError: when no entry has this name, or it cannot score finished trajectories.
            TrajectoryError: naming what gave no reward, and why.
        """
        seconds = self.config.rollout.trajectory_timeout + self.config.engine.start_timeout
        return self._call(
            lambda: self._running.score(name, trajectories), seconds, f"the rewards of {name}"
        )

    def load(self, folder: str | Path) -> int:
        """Resume from a checkpoint that `save` or `turnwise train` wrote; the engines are updated.

        Restores the model, the optimizer, `iteration`, `exactness` and `state`.

        Returns:
            The weight version of the checkpoint.

        Raises:
            InputError: when it is not whole, or does not fit this model.
            TrainerError, WeightUpdateError, DeadlineError: naming who failed.
        """
        place = _whole(folder)
        seconds = self.config.training.step_timeout + self._update_seconds
        return self._call(lambda: self._running.load(place), seconds, f"{place} to be loaded")

    def save(self, folder: str | Path, state: Mapping[str, object] | None = None) -> Path:
        """Write a checkpoint: the model in Hugging Face's format, and state/ to resume from.

        It appears whole or not at all.

        Args:
            state: Plain values of the program's own, such as `ProblemStream.state()`; a pipeline
                that loads the checkpoint has them as its `state`.

        Returns:
            The folder's absolute path.

        Raises:
            InputError: when the folder holds anything but an earlier checkpoint.
            TurnwiseError: when the disk is full.
        """
        place = Path(folder).expanduser().resolve()
        taken = place.exists() and (not place.is_dir() or any(place.iterdir()))
        if taken and (flaw := checkpoint.incomplete_reason(place)):
            raise InputError(f"{place} exists and is no checkpoint to replace: {flaw}")
        seconds = self.config.training.step_timeout
        self._call(lambda: self._running.save(place, state or {}), seconds, f"{place} to be saved")
        return place

    @property
    def generator(self) -> Generator:
        """The scheduler of all engines."""
        return self._running.runtime.generator

    @property
    def runner(self) -> Runner:
        """Makes the groups of the configured environment."""
        return self._running.runtime.runner

    @property
    def weight_version(self) -> int:
        """The trainer's weight version, which the engines serve."""
        return self._running.trainer.version

    def submit(self, work: Work[_Result]) -> "Future[_Result]":
        """Call a coroutine function in the pipeline's thread; returns its future."""
        return self._running_thread.submit(work)

    def wait(
        self, requests: "Sequence[Future[_Result]]", seconds: float, who: str
    ) -> list[_Result]:
        """Return the results of submitted calls.

        If the wait ends early (by an error in one of them, the deadline or Ctrl-C), all of them are
        cancelled.

        Raises:
            DeadlineError: naming `who`.
        """
        try:
            return self._call(lambda: _all(requests), seconds, who)
        finally:
            for request in requests:
                request.cancel()

    @property
    def _running(self) -> RunningPipeline:
        if self._opened is None:
            raise InputError(_NOT_RUNNING)
        return self._opened

    @property
    def _running_thread(self) -> EventLoopThread[RunningPipeline]:
        if self._thread is None or self._opened is None:
            raise InputError(_NOT_RUNNING)
        return self._thread

    @property
    def _update_seconds(self) -> float:
        """Deadline of a weight update, including time for a worker to restart."""
        return 2 * self.config.weights.update_timeout + self.config.engine.start_timeout

    def _check_name(self, module: Module) -> None:
        if any(module.name == other.name for other in self._modules):
            raise InputError(f"the pipeline has a module {module.name} already")

    def _set_up(self, module: Module) -> None:
        module.join(self)
        module.setup()

    def _call(self, work: Work[_Result], seconds: float, who: str) -> _Result:
        async def watched() -> _Result:
            async with Watchdog(self.config.watchdog_seconds, logger.warning):
                return await work()

        return self._running_thread.call(watched, seconds, who)


def _whole(folder: str | Path) -> Path:
    """Return a checkpoint's absolute path.

    Raises:
        InputError: when there is none, or it is not whole.
    """
    place = Path(folder).expanduser().resolve()
    if flaw := checkpoint.incomplete_reason(place):
        raise InputError(f"{place} is no checkpoint to resume from: {flaw}")
    return place


async def _all(requests: "Sequence[Future[_Result]]") -> list[_Result]:
    return await asyncio.gather(*map(asyncio.wrap_future, requests))
