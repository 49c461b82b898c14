"""A pipeline: engines and trainer behind blocking calls, inside a `with` block.

Everything runs in a separate thread. Every call waits with a deadline and raises the errors of that
thread: `TrainerError`, `WeightUpdateError` and `DeadlineError` name the part that failed. Leaving
the block, also by Ctrl-C, ends all processes that the pipeline started. Whenever a call returns,
the engines have the trainer's weights.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import ClassVar, Self, TypeVar

from turnwise.compat.chatlearn.model_file import (
    REWARDS,
    Args,
    Settings,
    args_of,
    model_settings,
    sentences,
)
from turnwise.compat.chatlearn.outputs import rewarded_groups
from turnwise.compat.chatlearn.pipeline_file import DEFAULTS, DRAFT, PipelineFile, is_pipeline_file
from turnwise.config import Config, ConfigSource, load_config
from turnwise.core.aio import task_group, together
from turnwise.core.json_types import JsonObject
from turnwise.core.loop_thread import EventLoopThread, Work
from turnwise.core.watchdog import watching_progress
from turnwise.engine.protocol import Generator
from turnwise.errors import InputError
from turnwise.observe.metrics import StepMetrics, mean
from turnwise.rollouts import Group, Runner, check_failures
from turnwise.rollouts.data import load_heldout, load_training
from turnwise.run.checks import check_sampled
from turnwise.run.runtime import Runtime, TrainingStep, open_runtime
from turnwise.training import checkpoint
from turnwise.training.loading import missing_model
from turnwise.training.model import ModelName
from turnwise.training.trainer_group import TrainerGroup
from turnwise.trajectory import ExactnessReport, Trajectory

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")
Parts = tuple[Runtime, TrainerGroup, TrainingStep]
_OPTIONAL = ("data.path",)
"""Keys that a configuration may omit, because the program provides the prompts."""


def log_notes(notes: Sequence[str]) -> None:
    for note in notes:
        logger.warning("%s", note)


class Module:
    """A model of a pipeline; the base class of all modules.

    Args:
        name: Unique in the pipeline. A model other than the policy has the name that the pipeline's
            file gives it.
        model_file: The model's YAML file (see `compat.chatlearn.model_file`), if the pipeline's
            file does not name it.
    """

    role: ClassVar[str] = ""
    """The model's role in a pipeline's file; empty for the policy."""

    def __init__(self, name: str, model_file: str | Path | None = None) -> None:
        self.name = name
        self._settings: Settings = {}
        self._args: Args = {}
        self._planned: Config | None = None
        if model_file is not None:
            self._settings, self._args, notes = model_settings(name, self.role, model_file)
            log_notes(sentences(notes))
        self._pipeline: Pipeline | None = None

    @property
    def settings(self) -> Settings:
        """Configuration values that the module sets, by dotted key."""
        return self._settings

    def plan(self, config: Config, args: Args) -> None:
        """Receive the merged configuration before anything starts.

        Args:
            config: The configuration of all files together.
            args: Flat keys of the policy's file, if the pipeline's file names such a file.
        """
        self._planned, self._pipeline = config, None

    def start(self, pipeline: "Pipeline") -> None:
        """Bind the module to a running pipeline, and set it up."""
        self.join(pipeline)
        self.setup()

    def join(self, pipeline: "Pipeline") -> None:
        """Bind the module to a running pipeline, which calls this before `setup`."""
        self._pipeline = pipeline

    def setup(self) -> None:
        """Prepare the module; called once, inside the running pipeline."""

    @property
    def pipeline(self) -> "Pipeline":
        """The running pipeline."""
        if self._pipeline is None:
            raise InputError(
                f"the module {self.name} is in no running pipeline: give it to Pipeline(...) and "
                "use it inside its with block"
            )
        return self._pipeline

    @property
    def model_args(self) -> Settings:
        """The configuration under ChatLearn's names, and for a policy the other flat keys of its
        file."""
        config = self.config
        named = args_of(config.model, config.sampling, config.eval.sampling, self._args)
        return {**named, "seed": config.seed}

    @property
    def config(self) -> Config:
        """The pipeline's configuration, with the settings of this module's file."""
        if self._pipeline is None and self._planned is not None:
            return self._planned
        return self.pipeline.config


class Pipeline:
    """Runs modules, and trains the policy that the sampling modules share; a context manager.

    Pass modules here rather than to `add`, because their model files are part of the configuration
    that the engines start with. A module that is added later must not change the configuration.

    Args:
        config: A `Config`, or a YAML file that describes a pipeline (see `pipeline_file`) or holds
            a configuration. A file may leave out `environment` and `data`.
        modules: Modules whose model files change `config`, in this order.
        overrides: `key.sub=value` changes, with the highest precedence.
        resume: A checkpoint to start from, written by `save` or `turnwise train`; None starts
            from the model's own weights.

    Raises:
        InputError: when an argument cannot be used, or two modules' files disagree.

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
        config: ConfigSource,
        *modules: Module,
        overrides: Sequence[str] = (),
        resume: str | Path | None = None,
    ) -> None:
        self._given = config
        self._overrides = list(overrides)
        self._resume = None if resume is None else checkpoint.checked_source(resume)
        self._modules = list(modules)
        self._thread = EventLoopThread(self._open, "the pipeline")
        self.iteration = 0
        """Number of calls of `train` so far, including calls before a resumed checkpoint."""
        self.exactness = ExactnessReport()
        """Audit of everything trained so far."""
        self.state: JsonObject = {}
        """The `state` of the loaded checkpoint, as the program gave it to `save`; else empty."""
        self._file: PipelineFile | None = None
        """The pipeline's file as it was last read; None if `config` is not a pipeline's file."""
        self._plan(self._modules, self._modules)
        self.config = self._shared(self._modules)

    def add(self, module: Module) -> None:
        """Bind a module; a running pipeline also calls its `setup`.

        Raises:
            InputError: when the module's name is taken, when its model file contradicts the file of
                another module, or when the module would change the configuration of a running
                pipeline.
        """
        modules = [*self._modules, module]
        self._plan(modules, [module])
        if not self._thread.is_open:
            self.config = self._shared(modules)
        elif self._resolved(_settings_of(modules)) != self.config:
            raise InputError(
                f"the model file of {module.name} changes the configuration, and the pipeline "
                "runs already: give the module to Pipeline(...)"
            )
        self._modules = modules
        if self._thread.is_open:
            module.start(self)

    @property
    def notes(self) -> list[str]:
        """One sentence for each group of the file's keys whose effect differs from ChatLearn's."""
        return [] if self._file is None else self._file.notes

    def _plan(self, modules: Sequence[Module], new: Sequence[Module]) -> None:
        """Give the new modules the draft configuration that the files of all modules produce."""
        draft = self._resolved(_settings_of(modules), DRAFT)
        for module in new:
            module.plan(draft, {} if self._file is None else self._file.args)

    def _shared(self, modules: Sequence[Module]) -> Config:
        """Return the given configuration, changed by the modules' settings, then by overrides."""
        settings = _settings_of(modules)
        config = self._resolved(settings)
        for module in modules:
            for key, value in module.settings.items():
                if key == REWARDS or value == settings[key]:
                    continue
                # No contradiction if both values mean the same (top_k -1 and 0), or if an override
                # replaces both.
                if self._resolved(settings | {key: value}) != config:
                    raise InputError(
                        f"the model file of {module.name} contradicts that of a module after it: "
                        f"{key} is {value!r} and {settings[key]!r}; the modules of a pipeline "
                        "share one model and its engines"
                    )
        return config

    def _resolved(self, settings: Settings, defaults: Settings = DEFAULTS) -> Config:
        given, overrides = self._given, self._overrides
        if isinstance(given, str | Path) and is_pipeline_file(given):
            self._file = PipelineFile(given, overrides, settings, defaults)
            return self._file.config
        return load_config(given, overrides, defaults, settings, _OPTIONAL)

    def __enter__(self) -> Self:
        """Start the engines and the trainer, send the weights, and set up the modules."""
        config = self.config
        try:
            config.run_folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"the run folder cannot be made: {error}") from error
        log_notes(self.notes)
        with ExitStack() as stack:
            stack.enter_context(self._thread)
            self._thread.start(
                config.engine.start_timeout + config.training.step_timeout + self._update_seconds
            )
            for module in self._modules:
                module.start(self)
            stack.pop_all()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._thread.__exit__(kind, error, traceback)

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[Parts]:
        """Start the engines and the trainer, and send the trainer's weights to the engines."""
        folder = self.config.run_folder
        # There are no problems to check here, because modules check prompts when they build
        # datasets.
        async with open_runtime(self.config, None, folder=folder) as runtime:
            trainer = runtime.policy
            assert trainer is not None
            async with task_group() as tasks:
                watching = tasks.create_task(trainer.watch())
                step = TrainingStep(self.config, runtime)
                if self._resume is None:
                    await step.update_weights()
                else:
                    await self._restore(self._resume, step)
                yield runtime, trainer, step
                watching.cancel()

    def rows(self, is_eval: bool = False) -> list[JsonObject]:
        """Return the rows of `data.path` or `data.eval_path`, for a module's `build_dataset`."""
        problems = load_heldout(self.config) if is_eval else load_training(self.config)
        return [problem.row for problem in problems]

    def train(self, *outputs: Mapping[str, object]) -> JsonObject:
        """Train on the groups of one or more calls of `forward_step`, then update the engines.

        Args:
            outputs: Dictionaries with `groups`. If they have `rewards`, one number for each
                trajectory, these replace the environment's rewards.

        Returns:
            The step's metrics, as in metrics.jsonl; `weight_version` is the engines' new version.

        Raises:
            InputError: when the outputs hold no groups or hold answers of a beam search, or when
                `rewards` does not hold exactly one reward for each trajectory.
            ExactnessError: when a token differs from the sampled token; then nothing is trained.
            StepError: when more than `rollout.max_failed_fraction` of the trajectories failed.
        """
        check_sampled(self.config)
        groups = [group for each in outputs for group in rewarded_groups(each)]
        seconds = self.config.training.step_timeout + self._update_seconds
        return self._call(lambda: self._train(groups), seconds, "the training step")

    async def _train(self, groups: Sequence[Group]) -> JsonObject:
        _, _, step = self._opened()
        dropped = check_failures(groups, self.config.rollout.max_failed_fraction, "training")
        made = await step.make_samples(groups)
        self.exactness += made.report
        trajectories = [t for group in groups for t in group.trajectories]
        metrics = StepMetrics(
            reward_mean=mean([t.reward or 0.0 for t in trajectories]),
            trajectories=len(trajectories),
            dropped=dict(sorted(dropped.items())),
            sampled_tokens=sum(t.sampled_tokens for t in trajectories),
        )
        metrics.add_samples(made)
        training = self.config.training
        if stale := made.report.masked["stale"] + made.report.masked["stale_group"]:
            logger.warning(
                "%d of %d sampled tokens are not trained: a step has changed the weights since "
                "forward_step sampled them, and they are older than training.max_staleness (%d) "
                "allows; train the outputs of several forward_steps by one call of train",
                stale,
                made.report.tokens_sampled,
                training.max_staleness,
            )
        if self.iteration == training.steps and training.lr_schedule != "constant":
            logger.warning(
                "training.lr_schedule %s ended with step %d (training.steps), and the program "
                "goes on: the learning rate stays at its last value",
                training.lr_schedule,
                training.steps,
            )
        metrics.add(await step.learn(made))
        self.iteration += 1
        metrics.add(await step.update_weights())
        return metrics.to_json()

    def score(
        self, name: ModelName, token_ids: Sequence[Sequence[int]], masks: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        """Score sequences of T tokens with one of the models in the trainer's processes.

        Args:
            name: `policy` (with its current weights), `reference` or `value`.
            masks: For each sequence T numbers: 1 for a token to score, else 0.

        Returns:
            For each sequence T floats: the token's log-prob under `sampling`, or the return that
            the value model expects before the token; 0.0 where a token is not scored.
        """
        self.check_model(name)
        seconds = self.config.training.step_timeout
        return self._call(
            lambda: self._opened()[2].score(name, token_ids, masks),
            seconds,
            f"the {name} model",
        )

    def check_model(self, name: ModelName) -> None:
        """Raise an `InputError` that names the missing key if the trainer has no such model."""
        if why := missing_model(self.config.algorithm, name):
            raise InputError(why)

    def judge(self, name: str, trajectories: Sequence[Trajectory]) -> list[float]:
        """Return the unweighted value of one entry of `rollout.rewards` for each trajectory.

        Raises:
            InputError: when no entry has this name, or the entry cannot score finished
                trajectories.
            TrajectoryError: when the entry gives no reward; the error names the entry and the
                reason.
        """
        seconds = self.config.rollout.trajectory_timeout + self.config.engine.start_timeout
        rewards = self.runner.rewards
        return self._call(
            lambda: together(rewards.score(name, t) for t in trajectories),
            seconds,
            f"the rewards of {name}",
        )

    def load(self, folder: str | Path) -> int:
        """Resume from a checkpoint that `save` or `turnwise train` wrote, and update the engines.

        Restores the model, the optimizer, `iteration`, `exactness` and `state`; returns the
        checkpoint's weight version.

        Raises:
            InputError: when the checkpoint is incomplete, or does not fit this model.
        """
        place = checkpoint.checked_source(folder)
        seconds = self.config.training.step_timeout + self._update_seconds
        step = self._opened()[2]
        return self._call(lambda: self._restore(place, step), seconds, f"{place} to be loaded")

    async def _restore(self, folder: Path, step: TrainingStep) -> int:
        loop = await step.load(folder)
        version = (await step.update_weights())["weight_version"]
        self.iteration = loop["step"]
        self.exactness = ExactnessReport.from_dict(loop["exactness"])
        self.state = loop.get("program", {})
        return int(version)

    def save(self, folder: str | Path, state: Mapping[str, object] | None = None) -> Path:
        """Write a checkpoint: the model in Hugging Face's format, and state/ to resume from.

        The write is atomic. Returns the folder's absolute path.

        Args:
            state: JSON values of the program, such as `ProblemStream.state()`. A pipeline that
                loads the checkpoint has them in its attribute `state`.

        Raises:
            InputError: when the folder holds anything other than an earlier checkpoint.
            TurnwiseError: when the disk is full.
        """
        loop = {
            "step": self.iteration,
            "exactness": self.exactness.to_dict(),
            "program": dict(state or {}),
        }
        saved = partial(self._opened()[2].save, Path(folder), loop)
        return self._call(saved, self.config.training.step_timeout, f"{folder} to be saved")

    def _opened(self) -> Parts:
        return self._thread.opened

    @property
    def generator(self) -> Generator:
        """The scheduler of all engines."""
        return self._opened()[0].generator

    @property
    def runner(self) -> Runner:
        """Makes the groups of the configured environment."""
        return self._opened()[0].runner

    @property
    def weight_version(self) -> int:
        """The trainer's weight version, which the engines serve."""
        return self._opened()[1].version

    def submit(self, work: Work[_Result]) -> "Future[_Result]":
        """Call a coroutine function in the pipeline's thread; return a future of its result."""
        return self._thread.submit(work)

    def wait(
        self, requests: "Sequence[Future[_Result]]", seconds: float, who: str
    ) -> list[_Result]:
        """Return the results of submitted calls; cancel all of them if the wait ends early."""

        async def gathered() -> list[_Result]:
            return await asyncio.gather(*map(asyncio.wrap_future, requests))

        try:
            return self._call(gathered, seconds, who)
        finally:
            for request in requests:
                request.cancel()

    @property
    def _update_seconds(self) -> float:
        """Deadline of a weight update in seconds, including time for a worker to restart."""
        return 2 * self.config.weights.update_timeout + self.config.engine.start_timeout

    def _call(self, work: Work[_Result], seconds: float, who: str) -> _Result:
        async def watched() -> _Result:
            async with watching_progress(self.config.watchdog_seconds, logger.warning):
                return await work()

        return self._thread.call(watched, seconds, who)


def _settings_of(modules: Sequence[Module]) -> Settings:
    """Merge all modules' settings: a later module replaces values of earlier modules, and the
    rewards of all modules are joined."""
    names = [module.name for module in modules]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"the pipeline has a module {twice[0]} already")
    settings: Settings = {}
    rewards: list[object] = []
    for module in modules:
        settings |= module.settings
        rewards += [r for r in module.settings.get(REWARDS, []) if r not in rewards]
    return settings | {REWARDS: rewards} if rewards else settings
