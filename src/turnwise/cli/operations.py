"""The commands around a run: init, doctor, stuck, trace timeline."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from turnwise.cli.command import Command
from turnwise.cli.command import run as run_command
from turnwise.config import Config, load_config
from turnwise.core.aio import run_in_thread
from turnwise.core.deadlines import deadline
from turnwise.errors import TurnwiseError, visible

if TYPE_CHECKING:
    from turnwise.observe.doctor import Finding

_ROLLOUT_SECONDS = 900.0
_ROLLOUT_PROBLEMS = 4

Debug = Annotated[bool, typer.Option("--debug", help="Print the traceback of an error.")]


def add_to(app: typer.Typer, traces: typer.Typer) -> None:
    """Add the commands of this module to the command line."""
    app.command()(init)
    app.command()(doctor)
    app.command()(stuck)
    traces.command()(timeline)


def init(
    name: Annotated[Path, typer.Argument(metavar="NAME", help="The folder to make.")],
    model: Annotated[
        str | None,
        typer.Option(
            help="Folder or Hugging Face name; default: the demo's in a clone, else Qwen3-0.6B."
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Make a project that trains at once: environment, data, configuration, test, README."""

    async def make() -> None:
        from turnwise.run.project import make_project

        files = await run_in_thread(lambda: make_project(name, model))
        lines = [*map(str, files), "", f"cd {name}", "turnwise train config.yaml"]
        Console().print("\n".join(lines), highlight=False, soft_wrap=True, markup=False)

    run_command(make, Command(debug))


def doctor(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="A YAML configuration; without one, this machine."),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[key.sub=value]...", help="Changes to it.")
    ] = None,
    rollout: Annotated[
        bool, typer.Option("--rollout", help="Also start an engine and play some problems.")
    ] = False,
    clean: Annotated[
        bool, typer.Option("--clean", help="Remove what killed engines left in shared memory.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Check that everything is ready; name the command that mends what is not."""
    command, found = Command(debug), list["Finding"]()
    if rollout and file is None:
        raise typer.BadParameter("--rollout plays the problems of a FILE")
    run_command(lambda: _examine(file, overrides or [], rollout, clean, command, found), command)
    if any(finding.state == "broken" for finding in found):
        raise typer.Exit(1)


def stuck(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    debug: Debug = False,
) -> None:
    """Print what a run waits for, and the stacks of all of its processes."""

    async def read() -> None:
        from turnwise.core.stacks import ask

        typer.echo(visible(await run_in_thread(lambda: ask(run))), nl=False)

    run_command(read, Command(debug))


def timeline(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="The JSON file to write.")],
    step: Annotated[int | None, typer.Option(help="The step; default: the last one.")] = None,
    heldout: Annotated[bool, typer.Option("--heldout", help="The evaluation's turns.")] = False,
    debug: Debug = False,
) -> None:
    """Write when a step's turns were sampled, for Perfetto and other trace viewers."""

    async def write() -> None:
        from turnwise.observe.timeline import write_timeline

        count = await run_in_thread(lambda: write_timeline(run, step, target, heldout))
        Console().print(f"{count} turns\n{target}", highlight=False, soft_wrap=True, markup=False)

    run_command(write, Command(debug))


async def _examine(
    file: Path | None,
    overrides: list[str],
    rollout: bool,
    clean: bool,
    command: Command,
    found: "list[Finding]",
) -> None:
    from turnwise.observe.doctor import (
        ConfigChecks,
        Finding,
        examine,
        machine_checks,
        print_finding,
        verdict,
    )

    console, config = Console(), None

    def report(finding: Finding) -> None:
        found.append(finding)
        print_finding(console, finding)

    if file is not None:
        try:
            config = command.of(load_config(file, overrides))
            report(Finding("configuration", "ok", str(file)))
        except TurnwiseError as error:
            report(Finding("configuration", "broken", str(error)))
    checks = machine_checks(None if config is None else config.ray_address, clean)
    if config is not None:
        checks += ConfigChecks(config).all
    findings = examine(checks)
    while (finding := await run_in_thread(lambda: next(findings, None))) is not None:
        report(finding)
    if rollout and config is not None:
        report(await _play(config, console))
    console.print(verdict(found), highlight=False)


async def _play(config: Config, console: Console) -> "Finding":
    """Play some problems on an engine, print the best and the worst, and compare the rewards."""
    from turnwise.observe.conversations import Overview, show
    from turnwise.observe.doctor import Finding, spread
    from turnwise.run import commands

    few = config.with_row_limit(_ROLLOUT_PROBLEMS)
    try:
        async with deadline(_ROLLOUT_SECONDS, "the first problems were not played"):
            trajectories, dropped = await commands.rollout(few, console, None)
    except TurnwiseError as error:
        return Finding("rollout", "broken", str(error))
    show(console, Overview.of(trajectories))
    return spread(trajectories, dropped)
