"""An agent that knows nothing of turnwise: it gets a base URL and a problem, and talks HTTP.

It is an async function `package.module:name(base_url, problem)`, or a command, which finds them as
OPENAI_BASE_URL and TURNWISE_PROBLEM (the row as JSON) in its environment and the row on standard
input. What it samples through that URL becomes the trajectory; the environment's reward judges it
unless the agent has posted one to the session.
"""

import asyncio
import json
import os
import re
import shlex
import signal
from contextlib import suppress
from typing import Any

from turnwise.errors import InputError, TrajectoryError
from turnwise.rollout.agent_loop import RolloutContext
from turnwise.rollout.environment import Environment, load_object
from turnwise.watchdog import waiting

_FUNCTION = re.compile(r"[\w.]+:\w+")
_SAID = 500


class HttpAgentLoop:
    async def run(self, environment: Environment, context: RolloutContext) -> None:
        agent, server = context.rollout.agent, context.server
        if agent is None:
            raise InputError(
                "rollout.loop agent wants rollout.agent: package.module:function, or a command"
            )
        if server is None:
            raise InputError("rollout.loop agent wants the OpenAI server, which is not running")
        name = context.request_id
        group = context.route.group if context.route is not None else ""
        session = server.sessions.open(name, sampling=context.sampling, group=group)
        session.trajectory = context.trajectory
        base_url = server.session_url(name)
        try:
            with context.timed("agent"), waiting(name, "agent"):
                if _FUNCTION.fullmatch(agent):
                    await load_object(agent, "rollout.agent")(base_url, context.row)
                else:
                    await _run_command(agent, base_url, context.row)
        finally:
            server.sessions.close(name)
        session.finish()
        if session.lost_turns:
            context.trajectory.events["lost_turn"] += session.lost_turns
        if not context.trajectory.turns:
            raise TrajectoryError("agent_silent", f"the agent of {name} sampled nothing")


async def _run_command(command: str, base_url: str, problem: dict[str, Any]) -> None:
    """Run a command to its end; it is killed when the trajectory's time is over.

    Raises:
        TrajectoryError: when it fails; the message holds the end of what it said.
    """
    row = json.dumps(problem)
    given = {"OPENAI_BASE_URL": base_url, "TURNWISE_PROBLEM": row}
    process = await asyncio.create_subprocess_exec(
        *shlex.split(command),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={"OPENAI_API_KEY": "none", **os.environ, **given},
        start_new_session=True,
    )
    try:
        said, _ = await process.communicate(row.encode())
    finally:
        with suppress(ProcessLookupError):  # its children too, which may hold its output open
            os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        text = said.decode(errors="replace").strip()[-_SAID:]
        raise TrajectoryError("agent_error", f"{command} exited with {process.returncode}: {text}")
