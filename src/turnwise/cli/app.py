"""The command line itself, and the arguments that several commands have."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from turnwise import __version__
from turnwise.cli.command import print_error, run_to_the_end
from turnwise.config import known_keys
from turnwise.core import logs

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
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON value.")]
Step = Annotated[int | None, typer.Option(help="The step; default: the last one.")]


def complete_key(incomplete: str) -> list[tuple[str, str]]:
    """Complete a key of the configuration in a shell."""
    found = known_keys().items()
    return [(f"{key}=", text) for key, text in found if key.startswith(incomplete)]


Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[key.sub=value]...",
        help="Changes to the configuration.",
        autocompletion=complete_key,
    ),
]
ANYWHERE = ("view", "show", "export", "config", "plan", "docs", "explain", "init", "trace")
"""Commands that run on any system. The others need processes, engines or their stacks, and so
Linux."""


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
    name = context.invoked_subcommand
    if name not in (None, *ANYWHERE) and not sys.platform.startswith("linux"):
        print_error(
            f"turnwise: {name} needs Linux, and this is {sys.platform}; {', '.join(ANYWHERE)} work "
            "here too",
            style="red",
        )
        raise typer.Exit(2)


def main() -> None:
    """Run the command `turnwise`."""
    # User classes are imported from the working directory.
    sys.path.insert(0, os.getcwd())
    logs.to_terminal()
    run_to_the_end(app)
