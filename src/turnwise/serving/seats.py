"""Seats of an engine: the number of trajectories that keep it busy and fit into its KV cache."""

import math
from dataclasses import replace

from turnwise.config import Config
from turnwise.core.admission import Admission, Limits
from turnwise.engine.protocol import Occupancy
from turnwise.serving.scheduler import Scheduler

_SPARE = 1.25
"""Trajectories per sequence that an engine computes at once, so that another trajectory is ready
when a turn ends."""
_FULL, _ROOMY = 0.9, 0.5
"""Used share of a KV cache above which the cache is full, and used share below which it has room
for twice as many trajectories."""


def limits_of(config: Config, engines: int | None = None) -> Limits:
    """Return the limits for a number of engines, by default the number that a run begins with. An
    evaluation begins only while fewer trajectories are at work than a training step has."""
    seats = math.ceil(_SPARE * (1 if config.deterministic else config.engine.max_num_seqs))
    rollout, count = config.rollout, config.serving.min_workers if engines is None else engines
    step = rollout.prompts_per_step * config.sampling.n
    return Limits(count * seats, rollout.concurrency, step)


def engine_admission(limits: Limits, scheduler: Scheduler) -> Admission:
    """Return an admission (a limit on trajectories at work) that follows the engines of a
    scheduler; `limits` apply to the engines that a run begins with."""
    admission, min_engines = Admission(limits), scheduler.min_workers
    scheduler.subscribe(EngineSeats(admission, limits.working // min_engines, min_engines))
    return admission


class EngineSeats:
    """Adapts the limit of an admission to the engines of a scheduler as they join and leave, and to
    the use of their KV caches.

    An engine whose cache is full while requests wait gets at most one seat for each sequence that
    it computes now. While the cache has room and no request waits, the number of the engine's seats
    grows by a quarter at each health check, or doubles if less than half of the cache is used, up
    to `seats`.

    Args:
        seats: Maximum number of seats of one engine.
        min_engines: Number of engines that the run begins with. Engines that are not up count as
            well, with the maximum number of seats.
    """

    def __init__(self, admission: Admission, seats: int, min_engines: int) -> None:
        self._admission, self._max_seats, self._min_engines = admission, seats, min_engines
        self._seats: dict[str, int] = {}

    def __call__(self, change: str, name: str = "", *more: object) -> None:
        """Handle a change of the scheduler's workers, as a `Listener`."""
        if change == "add":
            self._seats[name] = self._max_seats
        elif change == "remove":
            self._seats.pop(name, None)
        elif change == "occupancy" and name in self._seats and isinstance(more[0], Occupancy):
            self._seats[name] = self._adapted(self._seats[name], more[0])
        else:
            return
        missing = max(0, self._min_engines - len(self._seats))
        total = sum(self._seats.values()) + missing * self._max_seats
        limits = self._admission.limits
        if total != limits.working:
            self._admission.limits = replace(limits, working=total)

    def _adapted(self, seats: int, now: Occupancy) -> int:
        if now.cache >= _FULL and now.waiting:
            return max(1, min(seats, now.running))
        if now.cache < _FULL and not now.waiting:
            factor = _SPARE if now.cache >= _ROOMY else 2.0
            return min(self._max_seats, math.ceil(factor * max(seats, now.running)))
        return seats
