"""The speed of the machine itself: a fixed piece of work, whose processor time is measured."""

import hashlib
import statistics
import time

_HASHED = bytes(4 << 20)
_COPIED = bytearray(16 << 20)


class MachineSpeed:
    """Samples of a machine that other programs use as well, which makes it faster or slower.

    Example:
        speed = MachineSpeed()
        speed.sample()  # now and then
        speed.change(begin, end)  # 0.9: it was slower at the end
    """

    def __init__(self) -> None:
        self._samples: list[tuple[float, float]] = []
        self._stolen = _stolen_ticks()

    def sample(self) -> None:
        """Do the work once, in about 20 ms, and note its speed."""
        began = time.thread_time()
        hashlib.sha256(_HASHED).digest()
        bytes(_COPIED)
        spent, now = time.thread_time() - began, time.monotonic()
        stolen, total = _stolen_ticks()
        share = (stolen - self._stolen[0]) / max(1e-9, total - self._stolen[1])
        self._stolen = stolen, total
        self._samples.append((now, (1.0 - share) / spent))

    def change(self, begin: float, end: float) -> float:
        """Return the last sixth's median speed by the first's."""
        part = (end - begin) / 6
        first = [speed for at, speed in self._samples if begin <= at <= begin + part]
        last = [speed for at, speed in self._samples if end - part <= at <= end]
        return statistics.median(last) / statistics.median(first) if first and last else 1.0


def _stolen_ticks() -> tuple[float, float]:
    """Return the clock ticks that other virtual machines took from this one's cores, and all."""
    with open("/proc/stat") as file:
        values = [float(value) for value in file.readline().split()[1:9]]
    return values[7], sum(values)
