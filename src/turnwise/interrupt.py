"""Ctrl-C and SIGTERM: the run is cancelled, and what does not end by itself is killed.

The first signal cancels the run, which then ends what it started. A second one, or
`PATIENCE_SECONDS` without an end, kills every process below this one and ends this one, with a line
that names the user code which has not returned. Signals are read in a thread of their own, so that
an event loop which is stuck holds nothing up.
"""

import asyncio
import os
import signal
import socket
import sys
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import psutil

from turnwise.tasks import unreturned_calls

EXIT_INTERRUPTED = 130
PATIENCE_SECONDS = 6.0
"""With what killing takes on a busy machine, all has ended within ten seconds."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_KILL_SECONDS = 1.0
_SHOW_CURSOR = "\x1b[?25h"


async def interruptible(run: Coroutine[Any, Any, None]) -> None:
    """Run until it is done or a signal comes; called in the main thread.

    Raises:
        asyncio.CancelledError: when a signal came and `run` has ended what it started.
    """
    task, loop = asyncio.ensure_future(run), asyncio.get_running_loop()
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    interrupted = threading.Event()

    def listen() -> None:
        if not _signal_comes(reader):
            return
        interrupted.set()
        late = f"interrupted; it did not end within {PATIENCE_SECONDS:g} s and was killed"
        end_by_force_after(PATIENCE_SECONDS, EXIT_INTERRUPTED, late)
        with suppress(RuntimeError):  # the loop has closed: the run is over
            loop.call_soon_threadsafe(task.cancel)
        if _signal_comes(reader):
            _end_by_force(EXIT_INTERRUPTED, "interrupted twice; everything it started was killed")

    # A signal is written to the socket only where Python has a handler for it.
    before = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}
    wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=listen, daemon=True, name="turnwise-signals").start()
    try:
        await task
    finally:
        if not interrupted.is_set():  # else signals are listened to until the process has ended
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)
            writer.close()


def _signal_comes(reader: socket.socket) -> bool:
    """Wait for one of our signals; False when nobody listens any more."""
    while received := reader.recv(1):
        if received[0] in _SIGNALS:
            return True
    return False


def end_by_force_after(seconds: float, code: int, why: str = "") -> None:
    """End this process and all below it if it still runs then, and say why."""
    timer = threading.Timer(seconds, _end_by_force, [code, why])
    timer.daemon = True
    timer.start()


def _end_by_force(code: int, why: str) -> None:
    calls = unreturned_calls()
    kill_children()
    if why:
        text = f"turnwise: {why}" + (f"; {calls}" if calls else "") + "\n"
        if sys.stderr is not None and sys.stderr.isatty():
            text = _SHOW_CURSOR + text  # a live table hides it
        os.write(2, text.encode())  # whoever is stuck may hold the lock of sys.stderr
    os._exit(code)


def kill_children() -> None:
    """Kill all processes below this one; what they kept in shared memory is then removed."""
    for _ in range(2):  # one of them may be starting another
        # Listed before any is killed: the children of a dead process are no longer found.
        below = psutil.Process().children(recursive=True)
        killed = [process for process in below if not _cleans_up(process)]
        for process in killed:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(killed, timeout=_KILL_SECONDS)


def _cleans_up(process: psutil.Process) -> bool:
    """Whether it is Python's tracker of named semaphores and shared memory, which removes what
    is left over once the processes that it serves have ended, and then ends too."""
    try:
        return "multiprocessing.resource_tracker" in " ".join(process.cmdline())
    except psutil.Error:
        return False
