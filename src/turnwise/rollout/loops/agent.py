"""The loop for HTTP agents, which get a base URL and a problem and need no code of Turnwise.

An agent is a function `package.module:name(base_url, problem)`, async or not, or a command. A
command gets the row as JSON on standard input and, unless it is long, as TURNWISE_PROBLEM. Its
environment holds the usual variables, those of `rollout.agent_env`, OPENAI_BASE_URL, OPENAI_MODEL
and OPENAI_API_KEY. The requests to the base URL become the trajectory's turns. The URL contains a
secret random name, so an agent cannot reach another's trajectory.
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

from turnwise.core.aio import run_in_thread
from turnwise.core.deadlines import StallClock
from turnwise.core.user_code import call_user_code
from turnwise.core.watchdog import waiting
from turnwise.errors import InputError, TrajectoryError
from turnwise.rollout.agent_loop import RolloutContext
from turnwise.rollout.environment import Environment, load_object
from turnwise.rollout.problems import Row

_FUNCTION = re.compile(r"[\w.]+:\w+")
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


class HttpAgentLoop:
    """Passes the URL of a session to an agent, and waits until it returns or exits.

    Example:
        rollout:
          loop: agent
          agent: python my_agent.py      # or my_package.my_module:run
    """

    async def run(self, environment: Environment, context: RolloutContext) -> None:
        """Run the agent of one trajectory; its requests become the turns.

        Raises:
            TrajectoryError: `agent_error`, when a command fails; `agent_silent`, when nothing was
                sampled.
        """
        agent, server, rollout = context.rollout.agent, context.server, context.rollout
        if agent is None:
            raise InputError(
                "rollout.loop agent needs rollout.agent: package.module:function, or a command"
            )
        if server is None:
            raise InputError("rollout.loop agent needs the OpenAI server, which is not running")
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
                    variables = _environment(rollout.agent_env, base_url, server.model_name)
                    await _run_command(agent, variables, context.row, context.clock)
        finally:
            server.sessions.close(session.id)
        session.finish()
        if session.lost_turns:
            context.trajectory.events["lost_turn"] += session.lost_turns
        if not context.trajectory.turns:
            raise TrajectoryError(
                "agent_silent", f"the agent of {context.request_id} sampled nothing"
            )


async def _call_function(agent: str, base_url: str, row: Row) -> None:
    function = await run_in_thread(lambda: load_object(agent, "rollout.agent"))
    # A copy: the environment computes the reward from the original row.
    await call_user_code(function, base_url, copy.deepcopy(row), name=f"the agent {agent}")


def _environment(more: Sequence[str], base_url: str, model: str) -> dict[str, str]:
    """Return the environment of an agent's command.

    Raises:
        InputError: when a variable of `rollout.agent_env` is not set.
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
    command: str, environment: dict[str, str], row: Row, clock: StallClock
) -> None:
    """Run a command to its end; it is killed if this call is cancelled.

    Raises:
        InputError: when the command does not exist.
        TrajectoryError: when it fails; the message contains the end of its output.
    """
    problem = json.dumps(row).encode()
    if len(problem) <= _MAX_ROW_BYTES:
        environment = environment | {"TURNWISE_PROBLEM": problem.decode()}
    try:
        transport, process = await asyncio.get_running_loop().subprocess_exec(
            lambda: _Command(clock),
            *shlex.split(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    except (FileNotFoundError, PermissionError, ValueError) as error:
        raise InputError(f"rollout.agent: {command} cannot be started: {error}") from error
    except OSError as error:
        raise TrajectoryError("agent_error", f"{command} cannot be started: {error}") from error
    try:
        stdin = transport.get_pipe_transport(0)
        assert isinstance(stdin, asyncio.WriteTransport)
        stdin.write(problem)
        stdin.write_eof()
        await process.exited.wait()
    finally:
        with suppress(ProcessLookupError):  # also its children, which may keep its output open
            os.killpg(transport.get_pid(), signal.SIGKILL)
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


class _Command(asyncio.SubprocessProtocol):
    """A process, and the end of its output."""

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
