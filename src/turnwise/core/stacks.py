"""Stacks of all processes of a run, on a signal, even of one whose interpreter is stuck.

A process that calls `register` writes the stacks of its threads to a file of its own in the run
folder's `logs/stacks/` when it receives `SIGNAL`; so do the processes that it forks. The file is
also the proof that the signal is safe: to any other process it would be deadly.
"""

import faulthandler
import os
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import psutil

SIGNAL = signal.SIGRTMAX - 5
"""A signal that neither Python, Ray, vLLM nor Slurm uses."""
_SECONDS = 3.0
"""Time for all processes to write."""
_PAUSE_SECONDS = 0.05
_STARTED = "started "
_START_FIELD = 19
"""Place of a process's start in /proc/PID/stat, after its name."""


@dataclass(frozen=True, slots=True)
class ProcessStacks:
    """One process of a run, and what its threads are doing.

    Example:
        for process in collect(Path("runs/demo")):
            print(process.text())
    """

    name: str
    """Name of its log file, such as "worker-0", and its title."""
    pid: int
    stacks: Sequence[str]
    """Each stack that a thread has, its innermost frame first."""
    flaw: str = ""
    """Reason why there are none; "" if there are."""

    def text(self) -> str:
        """Return the stacks as lines, headed by the process."""
        lines = [f"== {self.name} (process {self.pid})", *([self.flaw] if self.flaw else [])]
        return "\n\n".join(["\n".join(lines), *self.stacks])


class _Registered:
    """The file of this process; None before `register`."""

    folder: Path | None = None
    name = ""
    file: TextIO | None = None
    forks_too = False


def register(run: Path, name: str) -> None:
    """Make this process, and those that it forks, write their stacks on `SIGNAL`.

    Does nothing if the folder cannot be written.

    Args:
        run: The run folder.
        name: Name of the process in reports.

    Example:
        register(Path("runs/demo"), "worker-0")
    """
    _Registered.folder, _Registered.name = stacks_folder(run).absolute(), name
    with suppress(OSError):
        _Registered.folder.mkdir(parents=True, exist_ok=True)
    _open()
    if not _Registered.forks_too:
        _Registered.forks_too = True
        os.register_at_fork(after_in_child=_open)


def stacks_folder(run: Path) -> Path:
    """Return the folder of the processes' files."""
    return run / "logs" / "stacks"


def _open() -> None:
    """Open this process's file, and write to it on the signal."""
    if _Registered.folder is None:
        return
    path = _Registered.folder / f"{socket.gethostname()}-{os.getpid()}.txt"
    with suppress(OSError):
        file = path.open("w", encoding="utf-8")
        file.write(f"{_Registered.name}\n{_STARTED}{_start(os.getpid())}\n\n")
        file.flush()
        faulthandler.register(SIGNAL, file=file, all_threads=True)
        _Registered.file = file  # kept open


def collect(run: Path, seconds: float = _SECONDS) -> list[ProcessStacks]:
    """Ask all processes of a run on this machine for their stacks.

    Files of processes that have ended are removed.

    Args:
        seconds: Time for all of them together.
    """
    asked: list[tuple[Path, psutil.Process, str, int]] = []
    found: list[ProcessStacks] = []
    host = f"{socket.gethostname()}-"
    for path in sorted(stacks_folder(run).glob("*.txt")):
        try:
            name, started, *_ = path.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError):
            continue
        machine, _, pid = path.stem.rpartition("-")
        if not path.name.startswith(host):
            elsewhere = f"on {machine}: stacks of another machine are not collected"
            found.append(ProcessStacks(name, int(pid), [], elsewhere))
            continue
        process = _living(int(pid), started.removeprefix(_STARTED))
        if process is None:
            path.unlink(missing_ok=True)
            continue
        with suppress(psutil.Error, OSError):
            title = " ".join(process.cmdline()).strip()[:80]
            asked.append((path, process, f"{name}: {title}", path.stat().st_size))
            process.send_signal(SIGNAL)
    return [*_answers(asked, seconds), *found]


def running(run: Path) -> bool:
    """Return whether a registered process of a run lives, here or (presumably) elsewhere."""
    host = f"{socket.gethostname()}-"
    for path in stacks_folder(run).glob("*.txt"):
        with suppress(OSError, ValueError):
            _, started, *_ = path.read_text(encoding="utf-8").splitlines()
            pid = int(path.stem.rpartition("-")[2])
            if not path.name.startswith(host) or _living(pid, started.removeprefix(_STARTED)):
                return True
    return False


def _living(pid: int, started: str) -> psutil.Process | None:
    """Return the process with this id and start that handles the signal; None without one."""
    try:
        process = psutil.Process(pid)
        if _start(pid) != started or _ended(process):
            return None
        status = Path(f"/proc/{pid}/status").read_text()
    except (psutil.Error, OSError):
        return None
    caught = next((line for line in status.splitlines() if line.startswith("SigCgt:")), "")
    return process if caught and int(caught.split()[1], 16) >> (SIGNAL - 1) & 1 else None


def _ended(process: psutil.Process) -> bool:
    """Return whether a process has ended, even if its parent has not noticed."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _start(pid: int) -> str:
    """Return a process's start, in clock ticks since the machine's."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[_START_FIELD]


def _answers(
    asked: Sequence[tuple[Path, psutil.Process, str, int]], seconds: float
) -> list[ProcessStacks]:
    """Wait until every file has grown and no longer does, and return what was written."""
    sizes = {path: before for path, _, _, before in asked}
    due = time.monotonic() + seconds
    while time.monotonic() < due:
        time.sleep(_PAUSE_SECONDS)
        now = {path: _size(path) for path in sizes}
        if now == sizes and all(now[path] > old or _ended(p) for path, p, _, old in asked):
            break
        sizes = now
    answers = []
    for path, process, name, before in asked:
        with suppress(OSError), path.open("rb") as file:
            file.seek(before)
            stacks = _folded(file.read().decode(errors="replace"))
            if not stacks and _ended(process):
                path.unlink(missing_ok=True)
                continue
            flaw = "" if stacks else f"it wrote nothing within {seconds:g} s"
            answers.append(ProcessStacks(name, process.pid, stacks, flaw))
    return answers


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _folded(text: str) -> list[str]:
    """Return the threads' stacks, equal ones once, with their number."""
    alike: dict[str, int] = {}
    for block in text.replace("Current thread", "\n\nCurrent thread").split("\n\n"):
        _, _, frames = block.strip().partition("\n")
        if frames:
            alike[frames] = alike.get(frames, 0) + 1
    return [
        f"{count} {'thread' if count == 1 else 'threads'}:\n{frames}"
        for frames, count in alike.items()
    ]
