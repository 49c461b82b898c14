"""The processes that a program starts, so that tests can count and end exactly these."""

import contextlib
import os
import sys
import time
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
    after the mark was made, unless they are workers of the session's own Ray.
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
                if self._value.encode() in environment or (
                    process.pid in new and not _belongs_to_own_ray(process.pid)
                ):
                    found.append(process)
        return found

    def left(self, seconds: float = 60.0) -> list[psutil.Process]:
        """Return the processes that do not end within some seconds."""
        ends = time.monotonic() + seconds
        while (alive := self.processes()) and time.monotonic() < ends:
            time.sleep(0.05)
        return alive


def _belongs_to_own_ray(pid: int) -> bool:
    """Return whether a fork is a worker of this process's own Ray, by the log files that it has."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return False
    logs = os.path.realpath(ray._private.worker._global_node.get_session_dir_path())
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed since
            if os.readlink(descriptor).startswith(logs):
                return True
    return False
