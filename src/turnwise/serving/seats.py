"""Seats of the engines: how many trajectories keep them busy, and fit into their caches."""

import math
from dataclasses import replace

from turnwise.config import Config
from turnwise.core.admission import Admission, Limits
from turnwise.engine.protocol import Occupancy
from turnwise.serving.scheduler import Scheduler

_SPARE = 1.25
"""Trajectories for each sequence that an engine computes at once: one is there when another's turn
ends."""
_FULL, _ROOMY = 0.9, 0.5
"""Shares of a KV cache above which it is full, and below which it has room for twice as many."""


def limits_of(config: Config, engines: int | None = None) -> Limits:
    """Return the limits of a number of engines, or of those that a run begins with; an evaluation
    begins where less than a training step is at work."""
    seats = math.ceil(_SPARE * (1 if config.deterministic else config.engine.max_num_seqs))
    rollout, count = config.rollout, config.serving.fewest_workers if engines is None else engines
    step = rollout.prompts_per_step * config.sampling.n
    return Limits(count * seats, rollout.concurrency, step)


def engine_admission(limits: Limits, scheduler: Scheduler) -> Admission:
    """Return an admission that follows the engines of a scheduler; `limits` are those of the
    engines that a run begins with."""
    admission, fewest = Admission(limits), scheduler.fewest_workers
    scheduler.subscribe(EngineSeats(admission, limits.working // fewest, fewest))
    return admission


class EngineSeats:
    """Keeps the limit of an admission at what a scheduler's engines hold: it follows engines that
    join and leave, and the use of their KV caches.

    An engine whose cache is full and has requests that wait gets no more trajectories than it
    computes; while the cache has room, its seats grow by a quarter at each health check, and below
    half of its cache they double, up to `seats`.

    Args:
        seats: Number of an engine with room in its cache.
        fewest: Number of engines that the run begins with, also while fewer are up.
    """

    def __init__(self, admission: Admission, seats: int, fewest: int) -> None:
        self._admission, self._most, self._fewest = admission, seats, fewest
        self._seats: dict[str, int] = {}

    def __call__(self, change: str, name: str = "", *more: object) -> None:
        """Take note of a scheduler's change, as a `Listener`."""
        if change == "add":
            self._seats[name] = self._most
        elif change == "remove":
            self._seats.pop(name, None)
        elif change == "occupancy" and name in self._seats and isinstance(more[0], Occupancy):
            self._seats[name] = self._adapted(self._seats[name], more[0])
        else:
            return
        missing = max(0, self._fewest - len(self._seats))
        total = sum(self._seats.values()) + missing * self._most
        limits = self._admission.limits
        if total != limits.working:
            self._admission.limits = replace(limits, working=total)

    def _adapted(self, seats: int, now: Occupancy) -> int:
        if now.cache >= _FULL and now.waiting:
            return max(1, min(seats, now.running))
        if now.cache < _FULL and not now.waiting:
            factor = _SPARE if now.cache >= _ROOMY else 2.0
            return min(self._most, math.ceil(factor * max(seats, now.running)))
        return seats
