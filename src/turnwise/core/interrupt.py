"""Ctrl-C and SIGTERM: let the run save its work, cancel it, and kill every process that does not
end.

After the first signal, a run that has something to save may do so for `SAVE_SECONDS` (`Ending`). It
is then cancelled, and ends the processes that it started. A second signal, or `PATIENCE_SECONDS`
without an end, kills all child processes and ends this one, with a line that names the user code
that has not returned. A thread reads the signals, so that a stuck event loop delays nothing.
"""

import asyncio
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Self

from turnwise.core.user_code import unreturned_calls

EXIT_INTERRUPTED = 130
PATIENCE_SECONDS = 6.0
"""Time for a cancelled run to end; with the killing, everything ends within ten seconds."""
SAVE_SECONDS = 60.0  # time for a run to save its work once it was asked to end
_EXIT_TERMINATED = 128 + signal.SIGTERM
_POLL_SECONDS = 0.1
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_KILL_SECONDS = 1.0
_TWICE = "interrupted twice; everything it started was killed"


class Ending:
    """A context manager for a run that, when asked to end, may finish its work before it is
    cancelled. Another thread calls `has_work` to learn whether there is work to finish."""

    _open: "list[Ending]" = []  # noqa: RUF012 (of this process: the runs in progress)

    def __init__(self, has_work: Callable[[], bool]) -> None:
        self.asked = asyncio.Event()  # set once the run is asked to end, and has work
        self._has_work = has_work
        self._done = threading.Event()

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._open.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.remove(self)
        self._done.set()

    async def finished(self) -> None:
        """Report that the work is done, and wait to be cancelled."""
        self._done.set()
        await asyncio.Event().wait()

    @classmethod
    def begin(cls) -> "Ending | None":
        """Ask the run in progress to end; return None if it has no work to do first."""
        with suppress(IndexError, RuntimeError):  # no run, or its loop has closed
            ending = cls._open[-1]
            if ending._has_work():
                ending._loop.call_soon_threadsafe(ending.asked.set)
                return ending
        return None

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds` until the work is done; return whether it is."""
        return self._done.wait(seconds)


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Raise SystemExit on SIGTERM during a `with` block, where the program would otherwise end at
    once. Do nothing if the program has its own handler, or outside the main thread."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def leave(*_: object) -> None:
        raise SystemExit(_EXIT_TERMINATED)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


async def interruptible(run: Awaitable[None]) -> None:
    """Run a coroutine until it is done or a signal arrives; call this in the main thread. After a
    signal it raises CancelledError, once `run` has ended."""
    task, loop = asyncio.ensure_future(run), asyncio.get_running_loop()
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    interrupted = threading.Event()

    def listen() -> None:
        if not _signal_comes(reader):
            return
        interrupted.set()
        ending, end = Ending.begin(), time.monotonic() + SAVE_SECONDS
        while ending is not None and not ending.wait(0) and time.monotonic() < end:
            readable, _, _ = select.select([reader], [], [], _POLL_SECONDS)
            if readable and (received := reader.recv(1)) and received[0] in _SIGNALS:
                _end_by_force(EXIT_INTERRUPTED, _TWICE)
        late = f"interrupted; it did not end within {PATIENCE_SECONDS:g} s and was killed"
        end_by_force_after(PATIENCE_SECONDS, EXIT_INTERRUPTED, late)
        with suppress(RuntimeError):  # the loop has closed: the run is over
            loop.call_soon_threadsafe(task.cancel)
        if _signal_comes(reader):
            _end_by_force(EXIT_INTERRUPTED, _TWICE)

    # A signal is written to the socket only if Python has a handler for it.
    before = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}
    wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=listen, daemon=True, name="turnwise-signals").start()
    try:
        await task
    finally:
        if not interrupted.is_set():  # otherwise keep listening until the process ends
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)
            writer.close()


def _signal_comes(reader: socket.socket) -> bool:
    """Wait for one of our signals; returns False once the socket is closed."""
    while received := reader.recv(1):
        if received[0] in _SIGNALS:
            return True
    return False


def end_by_force_after(seconds: float, code: int, why: str = "") -> None:
    """End this process and its descendants after some seconds, and print why."""
    timer = threading.Timer(seconds, _end_by_force, [code, why])
    timer.daemon = True
    timer.start()


def _end_by_force(code: int, why: str) -> None:
    calls = unreturned_calls()
    kill_children()
    if why:
        text = f"turnwise: {why}" + (f"; {calls}" if calls else "") + "\n"
        if sys.stderr is not None and sys.stderr.isatty():
            text = "\x1b[?25h" + text  # shows the cursor, which a live table hides
        os.write(2, text.encode())  # a stuck thread may hold the lock of sys.stderr
    os._exit(code)


def kill_children() -> None:
    """Kill all descendants of this process except Python's resource tracker, which removes the
    shared memory of the killed processes, and then ends by itself."""
    import psutil

    for _ in range(2):  # one of them may be starting another
        killed = []
        # List them before any is killed: the children of a dead process are no longer found.
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if "multiprocessing.resource_tracker" in " ".join(process.cmdline()):
                    continue
            killed.append(process)
        for process in killed:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(killed, timeout=_KILL_SECONDS)
