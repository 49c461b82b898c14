"""The command line: train, pipeline, eval, rollout, serve, config.

Every mistake of the user's ends in one sentence on standard error and exit code 2; Ctrl-C and
SIGTERM end the run, everything that it started, and exit with 130. The traceback of an error that
came from elsewhere (user code, a library, a bug) goes to errors.log in the run folder; --debug
prints it.
"""

import asyncio
import itertools
import os
import sys
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from turnwise import __version__, logs
from turnwise.config import Config, explain_config, known_keys, load_config
from turnwise.errors import InputError, TrainerError, TurnwiseError, describe_error
from turnwise.interrupt import (
    EXIT_INTERRUPTED,
    end_by_force_after,
    interruptible,
    kill_children,
)
from turnwise.serving.address import listen
from turnwise.sources import check_data, check_model, check_tokenizer
from turnwise.tasks import run_in_thread, stuck_calls, unreturned_calls

if TYPE_CHECKING:
    from turnwise.display import Display
    from turnwise.rollout import Problem
    from turnwise.run_folder import Resume, RunFolder
    from turnwise.trajectory import ExactnessReport


def _complete_key(incomplete: str) -> Iterator[tuple[str, str]]:
    """The keys that an override may begin with, for the shell."""
    for key, meaning in known_keys().items():
        if key.startswith(incomplete):
            yield f"{key}=", meaning


app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Reinforcement learning of tool-calling language models, exact to the token.",
)
ConfigFile = Annotated[Path, typer.Argument(metavar="FILE", help="A YAML configuration.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[key.sub=value]...", help="Changes to it.", autocompletion=_complete_key
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="Print the traceback of an error.")]
_EXIT_FAILED = 1
_EXIT_BAD_INPUT = 2
_END_SECONDS = 10.0
"""The event loop's own end may take so long where user code was left behind."""
_NO_SIGNAL = (
    "; the problems may be too easy or too hard for this model, or the reward may not tell its "
    "answers apart"
)
_LOADING = "importing libraries and reading the data"


@dataclass(slots=True)
class _Command:
    """One command, and how it reports the error that ends it."""

    debug: bool
    folder: Path | None = None
    """The run folder; None until the configuration is read."""
    _began: float = field(default_factory=time.time)

    def of(self, config: Config) -> Config:
        """Run with this configuration."""
        self.folder = Path(config.output_dir, config.name)
        return config

    def fail(self, error: Exception) -> int:
        """Print an error in one sentence and keep its traceback; returns the exit code."""
        expected = isinstance(error, TurnwiseError)
        said = str(error) if expected else f"unexpected {describe_error(error)}"
        _print_error(f"turnwise: {said}", style="red")
        text = "".join(traceback.format_exception(error))
        log = None if self.folder is None else self.folder / "errors.log"
        if log is not None and (error.__cause__ is not None or not expected):
            try:
                log.parent.mkdir(parents=True, exist_ok=True)
                with log.open("a", encoding="utf-8", errors="replace") as file:
                    file.write(f"{datetime.now().isoformat(' ', 'seconds')}\n{text}\n")
            except OSError:
                log = None
        if self.debug or (log is None and not expected):
            _print_error(text.rstrip())
        elif log is not None and log.exists() and log.stat().st_mtime >= self._began:
            _print_error(f"traceback: {log} (or --debug)")
        return _EXIT_BAD_INPUT if expected else _EXIT_FAILED


def _print_error(text: str, style: str | None = None) -> None:
    console = Console(stderr=True)
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"turnwise {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print it."),
    ] = False,
) -> None:
    """Options that stand before a command."""


@app.command()
def train(
    file: Annotated[
        str | None, typer.Argument(metavar="FILE", help="A YAML configuration; not with --resume.")
    ] = None,
    overrides: Overrides = None,
    resume: Annotated[
        Path | None, typer.Option(help="A run's folder: go on from its last whole checkpoint.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Train a model; everything about the run goes to its folder."""
    command, changes = _Command(debug), [*(overrides or ())]
    if resume is None:
        if file is None:
            raise typer.BadParameter("give a FILE, or --resume runs/NAME")
        _run(lambda: _train(command.of(load_config(file, changes))), command)
        return
    if file is not None:
        changes.insert(0, file)
    _run(lambda: _resume(resume, command.of(_config_of(resume, changes))), command)


@app.command()
def pipeline(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A YAML file with models and runtime.")
    ],
    overrides: Overrides = None,
    debug: Debug = False,
) -> None:
    """Train the models of a pipeline's file, from the last checkpoint where there is one."""
    command = _Command(debug)
    _run(lambda: _pipeline(file, overrides or (), command), command)


@app.command("eval")
def evaluate(file: ConfigFile, overrides: Overrides = None, debug: Debug = False) -> None:
    """Evaluate the model on data.eval_path (or data.path), and keep the trajectories."""
    command = _Command(debug)
    _run(lambda: _evaluate(command.of(load_config(file, overrides or ()))), command)


@app.command()
def rollout(
    file: ConfigFile,
    overrides: Overrides = None,
    output: Annotated[
        Path | None, typer.Option(help="Where to; default: rollouts.jsonl in the run folder.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Sample the groups of data.path as training would, into a JSON Lines file."""
    command = _Command(debug)
    _run(lambda: _rollout(command.of(load_config(file, overrides or ())), output), command)


@app.command()
def serve(file: ConfigFile, overrides: Overrides = None, debug: Debug = False) -> None:
    """Serve the model to OpenAI and Anthropic clients, on serving.workers engines."""
    unneeded = {"environment": "none", "data": {"path": "none"}}
    command = _Command(debug)
    _run(lambda: _serve(command.of(load_config(file, overrides or (), unneeded))), command)


@app.command()
def config(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="A YAML configuration; without one, the defaults."),
    ] = None,
    overrides: Overrides = None,
    debug: Debug = False,
) -> None:
    """Print the resolved configuration, or the defaults, with the meaning of each key."""
    changes = [*(overrides or ())]
    if file is not None and "=" in file.name and not file.exists():
        raise typer.BadParameter("changes apply to a FILE: turnwise config FILE key.sub=value")
    _run(
        lambda: _print_config(None if file is None else load_config(file, changes)), _Command(debug)
    )


def main() -> None:
    """The command `turnwise`."""
    # Plug-ins are named relative to where the command is run.
    sys.path.insert(0, os.getcwd())
    logs.to_terminal()
    app()


def _run(make: Callable[[], Coroutine[Any, Any, None]], command: _Command) -> None:
    code = asyncio.run(_exit_code(make, command))
    if code:
        raise typer.Exit(code)


async def _exit_code(make: Callable[[], Coroutine[Any, Any, None]], command: _Command) -> int:
    """Run a command, report how it ended, and return its exit code."""
    code = _EXIT_FAILED
    try:
        await interruptible(make())
        code = 0
    except Exception as error:
        code = command.fail(error)
    except asyncio.CancelledError:
        code = EXIT_INTERRUPTED
        left = unreturned_calls()
        await asyncio.to_thread(kill_children)
        text = "turnwise: interrupted; everything it started has ended"
        _print_error(text + (f", but {left}" if left else ""))
    finally:
        if left := stuck_calls():
            if code != EXIT_INTERRUPTED:
                _print_error(f"turnwise: {left}")
            # One that swallows its cancellation would hold up the end of the event loop for ever.
            sys.stdout.flush()
            end_by_force_after(_END_SECONDS, code)
    return code


async def _resume(run: Path, config: Config) -> None:
    from turnwise.run_folder import find_resume

    resume = await run_in_thread(lambda: find_resume(run))
    if resume.step >= config.training.steps:
        raise InputError(
            f"{resume.checkpoint} is step {resume.step} of {config.training.steps}: the run is "
            "complete; training.steps=N goes on to step N"
        )
    accuracy = resume.state.get("accuracy_heldout")
    if config.eval.reached(accuracy):
        raise InputError(
            f"{resume.checkpoint} has held-out accuracy {accuracy:.3f} and eval.target is "
            f"{config.eval.target:g}: the run is complete; eval.target=null goes on to "
            "training.steps"
        )
    await _train(config, resume)


async def _pipeline(file: Path, changes: Sequence[str], command: _Command) -> None:
    from turnwise.modules.pipeline_file import read_pipeline_file

    read = await run_in_thread(lambda: read_pipeline_file(file, changes))
    config = command.of(read.config)
    for note in read.notes:
        _print_error(f"turnwise: {file}: {note}", style="yellow")
    run = Path(config.output_dir, config.name)
    if read.resumes and any((run / "checkpoints").glob("step-*[0-9]")):
        await _resume(run, config)
    else:
        await _train(config)


def _config_of(run: Path, changes: Sequence[str]) -> Config:
    """The configuration of a run, with changes, wherever its folder stands now.

    Raises:
        InputError: when there is no run, or the changes do not fit.
    """
    if not (run / "config.yaml").is_file():
        raise InputError(f"there is no run in {run} (a folder with config.yaml)")
    home = {"output_dir": str(run.resolve().parent), "name": run.resolve().name}
    return load_config(run / "config.yaml", changes).model_copy(update=home)


async def _train(config: Config, resume: "Resume | None" = None) -> None:
    from turnwise.display import why_untrained

    _check_sources(config, config.data.path, config.data.eval_path)
    for key, other in config.algorithm.other_models().items():
        check_model(other, f"{key}.path")
    console = Console()
    with _display(config, console, config.training.steps) as display:
        with display.part(_LOADING):
            from turnwise.machinery import load_problems
            from turnwise.run_folder import RunFolder, find_resume

            problems, heldout = await run_in_thread(lambda: load_problems(config))
        run = Path(config.output_dir, config.name)
        for attempt in itertools.count():
            folder = RunFolder(config, resume)
            logs.open_logs(config)
            for flaw in resume.flaws if resume is not None else ():
                display.warn(f"a newer checkpoint is cut short ({flaw}) and is passed over")
            if resume is not None:
                display.warn(f"going on from {resume.checkpoint}")
            try:
                exactness = await _attempt(config, problems, heldout, folder, display, resume)
                break
            except TrainerError as error:
                if attempt >= config.training.restarts:
                    raise
                try:
                    resume = await run_in_thread(lambda: find_resume(run))
                except InputError as nothing:
                    raise TrainerError(f"{error}; {nothing}") from error
                display.warn(f"{error}; restart {attempt + 1} of {config.training.restarts}")
            finally:
                folder.close()
    if why := why_untrained(folder.rows):
        no_signal = any(row.get("groups_without_signal") for row in folder.rows)
        console.print(
            f"nothing was trained: {why}{_NO_SIGNAL if no_signal else ''}",
            style="yellow",
            highlight=False,
            soft_wrap=True,
        )
    console.print(
        f"{exactness}\nrun folder {folder.path}\npicture    {folder.picture}",
        highlight=False,
        soft_wrap=True,
    )


async def _attempt(
    config: Config,
    problems: "list[Problem]",
    heldout: "list[Problem]",
    folder: "RunFolder",
    display: "Display",
    resume: "Resume | None",
) -> "ExactnessReport":
    """One start of everything, to the end of the run."""
    from turnwise.loop import TrainingLoop
    from turnwise.machinery import open_machinery

    everything = [*problems, *heldout]
    async with open_machinery(
        config, everything, folder=folder.path, progress=display
    ) as machinery:
        loop = TrainingLoop(config, machinery, problems, heldout, folder, display, resume)
        await loop.run()
        return loop.exactness


async def _evaluate(config: Config) -> None:
    _check_sources(config, config.data.eval_path or config.data.path)
    logs.open_logs(config)
    console = Console()
    with _display(config, console) as display:
        with display.part(_LOADING):
            from turnwise.machinery import evaluate, load_heldout, open_machinery
            from turnwise.trajectory import write_jsonl

            problems = await run_in_thread(lambda: load_heldout(config))
        async with open_machinery(config, problems, progress=display) as machinery:
            evaluation = await evaluate(machinery, problems, config, display)
    path = Path(config.output_dir) / config.name / "eval.jsonl"
    write_jsonl(path, evaluation.trajectories)
    several = {k: v for k, v in evaluation.summary.items() if "@" in k and not k.endswith("@1")}
    if several:
        console.print("  ".join(f"{k} {v:.4f}" for k, v in several.items()), highlight=False)
    console.print(
        f"accuracy (reward ≥ {config.eval.success_reward:g}) {evaluation.accuracy:.4f}  "
        f"reward {evaluation.summary['reward_mean']:.4f}  "
        f"trajectories {len(evaluation.trajectories)}  dropped {dict(evaluation.dropped)}  "
        f"{evaluation.tokens_per_s:,.0f} tok/s\n{path}",
        highlight=False,
        soft_wrap=True,
    )


async def _rollout(config: Config, output: Path | None) -> None:
    _check_sources(config, config.data.path)
    logs.open_logs(config)
    console = Console()
    with _display(config, console) as display:
        with display.part(_LOADING):
            from turnwise.machinery import load_training, open_machinery, run_groups
            from turnwise.rollout import check_failures
            from turnwise.trajectory import write_jsonl

            problems = await run_in_thread(lambda: load_training(config))
        async with open_machinery(config, problems, progress=display) as machinery:
            display.phase("rollout", len(problems))
            groups = await run_groups(machinery, problems, config.sampling, "rollout", display)
    path = output or Path(config.output_dir) / config.name / "rollouts.jsonl"
    write_jsonl(path, (t for group in groups for t in group.trajectories))
    dropped = check_failures(groups, config.rollout.max_failed_fraction, "rollouts")
    count = sum(len(group.trajectories) for group in groups)
    console.print(f"{count} trajectories  dropped {dict(dropped)}\n{path}", highlight=False)


async def _serve(config: Config) -> None:
    listen(config.serving.host, config.serving.port).close()  # before all that is slow
    _check_sources(config)
    logs.open_logs(config)
    console = Console()
    with _display(config, console) as display:
        with display.part("importing libraries"):
            from turnwise.machinery import open_server

        serving = open_server(config, display)
        server = await serving.__aenter__()
    try:
        console.print(f"base URL {server.base_url}", highlight=False, soft_wrap=True)
        for name, url in server.workers().items():
            console.print(f"{name} {url}", highlight=False, soft_wrap=True)
        await asyncio.Event().wait()  # until it is interrupted
    finally:
        await serving.__aexit__(None, None, None)


def _check_sources(config: Config, *data: str | None) -> None:
    """See that the model and these data may be there, before anything slow is imported."""
    for path in filter(None, data):
        check_data(path)
    check_model(config.model.path)
    if config.model.tokenizer is not None:
        check_tokenizer(config.model.tokenizer)


def _display(config: Config, console: Console, steps: int = 0) -> "Display":
    from turnwise.display import Display

    return Display(config.name, steps, console, config.eval.success_reward)


async def _print_config(config: Config | None) -> None:
    sys.stdout.write(explain_config(config))


if __name__ == "__main__":
    main()
