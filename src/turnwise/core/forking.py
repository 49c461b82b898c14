"""The loop of a fork server: a fork for each client, none without an owner.

A fork has its client as owner, and is killed when the client closes its connection; it also ends
with the server. So the server outlives every lack of processes, memory or descriptors: it then
refuses one client, or lets it wait.
"""

import atexit
import contextlib
import ctypes
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable

from turnwise.core.child import kill_group
from turnwise.core.json_types import JsonObject
from turnwise.core.untrusted import HEADER, receive

STREAMS = 3
"""Number of standard streams that come with a request, before its other descriptors."""
SENDING_SECONDS = 10.0
"""Deadline for sending a request, in which other clients wait."""
_MAX_REQUEST = 2**24
_LACK_SECONDS = 0.1
"""Time before the next client is looked at when there is no descriptor for it."""
_SET_PDEATHSIG = 1

Job = Callable[[], None]
Request = tuple[JsonObject, list[int]]


def exit_code(job: Job) -> int:
    """Run the job as an interpreter would, but skip freeing its memory, which takes seconds."""
    code = 0
    try:
        job()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            sys.stderr.write(f"{error.code}\n")
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def serve(listener: socket.socket, alive: int, *, end_groups: bool = False) -> Request | None:
    """Fork for each request until `alive` is closed; in each fork, return the request.

    A fork is killed when its client closes the connection.

    Args:
        end_groups: Whether to kill what remains of a fork's process group when it has ended.

    Returns:
        In a fork, the request and the descriptors that came with it; in the server, None at the
        end.
    """
    server = _Server(listener, alive, end_groups)
    while True:
        for key, _ in server.selector.select():
            if key.fileobj is listener:
                if (request := server.fork()) is not None:
                    return request
            elif key.fileobj is server.woken:
                server.reap()
            elif key.fileobj == alive:
                server.end()
                return None
            else:
                server.kill(key.data)


class _Server:
    """The forks, and what the server waits for."""

    def __init__(self, listener: socket.socket, alive: int, end_groups: bool) -> None:
        self._listener, self._alive, self._end_groups = listener, alive, end_groups
        self._pid = os.getpid()
        self._libc = ctypes.CDLL(None)
        self._children: dict[int, socket.socket] = {}
        """Connections of the clients by the process ids of their forks."""
        self._wake, self.woken = socket.socketpair()
        self._wake.setblocking(False)
        self.woken.setblocking(False)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.selector = selectors.DefaultSelector()
        for watched in (listener, alive, self.woken):
            self.selector.register(watched, selectors.EVENT_READ)

    def fork(self) -> Request | None:
        """Fork for the next client; in the fork, return its request."""
        try:
            connection, _ = self._listener.accept()
        except OSError:
            time.sleep(_LACK_SECONDS)
            return None
        if (request := _receive(connection)) is None:
            connection.close()
            return None
        try:
            # Before the fork, so that there is none that nobody watches.
            self.selector.register(connection, selectors.EVENT_READ)
            pid = os.fork()
        except OSError as error:
            sys.stderr.write(f"no process can be forked: {error}\n")
            with contextlib.suppress(KeyError):
                self.selector.unregister(connection)
            connection.close()
        else:
            if pid == 0:
                self._leave(connection)
                return request
            self._children[pid] = connection
            self.selector.modify(connection, selectors.EVENT_READ, pid)
            _reply(connection, pid)
        for descriptor in request[1]:
            os.close(descriptor)
        return None

    def _leave(self, connection: socket.socket) -> None:
        """In a fork, close what is the server's, and end with it, however it ends."""
        self._libc.prctl(_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != self._pid:  # it has ended meanwhile
            os._exit(1)
        for ours in (self._listener, self._wake, self.woken, connection, *self._children.values()):
            ours.close()
        os.close(self._alive)
        self.selector.close()

    def reap(self) -> None:
        """Tell the clients of the forks that have ended how they did."""
        with contextlib.suppress(BlockingIOError):
            while self.woken.recv(4096):
                pass
        for pid, status in _ended():
            if self._end_groups:
                kill_group(pid, reaped=True)
            if (waiting := self._children.pop(pid, None)) is not None:
                _reply(waiting, status)
                self.selector.unregister(waiting)
                waiting.close()

    def kill(self, pid: int) -> None:
        """Kill the fork of a client that is gone."""
        if (asker := self._children.pop(pid, None)) is not None:
            os.kill(pid, signal.SIGKILL)
            self.selector.unregister(asker)
            asker.close()

    def end(self) -> None:
        """Kill all forks."""
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
            if self._end_groups:
                kill_group(pid, reaped=False)
        signal.set_wakeup_fd(-1)


def _receive(connection: socket.socket) -> Request | None:
    """Return a request and the descriptors that came with it; None if it is incomplete."""
    connection.settimeout(SENDING_SECONDS)
    ends = time.monotonic() + SENDING_SECONDS
    descriptors: list[int] = []
    try:
        header, descriptors, _, _ = socket.recv_fds(connection, HEADER, 8)
        header += receive(connection, HEADER - len(header), ends)
        size = int.from_bytes(header, "big")
        if len(descriptors) < STREAMS or not 0 < size <= _MAX_REQUEST:
            raise ValueError("no request")
        # Of this user's processes, and with an environment that may not be UTF-8.
        request = json.loads(receive(connection, size, ends))
        if not isinstance(request, dict):
            raise TypeError("no request")
        connection.settimeout(SENDING_SECONDS)
        return request, descriptors
    except (OSError, EOFError, ValueError, TypeError, RecursionError):
        for descriptor in descriptors:
            os.close(descriptor)
        return None


def _reply(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(b"%d\n" % number)


def _ended() -> list[tuple[int, int]]:
    """Return the children that have ended, and their wait statuses."""
    ended: list[tuple[int, int]] = []
    with contextlib.suppress(ChildProcessError):
        while (pair := os.waitpid(-1, os.WNOHANG))[0]:
            ended.append(pair)
    return ended
