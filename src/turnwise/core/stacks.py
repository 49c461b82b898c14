"""Stacks of a run's processes, even of a stuck interpreter, and the run's report: `turnwise stuck`.

Each process has a file in the run folder's `logs/stacks/`, and a thread that answers requests on a
socket with the stacks of all other threads. A process that does not answer, because something holds
the interpreter's lock, is sent `SIGNAL`, whose handler writes the stacks to the file. The signal is
the last resort, because reading the stack of a running thread can crash the process. The watchdog
writes the whole report, including what the run waits for, to `stuck.txt`; another process can
request the report by creating a file.
"""

import asyncio
import faulthandler
import itertools
import os
import re
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TextIO

import psutil

from turnwise.errors import InputError

SIGNAL: int = signal.SIGRTMAX - 5
"""A signal that neither Python, Ray, vLLM nor Slurm uses; only Linux has such signals."""
REPORT = "stuck.txt"
_SECONDS = 8.0
"""Time for all processes to answer; only a stopped or starved process needs all of it."""
_THREAD_SECONDS = 3.0
"""Time for a process's thread to answer, before the process is sent the signal."""
_STILL_SECONDS = 1.0
"""Time after which a file that no longer grows has all stacks from the signal's handler."""
_REPORT_SECONDS = 15.0  # time for a run to write its report
_PAUSE_SECONDS = 0.05
_MAX_FRAMES = 100
_LISTENER = re.compile(r"stacks\.py\", line \d+ in _listen$", re.MULTILINE)
"""Matches the stack of the answering thread, which is not shown."""
_PEER = struct.Struct("3i")  # process, user and group at the other end of a socket
_STARTED = "started "
_START_FIELD = 19  # index of the start time among the fields after the name in /proc/PID/stat


@dataclass(frozen=True, slots=True)
class ProcessStacks:
    """One process of a run, and what its threads are doing."""

    name: str
    """Name of the process's log file, such as "worker-0", and the process's title."""
    pid: int
    stacks: Sequence[str]
    """Each distinct stack, innermost frame first, headed by the number of threads that have it."""
    flaw: str = ""
    """Reason why stacks are missing; "" if no stack is missing."""

    def text(self) -> str:
        """Return the stacks as lines, headed by the process."""
        lines = [f"== {self.name} (process {self.pid})", *([self.flaw] if self.flaw else [])]
        return "\n\n".join(["\n".join(lines), *self.stacks])


# A process that shows its stacks


# The state of this process; empty before `register`.
_folder: Path | None = None
_name = ""
_file: TextIO | None = None  # kept open for the signal's handler
_socket: socket.socket | None = None
_listener: int | None = None
"""Id of the process that listens on the socket; a fork inherits the socket, but not the thread."""


def register(run: Path, name: str) -> None:
    """Make this process and its forks show their stacks under a name when asked, if the run folder
    can be written."""
    global _folder, _name
    first = _folder is None
    _folder, _name = stacks_folder(run).absolute(), name
    with suppress(OSError):
        _folder.mkdir(parents=True, exist_ok=True)
    _open()
    if first:
        os.register_at_fork(after_in_child=_open)


def stacks_folder(run: Path) -> Path:
    """Return the folder of the processes' files."""
    return run / "logs" / "stacks"


def report_request(run: Path) -> Path:
    """Return the file by which another process asks a run for its report."""
    return stacks_folder(run) / "report-wanted"


def _open() -> None:
    """Open this process's file, and answer on its socket."""
    global _file, _socket, _listener
    assert _folder is not None
    pid = os.getpid()
    with suppress(OSError):
        path, started = _folder / f"{socket.gethostname()}-{pid}.txt", _start(pid)
        _file = file = path.open("w", encoding="utf-8")
        file.write(f"{_name}\n{_STARTED}{started}\n\n")
        file.flush()
        faulthandler.register(SIGNAL, file=file, all_threads=True)
        if _listener == pid:
            return
        if _socket is not None:  # belongs to the process that forked this one
            _socket.close()
        _socket = asked = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        asked.bind(_address(pid, started))
        asked.listen()
        threading.Thread(target=_listen, args=(asked,), name="stacks", daemon=True).start()
        _listener = pid


def _listen(asked: socket.socket) -> None:
    """Answer each connection of this user, or of root, with the stacks of all other threads."""
    while True:
        connection, _ = asked.accept()
        with connection, suppress(OSError):  # the client has gone, or does not read
            peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
            if _PEER.unpack(peer)[1] in (os.getuid(), 0):  # any user can connect
                connection.settimeout(_SECONDS)
                connection.sendall(_stacks_here().encode(errors="replace"))


def _stacks_here() -> str:
    """Return the stacks of all other threads of this process in `faulthandler`'s format.
    `faulthandler` itself writes at most a hundred threads."""
    blocks = []
    for thread, frame in sys._current_frames().items():
        if thread != threading.get_ident():
            lines = [
                f'  File "{each.f_code.co_filename}", line {line} in {each.f_code.co_name}'
                for each, line in itertools.islice(traceback.walk_stack(frame), _MAX_FRAMES)
            ]
            blocks.append("\n".join(["Thread (most recent call first):", *lines]))
    return "\n\n".join(blocks)


def _address(pid: int, started: str) -> str:
    """Return the address of a process's socket, in Linux's abstract namespace, where it is not a
    file."""
    return f"\0turnwise-stacks-{pid}-{started}"


# Collecting the stacks


async def _answer_of(
    path: Path, before: int, process: psutil.Process, started: str, seconds: float
) -> bytes | None:
    """Return the answer of a process's thread within `seconds`; b"" if instead the signal's handler
    has written to the file (whose size was `before`) or the process has ended; None if neither
    happened."""
    begun = since = time.monotonic()  # `since`: when the file got its present size
    grown = before

    async def receive() -> bytes:
        """Return the thread's answer; b"" if the thread is ending, or cannot be reached."""
        with suppress(OSError):
            reader, writer = await asyncio.open_unix_connection(_address(process.pid, started))
            try:
                return await reader.read()
            finally:
                writer.close()
        return b""

    answer = asyncio.create_task(receive())
    await asyncio.wait([answer], timeout=min(_THREAD_SECONDS, seconds / 2))
    if not (answer.done() and answer.result()):
        with suppress(psutil.Error):  # it ends at this moment
            process.send_signal(SIGNAL)
    while not (answer.done() and answer.result()):
        if _ended(process) or (grown > before and time.monotonic() - since >= _STILL_SECONDS):
            return b""
        if time.monotonic() >= begun + seconds:
            return None
        await asyncio.sleep(_PAUSE_SECONDS)
        if (size := _size(path)) != grown:
            grown, since = size, time.monotonic()
    return answer.result()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def collect(run: Path, seconds: float = _SECONDS) -> list[ProcessStacks]:
    """Ask all processes of a run on this machine for their stacks, within `seconds` in total, and
    remove the files of processes that have ended. Call it outside event loops."""
    found: list[ProcessStacks] = []
    elsewhere: list[ProcessStacks] = []
    asked: list[tuple[str, Path, int, psutil.Process, str]] = []
    for path, host, pid, name, started in _registered(run):
        if host != socket.gethostname():
            flaw = f"on {host}: stacks of another machine are not collected"
            elsewhere.append(ProcessStacks(name, pid, [], flaw))
        elif (process := _living(pid, started)) is None:
            path.unlink(missing_ok=True)
        else:
            with suppress(psutil.Error):  # it ends at this moment
                title = " ".join(process.cmdline()).strip()[:80]
                asked.append((f"{name}: {title}", path, _size(path), process, started))

    async def ask_all() -> list[bytes | None]:
        return await asyncio.gather(*(_answer_of(*each[1:], seconds) for each in asked))

    # Other event loops, such as uvloop's, cannot connect to abstract addresses.
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        answers = runner.run(ask_all())
    for (name, path, size, process, _), answer in zip(asked, answers, strict=True):
        text = answer or b""
        if not answer:
            with suppress(OSError):
                text = path.read_bytes()[size:]
        alike: Counter[str] = Counter()
        shown = text.decode(errors="replace").replace("Current thread", "\n\nCurrent thread")
        for block in shown.split("\n\n"):
            _, _, frames = block.strip().partition("\n")
            if frames and not _LISTENER.search(frames):
                alike[frames] += 1
        stacks = [
            f"{count} {'thread' if count == 1 else 'threads'}:\n{frames}"
            for frames, count in alike.items()
        ]
        if not stacks and _ended(process):
            path.unlink(missing_ok=True)
            continue
        part = "only this" if stacks else "nothing"
        flaw = f"it wrote {part} within {seconds:g} s" if answer is None else ""
        found.append(ProcessStacks(name, process.pid, stacks, flaw))
    return [*found, *elsewhere]


def may_be_running(run: Path) -> bool:
    """Return whether a run has a living process here, or any process on another machine, where it
    may have ended."""
    return any(
        host != socket.gethostname() or _living(pid, started)
        for _, host, pid, _, started in _registered(run)
    )


def _registered(run: Path) -> Iterator[tuple[Path, str, int, str, str]]:
    """Yield the files of a run's processes: each with host, process id, name and start time."""
    for path in sorted(stacks_folder(run).glob("*.txt")):
        host, _, pid = path.stem.rpartition("-")
        with suppress(OSError, ValueError):  # other files in the folder are not ours
            name, started, *_ = path.read_text(encoding="utf-8").splitlines()
            yield path, host, int(pid), name, started.removeprefix(_STARTED)


def _living(pid: int, started: str) -> psutil.Process | None:
    """Return the process with this id and start time, if it handles the signal; else None."""
    with suppress(psutil.Error, OSError):
        process = psutil.Process(pid)
        if _start(pid) == started and not _ended(process):
            status = Path(f"/proc/{pid}/status").read_text()
            handled = re.search(r"^SigCgt:\s*(\w+)$", status, re.MULTILINE)
            if handled is not None and int(handled[1], 16) >> (SIGNAL - 1) & 1:
                return process
    return None


def _ended(process: psutil.Process) -> bool:
    """Return whether a process has ended, even if its parent has not noticed."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _start(pid: int) -> str:
    """Return a process's start time, in clock ticks since the machine's boot."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[_START_FIELD]


# The report


def write_report(run: Path, line: str) -> Path | None:
    """Write a run's report, which begins with a line of the watchdog; return its path, or None if
    it cannot be written."""
    try:
        parts = [process.text() for process in collect(run)]
        text = "\n\n".join([f"{datetime.now().isoformat(' ', 'seconds')}  {line}", *parts])
        (run / REPORT).write_text(text + "\n", encoding="utf-8")
    except OSError:
        return None
    return run / REPORT


def ask(run: Path, seconds: float = _REPORT_SECONDS) -> str:
    """Return a run's report. If the run does not answer in time, return the stacks of its processes
    on this machine; if it has ended, return its last report."""
    if not (run / "logs").is_dir():
        raise InputError(f"there is no run in {run} (a folder with logs)")
    report, request = run / REPORT, report_request(run)
    if may_be_running(run):
        due = time.monotonic() + seconds
        with suppress(OSError):
            request.touch()
            while request.exists() and time.monotonic() < due:  # the watchdog removes it
                time.sleep(_PAUSE_SECONDS)
            if not request.exists():
                return report.read_text(encoding="utf-8")
            request.unlink(missing_ok=True)
        if found := collect(run):
            said = (
                f"the run did not answer within {seconds:g} s: it is not training, or its main "
                "process is stuck"
            )
            return "\n\n".join([said, *(process.text() for process in found)]) + "\n"
    if report.is_file():
        return f"no process of {run} is running; its last report:\n{report.read_text('utf-8')}"
    raise InputError(f"no process of {run} is running here, and it has no {REPORT}")
