"""The processes of environments: started by forking, and asked over a socket.

Used by `remote_episode`; the other side is `environment_host`.
"""

import asyncio
import os
import pickle
import signal
import socket
import threading
import time
import weakref
from array import array
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import cloudpickle  # type: ignore[import-untyped]
from pydantic import TypeAdapter

from turnwise.config import RolloutConfig
from turnwise.core.children import lacks_resources
from turnwise.core.deadlines import deadline
from turnwise.core.fork_server import ForkServer
from turnwise.core.json_types import JsonObject
from turnwise.core.spans import trace_headers
from turnwise.core.untrusted import HEADER, AnswerError, read_frame, receive, receive_frame
from turnwise.errors import DeadlineError, InputError, TrajectoryError, describe_error
from turnwise.rollout.environment import EnvironmentType, name_of
from turnwise.rollout.environment_answers import REPLY, read_reply, value_of
from turnwise.rollout.problems import Problem

_T = TypeVar("_T")

GRACE_SECONDS = 10.0
"""Time beyond a call's own deadline, which its process keeps, until the process is killed."""

_ENDING_SECONDS = 5.0
"""Time for a process whose connection is closed to end."""


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
            raise InputError(
                f"the environment {name_of(factory)} cannot be sent to another process "
                f"(rollout.environment_process): {describe_error(error)}"
            ) from error
        self._server: ForkServer | None = None
        self._folder: TemporaryDirectory[str] | None = None
        self._starting = threading.Lock()

    def ask(self, method: str, problem: Problem, kind: TypeAdapter[_T]) -> _T:
        """Ask a process that is started for this one question; call it from a thread.

        Args:
            method: `prompt` or `preview`.
            kind: Type of the answer.

        Raises:
            InputError: the environment's own, naming the row.
            TrajectoryError: `environment_crashed`, `environment_reply`.
            DeadlineError: when the process does not answer.
        """
        talk, control = self.start()
        seconds = self._rollout.environment_timeout + GRACE_SECONDS
        with talk, control:
            talk.settimeout(seconds)
            try:
                talk.sendall(_request(0, method, (problem,)))
                _, reply = read_reply(receive_frame(talk, seconds))
                return value_of(reply, kind, alone=True)
            except AnswerError as error:
                raise _wrong(problem.id, error) from None
            except TimeoutError:
                raise DeadlineError(f"the environment of {problem.id} did not answer") from None
            except (EOFError, ConnectionError):
                control.settimeout(GRACE_SECONDS)
                with suppress(OSError):
                    raise _crashed(problem.id, control.makefile().readline()) from None
                raise _crashed(problem.id, "") from None

    def start(self) -> tuple[socket.socket, socket.socket]:
        """Start a process; call it from a thread.

        Returns:
            A connection for requests, and one that brings the exit status, and whose closing kills
            the process with its process group.

        Raises:
            TrajectoryError: `environment_crashed`, also when the machine lacks descriptors,
                processes or memory for it.
        """
        try:
            with ExitStack() as opened:
                talk, its_end = socket.socketpair()
                opened.enter_context(talk)
                with its_end:
                    control = opened.enter_context(self._connect())
                    self._send(control, its_end)
                opened.pop_all()
        except (OSError, EOFError) as error:
            raise self._not_started(error) from error
        return talk, control

    def _send(self, control: socket.socket, its_end: socket.socket) -> None:
        """Send the request for a process, and wait for its process id."""
        seconds = self._rollout.environment_timeout
        control.settimeout(seconds)
        descriptors = array("i", [0, 1, 2, its_end.fileno()])
        body = b"{}"
        control.sendmsg(
            [len(body).to_bytes(4, "big")],
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)],
        )
        control.sendall(body)
        ends = time.monotonic() + seconds
        while receive(control, 1, ends) != b"\n":
            pass

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
        except OSError:
            control.close()
            raise
        return control

    def _not_started(self, error: OSError | EOFError) -> TrajectoryError:
        code = None
        if self._server is not None and not lacks_resources(error):
            # A crash closes the connection a moment before the process has ended.
            code = self._server.exit_code(_ENDING_SECONDS)
        if isinstance(error, TimeoutError):
            seconds = self._rollout.environment_timeout
            reason = f"was not imported within {seconds:g} s (rollout.environment_timeout)"
        elif code is None:
            why = getattr(error, "strerror", None) or "its process was not forked"
            reason = f"did not start: {why}"
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
        self._asked: dict[int, asyncio.Future[JsonObject]] = {}
        """Requests without an answer, by their numbers; some are waited for no more."""
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

    async def ask(
        self, method: str, arguments: Sequence[object], seconds: float, kind: TypeAdapter[_T]
    ) -> _T:
        """Ask for a method's value, of the given type.

        Raises:
            DeadlineError: when the process does not answer within `seconds`.
            TrajectoryError: the environment's own, `environment_crashed`, or `environment_reply`,
                after which the process has been killed.
        """
        if self.ended is not None:
            raise self.ended
        number, self._number = self._number, self._number + 1
        future = asyncio.get_running_loop().create_future()
        self._asked[number] = future
        self._writer.write(_request(number, method, tuple(arguments)))
        async with deadline(seconds, f"{method} of {self._where} did not answer"):
            reply = await future
        try:
            return value_of(reply, kind)
        except AnswerError as error:
            raise self._fail(_wrong(self._where, error)) from None

    async def _read(self) -> None:
        """Pass the answers on, each once, until the process ends or sends a wrong one."""
        try:
            while True:
                number, reply = read_reply(await read_frame(self._reader))
                if (future := self._asked.pop(number, None)) is None:
                    raise AnswerError(f"answered the request {number}, which nobody waits for")
                if not future.done():  # it may have been late, or cancelled
                    future.set_result(reply)
        except AnswerError as error:
            self._fail(_wrong(self._where, error))
        except (asyncio.IncompleteReadError, OSError):
            status = b""
            with suppress(TimeoutError, OSError):
                status = await asyncio.wait_for(self._status.readline(), GRACE_SECONDS)
            self._fail(_crashed(self._where, status.decode(errors="replace")))

    def _fail(self, error: TrajectoryError) -> TrajectoryError:
        """End the process, and every request with an error, which is returned."""
        self.kill()
        self.ended = self.ended or error
        for future in self._asked.values():
            if not future.done():
                future.set_exception(self.ended)
                future.exception()  # nobody may ask for it
        self._asked.clear()
        return self.ended

    def kill(self) -> None:
        """Kill the process with its process group; safe to repeat."""
        self._control.close()
        self._writer.close()


def _request(number: int, method: str, arguments: tuple[object, ...]) -> bytes:
    message = number, method, arguments, trace_headers()
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return len(body).to_bytes(HEADER, "big") + body


def _wrong(where: str, error: AnswerError) -> TrajectoryError:
    return TrajectoryError(REPLY, f"{where}: the environment's process {error}")


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
