"""The processes that a program starts, so that tests can count and end exactly these."""

import contextlib
from pathlib import Path
from uuid import uuid4

import psutil

from turnwise.core import fork_server

_VARIABLE = "TURNWISE_TEST"


def forks() -> set[int]:
    """Return the process ids of the running forks of this session's fork server."""
    own = fork_server._own
    if own is None:
        return set()
    return {child.pid for child in psutil.Process(own.pid).children(recursive=True)}


class Mark:
    """Recognises processes by a variable in their environment, which children inherit.

    Forks of the session's fork server show that server's environment; they count when they started
    after the mark was made.
    """

    def __init__(self) -> None:
        self._value = uuid4().hex
        self._before = forks()

    @property
    def environment(self) -> dict[str, str]:
        """Variables to add to the program's environment."""
        return {_VARIABLE: self._value}

    def processes(self) -> list[psutil.Process]:
        """Return all processes that have the mark now."""
        found = []
        new = forks() - self._before
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                environment = Path(f"/proc/{process.pid}/environ").read_bytes()
                if process.pid in new or self._value.encode() in environment:
                    found.append(process)
        return found

    def left(self, seconds: float = 5.0) -> list[psutil.Process]:
        """Return the processes that do not end within some seconds."""
        alive: list[psutil.Process] = psutil.wait_procs(self.processes(), timeout=seconds)[1]
        return alive
