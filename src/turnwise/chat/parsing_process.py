"""A process that parses long answers, and abandons a parse that takes too long.

For some texts that a model may write, vLLM's parsers take time that grows with the square or the
cube of the length, and they hold the GIL meanwhile. A `ParsingProcess` gets such texts. A fork of
the process parses them. At a limit of CPU time the system kills the fork, and another fork
continues with the next text.

The process runs `main`. Its standard input is a socket, from which it reads a pickled parser and
then texts; it writes the answer to each text, in JSON, to the same socket. Only the program that
started the process sends to it.
"""

import gc
import itertools
import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, Protocol

from turnwise.core import fork_server
from turnwise.core.aio import run_in_thread
from turnwise.core.json_types import JsonObject
from turnwise.core.optional import Foreign
from turnwise.core.untrusted import HEADER, framed, receive
from turnwise.errors import TrajectoryError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)

_SECONDS, _SECONDS_EACH = 0.5, 50e-6
"""Maximum CPU time of one parse: a base, and an addition for each character. The slowest of vLLM's
parsers take 15 us per character of an ordinary call."""
_STARTING_SECONDS = 120.0  # deadline for vLLM's imports, which many processes may do at once
_ANSWER_SECONDS = 30.0
"""Deadline for an answer, far above the parse's CPU time, because the machine may be overloaded."""
_ENDING_SECONDS = 5.0
_LATE = b"null"


class Parser(Protocol):
    """A `chat.tool_parser.ToolParser`."""

    def parse(self, text: str, schemas: "Sequence[JsonObject]") -> Foreign: ...


class Parsed(NamedTuple):
    """Outcome of the parse of a text, with the fields of `ParsedText`."""

    content: str
    calls: list[tuple[str, str]]
    malformed: bool
    seconds: float
    """CPU time that the parse took."""


class ParsingProcess:
    """Parses texts one after another, in a process that the first text starts. `make` is pickled,
    and makes the parser in that process. The process ends with this object or the program."""

    def __init__(self, make: "Callable[[], Parser]") -> None:
        self._make = make
        self._turn = threading.Lock()
        self._numbers = itertools.count(1)
        self._connection: socket.socket | None = None
        self._end: Foreign = None

    async def parse(self, text: str, schemas: "Sequence[JsonObject]") -> Parsed | None:
        """Return the outcome of a text; None if its parse did not end in time. Raise
        TrajectoryError if the process cannot be started."""
        return await run_in_thread(self._parse, text, schemas)

    def _parse(self, text: str, schemas: "Sequence[JsonObject]") -> Parsed | None:
        with self._turn:
            connection = self._connection or self._start()
            number = next(self._numbers)
            ends = time.monotonic() + _ANSWER_SECONDS
            try:
                connection.settimeout(_ANSWER_SECONDS)
                connection.sendall(framed(json.dumps([number, text, [*schemas]]).encode()))
                while (answer := json.loads(_receive(connection, ends))) is not None:
                    if answer[0] == number:
                        _, content, calls, malformed, seconds = answer
                        return Parsed(content, [(*call,) for call in calls], malformed, seconds)
            except (OSError, EOFError) as error:
                logger.warning("the process that parses long answers ended: %s", error)
                self.close()
            return None

    def _start(self) -> socket.socket:
        """Start the process, and wait until it has its parser."""
        address = fork_server.address()
        python = [sys.executable] if address is None else fork_server.command(address)
        own, its = socket.socketpair()
        try:
            with its:
                process = subprocess.Popen(
                    [*python, "-c", f"from {__name__} import main; main()"],
                    stdin=its.fileno(),
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                )
            self._end = weakref.finalize(self, _end, process, own)
            own.settimeout(_STARTING_SECONDS)
            own.sendall(framed(pickle.dumps(self._make)))
            _receive(own, time.monotonic() + _STARTING_SECONDS)
        except (OSError, EOFError) as error:
            own.close()
            self.close()
            message = f"the process that parses long answers did not start: {error}"
            raise TrajectoryError("parsing_process", message) from error
        self._connection = own
        return own

    def close(self) -> None:
        """End the process; the next text starts a new one."""
        self._connection = None
        if self._end is not None:
            self._end()


def _end(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    from turnwise.core.child import kill_group  # not available on Windows

    connection.close()  # a fork ends by itself when its input ends
    kill_group(process.pid, process.poll() is not None)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_ENDING_SECONDS)


def _receive(connection: socket.socket, ends: float) -> bytes:
    size = int.from_bytes(receive(connection, HEADER, ends), "big")
    return receive(connection, size, ends)


# The process


def main() -> None:
    """Make the parser, then fork for texts until the program is gone."""
    connection = socket.socket(fileno=os.dup(0))
    stream = connection.makefile("rb")  # holds at most one request, so a dying fork loses no other
    if (recipe := _read(stream)) is None:
        return
    parser: Parser = pickle.loads(recipe)()
    gc.freeze()
    connection.sendall(framed(_LATE))  # it is ready
    while True:
        if (pid := os.fork()) == 0:
            try:
                _parse_all(stream, connection, parser)
                os._exit(0)
            finally:
                os._exit(1)
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0:
            return
        connection.sendall(framed(_LATE))


def _parse_all(stream: BinaryIO, connection: socket.socket, parser: "Parser") -> None:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    while (request := _read(stream)) is not None:
        number, text, schemas = json.loads(request)
        began = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, _SECONDS + len(text) * _SECONDS_EACH)
        try:
            parsed = parser.parse(text, schemas)
            calls = [(call.name, call.arguments) for call in parsed.calls]
            answer = [number, parsed.content, calls, parsed.malformed]
        except Exception:  # users write the schemas, which may be anything
            answer = [number, text, [], True]
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        answer.append(time.process_time() - began)
        connection.sendall(framed(json.dumps(answer).encode()))


def _read(stream: BinaryIO) -> bytes | None:
    """Read a frame; None at the end of the connection."""
    if len(header := stream.read(HEADER)) < HEADER:
        return None
    size = int.from_bytes(header, "big")
    return body if len(body := stream.read(size)) == size else None
