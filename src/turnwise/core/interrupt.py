"""Ctrl-C and SIGTERM: cancel the run, and kill whatever does not end by itself.

The first signal cancels the run, which then ends the processes that it started. A second
signal, or `PATIENCE_SECONDS` without an end, kills all child processes and ends this one, with a
line that names the user code that has not returned. A thread reads the signals, so that a stuck
event loop delays nothing.
"""

import asyncio
import os
import signal
import socket
import sys
import threading
from collections.abc import Awaitable
from contextlib import suppress
from typing import TYPE_CHECKING

from turnwise.core.user_code import unreturned_calls

if TYPE_CHECKING:
    import psutil

EXIT_INTERRUPTED = 130
PATIENCE_SECONDS = 6.0
"""Time for a cancelled run to end; with the killing, everything ends within ten seconds."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_KILL_SECONDS = 1.0
_SHOW_CURSOR = "\x1b[?25h"


async def interruptible(run: Awaitable[None]) -> None:
    """Run a coroutine until it is done or a signal arrives; call this in the main thread.

    Raises:
        asyncio.CancelledError: when a signal arrived, after `run` has ended.

    Example:
        asyncio.run(interruptible(train(config)))
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
            text = _SHOW_CURSOR + text  # a live table hides it
        os.write(2, text.encode())  # a stuck thread may hold the lock of sys.stderr
    os._exit(code)


def kill_children() -> None:
    """Kill all descendants of this process; their shared memory is removed afterwards."""
    import psutil

    for _ in range(2):  # one of them may be starting another
        # Listed before any is killed: the children of a dead process are no longer found.
        below = psutil.Process().children(recursive=True)
        killed = [process for process in below if not _cleans_up(process)]
        for process in killed:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(killed, timeout=_KILL_SECONDS)


def _cleans_up(process: "psutil.Process") -> bool:
    """Return whether a process is Python's tracker of semaphores and shared memory.

    It removes leftovers once the processes that it serves have ended, and then ends too.
    """
    import psutil

    try:
        return "multiprocessing.resource_tracker" in " ".join(process.cmdline())
    except psutil.Error:
        return False
