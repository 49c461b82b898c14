"""The process that starts one sandbox, watches it, and ends all of its processes.

The keeper ends them when its lifeline, a pipe from the driver, is closed by the session or by the
driver's death. It also ends a sandbox that uses more memory or disk than its limit, because the
kernel limits memory and disk only for each process. This module imports only Python's standard
library and, for that backend, sandlock.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

OVER_MEMORY, OVER_DISK = 10, 11
"""Exit codes of a keeper that ended its sandbox because of a limit."""
_PERIOD = 0.2
"""Seconds between two checks of the sandbox."""
_END_SECONDS = 5.0
_MAX_FILES = 20_000
_SET_SUBREAPER = 36


def main() -> int:
    """Keep one sandbox; `sys.argv[1]` is its specification as JSON."""
    spec = json.loads(sys.argv[1])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    # Orphaned processes of the sandbox become this process's children, so that it can find them.
    ctypes.CDLL(None).prctl(_SET_SUBREAPER, 1, 0, 0, 0)
    os.set_inheritable(spec["lifeline"], False)
    try:
        try:
            ended = _start(spec)
        except Exception as error:  # the session reads the error from the output
            print(f"{type(error).__name__}: {error}", flush=True)
            return 1
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(nothing, stream)
        return _watch(spec, ended)
    finally:
        removed = _remove(spec)
        ends = time.monotonic() + _END_SECONDS
        while (pids := _descendants()) and time.monotonic() < ends:  # more may start meanwhile
            for pid in pids:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            time.sleep(0.005)
        if not removed:  # the command that was just killed may have made the container late
            _remove(spec)
        if spec["scratch"]:  # use commands, because folders may have any depth and any modes
            for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
                with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                    command.append(spec["scratch"])
                    subprocess.run(command, timeout=60, capture_output=True, check=False)


def _remove(spec: dict[str, Any]) -> bool:
    """Remove the sandbox's container, if it has one; return False if the container could not be
    removed, for example because it did not exist yet."""
    if "end" not in spec:
        return True
    try:
        done = subprocess.run(spec["end"], timeout=60, capture_output=True, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and b"o such container" not in done.stderr


def _start(spec: dict[str, Any]) -> Callable[[], bool]:
    """Start the sandbox; return a function that returns whether it has ended."""
    if "sandlock" not in spec:
        process = subprocess.Popen(spec["command"], env=spec["environment"], cwd=spec["scratch"])
        return lambda: process.poll() is not None
    sys.path.append(spec["sandlock"]["path"])
    import sandlock

    sandboxed = sandlock.Sandbox(**spec["sandlock"]["options"]).popen(spec["command"])
    waiting = threading.Thread(target=sandboxed.wait, daemon=True)
    waiting.start()
    return lambda: not waiting.is_alive()


def _watch(spec: dict[str, Any], ended: Callable[[], bool]) -> int:
    """Wait until the sandbox has ended, or must be ended; return the keeper's exit code."""
    lifeline = select.poll()
    lifeline.register(spec["lifeline"], select.POLLIN)
    while not ended():
        if lifeline.poll(_PERIOD * 1000):
            return 0
        if "end" in spec:  # the container's engine enforces the limits
            continue
        # Memory without mapped files. The simple sum is far cheaper to read, but counts pages that
        # forked processes share more than once. Only if this sum is above the limit, read Pss,
        # which counts each shared page once.
        pids, limit = _descendants(), spec["memory"] / 1024
        used = sum(_kilobytes(pid, "status", ("RssAnon:", "RssShmem:")) or 0 for pid in pids)
        if used > limit:
            parts = [_kilobytes(pid, "smaps_rollup", ("Pss_Anon:", "Pss_Shmem:")) for pid in pids]
            if any(part is None for part in parts) or sum(part or 0 for part in parts) > limit:
                return OVER_MEMORY
        if spec["scratch"] and _disk(spec["scratch"], spec["disk"]) > spec["disk"]:
            return OVER_DISK
        for folder in spec["mounted"]:  # file systems that exist only inside the sandbox
            for pid in _descendants()[1:]:
                with contextlib.suppress(OSError):
                    inside = os.statvfs(f"/proc/{pid}/root{folder}")
                    if inside.f_files - inside.f_ffree > _MAX_FILES:
                        return OVER_DISK
                    break
    return 0


def _descendants() -> list[int]:
    """Return the process ids of all descendants, parents first."""
    found = [os.getpid()]
    for pid in found:
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{thread}/children") as children:
                    found += map(int, children.read().split())
    return found[1:]


def _kilobytes(pid: int, file: str, fields: tuple[str, ...]) -> int | None:
    """Return the sum of a process's fields, in KiB; 0 if the process is gone, None if the process's
    file may not be read."""
    try:
        with open(f"/proc/{pid}/{file}") as lines:
            return sum(int(line.split()[1]) for line in lines if line.startswith(fields))
    except PermissionError:
        return None
    except OSError:
        return 0


def _disk(folder: str, limit: int) -> int:
    """Return the number of bytes that the files below a folder occupy; stop counting above the
    limit. If there are too many files, return more than the limit."""
    total, files, folders = 0, 0, [folder]
    while folders and total <= limit:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    files += 1
                    if files > _MAX_FILES:
                        return limit + 1
                    with contextlib.suppress(FileNotFoundError):
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(entry.path)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue
        except OSError:  # a path that is too long
            return limit + 1
    return total


if __name__ == "__main__":
    code = main()
    # The library's threads must not delay the end.
    os._exit(code)
