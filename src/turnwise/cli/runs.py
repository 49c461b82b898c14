"""The command line: train, pipeline, eval, rollout, serve, export, show, view, plan, config, trace.

`turnwise.command` runs each, and reports how it ended.
"""

import asyncio
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from turnwise import __version__
from turnwise.cli import operations
from turnwise.cli.command import Command as _Command
from turnwise.cli.command import print_error as _print_error
from turnwise.cli.command import run as _run
from turnwise.cli.command import run_to_the_end
from turnwise.cli.operations import Debug
from turnwise.config import Config, explain_config, known_keys, load_config
from turnwise.core import logs
from turnwise.core.aio import run_in_thread
from turnwise.errors import visible
from turnwise.run import commands
from turnwise.training import checkpoint


def _complete_key(incomplete: str) -> Iterator[tuple[str, str]]:
    """Yield the keys that an override can begin with, for shell completion."""
    for key, meaning in known_keys().items():
        if key.startswith(incomplete):
            yield f"{key}=", meaning


app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Reinforcement learning of tool-calling language models, exact to the token.",
)
traces = typer.Typer(no_args_is_help=True, help="Convert trajectories to traces, and from them.")
app.add_typer(traces, name="trace")
Source = Annotated[Path, typer.Argument(metavar="SOURCE", help="A JSON Lines file.")]
Target = Annotated[Path, typer.Argument(metavar="TARGET", help="The JSON Lines file to write.")]
ConfigFile = Annotated[Path, typer.Argument(metavar="FILE", help="A YAML configuration.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[key.sub=value]...",
        help="Changes to the configuration.",
        autocompletion=_complete_key,
    ),
]
_NO_SIGNAL = (
    "; the problems may be too easy or too hard for this model, or the reward may not tell its "
    "answers apart"
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"turnwise {__version__}")
        raise typer.Exit


_ON_LINUX = ("train", "pipeline", "eval", "rollout", "serve", "doctor", "stuck")
"""Commands that need processes, engines or their stacks; the others read files on any system."""


@app.callback()
def options(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Parse the options before a command."""
    if context.invoked_subcommand in _ON_LINUX and not sys.platform.startswith("linux"):
        _print_error(
            f"turnwise: {context.invoked_subcommand} needs Linux, and this is {sys.platform}; "
            "view, show, export, config, plan, init and trace work here too",
            style="red",
        )
        raise typer.Exit(2)


@app.command()
def train(
    file: Annotated[
        str | None, typer.Argument(metavar="FILE", help="A YAML configuration; not with --resume.")
    ] = None,
    overrides: Overrides = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="A run's folder, to continue from its last whole checkpoint."),
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
    _run(lambda: _train(command.of(commands.config_of_run(resume, changes)), resume), command)


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
    """Evaluate the model on data.eval_path (or data.path), and save the trajectories."""
    command = _Command(debug)
    # commands.evaluate requires data.path only if data.eval_path is not set.
    optional = ("data.path",)
    _run(
        lambda: _evaluate(command.of(load_config(file, overrides or (), optional=optional))),
        command,
    )


@app.command()
def rollout(
    file: ConfigFile,
    overrides: Overrides = None,
    output: Annotated[
        Path | None, typer.Option(help="Output file; default: rollouts.jsonl in the run folder.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Sample the groups of data.path as training would, into a JSON Lines file."""
    command = _Command(debug)
    _run(lambda: _rollout(command.of(load_config(file, overrides or ())), output), command)


@app.command()
def serve(file: ConfigFile, overrides: Overrides = None, debug: Debug = False) -> None:
    """Serve the model to OpenAI and Anthropic clients, on serving.workers engines."""
    command, optional = _Command(debug), ("environment", "data.path")
    _run(lambda: _serve(command.of(load_config(file, overrides or (), optional=optional))), command)


@app.command()
def show(
    source: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run folder, or a file of trajectories.")
    ],
    problem: Annotated[
        str | None, typer.Argument(help="A problem's name or number: all its trajectories.")
    ] = None,
    step: Annotated[int | None, typer.Option(help="The step; default: the last one.")] = None,
    heldout: Annotated[bool, typer.Option(help="Those of the evaluation instead.")] = False,
    grep: Annotated[
        str | None, typer.Option(help="All trajectories in which this was said (a pattern).")
    ] = None,
    best: Annotated[int, typer.Option(min=0, help="Number of those with the highest reward.")] = 1,
    worst: Annotated[int, typer.Option(min=0, help="Number of those with the lowest.")] = 1,
    debug: Debug = False,
) -> None:
    """Print what was said in a run, and what it earned."""

    async def read() -> None:
        from turnwise.observe import conversations
        from turnwise.observe.alarms import alarms_of_run
        from turnwise.observe.conversations import Overview

        path = conversations.trajectory_file(source, step, heldout)
        found = conversations.select(conversations.read_trajectories(path), problem, grep)
        console = Console()
        if problem is None and grep is None:
            conversations.show(console, Overview.of(found, best, worst))
            for alarm in alarms_of_run(source) if source.is_dir() else ():
                _print(console, f"alarm at step {alarm.step}: {alarm.message}")
        else:
            conversations.show_all(console, found)
        _print(console, str(path))

    _run(read, _Command(debug))


@app.command()
def view(
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="RUN...", help="Run folders, compared.")
    ] = None,
    demo: Annotated[bool, typer.Option(help="Two small recorded runs, to look around.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="By default, a free one.")] = 0,
    export: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Write one page instead.")
    ] = None,
    step: Annotated[int | None, typer.Option(help="Its step; default: the last one.")] = None,
    heldout: Annotated[bool, typer.Option(help="The evaluation's trajectories instead.")] = False,
    trajectory: Annotated[
        int | None, typer.Option(help="One trajectory of the step, from 0; default: all.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Show runs in the browser, while they train or later; --export writes a page to send."""
    if not runs and (export is not None or not demo):
        raise typer.BadParameter("give a run's folder, such as runs/NAME, or --demo to look around")

    async def start() -> None:
        from turnwise.viewer.command import view as show_runs
        from turnwise.viewer.command import write_page

        console, folders = Console(), runs or []
        if export is None:
            await show_runs(folders, port, lambda address: _print(console, address), demo=demo)
            return
        await write_page(folders[0], export, step, heldout, trajectory)
        _print(console, str(export))

    _run(start, _Command(debug))


@app.command()
def export(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run's folder, or that of a checkpoint.")
    ],
    merged: Annotated[
        bool, typer.Option("--merged", help="Add a LoRA adapter to the model that it belongs to.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder to write; default: export, or merged, in the run's."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Write the trained model, or with LoRA the adapter, for other programs."""
    _run(lambda: _export(run, output, merged), _Command(debug))


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


@app.command()
def plan(
    file: ConfigFile,
    overrides: Overrides = None,
    gpus: Annotated[
        int | None, typer.Option(help="GPUs of the cluster; default: those of this machine.")
    ] = None,
    gpu_memory: Annotated[
        float | None, typer.Option(help="Memory of a GPU in GiB; default: that of this machine's.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Show what each device of a training run would hold; loads no weights."""

    async def start() -> None:
        from turnwise.observe.plan import print_plan  # imports torch

        config = load_config(file, overrides or (), optional=("environment", "data.path"))
        await run_in_thread(lambda: print_plan(config, gpus, gpu_memory))

    _run(start, _Command(debug))


@traces.command("export")
def export_traces(source: Source, target: Target, debug: Debug = False) -> None:
    """Write trajectories as OpenEnv's training traces."""
    _run(lambda: _convert("export_traces", "traces", source, target), _Command(debug))


@traces.command("import")
def import_traces(source: Source, target: Target, debug: Debug = False) -> None:
    """Write training traces, of Turnwise or another program, as trajectories."""
    _run(lambda: _convert("import_traces", "trajectories", source, target), _Command(debug))


operations.add_to(app, traces)


def main() -> None:
    """Run the command `turnwise`."""
    # User classes are imported from the working directory.
    sys.path.insert(0, os.getcwd())
    logs.to_terminal()
    run_to_the_end(app)


async def _train(config: Config, resume: Path | None = None) -> None:
    from turnwise.run.display import why_untrained

    console = Console()
    result = (
        await commands.train(config, console)
        if resume is None
        else await commands.resume(resume, config, console)
    )
    if why := why_untrained(result.metrics):
        no_signal = any(row.get("groups_without_signal") for row in result.metrics)
        _print(
            console, f"nothing was trained: {why}{_NO_SIGNAL if no_signal else ''}", style="yellow"
        )
    _print(
        console,
        f"{result.exactness}\nrun folder {result.folder}\npicture    {result.picture}",
    )


async def _pipeline(file: Path, changes: Sequence[str], command: _Command) -> None:
    from turnwise.compat.chatlearn.pipeline_file import read_pipeline_file

    read = await run_in_thread(lambda: read_pipeline_file(file, changes))
    config = command.of(read.config)
    for note in read.notes:
        _print_error(f"turnwise: {file}: {note}", style="yellow")
    run = commands.run_folder(config)
    saved = checkpoint.list_checkpoints(checkpoint.checkpoints_of(run))
    await _train(config, run if read.resumes and saved else None)


async def _evaluate(config: Config) -> None:
    from turnwise.observe.conversations import Overview
    from turnwise.observe.conversations import show as show_trajectories

    console, overview = Console(), Overview()
    evaluation = await commands.evaluate(config, console, on_group=overview.add_group)
    show_trajectories(console, overview)
    for name, summary in evaluation.environments.items():
        accuracy, reward = summary["accuracy"], summary["reward_mean"]
        _print(console, f"{name}: accuracy {accuracy:.4f}  reward {reward:.4f}")
    several = {k: v for k, v in evaluation.summary.items() if "@" in k and not k.endswith("@1")}
    if several:
        _print(console, "  ".join(f"{k} {v:.4f}" for k, v in several.items()))
    for name, value in evaluation.env.items():
        _print(console, f"{name} {value:.4f}")
    _print(
        console,
        f"accuracy (reward ≥ {config.eval.success_reward:g}) {evaluation.accuracy:.4f}  "
        f"reward {evaluation.summary['reward_mean']:.4f}  "
        f"trajectories {evaluation.finished}  dropped {dict(evaluation.dropped)}  "
        f"{evaluation.tokens_per_s:,.0f} tok/s\n{commands.run_folder(config) / 'eval.jsonl'}",
    )


async def _rollout(config: Config, output: Path | None) -> None:
    from turnwise.observe.conversations import Overview
    from turnwise.observe.conversations import show as show_trajectories

    console, path = Console(), output or commands.run_folder(config) / "rollouts.jsonl"
    overview = Overview()
    trajectories, dropped = await commands.rollout(
        config, console, path, on_group=overview.add_group
    )
    show_trajectories(console, overview)
    _print(console, f"{len(trajectories)} trajectories  dropped {dict(dropped)}\n{path}")


async def _serve(config: Config) -> None:
    console = Console()
    async with commands.serve(config, console) as server:
        _print(console, f"base URL {server.base_url}")
        for name, url in server.workers().items():
            _print(console, f"{name} {url}")
        await asyncio.Event().wait()  # until interrupted


async def _export(run: Path, output: Path | None, merged: bool) -> None:
    from turnwise.run.export import export_run

    written = await run_in_thread(lambda: export_run(run, output, merged=merged))
    _print(Console(), str(written))


async def _convert(name: str, what: str, source: Path, target: Path) -> None:
    from turnwise.trajectory import training_trace

    count = await run_in_thread(lambda: getattr(training_trace, name)(source, target))
    _print(Console(), f"{count} {what}\n{target}")


def _print(console: Console, text: str, style: str | None = None) -> None:
    console.print(visible(text), style=style, highlight=False, soft_wrap=True, markup=False)


async def _print_config(config: Config | None) -> None:
    sys.stdout.write(explain_config(config))
