"""The commands as coroutines: train, resume, evaluate, rollout, serve.

The command line and `turnwise.run.api`, the plain calls for programs, share them. Each command
checks its inputs before it imports anything slow.
"""

import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console

from turnwise.config import Config, check_unchanged, load_config, needed_keys
from turnwise.core import logs
from turnwise.core.aio import run_in_thread
from turnwise.core.json_types import JsonObject
from turnwise.core.sources import check_data, check_model, check_tokenizer
from turnwise.core.user_code import call_user_code
from turnwise.engine.adapters import EngineAdapters
from turnwise.errors import InputError, TrainerError
from turnwise.serving.openai.address import listen
from turnwise.training import checkpoint
from turnwise.trajectory import ExactnessReport, Trajectory, write_jsonl

if TYPE_CHECKING:
    from turnwise.rollout.environment import EnvironmentType
    from turnwise.rollout.evaluation import Evaluation
    from turnwise.rollout.foreign.trl_reward import RewardFunction
    from turnwise.rollout.problems import Problem
    from turnwise.run.display import Display
    from turnwise.run.run_dir import Resume, RunDir
    from turnwise.serving.openai.server import OpenAIServer

_T = TypeVar("_T")
_LOADING = "importing libraries and reading the data"
_PROVIDED = (*needed_keys(), "data.eval_path")
"""Keys whose values a program may have provided as objects."""


@dataclass(frozen=True, slots=True)
class ProgramInputs:
    """Objects that a program passes instead of configuration keys; None uses the key."""

    environment: "EnvironmentType | None" = None
    """Makes an environment from a row; replaces `environment`."""
    rows: Sequence[JsonObject] | None = None
    """Training rows; replace data.path."""
    eval_rows: Sequence[JsonObject] | None = None
    """Held-out rows; replace data.eval_path."""
    functions: "Mapping[str, RewardFunction] | None" = None
    """Reward functions by the paths that `rollout.rewards` has for them under `trl`."""


_FROM_CONFIG = ProgramInputs()


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
    inputs: ProgramInputs = _FROM_CONFIG,
) -> TrainingResult:
    """Train to the last step, with up to `training.restarts` restarts after the trainer dies.

    Raises:
        InputError: when anything that the user gave cannot be used.
        TurnwiseError: naming what failed.
    """
    _check_sources(
        config,
        None if inputs.rows is not None else config.data.path,
        None if inputs.eval_rows is not None else config.data.eval_path,
    )
    for key, other in config.algorithm.other_models().items():
        check_model(other, f"{key}.path")
    with _display(config, console, config.training.steps) as display:
        with display.part(_LOADING):
            from turnwise.run.run_dir import RunDir, find_resume

            problems, heldout = await _in_time(_load_problems, config, inputs)
        for attempt in itertools.count():
            folder = RunDir(config, resume)
            logs.open_logs(config)
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
                folder.close()
    return TrainingResult(folder.path, list(folder.rows), exactness)


async def resume(
    run: Path, config: Config, console: Console, inputs: ProgramInputs = _FROM_CONFIG
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
    config: Config, console: Console, inputs: ProgramInputs = _FROM_CONFIG
) -> "Evaluation":
    """Evaluate the model on held-out rows; trajectories go to eval.jsonl in the run folder.

    Raises:
        InputError: when anything that the user gave cannot be used.
        StepError: when more than `rollout.max_failed_fraction` of the trajectories fail.
    """
    path = None
    if inputs.eval_rows is None and not (path := config.data.eval_path or config.data.path):
        raise InputError("data.eval_path or data.path must be set: there are no rows to evaluate")
    _check_sources(config, path)
    logs.open_logs(config)
    with _display(config, console) as display:
        with display.part(_LOADING):
            from turnwise.rollout.evaluation import evaluate as evaluate_problems
            from turnwise.run.runtime import open_runtime

            problems = await _in_time(_load_heldout, config, inputs)
        async with open_runtime(
            config,
            problems[0],
            progress=display,
            environment=inputs.environment,
            functions=inputs.functions,
        ) as runtime:
            display.phase("evaluate", len(problems))
            run_group = runtime.group_runner(config.eval.sampling)
            evaluation = await evaluate_problems(
                run_group, problems, config, on_group=display.advance
            )
    from turnwise.run.timeline import TIMELINE, write_times

    folder = run_folder(config)
    write_jsonl(folder / "eval.jsonl", evaluation.trajectories)
    write_times(folder / TIMELINE / "eval.jsonl", evaluation.calls)
    return evaluation


async def rollout(
    config: Config,
    console: Console,
    output: Path | None,
    inputs: ProgramInputs = _FROM_CONFIG,
) -> tuple[list[Trajectory], Counter[str]]:
    """Sample the groups of all training rows, as in training.

    Args:
        output: A JSON Lines file for the trajectories; None writes none.

    Returns:
        The trajectories, and the number of failed ones by reason.

    Raises:
        InputError: when anything that the user gave cannot be used.
        StepError: when more than `rollout.max_failed_fraction` of the trajectories fail.
    """
    _check_sources(config, None if inputs.rows is not None else config.data.path)
    logs.open_logs(config)
    with _display(config, console) as display:
        with display.part(_LOADING):
            from turnwise.rollout.evaluation import run_groups, without_left_out
            from turnwise.rollout.group import check_failures
            from turnwise.run.runtime import open_runtime

            problems = await _in_time(_load_training, config, inputs)
        async with open_runtime(
            config,
            problems[0],
            progress=display,
            environment=inputs.environment,
            functions=inputs.functions,
        ) as runtime:
            display.phase("rollout", len(problems))
            run_group = runtime.group_runner(config.sampling)
            groups = await run_groups(run_group, problems, "rollout", display.advance)
            groups = without_left_out(groups)
    trajectories = [t for group in groups for t in group.trajectories]
    if output is not None:
        write_jsonl(output, trajectories)
    dropped = check_failures(groups, config.rollout.max_failed_fraction, "rollouts")
    return trajectories, dropped


@asynccontextmanager
async def serve(config: Config, console: Console) -> AsyncIterator["OpenAIServer"]:
    """Serve the model to OpenAI and Anthropic clients for the length of an `async with` block.

    Raises:
        InputError: when anything that the user gave cannot be used.
    """
    listen(config.serving.host, config.serving.port).close()  # before anything slow
    _check_sources(config)
    logs.open_logs(config)
    async with AsyncExitStack() as stack:
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
    from turnwise.run.prometheus import serving_metrics
    from turnwise.run.runtime import open_runtime
    from turnwise.run.trainer import TrainingLoop

    async with open_runtime(
        config,
        problems[0],
        folder=folder.path,
        progress=display,
        environment=inputs.environment,
        functions=inputs.functions,
    ) as runtime:
        loop = TrainingLoop(config, runtime, problems, heldout, folder, display, resume)
        scheduler = runtime.manager.scheduler
        host, port = config.serving.host, config.metrics.port
        async with serving_metrics(host, port, folder.rows, loop.in_flight, scheduler):
            await loop.run()
        return loop.exactness


async def _in_time(
    load: Callable[[Config, ProgramInputs], _T], config: Config, inputs: ProgramInputs
) -> _T:
    """Open the data in a thread: a program's rows, and some datasets, are user code."""
    seconds, key = config.data.load_timeout, "data.load_timeout"
    loaded: _T = await call_user_code(
        load, config, inputs, name="the data", seconds=seconds, key=key
    )
    return loaded


def _load_problems(
    config: Config, inputs: ProgramInputs
) -> "tuple[Sequence[Problem], Sequence[Problem]]":
    """Return training problems, and held-out ones if there are any."""
    measured = inputs.eval_rows is not None or config.data.eval_path is not None
    heldout = _load_heldout(config, inputs) if measured else []
    return _load_training(config, inputs), heldout


def _load_training(config: Config, inputs: ProgramInputs) -> "Sequence[Problem]":
    from turnwise.rollout.data import load_training
    from turnwise.rollout.problems import Problems

    if inputs.rows is None:
        return load_training(config)
    return Problems("data", _checked(inputs.rows, "data")[: config.data.limit])


def _load_heldout(config: Config, inputs: ProgramInputs) -> "Sequence[Problem]":
    from turnwise.rollout.data import load_heldout
    from turnwise.rollout.problems import Problems

    if inputs.eval_rows is None:
        return load_heldout(config)
    rows = _checked(inputs.eval_rows, "eval_data")
    return Problems("eval_data", rows[: config.data.eval_limit])


def _checked(rows: Sequence[JsonObject], name: str) -> Sequence[JsonObject]:
    """Return rows, checked to be dictionaries.

    Raises:
        InputError: when there are none, or one is not a mapping.
    """
    if not rows:
        raise InputError(f"{name} has no rows")
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise InputError(f"{name}[{number}] is not a dictionary: {repr(row)[:80]}")
    return [dict(row) for row in rows]


def _report_resume(resume: "Resume", display: "Display") -> None:
    for flaw in resume.flaws:
        display.warn(f"a newer checkpoint is incomplete ({flaw}) and is skipped")
    display.warn(f"continuing from {resume.checkpoint}")


def _check_sources(config: Config, *data: str | None) -> None:
    """Check that the model and data can exist, before anything slow is imported."""
    for path in filter(None, data):
        check_data(path)
    check_model(config.model.path)
    if config.model.tokenizer is not None:
        check_tokenizer(config.model.tokenizer)
    EngineAdapters.of(config)


def _display(config: Config, console: Console, steps: int = 0) -> "Display":
    from turnwise.run.display import Display

    return Display(config.name, steps, console, config.eval.success_reward)
