"""The commands for runs that exist: they read a run's folder, or ask a run that is in progress."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from turnwise.cli.app import AsJson, Overrides, Run, Source, Step, Target, app, traces
from turnwise.cli.command import Command, command_of, print_json, print_text
from turnwise.core.aio import run_in_thread
from turnwise.errors import visible
from turnwise.run import commands


@command_of(app)
async def show(
    command: Command,
    source: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run folder, or a file of trajectories.")
    ],
    problem: Annotated[
        str | None, typer.Argument(help="A problem's name or number: all its trajectories.")
    ] = None,
    step: Step = None,
    heldout: Annotated[bool, typer.Option(help="Show the evaluation's instead.")] = False,
    grep: Annotated[
        str | None,
        typer.Option(help="Show all trajectories whose messages match this regular expression."),
    ] = None,
    best: Annotated[int, typer.Option(min=0, help="Number of those with the highest reward.")] = 1,
    worst: Annotated[int, typer.Option(min=0, help="Number of those with the lowest.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Print conversations of a run, with their rewards."""
    from turnwise.observe import conversations
    from turnwise.observe.alarms import alarms_of_run

    path = conversations.trajectory_file(source, step, heldout)
    found = conversations.select(conversations.read_trajectories(path), problem, grep)
    if as_json:
        print_json([json.loads(each.to_json()) for each in found])
        return
    if problem is None and grep is None:
        conversations.show(Console(), conversations.Overview.of(found, best, worst))
        for alarm in alarms_of_run(source) if source.is_dir() else ():
            print_text(f"alarm at step {alarm.step}: {alarm.message}")
    else:
        conversations.show_all(Console(), found)
    print_text(str(path))


@command_of(app)
async def view(
    command: Command,
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
) -> None:
    """Show runs in the browser, while they train or later; --export writes a page to send."""
    if not runs and (export is not None or not demo):
        raise typer.BadParameter("give a run's folder, such as runs/NAME, or --demo to look around")
    from turnwise.viewer import server

    folders = runs or []
    if export is None:
        await server.view(folders, port, print_text, demo=demo)
        return
    await run_in_thread(server.write_page, folders[0], export, step, heldout, trajectory)
    print_text(str(export))


@command_of(app)
async def export(
    command: Command,
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a run, or of a checkpoint.")
    ],
    merged: Annotated[
        bool, typer.Option("--merged", help="Add a LoRA adapter to the model that it belongs to.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="Folder to write; default: export, or merged, in the run's.")
    ] = None,
) -> None:
    """Write the trained model, or with LoRA the adapter, for other programs."""
    written = await run_in_thread(lambda: commands.export_run(run, output, merged=merged))
    print_text(str(written))


@command_of(app)
async def replay(
    command: Command,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or a bundle's file.")],
    overrides: Overrides = None,
    step: Annotated[
        str | None, typer.Option(metavar="N or A-B", help="The steps; default: the last one.")
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FUNCTION", help="A reward in place of the run's rewards."),
    ] = None,
    train: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write the weights after the steps as a checkpoint."),
    ] = None,
    numbers: Annotated[
        bool, typer.Option("--numbers/--no-numbers", help="Compute log-probs, loss and gradients.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Make steps again from a run's files, and compare them with what the run wrote; with other
    rewards or keys, show what changes."""
    from turnwise.run.replay import replay_steps

    changes = [*(overrides or ())]
    if reward is not None:
        changes.append(f"rollout.rewards=[{{function: {reward}}}]")
    made = await replay_steps(run, step, changes, numbers or train is not None, train)
    if as_json:
        print_json([each.to_json() for each in made.steps])
    else:
        for line in made.lines():
            print_text(line)
    if not changes and not all(each.equal for each in made.steps):
        raise typer.Exit(1)


@command_of(app)
async def whatif(
    command: Command,
    run: Run,
    problem: Annotated[str, typer.Argument(help="The problem's name or number.")],
    overrides: Overrides = None,
    step: Step = None,
    sample: Annotated[int, typer.Option(min=0, help="The trajectory's number in its group.")] = 0,
    turn: Annotated[
        int | None,
        typer.Option(min=0, help="The first turn to sample; default: after the changed message."),
    ] = None,
    edit: Annotated[
        list[str] | None,
        typer.Option(metavar="N=TEXT", help="Another text of message N, counted from 0."),
    ] = None,
    n: Annotated[int, typer.Option("-n", min=1, help="Number of continuations.")] = 4,
    weights: Annotated[
        str, typer.Option(metavar="then|now", help="Weights before the step, or the last ones.")
    ] = "then",
    output: Annotated[
        Path | None, typer.Option(metavar="FILE.jsonl", help="Keep the continuations.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Continue a trajectory of a run from one of its turns, perhaps with another prompt or another
    answer of a tool; the run is only read."""
    from turnwise.run.display import SILENT, Display
    from turnwise.run.whatif import read_edits, what_if
    from turnwise.trajectory import write_jsonl

    if weights not in ("then", "now"):
        raise typer.BadParameter(f"--weights {weights}: choose then or now")
    console = Console()
    made = await what_if(
        *(run, problem, SILENT if as_json else Display(run.name, 0, console, 1.0)),
        step=step, sample=sample, turn=turn, edits=read_edits(edit or ()), n=n,
        weights="now" if weights == "now" else "then", overrides=overrides or (),
    )  # fmt: skip
    if output is not None:
        await run_in_thread(write_jsonl, output, made.made)
    if as_json:
        print_json(made.to_json())
    else:
        console.print(made.shown(), soft_wrap=True)
        if output is not None:
            print_text(str(output))


@command_of(app)
async def bundle(
    command: Command,
    run: Run,
    target: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="Default: RUN-step-N.zip.")
    ] = None,
    step: Step = None,
    weights: Annotated[
        bool, typer.Option("--weights", help="Add the last checkpoint before the step.")
    ] = False,
) -> None:
    """Write a step of a run into one file, which `turnwise replay` reads on another machine."""
    from turnwise.run.bundle import write_bundle

    print_text(str(await run_in_thread(lambda: write_bundle(run, step, target, weights=weights))))


@command_of(app)
async def stuck(command: Command, run: Run) -> None:
    """Print what a run waits for, and the stacks of all of its processes."""
    from turnwise.core.stacks import ask

    typer.echo(visible(await run_in_thread(lambda: ask(run))), nl=False)


@command_of(app)
async def scale(
    command: Command,
    run: Run,
    workers: Annotated[int, typer.Option(min=1, help="Number of engines from now on.")],
) -> None:
    """Change the number of engines of a run while it continues."""
    from turnwise.run.scaling import ask

    print_text(await run_in_thread(ask, run, workers))


@command_of(traces, "export")
async def export_traces(command: Command, source: Source, target: Target) -> None:
    """Write trajectories as OpenEnv's training traces."""
    from turnwise.trajectory import training_trace

    count = await run_in_thread(training_trace.export_traces, source, target)
    print_text(f"{count} traces\n{target}")


@command_of(traces, "import")
async def import_traces(command: Command, source: Source, target: Target) -> None:
    """Write training traces, of Turnwise or another program, as trajectories."""
    from turnwise.trajectory import training_trace

    count = await run_in_thread(training_trace.import_traces, source, target)
    print_text(f"{count} trajectories\n{target}")


@command_of(traces)
async def timeline(
    command: Command,
    run: Run,
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="The JSON file to write.")],
    step: Step = None,
    heldout: Annotated[bool, typer.Option("--heldout", help="The evaluation's turns.")] = False,
) -> None:
    """Write when a step's turns were sampled, for Perfetto and other trace viewers."""
    from turnwise.observe.timeline import write_timeline

    count = await run_in_thread(lambda: write_timeline(run, step, target, heldout))
    print_text(f"{count} turns\n{target}")
