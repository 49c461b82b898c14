"""Child processes: programs with pipes, the end of their error output, requests to them, and how to
end them.

A child leads a process group. The whole group is killed when the child or this program ends.
"""

import asyncio
import atexit
import errno
import itertools
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

from turnwise.core.aio import set_within
from turnwise.core.untrusted import MAX_BYTES
from turnwise.errors import InputError, TrajectoryError, TurnwiseError, visible

_T = TypeVar("_T")

LINES_A_SECOND = 20  # maximum number of a program's lines that are logged in a second
LONGEST_LINE = 1_000  # maximum number of bytes of a line that are logged
TAIL_BYTES = 4_096  # maximum number of bytes of a child's error output that are kept
_MISTAKES = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOEXEC, errno.ENOTDIR, errno.ELOOP)
_LACKS = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.ENOBUFS)

_running: "set[Child]" = set()  # children whose groups have not been ended
os.register_at_fork(after_in_child=_running.clear)  # the children are the parent's


@atexit.register
def _kill_all() -> None:
    for child in list(_running):
        child.kill()


def lacks_resources(error: BaseException) -> bool:
    """Return whether an error is a lack of descriptors, threads or memory, which is temporary."""
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _LACKS)


def start_error(error: OSError | ValueError, what: str, reason: str, first: bool) -> TurnwiseError:
    """Return the error for a program (`what`, with its configuration key) that does not start.

    A program that does not exist, or an unreadable command line, is the user's mistake at the
    `first` start; the error is then an `InputError`, which ends the run. Otherwise, it is a
    `TrajectoryError` with `reason`.
    """
    message = f"{what} cannot be started: {error}"
    mistake = not isinstance(error, OSError) or error.errno in _MISTAKES
    return InputError(message) if mistake and first else TrajectoryError(reason, message)


def kill_group(leader: int, reaped: bool, number: int = signal.SIGKILL) -> None:
    """Send a signal to the process group of a child that leads one, even after the child has ended.

    If the child was waited for (`reaped`), its id may now belong to another process, which is left
    alone. No other process gets the id while the group still has a process.
    """
    if reaped and os.path.exists(f"/proc/{leader}"):
        return
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


class _Streams(asyncio.subprocess.SubprocessStreamProtocol):
    def __init__(self) -> None:
        super().__init__(limit=MAX_BYTES, loop=asyncio.get_running_loop())
        self.ended = asyncio.Event()
        """Set at the process's end; asyncio's own `wait` also waits for the pipes, which other
        processes may hold open."""

    def process_exited(self) -> None:
        self.ended.set()
        super().process_exited()


class Child:
    """A program that was started with pipes; its standard error is always read."""

    def __init__(
        self,
        transport: asyncio.SubprocessTransport,
        streams: _Streams,
        heard: Callable[[bytes], object],
    ) -> None:
        self._transport, self._streams = transport, streams
        self._tail = b""
        self.pid = transport.get_pid()
        _running.add(self)

        async def hear() -> None:
            errors = streams.stderr or self.stdout
            with suppress(OSError):
                while part := await errors.read(65_536):
                    self._tail = (self._tail + part)[-TAIL_BYTES:]
                    heard(part)

        self._hearing = asyncio.create_task(hear())

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        cwd: str | None = None,
        heard: Callable[[bytes], object] = lambda _: None,
        joined: bool = False,
    ) -> "Child":
        """Start a program with only these environment variables; the caller passes errors to
        `start_error`.

        `heard` is called with each part of its standard error. If `joined`, `heard` also gets its
        standard output, and the caller does not read it.
        """
        transport, streams = await asyncio.get_running_loop().subprocess_exec(
            _Streams,
            *command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if joined else subprocess.PIPE,
            env=dict(environment),  # uvloop takes no other mapping
            cwd=cwd,
            start_new_session=True,
        )
        return cls(transport, streams, heard)

    @property
    def stdin(self) -> asyncio.StreamWriter:
        """The program's standard input."""
        assert self._streams.stdin is not None
        return self._streams.stdin

    @property
    def stdout(self) -> asyncio.StreamReader:
        """The program's standard output; a line has at most `MAX_BYTES`."""
        assert self._streams.stdout is not None
        return self._streams.stdout

    @property
    def status(self) -> int | None:
        """The program's exit status, negative for a signal; None while it runs."""
        return self._transport.get_returncode()

    @property
    def last_words(self) -> str:
        """The last `TAIL_BYTES` of the program's standard error."""
        return self._tail.decode(errors="replace").strip()

    async def exited(self, seconds: float | None = None) -> bool:
        """Wait at most `seconds` for the program's end, and return whether it has ended."""
        return await set_within(self._streams.ended, seconds)

    async def heard(self, seconds: float) -> None:
        """Wait at most `seconds` for the end of the standard error, which a process that has left
        the group may hold open."""
        await asyncio.wait([self._hearing], timeout=seconds)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Kill the program and its group, or send them the signal `number`; safe to repeat."""
        kill_group(self.pid, self.status is not None, number)

    async def end(self, seconds: float, *, leave: float = 0.0, terminate: float = 0.0) -> None:
        """End the program and its group, and close its pipes, standard input first; safe to repeat.

        If `leave` is not 0, the program has `leave` seconds to end by itself, and then `terminate`
        seconds after SIGTERM. Then it is killed: wait `seconds` for its end, and as long again for
        the rest of its standard error.
        """
        try:
            self.stdin.close()
            if leave and not await self.exited(leave) and terminate:
                self.kill(signal.SIGTERM)
                await self.exited(terminate)
        finally:
            self.kill()
            _running.discard(self)
            try:
                if await self.exited(seconds):
                    await self.heard(seconds)
            finally:
                self._hearing.cancel()
                self._transport.close()


class Requests(Generic[_T]):
    """Requests to a process that answers in any order; each answer has its request's number."""

    def __init__(self) -> None:
        self._asked: dict[int, asyncio.Future[_T]] = {}
        self._numbers = itertools.count(1)
        self.ended: TrajectoryError | None = None
        """Error of every further request once the process has ended; None while it runs."""

    def begin(self) -> "tuple[int, asyncio.Future[_T]]":
        """Return the number of a new request, and the future of its answer, or raise `ended`."""
        if self.ended is not None:
            raise self.ended
        future: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        number = next(self._numbers)
        self._asked[number] = future
        return number, future

    def resolve(self, number: int, answer: _T | TrajectoryError) -> bool:
        """Pass an answer to its request; return whether it is the first answer to a request."""
        if (future := self._asked.pop(number, None)) is None:
            return False
        if not future.done():  # it may have been late, or cancelled
            if isinstance(answer, TrajectoryError):
                future.set_exception(answer)
                future.exception()  # else asyncio would log an error that nobody retrieves
            else:
                future.set_result(answer)
        return True

    def end(self, error: TrajectoryError) -> TrajectoryError:
        """End all requests with an error, and return it; later calls use the first call's error."""
        self.ended = self.ended or error
        for number in list(self._asked):
            self.resolve(number, self.ended)
        return self.ended


class ForeignLines:
    """Logs the output of a program, which may write anything, line by line under its name.

    Lines beyond `LINES_A_SECOND` are only counted, and a line is cut after `LONGEST_LINE` bytes.
    """

    def __init__(self, logger: logging.Logger, name: str) -> None:
        self._logger, self._name = logger, name
        self._begun = b""  # beginning of the line that has not ended
        self._since = time.monotonic()
        self._logged = 0
        self._left_out = 0

    def add(self, piece: bytes) -> None:
        """Add output as it comes."""
        now = time.monotonic()
        if now - self._since >= 1.0:
            self._count()
            self._since, self._logged = now, 0
        *lines, rest = piece.split(b"\n", max(0, LINES_A_SECOND - self._logged))
        for line in lines:
            self._log(self._begun + line)
            self._begun = b""
        if ended := rest.count(b"\n"):
            self._left_out += ended
            self._begun, rest = b"", rest[rest.rfind(b"\n") + 1 :]
        self._begun += rest[: LONGEST_LINE + 1 - len(self._begun)]

    def end(self) -> None:
        """Log the remaining output once it has ended."""
        if self._begun:
            self._log(self._begun)
            self._begun = b""
        self._count()

    def _log(self, line: bytes) -> None:
        self._logged += 1
        text = line[:LONGEST_LINE].decode(errors="replace").rstrip("\r")
        cut = "…" if len(line) > LONGEST_LINE else ""
        self._logger.info("%s: %s%s", self._name, visible(text), cut)

    def _count(self) -> None:
        if self._left_out:
            self._logger.info("%s: [%d more lines left out]", self._name, self._left_out)
            self._left_out = 0
