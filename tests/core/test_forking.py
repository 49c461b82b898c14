"""The loop of a fork server: it outlives failures, and no fork outlives its owner."""

import array
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

SERVER = """
import os, socket, sys, time
from turnwise.core import fork_server
fork_server.SENDING_SECONDS = 0.5
real, forks = os.fork, []
def fork():
    forks.append(1)
    if len(forks) == 2 and "fails" in sys.argv:
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return real()
os.fork = fork
class Listener(socket.socket):
    accepted = 0
    def accept(self):
        Listener.accepted += 1
        if Listener.accepted in (2, 3) and "lacks" in sys.argv:
            raise OSError(23, "Too many open files in system")
        return super().accept()
got = fork_server.serve(Listener(fileno=int(sys.argv[1])), int(sys.argv[2]), end_groups=True)
if got is not None:  # in a fork: an environment that hangs
    os.setsid()
    time.sleep(600)
"""


class Server:
    """A fork server of its own, whose forks hang."""

    def __init__(self, folder: Path, *words: str) -> None:
        self._path = str(folder / "socket")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self._path)
            listener.listen()
            read, self._alive = os.pipe()
            numbers = [listener.fileno(), read]
            self.process = subprocess.Popen(
                [sys.executable, "-c", SERVER, *map(str, numbers), *words], pass_fds=numbers
            )
            os.close(read)

    def connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(60.0)
        connection.connect(self._path)
        return connection

    def send(self, body: bytes = b"{}") -> socket.socket:
        """Send a request for a fork."""
        connection = self.connect()
        streams = array.array("i", [0, 1, 2])
        header = len(body).to_bytes(4, "big")
        connection.sendmsg([header], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
        connection.sendall(body)
        return connection

    def ask(self, body: bytes = b"{}") -> tuple[socket.socket, str]:
        """Ask for a fork; return the connection and the answer."""
        connection = self.send(body)
        return connection, connection.makefile().readline().strip()

    def close(self) -> None:
        os.close(self._alive)
        assert self.process.wait(60) == 0


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    started: list[Server] = []

    def begin(*words: str) -> Server:
        started.append(Server(tmp_path, *words))
        return started[-1]

    yield begin
    for server in started:
        server.process.kill()
        server.process.wait()


def gone(pid: str) -> bool:
    try:
        process = psutil.Process(int(pid))
        psutil.wait_procs([process], timeout=60)
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_failed_fork_costs_its_client_only(start: Callable[..., Server]) -> None:
    server = start("fails")
    first, one = server.ask()
    _, refused = server.ask()
    third, three = server.ask()
    assert refused == ""
    assert int(one) != int(three)
    first.close()
    assert gone(one)
    assert psutil.pid_exists(int(three))
    server.close()
    assert gone(three)
    third.close()


def test_forks_end_with_a_server_that_is_killed(start: Callable[..., Server]) -> None:
    server = start()
    _connection, pid = server.ask()
    server.process.send_signal(signal.SIGKILL)
    assert gone(pid)


def test_a_lack_of_descriptors_passes(start: Callable[..., Server]) -> None:
    server = start("lacks")
    first, one = server.ask()
    second, two = server.ask()
    assert int(one) != int(two)
    first.close()
    second.close()
    assert gone(one)
    assert gone(two)


@pytest.mark.parametrize("killed", ["fork", "client"])
def test_nothing_is_left_open_of_what_was_killed(start: Callable[..., Server], killed: str) -> None:
    server = start()
    kept, _ = server.ask()
    process = psutil.Process(server.process.pid)
    before = process.num_fds()  # with a request's own three, until the server has closed them
    for _ in range(8):
        connection, pid = server.ask()
        if killed == "fork":
            os.kill(int(pid), signal.SIGKILL)
            connection.makefile().read()  # until the server closes it
        connection.close()
        assert gone(pid)
    ends = time.monotonic() + 60
    while process.num_fds() > before and time.monotonic() < ends:
        time.sleep(0.01)
    assert process.num_fds() <= before
    kept.close()


@pytest.mark.parametrize("sent", [b"", b"\0\0", b"\xff" * 9, b"\0\0\0\2{", b"\0\0\0\2[]"])
def test_a_client_that_sends_no_request_is_left(start: Callable[..., Server], sent: bytes) -> None:
    server = start()
    silent = server.connect()
    silent.sendall(sent)
    assert server.ask(b"[" * 100_000)[1] == ""
    _connection, pid = server.ask()
    assert psutil.pid_exists(int(pid))
    silent.close()
    server.close()
