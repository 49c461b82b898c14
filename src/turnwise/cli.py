"""The command line: train, eval, rollout, serve, config.

Every mistake of the user's ends in one sentence on standard error and exit code 2; Ctrl-C and
SIGTERM end the run, everything that it started, and exit with 130.
"""

import asyncio
import itertools
import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from turnwise import logs
from turnwise.config import Config, explain_config, load_config
from turnwise.errors import InputError, TrainerError, TurnwiseError
from turnwise.interrupt import (
    EXIT_INTERRUPTED,
    end_by_force_after,
    interruptible,
    kill_children,
)
from turnwise.tasks import run_in_thread, stuck_calls, unreturned_calls

if TYPE_CHECKING:
    from turnwise.display import Display
    from turnwise.rollout import Problem
    from turnwise.run_folder import Resume, RunFolder
    from turnwise.trajectory import ExactnessReport

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Reinforcement learning of tool-calling language models, exact to the token.",
)
ConfigFile = Annotated[Path, typer.Argument(metavar="FILE", help="A YAML configuration.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[key.sub=value]...", help="Changes to it.")
]
_EXIT_BAD_INPUT = 2
_END_SECONDS = 10.0
"""The event loop's own end may take so long where user code was left behind."""


@app.command()
def train(
    file: Annotated[
        str | None, typer.Argument(metavar="FILE", help="A YAML configuration; not with --resume.")
    ] = None,
    overrides: Overrides = None,
    resume: Annotated[
        Path | None, typer.Option(help="A run's folder: go on from its last whole checkpoint.")
    ] = None,
) -> None:
    """Train a model; everything about the run goes to its folder."""
    changes = [*(overrides or ())]
    if resume is None:
        if file is None:
            raise typer.BadParameter("give a FILE, or --resume runs/NAME")
        _run(lambda: _train(load_config(file, changes)))
        return
    if file is not None:
        changes.insert(0, file)
    _run(lambda: _resume(resume, changes))


@app.command("eval")
def evaluate(file: ConfigFile, overrides: Overrides = None) -> None:
    """Evaluate the model on data.eval_path (or data.path), and keep the trajectories."""
    _run(lambda: _evaluate(load_config(file, overrides or ())))


@app.command()
def rollout(
    file: ConfigFile,
    overrides: Overrides = None,
    output: Annotated[
        Path | None, typer.Option(help="Where to; default: rollouts.jsonl in the run folder.")
    ] = None,
) -> None:
    """Sample the groups of data.path as training would, into a JSON Lines file."""
    _run(lambda: _rollout(load_config(file, overrides or ()), output))


@app.command()
def serve(file: ConfigFile, overrides: Overrides = None) -> None:
    """Serve the model to OpenAI and Anthropic clients, on serving.workers engines."""
    unneeded = {"environment": "none", "data": {"path": "none"}}
    _run(lambda: _serve(load_config(file, overrides or (), unneeded)))


@app.command()
def config(file: ConfigFile, overrides: Overrides = None) -> None:
    """Print the resolved configuration, with the meaning of each key."""
    _run(lambda: _print_config(load_config(file, overrides or ())))


def main() -> None:
    """The command `turnwise`."""
    # Plug-ins are named relative to where the command is run.
    sys.path.insert(0, os.getcwd())
    logs.to_terminal()
    app()


def _run(make: Callable[[], Coroutine[Any, Any, None]]) -> None:
    code = asyncio.run(_exit_code(make))
    if code:
        raise typer.Exit(code)


async def _exit_code(make: Callable[[], Coroutine[Any, Any, None]]) -> int:
    """Run a command to its end; tell how it ended, and return its exit code."""
    code = 1
    try:
        await interruptible(make())
        code = 0
    except TurnwiseError as error:
        Console(stderr=True).print(
            f"turnwise: {error}", style="red", highlight=False, markup=False, soft_wrap=True
        )
        code = _EXIT_BAD_INPUT
    except asyncio.CancelledError:
        code = EXIT_INTERRUPTED
        left = unreturned_calls()
        await asyncio.to_thread(kill_children)
        text = "turnwise: interrupted; everything it started has ended"
        Console(stderr=True).print(
            text + (f", but {left}" if left else ""), highlight=False, markup=False, soft_wrap=True
        )
    finally:
        if left := stuck_calls():
            if code != EXIT_INTERRUPTED:
                Console(stderr=True).print(
                    f"turnwise: {left}", highlight=False, markup=False, soft_wrap=True
                )
            # One that swallows its cancellation would hold up the end of the event loop for ever.
            sys.stdout.flush()
            end_by_force_after(_END_SECONDS, code)
    return code


async def _resume(run: Path, changes: Sequence[str]) -> None:
    from turnwise.run_folder import find_resume

    resume = await run_in_thread(lambda: find_resume(run))
    config = _config_of(run, changes)
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


def _config_of(run: Path, changes: Sequence[str]) -> Config:
    """The configuration of a run, with changes, wherever its folder stands now."""
    home = {"output_dir": str(run.resolve().parent), "name": run.resolve().name}
    return load_config(run / "config.yaml", changes).model_copy(update=home)


async def _train(config: Config, resume: "Resume | None" = None) -> None:
    from turnwise.display import Display
    from turnwise.machinery import load_problems
    from turnwise.run_folder import RunFolder, find_resume

    problems, heldout = await run_in_thread(lambda: load_problems(config))
    console = Console()
    run = Path(config.output_dir, config.name)
    for attempt in itertools.count():
        folder = RunFolder(config, resume)
        logs.open_logs(config)
        with Display(config.name, config.training.steps, console) as display:
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
    async with open_machinery(config, everything, folder=folder.path) as machinery:
        loop = TrainingLoop(config, machinery, problems, heldout, folder, display, resume)
        await loop.run()
        return loop.exactness


async def _evaluate(config: Config) -> None:
    logs.open_logs(config)
    from turnwise.display import Display
    from turnwise.machinery import evaluate, load_heldout, open_machinery
    from turnwise.trajectory import write_jsonl

    problems, console = await run_in_thread(lambda: load_heldout(config)), Console()
    with Display(config.name, 0, console) as display:
        async with open_machinery(config, problems) as machinery:
            evaluation = await evaluate(machinery, problems, config, display)
    path = Path(config.output_dir) / config.name / "eval.jsonl"
    write_jsonl(path, evaluation.trajectories)
    several = {k: v for k, v in evaluation.summary.items() if "@" in k and not k.endswith("@1")}
    if several:
        console.print("  ".join(f"{k} {v:.4f}" for k, v in several.items()), highlight=False)
    console.print(
        f"accuracy {evaluation.accuracy:.4f}  reward {evaluation.summary['reward_mean']:.4f}  "
        f"trajectories {len(evaluation.trajectories)}  dropped {dict(evaluation.dropped)}  "
        f"{evaluation.tokens_per_s:,.0f} tok/s\n{path}",
        highlight=False,
        soft_wrap=True,
    )


async def _rollout(config: Config, output: Path | None) -> None:
    logs.open_logs(config)
    from turnwise.display import Display
    from turnwise.machinery import load_training, open_machinery, run_groups
    from turnwise.rollout import check_failures
    from turnwise.trajectory import write_jsonl

    problems, console = await run_in_thread(lambda: load_training(config)), Console()
    with Display(config.name, 0, console) as display:
        async with open_machinery(config, problems) as machinery:
            display.phase("rollout", len(problems))
            groups = await run_groups(machinery, problems, config.sampling, "rollout", display)
    path = output or Path(config.output_dir) / config.name / "rollouts.jsonl"
    write_jsonl(path, (t for group in groups for t in group.trajectories))
    dropped = check_failures(groups, config.rollout.max_failed_fraction, "rollouts")
    count = sum(len(group.trajectories) for group in groups)
    console.print(f"{count} trajectories  dropped {dict(dropped)}\n{path}", highlight=False)


async def _serve(config: Config) -> None:
    logs.open_logs(config)
    from turnwise.machinery import open_server

    console = Console()
    with console.status("starting the workers"):
        serving = open_server(config)
        server = await serving.__aenter__()
    try:
        console.print(f"base URL {server.base_url}", highlight=False, soft_wrap=True)
        await asyncio.Event().wait()  # until it is interrupted
    finally:
        await serving.__aexit__(None, None, None)


async def _print_config(config: Config) -> None:
    sys.stdout.write(explain_config(config))


if __name__ == "__main__":
    main()
