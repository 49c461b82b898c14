"""Peak memory of a test session: of its own processes only."""

import contextlib
import threading

import psutil


class PeakMemory:
    """Samples the memory of this process and of all below it, each shared page counted once.

    The figure is the sum of proportional set sizes (PSS), in bytes, every 30 seconds: reading them
    takes a noticeable part of a core.
    """

    def __init__(self) -> None:
        self.peak = 0
        self.processes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join(10)

    def _sample(self) -> None:
        own = psutil.Process()
        while True:
            total = count = 0
            for process in (own, *own.children(recursive=True)):
                with contextlib.suppress(psutil.Error, OSError):
                    total += process.memory_full_info().pss
                    count += 1
            if total > self.peak:
                self.peak, self.processes = total, count
            if self._ended.wait(30):
                return
