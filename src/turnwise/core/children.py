"""Processes that this one starts: whose fault it is that one does not start, and the end of all."""

import asyncio
import errno
import os
import signal
from contextlib import suppress

from turnwise.errors import InputError, TrajectoryError, TurnwiseError

_MISTAKES = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOEXEC, errno.ENOTDIR, errno.ELOOP)
_POLL_SECONDS = 0.01
_LACKS = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.ENOBUFS)


def lacks_resources(error: BaseException) -> bool:
    """Return whether an error is a lack of descriptors, processes, threads or memory, which passes.

    Example:
        >>> lacks_resources(OSError(errno.EMFILE, "Too many open files"))
        True
    """
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _LACKS)


def start_error(error: OSError | ValueError, what: str, reason: str, first: bool) -> TurnwiseError:
    """Return the error of a program that does not start.

    Args:
        what: The program in messages, with its key.
        reason: Reason of the trajectory that fails.
        first: Whether it has never started before. Only then can it be a mistake of the user, which
            ends the run: a program that does not exist, or an unreadable command line.
    """
    message = f"{what} cannot be started: {error}"
    mistake = not isinstance(error, OSError) or error.errno in _MISTAKES
    return InputError(message) if mistake and first else TrajectoryError(reason, message)


def kill_group(leader: int, reaped: bool) -> None:
    """Kill the process group of a child that leads one, also after the child has ended.

    Args:
        leader: The child's process id, which is the group's.
        reaped: Whether the child's end was waited for. Its number can then be another process's,
            which is left alone. While the group has a process, no other gets its number.
    """
    if reaped and os.path.exists(f"/proc/{leader}"):
        return
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


async def exited(process: asyncio.subprocess.Process, seconds: float = float("inf")) -> bool:
    """Wait for a child's end, at most `seconds`, and return whether it came.

    Unlike the child's own `wait`, this does not wait for its pipes, which others may hold open.
    """
    loop = asyncio.get_running_loop()
    ends, pause = loop.time() + seconds, _POLL_SECONDS
    while process.returncode is None and loop.time() < ends:
        await asyncio.sleep(pause)
        pause = min(1.0, pause * 1.1)
    return process.returncode is not None
