"""The commands as coroutines: they check their inputs before anything slow is imported."""

import itertools
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from rich.console import Console

from turnwise.config import Config, load_config
from turnwise.config.base import NEEDED_KEYS
from turnwise.config.data import ADAPTER_CONFIG
from turnwise.config.resume import check_unchanged
from turnwise.config.supervised import supervised_config
from turnwise.core import logs
from turnwise.core.aio import run_in_thread
from turnwise.core.json_types import JsonObject
from turnwise.core.sources import check_data, check_model, check_tokenizer
from turnwise.core.user_code import call_user_code
from turnwise.engine.adapters import EngineAdapters
from turnwise.errors import CompleteError, InputError, TrainerError, translate_unwritable
from turnwise.run.checks import check_sampled
from turnwise.serving.openai.address import listen
from turnwise.training import checkpoint
from turnwise.trajectory import ExactnessReport, Trajectory

if TYPE_CHECKING:
    from turnwise.rollouts.environment import EnvironmentType
    from turnwise.rollouts.evaluation import Evaluation
    from turnwise.rollouts.group import Group
    from turnwise.rollouts.problems import Problem
    from turnwise.rollouts.producer import RunGroup
    from turnwise.run.display import Display
    from turnwise.run.run_dir import Resume, RunDir
    from turnwise.run.runtime import Runtime
    from turnwise.serving.openai.server import OpenAIServer

    OnGroup = Callable[[Sequence[Trajectory]], None]
    """Called with the trajectories of each group of a command, also of one that was not run."""
    Datasets = tuple[Sequence[Problem], Sequence[Problem]]
    """Problems to train on, and held-out ones."""
    Join = Callable[[Runtime, Datasets], AbstractAsyncContextManager[Datasets]]

_Server = TypeVar("_Server")
_LOADING = "importing libraries and reading the data"
_LOAD_SECONDS = 6 * 3600.0  # deadline for opening the data, which may be a download of hours
_PROVIDED = (*NEEDED_KEYS, "data.eval_path")  # keys that a program may give as objects


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
    """Audit that counts every sampled token as trained, as masked, or as a violation."""

    @property
    def checkpoint(self) -> Path | None:
        """The last checkpoint's folder, in Hugging Face's format; None before the first one."""
        saved = checkpoint.list_checkpoints(checkpoint.checkpoints_of(self.folder))
        return saved[-1] if saved else None

    @property
    def picture(self) -> Path:
        """Path of the plot of reward and held-out accuracy."""
        return self.folder / "reward.png"


@dataclass(frozen=True, slots=True)
class ProgramInputs:
    """Objects that a program passes instead of configuration keys; None uses the key."""

    environment: "EnvironmentType | None" = None  # makes one from a row; replaces the key
    rows: Sequence[JsonObject] | None = None  # training rows; replace data.path
    eval_rows: Sequence[JsonObject] | Mapping[str, Sequence[JsonObject]] | None = None
    """Held-out rows, or several sets of rows by name; they replace data.eval_path and
    data.eval_sets."""
    join: "Join | None" = None  # joins a run, and returns its datasets

    def paths(self, config: Config, *, heldout: bool = True) -> list[str]:
        """Return the paths of the rows that the configuration names."""
        found: list[str | None] = []
        for part in config.parts().values():
            found.append(part.data.path if self.rows is None else None)
            found += part.data.heldout.values() if heldout and self.eval_rows is None else ()
        return [path for path in found if path is not None]

    def environment_for(self, config: Config) -> "EnvironmentType | None":
        """Return `environment` with the configuration's `environment_args`; None without
        `environment`."""
        from turnwise.rollouts.environment import with_arguments

        if self.environment is None:
            return None
        return with_arguments(self.environment, config.environment_args)


FROM_CONFIG = ProgramInputs()  # inputs that leave everything to the configuration


def check_sources(config: Config, *data: str | None) -> None:
    """Check that the model and data can exist, before anything slow is imported."""
    keys = {path: key for key, path in config.row_paths().items()}
    for path in filter(None, data):
        check_data(path, keys.get(path, "data"))
    check_model(config.model.path)
    if config.model.tokenizer is not None:
        check_tokenizer(config.model.tokenizer)
    EngineAdapters.of(config)


def all_problems(
    config: Config, inputs: ProgramInputs
) -> "tuple[Sequence[Problem], Sequence[Problem]]":
    """Return the training problems, and the held-out problems if there are any."""
    measured = [name for name, part in config.parts().items() if part.data.heldout]
    heldout: Sequence[Problem] = []
    if inputs.eval_rows is not None or measured:
        heldout = load_problems(config.only(measured), inputs, heldout=True)
    return load_problems(config, inputs), heldout


def load_problems(
    config: Config, inputs: ProgramInputs, *, heldout: bool = False
) -> "Sequence[Problem]":
    """Return the problems to train on, or the problems to evaluate on."""
    own = (inputs.environment, inputs.rows, inputs.eval_rows)
    if config.environments and any(each is not None for each in own):
        raise InputError(
            "environments has its own environments and rows, and the program gives one too: leave "
            "out environment, data and eval_data, or environments"
        )
    from turnwise.rollouts.data import checked_rows, load_training
    from turnwise.rollouts.problems import JoinedProblems, Problems

    data, rows = config.data, inputs.eval_rows if heldout else inputs.rows
    if rows is None:
        split = "eval" if heldout else "train"
        return load_training(config, inputs.environment_for(config), split)
    name, limit = ("eval_data", data.eval_limit) if heldout else ("data", data.limit)
    if isinstance(rows, Mapping):
        checked = {of: checked_rows(each, f"{name}[{of!r}]", limit) for of, each in rows.items()}
        return JoinedProblems({of: Problems(name, each, "", of) for of, each in checked.items()})
    condition = None if heldout else data.filter
    return Problems(name, checked_rows(rows, name, limit, condition), marked=not heldout)


async def train(
    config: Config,
    console: Console,
    run: Path | None = None,
    inputs: ProgramInputs = FROM_CONFIG,
    *,
    supervised: bool = False,
) -> TrainingResult:
    """Train to the last step; if `run` is given, continue from its newest complete checkpoint. If
    `supervised`, train on the rows themselves, without engines."""
    if supervised:
        config = supervised_config(config)
    check_sampled(config)  # the other checks import more
    resume = None if run is None else await _resumable(run, config, supervised)
    check_sources(config, *inputs.paths(config))
    for key, other in config.other_models().items():
        check_model(other, key)
    with ExitStack() as stack, _display(config, console, config.training.steps) as display:
        with display.part(_LOADING):
            from turnwise.run.display import show_result
            from turnwise.run.run_dir import RunDir, find_resume

            data = await call_user_code(
                all_problems, config, inputs, name="the data", seconds=_LOAD_SECONDS
            )
        for attempt in itertools.count():
            folder = await run_in_thread(RunDir, config, resume)
            if not attempt:
                stack.enter_context(logs.open_logs(config.run_folder, config.log_level))
            for flaw in [] if resume is None else resume.flaws:
                display.warn(f"a newer checkpoint is incomplete ({flaw}) and is skipped")
            if resume is not None:
                display.warn(f"continuing from {resume.checkpoint}")
            try:
                exactness = await _play(config, inputs, data, folder, display, resume, supervised)
                break
            except TrainerError as error:
                if attempt >= config.training.restarts:
                    raise
                try:
                    resume = await run_in_thread(lambda: find_resume(config.run_folder))
                except InputError as nothing:
                    raise TrainerError(f"{error}; {nothing}") from error
                display.warn(f"{error}; restart {attempt + 1} of {config.training.restarts}")
            finally:
                await run_in_thread(folder.metrics.close)
    result = TrainingResult(folder.path, list(folder.metrics.rows), exactness)
    picture = None if supervised else result.picture
    show_result(console, str(exactness), result.folder, picture, result.metrics)
    return result


async def _play(
    config: Config,
    inputs: ProgramInputs,
    data: "Datasets",
    folder: "RunDir",
    display: "Display",
    start: "Resume | None",
    supervised: bool,
) -> ExactnessReport:
    """Run one attempt to its end. This is a separate function so that no object of a failed attempt
    stays in memory."""
    async with AsyncExitStack() as opened:
        if supervised:
            from turnwise.run.supervised import train_on_rows

            return await train_on_rows(config, *data, folder, display, start)
        from turnwise.observe.prometheus import serving_metrics
        from turnwise.run.trainer import TrainingLoop

        starting = _opened(config, inputs, data[0], display, folder.path)
        runtime = await opened.enter_async_context(starting)
        if inputs.join is not None:
            data = await opened.enter_async_context(inputs.join(runtime, data))
        loop = TrainingLoop(config, runtime, *data, folder, display, start)
        host, port = config.serving.host, config.metrics.port
        scheduler, lines = runtime.manager.scheduler, folder.metrics.rows
        async with serving_metrics(host, port, lines, loop.in_flight, scheduler):
            await loop.run()
        return loop.exactness


async def _resumable(run: Path, config: Config, supervised: bool) -> "Resume":
    """Return the newest complete checkpoint of a run; raise if the configuration cannot go on with
    it."""
    from turnwise.run.run_dir import find_resume

    saved = config_of_run(run, optional=_PROVIDED)
    home = {"name": saved.name, "output_dir": saved.output_dir}  # perhaps spelled differently
    check_unchanged(saved, config.model_copy(update=home))
    found = await run_in_thread(lambda: find_resume(run))
    if found.state.get("supervised", False) is not supervised:
        other = "train" if supervised else "sft"
        raise InputError(f"{run} is a run of another command: turnwise {other} --resume {run}")
    if "problems" in found.state:
        raise InputError(f"{run} is a program's run: turnwise.open(resume=...) goes on with it")
    if found.step >= config.training.steps:
        raise CompleteError(
            f"{found.checkpoint} is step {found.step} of {config.training.steps}: the run is "
            "complete; set training.steps=N to continue to step N"
        )
    heldout: dict[str, float] = found.state.get("heldout") or {}
    if config.eval.reached(heldout):
        raise CompleteError(
            f"{found.checkpoint} has held-out accuracy {heldout['accuracy']:.3f} and eval.target "
            f"is {config.eval.target}: the run is complete; set eval.target=null to "
            "continue to training.steps"
        )
    return found


def config_of_run(
    run: Path,
    overrides: Sequence[str] = (),
    settings: Mapping[str, object] | None = None,
    optional: Sequence[str] = (),
) -> Config:
    """Return the configuration of a run with changes, even if its folder has been moved."""
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
    """Evaluate the model on held-out rows; each finished group is appended to eval.jsonl at
    once."""
    paths: list[str] = []
    if inputs.eval_rows is None:
        for name, part in config.parts().items():
            own = list(part.data.heldout.values()) or list(filter(None, [part.data.path]))
            if not own:
                key = f"environments.{name}.data" if name else "data"
                raise InputError(
                    f"{key}.eval_path or {key}.path must be set: there are no rows to evaluate"
                )
            paths += own
    playing = _playing(config, console, inputs, paths, "evaluate", on_group)
    async with playing as (run_group, problems, advance):
        from turnwise.observe.timeline import TIMELINE
        from turnwise.rollouts.evaluation import GroupLog, groups_at_once
        from turnwise.rollouts.evaluation import evaluate as evaluate_problems

        folder, name = config.run_folder, "eval.jsonl"
        return await evaluate_problems(
            run_group,
            problems,
            config.eval,
            config.rollout,
            groups_at_once(config, config.eval.sampling.n),
            on_group=advance,
            kept=GroupLog(folder / name, folder / TIMELINE / name),
        )


async def rollout(
    config: Config,
    console: Console,
    output: Path | None,
    inputs: ProgramInputs = FROM_CONFIG,
    on_group: "OnGroup" = lambda _: None,
) -> tuple[Sequence[Trajectory], Counter[str]]:
    """Sample the groups of all training rows; each finished group is appended to the file `output`
    at once, or kept in memory. Return the trajectories in the rows' order, and the number of failed
    trajectories by reason."""
    paths = inputs.paths(config, heldout=False)
    playing = _playing(config, console, inputs, paths, "rollout", on_group)
    async with playing as (run_group, problems, advance):
        from turnwise.rollouts.evaluation import GroupLog, groups_at_once, run_groups

        kept = GroupLog(output)
        outcomes = await run_groups(
            run_group,
            problems,
            "rollout",
            kept.keep,
            advance,
            at_once=groups_at_once(config, config.sampling.n),
            row_seconds=config.rollout.environment_timeout,
        )
    return kept.trajectories, outcomes.check(config.rollout.max_failed_fraction, "rollouts")


@asynccontextmanager
async def _playing(
    config: Config,
    console: Console,
    inputs: ProgramInputs,
    paths: Sequence[str],
    phase: Literal["evaluate", "rollout"],
    on_group: "OnGroup",
) -> "AsyncIterator[tuple[RunGroup, Sequence[Problem], Callable[[Group], None]]]":
    """Read the rows and start the engines; yield a function that runs a group, the problems, and a
    callback for finished groups."""
    check_sources(config, *paths)
    heldout = phase == "evaluate"
    with logs.open_logs(config.run_folder, config.log_level), _display(config, console) as display:
        with display.part(_LOADING):
            from turnwise.run.run_dir import write_config

            with translate_unwritable(config.run_folder):  # for `turnwise view`
                await run_in_thread(write_config, config, replace=False)
            load = partial(load_problems, config, inputs, heldout=heldout)
            problems = await call_user_code(load, name="the data", seconds=_LOAD_SECONDS)
            opened = _opened(config, inputs, problems, display)
        async with opened as runtime:
            display.phase(phase, len(problems))
            sampling = config.eval.sampling if heldout else config.sampling

            def advance(group: "Group") -> None:
                display.advance()
                on_group(group.trajectories)

            yield runtime.group_runner(sampling), problems, advance


def _opened(
    config: Config,
    inputs: ProgramInputs,
    problems: "Sequence[Problem]",
    display: "Display",
    folder: Path | None = None,
) -> "AbstractAsyncContextManager[Runtime]":
    """Return the runtime of a command, with a trainer if the run's folder is given."""
    from turnwise.rollouts.problems import first_of_each
    from turnwise.run.runtime import open_runtime

    return open_runtime(
        config,
        None if inputs.join else first_of_each(problems),
        folder=folder,
        progress=display,
        environment=inputs.environment_for(config),
    )


def openai_server(
    config: Config, display: "Display"
) -> AbstractAsyncContextManager["OpenAIServer"]:
    """Open a server of the model for OpenAI and Anthropic clients."""
    with display.part("importing libraries"):
        from turnwise.run.fleet import open_server

    return open_server(config, display)


@asynccontextmanager
async def serving(
    config: Config,
    console: Console,
    opened: "Callable[[Config, Display], AbstractAsyncContextManager[_Server]]",
) -> AsyncIterator[_Server]:
    """Keep a server, and the logs of its processes, open during an `async with` block."""
    listen(config.serving.host, config.serving.port).close()  # before anything slow
    check_sources(config)
    async with AsyncExitStack() as stack:
        stack.enter_context(logs.open_logs(config.run_folder, config.log_level))
        with _display(config, console) as display:
            server = await stack.enter_async_context(opened(config, display))
        yield server


def export_run(run: Path, output: Path | None = None, *, merged: bool = False) -> Path:
    """Write the trained model of a run or of a checkpoint's folder. With LoRA, write the adapter
    or, if `merged`, the model merged with its adapter. Return the folder that was written:
    `output`, by default `export` or `merged` in the run folder."""
    chosen = run
    if (run / "state").is_dir():
        run = run.resolve().parents[1]
        if why := checkpoint.incomplete_reason(chosen):
            raise InputError(f"{chosen} is no whole checkpoint: {why}")
    config = config_of_run(run, optional=_PROVIDED)
    if chosen == run:
        chosen, _ = checkpoint.newest_whole(checkpoint.checkpoints_of(run))
    output = output or run / ("merged" if merged else "export")
    if output.exists():
        raise InputError(f"{output} exists: name another folder with --output")
    from transformers.utils.logging import disable_progress_bar

    from turnwise.training.export import merge_adapter
    from turnwise.training.lora import POLICIES

    disable_progress_bar()
    if merged and (chosen / POLICIES).is_dir():
        names = sorted(own.name for own in (chosen / POLICIES).iterdir())
        raise InputError(
            f"{chosen} has several policies, {', '.join(names)}: without --merged each is exported "
            "as an adapter"
        )
    if merged and (chosen / ADAPTER_CONFIG).exists():
        merge_adapter(chosen, output, config.model)
        return output
    with checkpoint.translate_disk_full(output):
        shutil.copytree(chosen, output, ignore=shutil.ignore_patterns("state"))
    return output


def _display(config: Config, console: Console, steps: int = 0) -> "Display":
    from turnwise.run.display import Display

    return Display(config.name, steps, console, config.eval.success_reward)
