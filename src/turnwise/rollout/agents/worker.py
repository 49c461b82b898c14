"""Agents in a long-lived worker: one process, usually of another virtual environment, that plays
any number of trajectories at once.

The process speaks the protocol of `turnwise.agent_worker`. It is started for the first trajectory.
If it ends, the trajectories in flight fail, and the next one starts it again.
"""

import asyncio
import itertools
import json
import logging
import os
import shlex
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress

from turnwise.core.json_types import JsonObject
from turnwise.errors import InputError, TrajectoryError
from turnwise.rollout.agents.command import clean_environment
from turnwise.rollout.agents.report import AgentReport, read_report

logger = logging.getLogger(__name__)

_LINE_BYTES = 16 << 20
"""Maximum length of one line of the worker."""
_OUTPUT_CHARS = 500
"""Number of characters of the worker's last output in the error message."""
_END_SECONDS = 5.0
"""Time for the worker's last output, and for its end after its input was closed."""
_TASKS_SECONDS = 600.0


class AgentWorker:
    """One worker process, and the requests that it plays.

    Args:
        command: The worker's command.
        more_environment: `rollout.agent_env`.

    Example:
        >>> worker = AgentWorker(".venv-agent/bin/python my_agent.py")
        >>> report = await worker.run({"task": row, "base_url": base_url})
        >>> await worker.close()
    """

    def __init__(self, command: str, more_environment: Sequence[str] = ()) -> None:
        self._command = command
        self._more_environment = more_environment
        self._ids = itertools.count(1)
        self._process: _Process | None = None
        self._starting = asyncio.Lock()

    @property
    def name(self) -> str:
        """The worker in messages."""
        return f"the agent worker {self._command}"

    async def run(self, request: JsonObject) -> AgentReport:
        """Have a task played, and return its report. A cancelled call cancels the task.

        Args:
            request: `task`, `base_url`, `model` and `name`.

        Raises:
            InputError: when the worker cannot be started.
            TrajectoryError: `agent_error`, when the agent fails; `agent_crashed`, when the worker
                ends; `agent_reply`, when the report cannot be used.
        """
        async with self._starting:
            if self._process is None or self._process.ended:
                environment = clean_environment(self._more_environment)
                self._process = await _Process.start(self._command, environment, self.name)
        value = await self._process.ask(next(self._ids), {"method": "run", **request})
        return read_report(value, self.name)

    async def close(self) -> None:
        """End the process, and its process group."""
        if self._process is not None:
            await self._process.close()


class _Process:
    """One life of a worker."""

    def __init__(self, process: asyncio.subprocess.Process, name: str) -> None:
        self._process = process
        self._name = name
        self._asked: dict[int, asyncio.Future[object]] = {}
        self._tail = ""
        self.ended = False
        """True once it answers nothing more."""
        self._logging = asyncio.create_task(self._log())
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, command: str, environment: dict[str, str], name: str) -> "_Process":
        """Start the process.

        Raises:
            InputError: when the command does not exist.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                *shlex.split(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                start_new_session=True,
                limit=_LINE_BYTES,
            )
        except (OSError, ValueError) as error:
            raise InputError(f"rollout.agent: {command} cannot be started: {error}") from error
        return cls(process, name)

    async def ask(self, number: int, request: JsonObject) -> object:
        """Return the result of a request.

        Raises:
            TrajectoryError: as `AgentWorker.run` does.
        """
        self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            await self._send({"id": number, **request})
            return await self._asked[number]
        except asyncio.CancelledError:
            if not self.ended:
                with suppress(ConnectionError):
                    self._write({"id": number, "method": "cancel"})
            raise
        except ConnectionError:  # it has ended: the reader says how
            return await self._asked[number]
        finally:
            del self._asked[number]

    async def _send(self, message: JsonObject) -> None:
        self._write(message)
        assert self._process.stdin is not None
        await self._process.stdin.drain()

    def _write(self, message: JsonObject) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _read(self) -> None:
        """Pass the answers on until the process ends."""
        assert self._process.stdout is not None
        why = ""
        try:
            while line := await self._process.stdout.readline():
                self._answer(line)
        except ValueError:  # of the stream's limit
            why = f" wrote a line of more than {_LINE_BYTES:,} bytes"
        finally:
            self.ended = True
            self._kill()
        status = await self._process.wait()
        await asyncio.wait([self._logging], timeout=_END_SECONDS)
        why = why or f" ended with {status}"
        text = self._tail.strip()[-_OUTPUT_CHARS:]
        for future in self._asked.values():
            if not future.done():
                future.set_exception(TrajectoryError("agent_crashed", f"{self._name}{why}: {text}"))

    def _answer(self, line: bytes) -> None:
        try:
            answer = json.loads(line)
            future = self._asked.get(answer["id"])
        except (ValueError, TypeError, KeyError, RecursionError):
            logger.warning("%s wrote a line that is no answer: %.200r", self._name, line)
            return
        if future is None or future.done():  # its trajectory has ended
            return
        if "error" in answer:
            error = str(answer["error"])[:_OUTPUT_CHARS]
            future.set_exception(TrajectoryError("agent_error", f"{self._name}: {error}"))
        else:
            future.set_result(answer.get("result"))

    async def _log(self) -> None:
        assert self._process.stderr is not None
        while piece := await self._process.stderr.read(4_096):
            text = piece.decode(errors="replace")
            self._tail = (self._tail + text)[-2 * _OUTPUT_CHARS :]
            for line in text.splitlines():
                logger.info("%s: %s", self._name, line)

    def _kill(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def close(self) -> None:
        """Close its input, which ends it, and kill what has not ended in time."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await asyncio.wait([self._reading], timeout=_END_SECONDS)
        self._kill()
        await asyncio.wait([self._reading, self._logging], timeout=_END_SECONDS)
        for task in (self._reading, self._logging):
            task.cancel()


def worker_tasks(command: str) -> list[JsonObject]:
    """Return the rows that a worker's `tasks` lists.

    Raises:
        InputError: when the worker cannot be started, fails, or lists no rows.

    Example:
        rows = worker_tasks(".venv-agent/bin/python my_agent.py")
    """
    where = f"data.path: the agent worker {command}"
    try:
        done = subprocess.run(
            shlex.split(command),
            input=b'{"id": 0, "method": "tasks"}\n',
            capture_output=True,
            timeout=_TASKS_SECONDS,
            env=clean_environment(()),
        )
    except (OSError, ValueError) as error:
        raise InputError(f"{where} cannot be started: {error}") from error
    except subprocess.TimeoutExpired:
        raise InputError(f"{where} listed no tasks within {_TASKS_SECONDS:g} s") from None
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
        rows = answer["result"]
    except (ValueError, IndexError, KeyError, TypeError):
        text = done.stderr.decode(errors="replace").strip()[-_OUTPUT_CHARS:]
        raise InputError(
            f"{where} listed no tasks, and ended with {done.returncode}: {text}"
        ) from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise InputError(f"{where}: tasks must be a list of objects")
    return rows
