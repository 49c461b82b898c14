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
import re
import selectors
import shlex
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NotRequired

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from turnwise.core.children import exited, kill_group, start_error
from turnwise.core.foreign_lines import ForeignLines
from turnwise.core.json_types import JsonObject
from turnwise.core.untrusted import MAX_BYTES, AnswerError, read_answer, read_line
from turnwise.errors import InputError, TrajectoryError
from turnwise.rollout.agents.command import clean_environment
from turnwise.rollout.agents.report import AgentReport, read_report

logger = logging.getLogger(__name__)

_OUTPUT_CHARS = 500
"""Number of characters of the worker's last output in the error message."""
_END_SECONDS = 5.0
"""Time for the worker's last output, and for its end after its input was closed."""
_TASKS_SECONDS = 600.0
_TASKS_BYTES = 256 << 20
"""Maximum size of a list of tasks, and of what is written beside it."""
_TASKS_VALUES = 20_000_000


class _Answer(TypedDict):
    """A line of the worker."""

    id: int
    result: NotRequired[object]
    error: NotRequired[object]


class _Tasks(TypedDict):
    """The line with a worker's tasks."""

    result: list[JsonObject]


_ANSWER = TypeAdapter(_Answer)
_TASKS = TypeAdapter(_Tasks)
_BEGINNING = re.compile(rb'\s*\{\s*"id"\s*:\s*(\d{1,18})\s*[,}]')
"""Beginning of an answer that cannot be read: it names the trajectory that must not wait."""


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
        self._started = False
        """Whether it has ever started."""

    @property
    def name(self) -> str:
        """The worker in messages."""
        return f"the agent worker {self._command}"

    async def run(self, request: JsonObject) -> AgentReport:
        """Have a task played, and return its report. A cancelled call cancels the task.

        Args:
            request: `task`, `base_url`, `model` and `name`.

        Raises:
            InputError: when the worker cannot be started, and never was.
            TrajectoryError: `agent_error`, when the agent fails; `agent_crashed`, when the worker
                ends or cannot be started now; `agent_reply`, when the report cannot be used.
        """
        async with self._starting:
            if self._process is None or self._process.ended:
                environment = clean_environment(self._more_environment)
                self._process = await self._start(environment)
                self._started = True
        value = await self._process.ask(next(self._ids), {"method": "run", **request})
        return read_report(value, self.name)

    async def _start(self, environment: dict[str, str]) -> "_Process":
        try:
            process = await asyncio.create_subprocess_exec(
                *shlex.split(self._command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                start_new_session=True,
                limit=MAX_BYTES,
            )
        except (OSError, ValueError) as error:
            what = f"rollout.agent: {self._command}"
            raise start_error(error, what, "agent_crashed", not self._started) from error
        return _Process(process, self.name)

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
        self._tail = b""
        self.ended = False
        """True once it answers nothing more."""
        self._logging = asyncio.create_task(self._log())
        self._reading = asyncio.create_task(self._read())

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
        """Pass the answers on until the process ends; then nobody waits for one any more."""
        passing = asyncio.create_task(self._pass_on())
        exit_ = asyncio.create_task(exited(self._process))
        why = ""
        try:
            # A process that left the group may hold its output open.
            await asyncio.wait([passing, exit_], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([passing], timeout=_END_SECONDS)
            self.ended = True
            self._kill()
            await exited(self._process, _END_SECONDS)
            await asyncio.wait([self._logging], timeout=_END_SECONDS)
            why = passing.result() if passing.done() else ""
        finally:
            self.ended = True
            for task in (passing, exit_):
                task.cancel()
            why = why or f" ended with {self._process.returncode}"
            text = self._tail.decode(errors="replace").strip()[-_OUTPUT_CHARS:]
            error = TrajectoryError("agent_crashed", f"{self._name}{why}: {text}")
            for future in self._asked.values():
                if not future.done():
                    future.set_exception(error)
            # Closes the pipes, which others may hold open.
            self._process._transport.close()  # type: ignore[attr-defined]

    async def _pass_on(self) -> str:
        """Pass the answers on until the output ends; return what is wrong with it, or ""."""
        assert self._process.stdout is not None
        others = ForeignLines(logger, f"{self._name} wrote a line that is no answer")
        try:
            while line := await read_line(self._process.stdout):
                if not self._answer(line):
                    others.add(line)
        except (AnswerError, OSError) as error:
            return f" {error}"
        finally:
            others.end()
        return ""

    def _answer(self, line: bytes) -> bool:
        """Pass a line on; return whether it is an answer."""
        try:
            answer = read_answer(line, _ANSWER)
        except AnswerError as error:
            number = _BEGINNING.match(line)
            future = None if number is None else self._asked.get(int(number[1]))
            if future is not None and not future.done():
                future.set_exception(TrajectoryError("agent_reply", f"{self._name} {error}"))
            return future is not None
        future = self._asked.get(answer["id"])
        if future is None or future.done():  # its trajectory has ended
            return True
        if "error" in answer:
            why = str(answer["error"])[:_OUTPUT_CHARS]
            future.set_exception(TrajectoryError("agent_error", f"{self._name}: {why}"))
        else:
            future.set_result(answer.get("result"))
        return True

    async def _log(self) -> None:
        assert self._process.stderr is not None
        lines = ForeignLines(logger, self._name)
        while piece := await self._process.stderr.read(65_536):
            self._tail = (self._tail + piece)[-4 * _OUTPUT_CHARS :]
            lines.add(piece)
        lines.end()

    def _kill(self) -> None:
        kill_group(self._process.pid, self._process.returncode is not None)

    async def close(self) -> None:
        """Close its input, which ends it, and kill what has not ended in time."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await asyncio.wait([self._reading], timeout=_END_SECONDS)
        self._kill()
        await asyncio.wait([self._reading, self._logging], timeout=_END_SECONDS)
        for task in (self._reading, self._logging):
            task.cancel()


def worker_tasks(command: str, more_environment: Sequence[str] = ()) -> list[JsonObject]:
    """Return the rows that a worker's `tasks` lists.

    Args:
        more_environment: `rollout.agent_env`.

    Raises:
        InputError: when the worker cannot be started, fails, or lists no rows.

    Example:
        rows = worker_tasks(".venv-agent/bin/python my_agent.py", ["TASKS_TOKEN"])
    """
    where = f"data.path: the agent worker {command}"
    try:
        process = subprocess.Popen(
            shlex.split(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=clean_environment(more_environment),
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        raise InputError(f"{where} cannot be started: {error}") from error
    try:
        with process:
            try:
                said, errors = _communicate(process, b'{"id": 0, "method": "tasks"}\n')
                status = process.wait(_END_SECONDS)
            finally:
                kill_group(process.pid, process.returncode is not None)
    except (subprocess.TimeoutExpired, TimeoutError):
        raise InputError(f"{where} listed no tasks within {_TASKS_SECONDS:g} s") from None
    except AnswerError as error:
        raise InputError(f"{where} {error}") from None
    try:
        return read_answer(said.strip().rpartition(b"\n")[2], _TASKS, _TASKS_VALUES)["result"]
    except AnswerError as error:
        text = errors.decode(errors="replace").strip()[-_OUTPUT_CHARS:]
        raise InputError(
            f"{where} listed no tasks, and ended with {status}: {text or error}"
        ) from None


def _communicate(process: "subprocess.Popen[bytes]", request: bytes) -> tuple[bytes, bytes]:
    """Send a request, and return all of the output and the end of standard error."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    with suppress(BrokenPipeError):
        process.stdin.write(request)
        process.stdin.close()
    said, errors, ends = bytearray(), b"", time.monotonic() + _TASKS_SECONDS
    with selectors.DefaultSelector() as selector:
        for pipe in (process.stdout, process.stderr):
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map():
            if (left := ends - time.monotonic()) <= 0:
                raise TimeoutError
            for key, _ in selector.select(left):
                part = os.read(key.fd, 1 << 16)
                if not part:
                    selector.unregister(key.fileobj)
                elif key.fileobj is process.stderr:
                    errors = (errors + part)[-4 * _OUTPUT_CHARS :]
                else:
                    said += part
                if len(said) > _TASKS_BYTES:
                    raise AnswerError(f"sent more than {_TASKS_BYTES:,} bytes")
    return bytes(said), errors
