"""The commands as coroutines: train, resume, evaluate, rollout, serve.

The command line and `turnwise.run.api`, the plain calls for programs, share them. Each command
checks its inputs before it imports anything slow.
"""

import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console

from turnwise.config import Config, SamplingConfig, check_unchanged, load_config, needed_keys
from turnwise.core import logs
from turnwise.core.aio import run_in_thread
from turnwise.core.json_types import JsonObject
from turnwise.core.sources import check_model
from turnwise.errors import InputError, TrainerError
from turnwise.run.inputs import (
    FROM_CONFIG,
    ProgramInputs,
    all_problems,
    check_sources,
    heldout_problems,
    in_time,
    training_problems,
)
from turnwise.serving.openai.address import listen
from turnwise.training import checkpoint
from turnwise.trajectory import ExactnessReport, Trajectory

if TYPE_CHECKING:
    from turnwise.rollouts.evaluation import Evaluation
    from turnwise.rollouts.group import Group
    from turnwise.rollouts.problems import Problem
    from turnwise.rollouts.producer import RunGroup
    from turnwise.run.display import Display
    from turnwise.run.run_dir import Resume, RunDir
    from turnwise.serving.openai.server import OpenAIServer

    OnGroup = Callable[[Group], None]
    """Called with each group of a command, also one that was not run."""

_T = TypeVar("_T")
_LOADING = "importing libraries and reading the data"
_PROVIDED = (*needed_keys(), "data.eval_path")
"""Keys whose values a program may have provided as objects."""


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """The outcome of a training run.

    Example:
        result = turnwise.train(model="...", environment=Weather, data=rows, steps=100)
        print(result.metrics[-1]["reward_mean"], result.checkpoint)
    """

    folder: Path
    """The run folder."""
    metrics: Sequence[JsonObject]
    """One record per step, as in metrics.jsonl; step 0 is the model before training."""
    exactness: ExactnessReport
    """Audit of every sampled token: trained, masked, or a violation."""

    @property
    def checkpoint(self) -> Path | None:
        """The last checkpoint's folder, in Hugging Face's format; None before the first one."""
        saved = checkpoint.list_checkpoints(checkpoint.checkpoints_of(self.folder))
        return saved[-1] if saved else None

    @property
    def picture(self) -> Path:
        """Path of the plot of reward and held-out accuracy."""
        return self.folder / "reward.png"


def run_folder(config: Config) -> Path:
    """Return the folder of a configuration's run."""
    return Path(config.output_dir, config.name)


async def train(
    config: Config,
    console: Console,
    resume: "Resume | None" = None,
    inputs: ProgramInputs = FROM_CONFIG,
) -> TrainingResult:
    """Train to the last step, with up to `training.restarts` restarts after the trainer dies.

    Raises:
        InputError: when anything that the user gave cannot be used.
        TurnwiseError: naming what failed.
    """
    check_sources(config, *inputs.paths(config))
    for key, other in config.algorithm.other_models().items():
        check_model(other, f"{key}.path")
    with ExitStack() as stack, _display(config, console, config.training.steps) as display:
        with display.part(_LOADING):
            from turnwise.run.run_dir import RunDir, find_resume

            problems, heldout = await in_time(all_problems, config, inputs)
        for attempt in itertools.count():
            folder = await run_in_thread(RunDir, config, resume)
            if not attempt:
                stack.enter_context(logs.open_logs(config))
            if resume is not None:
                _report_resume(resume, display)
            try:
                exactness = await _attempt(
                    config, problems, heldout, folder, display, resume, inputs
                )
                break
            except TrainerError as error:
                if attempt >= config.training.restarts:
                    raise
                try:
                    resume = await run_in_thread(lambda: find_resume(run_folder(config)))
                except InputError as nothing:
                    raise TrainerError(f"{error}; {nothing}") from error
                display.warn(f"{error}; restart {attempt + 1} of {config.training.restarts}")
            finally:
                await run_in_thread(folder.close)
    return TrainingResult(folder.path, list(folder.rows), exactness)


async def resume(
    run: Path, config: Config, console: Console, inputs: ProgramInputs = FROM_CONFIG
) -> TrainingResult:
    """Continue training from the newest complete checkpoint of a run.

    Args:
        config: The run's, as `config_of_run` returns it.

    Raises:
        InputError: when the run has no complete checkpoint, has already finished, or changes what
            cannot change.
        TurnwiseError: naming what failed.
    """
    from turnwise.run.run_dir import find_resume

    saved = config_of_run(run, optional=_PROVIDED)
    home = {"name": saved.name, "output_dir": saved.output_dir}  # which may be spelled otherwise
    check_unchanged(saved, config.model_copy(update=home))
    found = await run_in_thread(lambda: find_resume(run))
    if found.step >= config.training.steps:
        raise InputError(
            f"{found.checkpoint} is step {found.step} of {config.training.steps}: the run is "
            "complete; set training.steps=N to continue to step N"
        )
    accuracy = found.state.get("accuracy_heldout")
    if config.eval.reached(accuracy):
        raise InputError(
            f"{found.checkpoint} has held-out accuracy {accuracy:.3f} and eval.target is "
            f"{config.eval.target:g}: the run is complete; set eval.target=null to "
            "continue to training.steps"
        )
    return await train(config, console, found, inputs)


def config_of_run(
    run: Path,
    overrides: Sequence[str] = (),
    settings: Mapping[str, object] | None = None,
    optional: Sequence[str] = (),
) -> Config:
    """Return the configuration of a run with changes, even if its folder has been moved.

    Raises:
        InputError: when there is no run in the folder, or the changes are invalid.
    """
    if not (run / "config.yaml").is_file():
        raise InputError(f"there is no run in {run} (a folder with config.yaml)")
    home = {"output_dir": str(run.resolve().parent), "name": run.resolve().name}
    file = run / "config.yaml"
    config = load_config(file, overrides, settings=settings, optional=optional)
    if overrides or settings:
        check_unchanged(load_config(file, optional=_PROVIDED), config)
    return config.model_copy(update=home)


async def evaluate(
    config: Config,
    console: Console,
    inputs: ProgramInputs = FROM_CONFIG,
    on_group: "OnGroup" = lambda _: None,
) -> "Evaluation":
    """Evaluate the model on held-out rows; trajectories go to eval.jsonl in the run folder.

    Finished groups are in the file at once, so that an early end loses none of them.

    Raises:
        InputError: when anything that the user gave cannot be used.
        StepError: when more than `rollout.max_failed_fraction` of the trajectories fail.
    """
    paths = []
    if inputs.eval_rows is None:
        for name, part in config.parts().items():
            if not (path := part.data.eval_path or part.data.path):
                key = f"environments.{name}.data" if name else "data"
                raise InputError(
                    f"{key}.eval_path or {key}.path must be set: there are no rows to evaluate"
                )
            paths.append(path)
    sampling, show = config.eval.sampling, "evaluate"
    async with _playing(
        config, console, inputs, paths, heldout_problems, sampling, show
    ) as playing:
        from turnwise.observe.timeline import TIMELINE
        from turnwise.rollouts.evaluation import evaluate as evaluate_problems
        from turnwise.run.group_log import GroupLog

        folder, name = run_folder(config), "eval.jsonl"
        return await evaluate_problems(
            playing.run_group,
            playing.problems,
            config,
            on_group=playing.on_group(on_group),
            kept=GroupLog(folder / name, folder / TIMELINE / name),
        )


async def rollout(
    config: Config,
    console: Console,
    output: Path | None,
    inputs: ProgramInputs = FROM_CONFIG,
    on_group: "OnGroup" = lambda _: None,
) -> tuple[Sequence[Trajectory], Counter[str]]:
    """Sample the groups of all training rows, as in training.

    Args:
        output: A JSON Lines file for the trajectories, which has finished groups at once; None
            keeps them in memory.

    Returns:
        The trajectories in the rows' order, and the number of failed ones by reason.

    Raises:
        InputError: when anything that the user gave cannot be used.
        StepError: when more than `rollout.max_failed_fraction` of the trajectories fail.
    """
    paths, sampling = inputs.paths(config, heldout=False), config.sampling
    async with _playing(
        config, console, inputs, paths, training_problems, sampling, "rollout"
    ) as playing:
        from turnwise.rollouts.evaluation import KeptInMemory, groups_at_once, run_groups
        from turnwise.run.group_log import GroupLog

        kept = KeptInMemory() if output is None else GroupLog(output)
        outcomes = await run_groups(
            playing.run_group,
            playing.problems,
            "rollout",
            kept.keep,
            playing.on_group(on_group),
            at_once=groups_at_once(config, sampling.n),
            row_seconds=config.rollout.environment_timeout,
        )
    return kept.trajectories, outcomes.check(config.rollout.max_failed_fraction, "rollouts")


@dataclass(frozen=True, slots=True)
class _Playing:
    """The means to play the problems of a command."""

    run_group: "RunGroup"
    problems: "Sequence[Problem]"
    display: "Display"

    def on_group(self, also: "OnGroup") -> "OnGroup":
        """Return a function that advances the display, and passes the group on."""

        def advance(group: "Group") -> None:
            self.display.advance()
            also(group)

        return advance


@asynccontextmanager
async def _playing(
    config: Config,
    console: Console,
    inputs: ProgramInputs,
    paths: Sequence[str | None],
    load: "Callable[[Config, ProgramInputs], Sequence[Problem]]",
    sampling: SamplingConfig,
    phase: str,
) -> AsyncIterator[_Playing]:
    """Read the rows and start the engines, without a trainer.

    Args:
        paths: Of the rows, which are checked before anything slow.
        phase: Name of the phase, for display.
    """
    check_sources(config, *paths)
    with logs.open_logs(config), _display(config, console) as display:
        with display.part(_LOADING):
            from turnwise.rollouts.problems import first_of_each
            from turnwise.run.runtime import open_runtime

            problems = await in_time(load, config, inputs)
        async with open_runtime(
            config,
            first_of_each(problems),
            progress=display,
            environment=inputs.environment_for(config),
        ) as runtime:
            display.phase(phase, len(problems))
            yield _Playing(runtime.group_runner(sampling), problems, display)


@asynccontextmanager
async def serve(config: Config, console: Console) -> AsyncIterator["OpenAIServer"]:
    """Serve the model to OpenAI and Anthropic clients for the length of an `async with` block.

    Raises:
        InputError: when anything that the user gave cannot be used.
    """
    listen(config.serving.host, config.serving.port).close()  # before anything slow
    check_sources(config)
    async with AsyncExitStack() as stack:
        stack.enter_context(logs.open_logs(config))
        with _display(config, console) as display:
            with display.part("importing libraries"):
                from turnwise.run.fleet import open_server

            server = await stack.enter_async_context(open_server(config, display))
        yield server


async def _attempt(
    config: Config,
    problems: "Sequence[Problem]",
    heldout: "Sequence[Problem]",
    folder: "RunDir",
    display: "Display",
    resume: "Resume | None",
    inputs: ProgramInputs,
) -> ExactnessReport:
    """Start everything and train to the end of the run, or to the first failure."""
    from turnwise.observe.prometheus import serving_metrics
    from turnwise.rollouts.problems import first_of_each
    from turnwise.run.runtime import open_runtime
    from turnwise.run.trainer import TrainingLoop

    async with open_runtime(
        config,
        first_of_each(problems),
        folder=folder.path,
        progress=display,
        environment=inputs.environment_for(config),
    ) as runtime:
        loop = TrainingLoop(config, runtime, problems, heldout, folder, display, resume)
        scheduler = runtime.manager.scheduler
        host, port = config.serving.host, config.metrics.port
        async with serving_metrics(host, port, folder.rows, loop.in_flight, scheduler):
            await loop.run()
        return loop.exactness


def _report_resume(resume: "Resume", display: "Display") -> None:
    for flaw in resume.flaws:
        display.warn(f"a newer checkpoint is incomplete ({flaw}) and is skipped")
    display.warn(f"continuing from {resume.checkpoint}")


def _display(config: Config, console: Console, steps: int = 0) -> "Display":
    from turnwise.run.display import Display

    return Display(config.name, steps, console, config.eval.success_reward)
