"""The processes of environments: started by forking, and asked over a socket.

Used by `remote_episode`; the other side is `environment_host`.
"""

import asyncio
import json
import os
import pickle
import signal
import socket
import threading
import weakref
from array import array
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from turnwise.config import RolloutConfig
from turnwise.core.deadlines import deadline
from turnwise.core.fork_server import ForkServer
from turnwise.core.json_types import JsonObject
from turnwise.core.spans import trace_headers
from turnwise.errors import DeadlineError, InputError, TrajectoryError, describe_error
from turnwise.rollout.environment import EnvironmentType
from turnwise.rollout.problems import Problem

HEADER = 8
"""Bytes of the length before each message, big-endian."""
GRACE_SECONDS = 10.0
"""Time beyond a call's own deadline, which its process keeps, until the process is killed."""

_ENDING_SECONDS = 5.0
"""Time for a process whose connection is closed to end."""


class RemoteError(Exception):
    """An error in an environment's process; its message holds the traceback there."""


class EnvironmentProcesses:
    """Starts a process for each episode, all forked from one that has imported the environment.

    Args:
        factory: Environment class or function; importable, or defined in the main program.

    Example:
        processes = EnvironmentProcesses(Weather, config.rollout)
        episode = RemoteEpisode(processes, problem, config.rollout)
        async with playing(episode, clock, report):
            print(episode.problem)
    """

    def __init__(self, factory: EnvironmentType, rollout: RolloutConfig) -> None:
        self._rollout = rollout
        try:
            self._pickled = cloudpickle.dumps((factory, rollout))
        except Exception as error:
            name = getattr(factory, "__name__", factory)
            raise InputError(
                f"the environment {name} cannot be sent to another process "
                f"(rollout.environment_process): {describe_error(error)}"
            ) from error
        self._server: ForkServer | None = None
        self._folder: TemporaryDirectory[str] | None = None
        self._starting = threading.Lock()

    def ask(self, method: str, problem: Problem) -> Any:
        """Ask a process that is started for this one question; call it from a thread.

        Args:
            method: `prompt` or `preview`.

        Raises:
            InputError: the environment's own, naming the row.
            TrajectoryError: `environment_crashed`.
            DeadlineError: when the process does not answer.
        """
        talk, control = self.start()
        with talk, control:
            talk.settimeout(self._rollout.environment_timeout + GRACE_SECONDS)
            try:
                talk.sendall(_request(0, method, (problem,)))
                size = int.from_bytes(_receive(talk, HEADER), "big")
                _, reply = json.loads(_receive(talk, size))
            except TimeoutError:
                raise DeadlineError(f"the environment of {problem.id} did not answer") from None
            except (EOFError, ConnectionError):
                control.settimeout(GRACE_SECONDS)
                with suppress(OSError):
                    raise _crashed(problem.id, control.makefile().readline()) from None
                raise _crashed(problem.id, "") from None
        return _value(reply)

    def start(self) -> tuple[socket.socket, socket.socket]:
        """Start a process; call it from a thread.

        Returns:
            A connection for requests, and one that brings the exit status, and whose closing kills
            the process with its process group.
        """
        talk, its_end = socket.socketpair()
        with its_end:
            control = self._connect()
            try:
                control.settimeout(self._rollout.environment_timeout)
                descriptors = array("i", [0, 1, 2, its_end.fileno()])
                body = b"{}"
                control.sendmsg(
                    [len(body).to_bytes(4, "big")],
                    [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)],
                )
                control.sendall(body)
                pid = b""
                while not pid.endswith(b"\n"):
                    if not (part := control.recv(1)):
                        raise ConnectionResetError
                    pid += part
            except OSError as error:
                control.close()
                talk.close()
                raise self._not_started(error) from error
        return talk, control

    def _connect(self) -> socket.socket:
        with self._starting:
            if self._server is None or self._server.ended:
                self._folder = TemporaryDirectory(prefix="turnwise-environment-")
                file = Path(self._folder.name) / "environment"
                file.write_bytes(self._pickled)
                self._server = ForkServer("turnwise.rollout.environment_host", [str(file)])
                weakref.finalize(self, self._server.close)
            server = self._server
        control = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            control.connect(server.address)
        except OSError as error:
            control.close()
            raise self._not_started(error) from error
        return control

    def _not_started(self, error: OSError) -> TrajectoryError:
        # A crash closes the connection a moment before the process has ended.
        code = None if self._server is None else self._server.exit_code(_ENDING_SECONDS)
        if isinstance(error, TimeoutError):
            seconds = self._rollout.environment_timeout
            reason = f"was not imported within {seconds:g} s (rollout.environment_timeout)"
        elif code is None:
            reason = f"did not start: {error.strerror or type(error).__name__}"
        else:
            reason = f"cannot be imported in a process of its own, which {_ended(code)}"
        return TrajectoryError("environment_crashed", f"the environment {reason}")


class EnvironmentProcess:
    """The connection to one environment's process; requests may overlap."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        status: asyncio.StreamReader,
        control: asyncio.StreamWriter,
        where: str,
    ) -> None:
        self._reader, self._writer = reader, writer
        self._status, self._control = status, control
        self._where = where
        self._waiting: dict[int, asyncio.Future[JsonObject]] = {}
        self._number = 0
        self.ended: TrajectoryError | None = None
        """Error of every further request once the process has ended; None while it runs."""
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def connect(
        cls, talk: socket.socket, control: socket.socket, where: str
    ) -> "EnvironmentProcess":
        """Connect to a started process; `where` names its problem in errors."""
        control.settimeout(None)
        streams = await asyncio.open_connection(sock=talk)
        return cls(*streams, *await asyncio.open_connection(sock=control), where)

    async def ask(self, method: str, arguments: Sequence[object], seconds: float) -> Any:
        """Ask for a method's value.

        Raises:
            DeadlineError: when the process does not answer within `seconds`.
            TrajectoryError: the environment's own, or `environment_crashed`.
        """
        if self.ended is not None:
            raise self.ended
        number, self._number = self._number, self._number + 1
        future = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        self._writer.write(_request(number, method, tuple(arguments)))
        try:
            async with deadline(seconds, f"{method} of {self._where} did not answer"):
                reply = await future
        finally:
            self._waiting.pop(number, None)
        return _value(reply)

    async def _read(self) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                size = int.from_bytes(await self._reader.readexactly(HEADER), "big")
                number, reply = json.loads(await self._reader.readexactly(size))
                if (future := self._waiting.get(number)) is not None and not future.done():
                    future.set_result(reply)
        status = b""
        with suppress(TimeoutError, ConnectionError):
            status = await asyncio.wait_for(self._status.readline(), GRACE_SECONDS)
        self.ended = _crashed(self._where, status.decode())
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(self.ended)

    def kill(self) -> None:
        """Kill the process with its process group; safe to repeat."""
        self._control.close()
        self._writer.close()


def _request(number: int, method: str, arguments: tuple[object, ...]) -> bytes:
    message = number, method, arguments, trace_headers()
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return len(body).to_bytes(HEADER, "big") + body


def _receive(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        if not (part := connection.recv(size - len(parts))):
            raise EOFError
        parts += part
    return bytes(parts)


def _value(reply: JsonObject) -> Any:
    """Return a reply's value.

    Raises:
        InputError, TrajectoryError: the reply's error, with its traceback as the cause.
    """
    if (error := reply.get("error")) is not None:
        failure = error_of(error)
        raise failure from failure.__cause__
    return reply["value"]


def error_of(tree: JsonObject) -> InputError | TrajectoryError:
    message = str(tree["message"])
    error = InputError(message) if tree["input"] else TrajectoryError(tree["reason"], message)
    error.__cause__ = RemoteError(tree["cause"]) if tree["cause"] else None
    return error


def _crashed(where: str, status: str) -> TrajectoryError:
    try:
        how = _ended(os.waitstatus_to_exitcode(int(status)))
    except ValueError:
        how = "ended"
    return TrajectoryError("environment_crashed", f"{where}: the environment's process {how}")


def _ended(code: int) -> str:
    """Describe an exit code, negative for a signal, as a clause."""
    if code >= 0:
        return f"exited with status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = ", perhaps for lack of memory" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"
