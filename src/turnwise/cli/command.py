"""One command of the command line, from its start to its exit code.

An error that Turnwise raises, such as a user's mistake, ends in one sentence on standard error and
exit code 2. Ctrl-C and SIGTERM end the run and everything that it started, and exit with code 130.
The traceback of any other error (user code, a library, a bug) goes to errors.log in the run folder;
--debug prints it.
"""

import asyncio
import inspect
import json
import sys
import time
import traceback
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from datetime import datetime
from functools import wraps
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from turnwise.config import Config
from turnwise.core import aio
from turnwise.core.interrupt import (
    EXIT_INTERRUPTED,
    end_by_force_after,
    interruptible,
    kill_children,
)
from turnwise.core.user_code import stuck_calls, unreturned_calls, use_daemon_threads
from turnwise.errors import CompleteError, TurnwiseError, describe_error, visible

_Debug = Annotated[bool, typer.Option("--debug", help="Print the traceback of an error.")]
_EXIT_FAILED = 1
_EXIT_BAD_INPUT = 2
_FILE_CLOCK_SECONDS = 0.05  # largest lag of file times behind `time.time`
_END_SECONDS = 10.0  # deadline for closing the event loop when user code has not returned
_EXIT_SECONDS = 30.0  # deadline for the end of the interpreter, which joins threads


@dataclass(slots=True)
class Command:
    """One command in progress; reports the error that ends it."""

    debug: bool
    folder: Path | None = None  # the run folder; None until the configuration is read
    _began: float = field(default_factory=lambda: time.time() - _FILE_CLOCK_SECONDS)

    def of(self, config: Config) -> Config:
        """Remember a configuration's run folder, and return the configuration."""
        self.folder = config.run_folder
        return config

    def fail(self, error: Exception) -> int:
        """Print an error in one sentence, keep its traceback, and return the exit code."""
        if isinstance(error, CompleteError):
            print_error(f"turnwise: {error}")
            return 0
        expected = isinstance(error, TurnwiseError)
        message = str(error) if expected else f"unexpected {describe_error(error)}"
        print_error(f"turnwise: {message}", style="red")
        text = "".join(traceback.format_exception(error))
        log = None if self.folder is None else self.folder / "errors.log"
        if log is not None and (error.__cause__ is not None or not expected):
            try:
                log.parent.mkdir(parents=True, exist_ok=True)
                with log.open("a", encoding="utf-8", errors="replace") as file:
                    now = datetime.now().isoformat(" ", "seconds")
                    file.write(f"{now}\n{visible(text)}\n")
            except OSError:
                log = None
        if self.debug or (log is None and not expected):
            print_error(text.rstrip())
        elif log is not None and log.exists() and log.stat().st_mtime >= self._began:
            print_error(f"traceback: {log} (or --debug)")
        return _EXIT_BAD_INPUT if expected else _EXIT_FAILED


def print_text(text: str, style: str | None = None, *, stderr: bool = False) -> None:
    """Print lines, with control characters as escapes."""
    console = Console(stderr=stderr)
    console.print(visible(text), style=style, highlight=False, markup=False, soft_wrap=True)


def print_json(value: object) -> None:
    """Print a value as JSON, without control characters."""
    typer.echo(json.dumps(value, indent=1))


def print_error(text: str, style: str | None = None) -> None:
    print_text(text, style, stderr=True)


def command_of(
    group: typer.Typer, name: str | None = None
) -> Callable[[Callable[..., Coroutine[object, object, None]]], Callable[..., None]]:
    """Return a decorator that makes a command of a coroutine function and adds the option --debug.
    The function's first argument is its `Command`."""

    def register(work: Callable[..., Coroutine[object, object, None]]) -> Callable[..., None]:
        @wraps(work)
        def start(*, debug: bool, **values: object) -> None:
            command = Command(debug)
            code = aio.run(_exit_code(work(command, **values), command))
            if code:
                raise typer.Exit(code)

        given = [*inspect.signature(work).parameters.values()][1:]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        debug = inspect.Parameter("debug", kind, default=False, annotation=_Debug)
        vars(start)["__signature__"] = inspect.Signature([*given, debug])  # typer reads it
        return group.command(name)(start)

    return register


def run_to_the_end(app: Callable[[], object]) -> None:
    """Run the command line; end the process by force if it does not end by itself afterwards."""
    code: object = _EXIT_FAILED
    try:
        app()
        code = 0
    except SystemExit as error:
        code = error.code
        raise
    finally:
        number = code if isinstance(code, int) else int(code is not None)
        late = f"what it left behind did not end within {_EXIT_SECONDS:g} s and was killed"
        end_by_force_after(_EXIT_SECONDS, number, late)


async def _exit_code(work: Coroutine[object, object, None], command: Command) -> int:
    """Run a command, report how it ended, and return its exit code."""
    code, began = _EXIT_FAILED, time.monotonic()
    use_daemon_threads(asyncio.get_running_loop())
    try:
        await interruptible(work)
        code = 0
    except (typer.BadParameter, typer.Exit):
        raise
    except Exception as error:
        code = command.fail(error)
    except asyncio.CancelledError:
        code = EXIT_INTERRUPTED
        left = unreturned_calls()
        await aio.run_in_thread(kill_children)
        text = "turnwise: interrupted; everything it started has ended"
        print_error(text + (f", but {left}" if left else ""))
    finally:
        if left := stuck_calls(began):
            if code != EXIT_INTERRUPTED:
                print_error(f"turnwise: {left}")
            # A call that swallows its cancellation would keep the event loop open for ever.
            sys.stdout.flush()
            end_by_force_after(_END_SECONDS, code)
    return code
