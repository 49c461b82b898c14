"""Agents that are commands: one process for each trajectory.

A command gets the row as JSON on standard input and, unless it is long, as TURNWISE_PROBLEM. Its
environment holds the usual variables, those of `rollout.agent_env`, OPENAI_BASE_URL, OPENAI_MODEL
and OPENAI_API_KEY.
"""

import asyncio
import json
import os
import re
import shlex
import subprocess
from collections.abc import Sequence

from turnwise.core.children import kill_group, start_error
from turnwise.core.deadlines import StallClock
from turnwise.errors import InputError, TrajectoryError
from turnwise.rollout.problems import Row

_OUTPUT_CHARS = 500
"""Number of characters of a failed command's output in the error message."""
_OUTPUT_BYTES = 4 * _OUTPUT_CHARS
_OUTPUT_SECONDS = 5.0
"""Time to wait for the last output of a command that has exited; a process that left its group may
keep the pipe open."""
_MAX_ROW_BYTES = 65_536
"""Maximum size of a row in an environment variable; Linux allows 128 KiB."""
_INHERITED = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|TERM|TZ|LANG|LANGUAGE|LC_\w+|TMPDIR|TMP|TEMP|XDG_\w+"
    r"|PYTHON\w*|VIRTUAL_ENV|CONDA_\w+|NODE_PATH|LD_LIBRARY_PATH|SSL_CERT_FILE|SSL_CERT_DIR"
)
"""Variables that an agent's command inherits; none is likely to be a secret."""
_started: set[str] = set()
"""Commands that this process has started."""


def clean_environment(more: Sequence[str], **own: str) -> dict[str, str]:
    """Return the environment of an agent's process.

    Args:
        more: `rollout.agent_env`.
        own: Further variables.

    Raises:
        InputError: when a variable of `rollout.agent_env` is not set.

    Example:
        >>> clean_environment(["SEARCH_API_KEY"], OPENAI_BASE_URL=base_url)
    """
    for name in more:
        if name not in os.environ:
            raise InputError(f"rollout.agent_env names {name}, which is not set: export it")
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name in more or _INHERITED.fullmatch(name)
    }
    # The random name in the base URL is the key.
    return inherited | {"OPENAI_API_KEY": "none"} | own


async def run_command(
    command: str, environment: dict[str, str], row: Row, clock: StallClock
) -> None:
    """Run a command to its end; it is killed if this call is cancelled.

    Raises:
        InputError: when the command does not exist, and never did.
        TrajectoryError: when it fails; the message contains the end of its output.

    Example:
        >>> await run_command("node my_agent.js", environment, row, context.clock)
    """
    problem = json.dumps(row).encode()
    if len(problem) <= _MAX_ROW_BYTES:
        environment = environment | {"TURNWISE_PROBLEM": problem.decode()}
    try:
        transport, process = await asyncio.get_running_loop().subprocess_exec(
            lambda: Command(clock),
            *shlex.split(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        what = f"rollout.agent: {command}"
        raise start_error(error, what, "agent_error", command not in _started) from error
    _started.add(command)
    try:
        stdin = transport.get_pipe_transport(0)
        assert isinstance(stdin, asyncio.WriteTransport)
        stdin.write(problem)
        stdin.write_eof()
        await process.exited.wait()
    finally:
        # Also its children, which may keep its output open.
        kill_group(transport.get_pid(), transport.get_returncode() is not None)
        try:
            async with asyncio.timeout(_OUTPUT_SECONDS):
                await process.read.wait()
        except TimeoutError:
            pass
        finally:
            transport.close()
    if status := transport.get_returncode():
        text = process.end.decode(errors="replace").strip()[-_OUTPUT_CHARS:]
        raise TrajectoryError("agent_error", f"{command} exited with {status}: {text}")


class Command(asyncio.SubprocessProtocol):
    """A process, and the end of its output.

    Example:
        >>> await loop.subprocess_exec(lambda: Command(clock), "node", "my_agent.js")
    """

    def __init__(self, clock: StallClock) -> None:
        self._clock = clock
        self.end = b""
        self.exited = asyncio.Event()
        self.read = asyncio.Event()
        """Set when all of its output has been read."""

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self._clock.moved()
        self.end = (self.end + data)[-_OUTPUT_BYTES:]

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if fd == 1:
            self.read.set()

    def process_exited(self) -> None:
        self.exited.set()
