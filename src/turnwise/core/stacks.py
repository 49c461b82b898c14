"""Stacks of all processes of a run, on request, even of one whose interpreter is stuck.

A process that calls `register` writes the stacks of its threads to a file of its own in the run
folder's `logs/stacks/` when it is asked to; so do the processes that it forks. A thread listens on
a socket, writes an answer while it holds the interpreter's lock, and gives the file its name once
it is whole. Only a process whose thread does not answer, because something else keeps the lock, is
sent `SIGNAL`: written from the signal's handler, the stacks of threads that run at that moment can
be broken, and reading them crashes the process. The signal's stacks go to a file that the process
opened before, which is also the proof that the signal is safe: to others it would be deadly.
"""

import faulthandler
import itertools
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import psutil

SIGNAL: int = signal.SIGRTMAX - 5
"""A signal that neither Python, Ray, vLLM nor Slurm uses; Linux alone has such signals."""
_SECONDS = 8.0
"""Time for all processes to write; only one that is stopped, or gets no processor, needs it."""
_THREAD_SECONDS = 3.0
"""Time for a process's thread to answer, before the process is sent the signal."""
_UNFINISHED, _ANSWER = ".unfinished", ".answer"
"""Suffixes of the file that a process's thread writes, and of the same once it is whole."""
_MOST_THREADS = _MOST_FRAMES = 100
"""Numbers of threads, and of frames of each, that `faulthandler` writes."""
_LISTENER = re.compile(r"stacks\.py\", line \d+ in _listen$", re.MULTILINE)
"""The thread that writes the stacks, which shows nothing of the process."""
_PAUSE_SECONDS = 0.05
_STARTED = "started "
_START_FIELD = 19
"""Place of a process's start in /proc/PID/stat, after its name."""


@dataclass(slots=True)
class _Asked:
    """A process that was asked for its stacks."""

    name: str
    path: Path
    process: psutil.Process
    size: int
    """Size of its file before."""
    deaf: frozenset[str] | None = None
    """Threads that block the signal at all times; others block it while they write. None before
    the signal is sent."""

    def signal(self) -> None:
        """Send the process the signal, unless it was sent."""
        if self.deaf is None:
            self.deaf = _blocking(self.process.pid)
            with suppress(psutil.Error):
                self.process.send_signal(SIGNAL)

    def written(self) -> str:
        """Return what the process's thread has answered; without that, what the signal wrote."""
        with suppress(OSError):
            return self.path.with_suffix(_ANSWER).read_text(errors="replace")
        with suppress(OSError), self.path.open("rb") as file:
            file.seek(self.size)
            return file.read().decode(errors="replace")
        return ""

    def done(self) -> bool:
        """Return whether the process has written everything, or has ended."""
        if _ended(self.process) or self.path.with_suffix(_ANSWER).exists():
            return True
        if self.deaf is None:
            return False
        # Its file grows only once a thread blocks the signal, which it does until it is done.
        return _size(self.path) > self.size and _blocking(self.process.pid) <= self.deaf


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
    path: Path | None = None
    file: TextIO | None = None
    asks: socket.socket | None = None
    listener: int | None = None
    """The process that listens on the socket; a fork has the socket, but not the thread."""
    forks_too = False


def register(run: Path, name: str) -> None:
    """Make this process, and those that it forks, write their stacks when asked to.

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
    """Open this process's file, and write to it on request."""
    if _Registered.folder is None:
        return
    path = _Registered.folder / f"{socket.gethostname()}-{os.getpid()}.txt"
    with suppress(OSError):
        file = path.open("w", encoding="utf-8")
        file.write(f"{_Registered.name}\n{_STARTED}{_start(os.getpid())}\n\n")
        file.flush()
        faulthandler.register(SIGNAL, file=file, all_threads=True)
        _Registered.path, _Registered.file = path, file  # kept open
        if _Registered.listener == os.getpid():
            return
        if _Registered.asks is not None:  # of the process that forked this one
            _Registered.asks.close()
        _Registered.asks = asks = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        asks.bind(_address(os.getpid(), _start(os.getpid())))
        threading.Thread(target=_listen, args=(asks,), name="stacks", daemon=True).start()
        _Registered.listener = os.getpid()


def _listen(asks: socket.socket) -> None:
    """Write the stacks of all threads each time that a datagram comes."""
    while True:
        asks.recv(1)
        with suppress(BlockingIOError):  # requests that came while the lock was kept
            while asks.recv(1, socket.MSG_DONTWAIT):
                pass
        if (path := _Registered.path) is not None:
            with suppress(OSError):  # the disk is full
                unfinished = path.with_suffix(_UNFINISHED)
                with unfinished.open("w", encoding="utf-8") as file:
                    faulthandler.dump_traceback(file, all_threads=True)
                    file.writelines(_stacks_after(_MOST_THREADS))
                unfinished.replace(path.with_suffix(_ANSWER))


def _stacks_after(number: int) -> Iterator[str]:
    """Yield the stacks of the oldest threads, without the newest ones and this one.

    The main thread is the oldest of all.
    """
    # The order is that of `dump_traceback`.
    for thread, frame in itertools.islice(sys._current_frames().items(), number, None):
        if thread == threading.get_ident():
            continue
        yield "\nThread (most recent call first):\n"
        for each, line in itertools.islice(traceback.walk_stack(frame), _MOST_FRAMES):
            yield f'  File "{each.f_code.co_filename}", line {line} in {each.f_code.co_name}\n'


def _address(pid: int, started: str) -> str:
    """Return the address of a process's socket, in Linux's abstract namespace: it is no file."""
    return f"\0turnwise-stacks-{pid}-{started}"


def collect(run: Path, seconds: float = _SECONDS) -> list[ProcessStacks]:
    """Ask all processes of a run on this machine for their stacks.

    Files of processes that have ended are removed.

    Args:
        seconds: Time for all of them together.
    """
    asked: list[_Asked] = []
    found: list[ProcessStacks] = []
    for path, host, pid in _files(run):
        try:
            name, started, *_ = path.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError):
            continue
        if host != socket.gethostname():
            elsewhere = f"on {host}: stacks of another machine are not collected"
            found.append(ProcessStacks(name, pid, [], elsewhere))
            continue
        process = _living(pid, started.removeprefix(_STARTED))
        if process is None:
            _remove(path)
            continue
        with suppress(psutil.Error, OSError):
            path.with_suffix(_ANSWER).unlink(missing_ok=True)  # to an earlier request
            title = " ".join(process.cmdline()).strip()[:80]
            each = _Asked(f"{name}: {title}", path, process, path.stat().st_size)
            asked.append(each)
            if not _ask(pid, started.removeprefix(_STARTED)):
                each.signal()
    return [*_answers(asked, seconds), *found]


def _ask(pid: int, started: str) -> bool:
    """Send a process's thread the request; return whether its socket took it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        try:
            sender.sendto(b"?", socket.MSG_DONTWAIT, _address(pid, started))
        except OSError:  # another network namespace, or a queue of requests that nobody takes
            return False
    return True


def running(run: Path) -> bool:
    """Return whether a registered process of a run lives, here or (presumably) elsewhere."""
    for path, host, pid in _files(run):
        with suppress(OSError, ValueError):
            _, started, *_ = path.read_text(encoding="utf-8").splitlines()
            if host != socket.gethostname() or _living(pid, started.removeprefix(_STARTED)):
                return True
    return False


def _files(run: Path) -> Iterator[tuple[Path, str, int]]:
    """Yield the processes' files in their order, each with its host and process id."""
    for path in sorted(stacks_folder(run).glob("*.txt")):
        host, _, pid = path.stem.rpartition("-")
        if pid.isdecimal():  # other files in the folder are not ours
            yield path, host, int(pid)


def _living(pid: int, started: str) -> psutil.Process | None:
    """Return the process with this id and start that handles the signal; None without one."""
    try:
        process = psutil.Process(pid)
        if _start(pid) != started or _ended(process):
            return None
        return process if _contains(Path(f"/proc/{pid}/status"), "SigCgt:") else None
    except (psutil.Error, OSError):
        return None


def _ended(process: psutil.Process) -> bool:
    """Return whether a process has ended, even if its parent has not noticed."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _start(pid: int) -> str:
    """Return a process's start, in clock ticks since the machine's."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[_START_FIELD]


def _answers(asked: Sequence[_Asked], seconds: float) -> list[ProcessStacks]:
    """Wait until every process is done, and return what was written."""
    start = time.monotonic()
    waited_for = list(asked)
    while (waited_for := [each for each in waited_for if not each.done()]) and (
        time.monotonic() < start + seconds
    ):
        if time.monotonic() >= start + min(_THREAD_SECONDS, seconds / 2):
            for each in waited_for:
                each.signal()
        time.sleep(_PAUSE_SECONDS)
    answers = []
    for each in asked:
        stacks = _folded(each.written())
        if not stacks and _ended(each.process):
            with suppress(OSError):
                _remove(each.path)
            continue
        flaw = ""
        if each in waited_for:
            flaw = f"it wrote {'only this' if stacks else 'nothing'} within {seconds:g} s"
        answers.append(ProcessStacks(each.name, each.process.pid, stacks, flaw))
    return answers


def _blocking(pid: int) -> frozenset[str]:
    """Return the threads of a process that block the signal now."""
    blocking = set()
    with suppress(OSError):  # the process has ended
        for thread in sorted(Path(f"/proc/{pid}/task").iterdir()):
            with suppress(OSError):  # the thread has ended
                if _contains(thread / "status", "SigBlk:"):
                    blocking.add(thread.name)
    return frozenset(blocking)


def _contains(status: Path, line: str) -> bool:
    """Return whether a line of signals in a file of /proc contains the signal."""
    signals = next((each for each in status.read_text().splitlines() if each.startswith(line)), "")
    return bool(signals) and bool(int(signals.split()[1], 16) >> (SIGNAL - 1) & 1)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _remove(path: Path) -> None:
    """Remove the files of a process that has ended."""
    for suffix in (path.suffix, _ANSWER, _UNFINISHED):
        path.with_suffix(suffix).unlink(missing_ok=True)


def _folded(text: str) -> list[str]:
    """Return the threads' stacks, equal ones once, with their number."""
    alike: dict[str, int] = {}
    for block in text.replace("Current thread", "\n\nCurrent thread").split("\n\n"):
        _, _, frames = block.strip().partition("\n")
        if frames and not _LISTENER.search(frames):
            alike[frames] = alike.get(frames, 0) + 1
    return [
        f"{count} {'thread' if count == 1 else 'threads'}:\n{frames}"
        for frames, count in alike.items()
    ]
