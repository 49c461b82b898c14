"""Memory, file descriptors and processor time of the soak test's processes, from start to end."""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from benchmarks.soak.programs import Program

MIB = 2**20
WARM_UP = 1 / 6
"""Share of the time that is not compared."""
PART = 1 / 4
"""Share of each half of the rest that is compared with the half's last such share."""
SLACK = 8.0
"""Growth in MiB that does not count in one half."""
PARTS = 60
"""Parts of the time that processor time is counted in."""
FEW = 2.0
"""Growth of open files that does not count: a fork server has one for each fork that is alive, and
a sample may meet a moment in which one is missing. What leaks with each killed process, of which
each kind has seven in an hour, grows by more."""


def growth(
    values: Sequence[tuple[float, float]],
    begin: float,
    end: float,
    middle: Callable[[Sequence[float]], float] = statistics.median,
    slack: float = 0.0,
) -> float | None:
    """Return by what a process grew in each half of the time after the warm-up: the smaller of both
    halves' last quarters by their first. A leak grows in both; a cache that a new shape of batch
    fills, such as oneDNN's of compiled kernels, grows once.

    Args:
        values: Pairs of a time and a value.
        begin: Start of the test.
        end: Its end.
        middle: What is taken instead of the median.
        slack: Growth in one half that does not count, in the unit of the values.

    Returns:
        None where a quarter has no value, or the first value came after the warm-up.
    """
    begin += (end - begin) * WARM_UP
    if not values or values[0][0] > begin:
        return None
    half, grown = (end - begin) / 2, list[float]()
    for start in (begin, begin + half):
        part, stop = half * PART, start + half
        first = [value for at, value in values if start <= at < start + part]
        last = [value for at, value in values if stop - part <= at <= stop]
        if not first or not last:
            return None
        before, after = middle(first), middle(last)
        grown.append(1.0 if before <= after <= before + slack else after / before)
    return min(grown)


@dataclass
class Watched:
    """The samples of one process."""

    name: str = ""
    memory: list[tuple[float, float]] = field(default_factory=list)
    """Its own memory (USS) in MiB, by time."""
    descriptors: list[tuple[float, float]] = field(default_factory=list)
    seconds: list[tuple[float, float]] = field(default_factory=list)
    """Its processor time in seconds since its start, by time."""


class Memory:
    """The samples of all processes of some programs, to which others may be added.

    Example:
        memory = Memory([training, serving])
        memory.sample()
        print(memory.long_lived(begin, time.monotonic()))
    """

    def __init__(self, programs: Sequence[Program]) -> None:
        self._programs = programs
        self._watched: dict[psutil.Process, Watched] = {}

    def sample(self) -> None:
        """Sample every process that is there now, without an environment's short ones."""
        now = time.monotonic()
        for program in self._programs:
            for role, process in program.processes():
                if role == "environment":
                    continue
                with suppress(psutil.Error):
                    uss = process.memory_full_info().uss / MIB
                    watched = self._watched.setdefault(process, Watched())
                    watched.name = f"{program.name}: {role} {process.pid}"  # forks get theirs late
                    watched.memory.append((now, uss))
                    watched.descriptors.append((now, process.num_fds()))
                    times = process.cpu_times()
                    watched.seconds.append((now, times.user + times.system))

    def write(self, path: Path) -> None:
        """Write all samples, a line of JSON for each process."""
        lines = [json.dumps(asdict(watched)) + "\n" for watched in self._watched.values()]
        path.write_text("".join(lines))

    def spent(self, name: str, begin: float, end: float) -> list[float]:
        """Return the processor time of a program in each of `PARTS` parts of the time, without what
        its processes spent after their last sample."""
        parts = [0.0] * PARTS
        for watched in self._watched.values():
            if watched.name.startswith(f"{name}: "):
                before = watched.seconds[0][1] if watched.seconds[0][0] <= begin else 0.0
                for at, seconds in watched.seconds:
                    if begin < at < end:
                        parts[int((at - begin) / (end - begin) * PARTS)] += seconds - before
                    before = seconds
        return parts

    def long_lived(self, begin: float, end: float) -> list[tuple[Watched, float, float]]:
        """Return the processes that lived from the warm-up to the end, with the growth of their
        memory and of their descriptors, the fastest-growing first."""
        found = []
        for watched in self._watched.values():
            memory = growth(watched.memory, begin, end, slack=SLACK)
            # The fewest, because an environment server has one for each trajectory.
            descriptors = growth(watched.descriptors, begin, end, min, FEW)
            if memory is not None and descriptors is not None:
                found.append((watched, memory, descriptors))
        return sorted(found, key=lambda item: -item[1])
