"""An agent that knows nothing of turnwise: it gets a base URL and a problem, and talks HTTP.

It is a function `package.module:name(base_url, problem)`, async or not, or a command. A command
gets the row as JSON on standard input and, unless it is long, as TURNWISE_PROBLEM, and an
environment of the usual variables, those of `rollout.agent_env`, OPENAI_BASE_URL, OPENAI_MODEL and
OPENAI_API_KEY. What it samples through the base URL becomes the trajectory. The URL holds a random
name that nobody else knows, so no agent reaches another's trajectory.
"""

import asyncio
import copy
import json
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from turnwise.deadlines import StallClock
from turnwise.errors import InputError, TrajectoryError
from turnwise.rollout.agent_loop import RolloutContext
from turnwise.rollout.environment import Environment, load_object
from turnwise.tasks import call_user_code, run_in_thread
from turnwise.watchdog import waiting

_FUNCTION = re.compile(r"[\w.]+:\w+")
_SAID = 500
"""Characters of a failed command's output in its message."""
_SAID_BYTES = 4 * _SAID
_OUTPUT_SECONDS = 5.0
"""For the last output of a command that has ended; a process that left its group may hold it."""
_LONG_ROW = 65_536
"""Bytes of a row that is left out of the environment, where Linux takes 128 KiB."""
_INHERITED = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|TERM|TZ|LANG|LANGUAGE|LC_\w+|TMPDIR|TMP|TEMP|XDG_\w+"
    r"|PYTHON\w*|VIRTUAL_ENV|CONDA_\w+|NODE_PATH|LD_LIBRARY_PATH|SSL_CERT_FILE|SSL_CERT_DIR"
)
"""What an agent's command inherits: nothing that is likely to be a secret."""


class HttpAgentLoop:
    async def run(self, environment: Environment, context: RolloutContext) -> None:
        agent, server, rollout = context.rollout.agent, context.server, context.rollout
        if agent is None:
            raise InputError(
                "rollout.loop agent wants rollout.agent: package.module:function, or a command"
            )
        if server is None:
            raise InputError("rollout.loop agent wants the OpenAI server, which is not running")
        session = server.sessions.open_private(
            context.trajectory,
            sampling=context.sampling,
            group=context.route.group if context.route is not None else "",
            agent_rewards=rollout.agent_rewards,
        )
        session.clock = context.clock
        base_url = server.session_url(session.id)
        try:
            with context.timed("agent"), waiting(context.request_id, "agent"):
                if _FUNCTION.fullmatch(agent):
                    await _call_function(agent, base_url, context.row)
                else:
                    given = _environment(rollout.agent_env, base_url, server.model_name)
                    await _run_command(agent, given, context.row, context.clock)
        finally:
            server.sessions.close(session.id)
        session.finish()
        if session.lost_turns:
            context.trajectory.events["lost_turn"] += session.lost_turns
        if not context.trajectory.turns:
            raise TrajectoryError(
                "agent_silent", f"the agent of {context.request_id} sampled nothing"
            )


async def _call_function(agent: str, base_url: str, problem: dict[str, Any]) -> None:
    function = await run_in_thread(lambda: load_object(agent, "rollout.agent"))
    # The environment keeps the row itself, to judge by.
    await call_user_code(function, base_url, copy.deepcopy(problem), name=f"the agent {agent}")


def _environment(more: Sequence[str], base_url: str, model: str) -> dict[str, str]:
    """The environment of an agent's command.

    Raises:
        InputError: when a variable that it should have is not set.
    """
    for name in more:
        if name not in os.environ:
            raise InputError(f"rollout.agent_env names {name}, which is not set: export it")
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name in more or _INHERITED.fullmatch(name)
    }
    return inherited | {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_MODEL": model,
        "OPENAI_API_KEY": "none",  # the random name in the URL is the key
    }


async def _run_command(
    command: str, given: dict[str, str], problem: dict[str, Any], clock: StallClock
) -> None:
    """Run a command to its end; it is killed when the trajectory's time is over.

    Raises:
        InputError: when there is no such command.
        TrajectoryError: when it fails; the message holds the end of its output.
    """
    row = json.dumps(problem).encode()
    if len(row) <= _LONG_ROW:
        given = given | {"TURNWISE_PROBLEM": row.decode()}
    try:
        transport, process = await asyncio.get_running_loop().subprocess_exec(
            lambda: _Command(clock),
            *shlex.split(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=given,
            start_new_session=True,
        )
    except (FileNotFoundError, PermissionError, ValueError) as error:
        raise InputError(f"rollout.agent: {command} cannot be started: {error}") from error
    except OSError as error:
        raise TrajectoryError("agent_error", f"{command} cannot be started: {error}") from error
    try:
        stdin = transport.get_pipe_transport(0)
        assert isinstance(stdin, asyncio.WriteTransport)
        stdin.write(row)
        stdin.write_eof()
        await process.exited.wait()
    finally:
        with suppress(ProcessLookupError):  # its children too, which may hold its output open
            os.killpg(transport.get_pid(), signal.SIGKILL)
        try:
            async with asyncio.timeout(_OUTPUT_SECONDS):
                await process.read.wait()
        except TimeoutError:
            pass
        finally:
            transport.close()
    if status := transport.get_returncode():
        text = process.end.decode(errors="replace").strip()[-_SAID:]
        raise TrajectoryError("agent_error", f"{command} exited with {status}: {text}")


class _Command(asyncio.SubprocessProtocol):
    """A process, and the end of its output."""

    def __init__(self, clock: StallClock) -> None:
        self._clock = clock
        self.end = b""
        self.exited = asyncio.Event()
        self.read = asyncio.Event()
        """All of its output was read."""

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self._clock.moved()
        self.end = (self.end + data)[-_SAID_BYTES:]

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if fd == 1:
            self.read.set()

    def process_exited(self) -> None:
        self.exited.set()
