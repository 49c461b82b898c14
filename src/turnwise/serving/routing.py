"""The workers and turns of a fleet, and the choice of a worker for each turn.

A session stays on the worker that holds its KV cache unless that worker is overloaded or slow; the
first turns of a group run on one worker, so that they share their prompt's cache; every other turn
goes to the least loaded worker. Loads are stored in arrays, so a choice among a thousand workers
costs little more than among eight. The constants were found by the simulation that
`tests/serving/test_scheduler.py` repeats.
"""

import asyncio
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from turnwise.config import ServingConfig
from turnwise.engine.protocol import Engine, Request, Route

TOKENS_PER_REQUEST = 2048
"""Number of prompt tokens that count as much load as one request."""
_SLACK = 4.0
"""Number of requests by which a worker's load may exceed `serving.overload` times the mean load,
because with few turns any bound is exceeded at times."""
_SMOOTHING = 128
"""Number of turns per worker over which its load is averaged; it is large, so that a burst of turns
does not move sessions."""
_LASTING = 1.05
"""Multiple of the workers' mean load, and of the mean of their average loads, above which a session
leaves its worker; smaller differences are noise."""
_AVERAGE_WEIGHT = 32
"""Weight of the average load, relative to the present one, in the choice of a session's worker."""
_ENOUGH_TOKENS, _RECENT_TOKENS = 512, 8192
"""Number of sampled tokens after which the speed of a worker is known, and number beyond which the
weight of earlier tokens is halved, so that recent tokens count most."""
_FORGETTING = 0.01
"""Share of a slow worker's difference from the median that is forgotten at each comparison.
Otherwise a slow worker that gets no turns would never be measured again."""
_COMPARED = 4  # number of choices per worker between two comparisons of speeds
_SLOW = 1.5
"""Multiple of the median time per token above which a worker is slow: sessions leave it, and it
gets turns only while the other workers are busier."""
_BASE_LOAD = 8.0
"""Load added to each worker before loads are multiplied by slowness, so that an idle slow worker is
not the first choice."""
_TIE = 1e-9  # weight of each served turn; decides only between workers with equal load


class Supervisor(NamedTuple):
    """The owner of a worker's process, which can restart it."""

    report_failure: Callable[[str], None]
    """Handles a failed request: checks whether the worker is alive, then calls `restore`, `suspend`
    or `remove` of the `Scheduler`. It is not called again before one of these calls."""
    excuse_death: Callable[[], None]
    """Takes back the count of the worker's last death, because a single request caused it."""


@dataclass(slots=True, eq=False)
class ScheduledTurn:
    """One request to the scheduler; it may run on several workers, one after another."""

    request: Request
    weight: float
    """Load that the turn adds to its worker."""
    sampled: list[int] = field(default_factory=list)
    deaths: "list[Worker]" = field(default_factory=list)
    """Workers that died while they ran the turn."""
    failures: int = 0
    """Number of failures on workers that stayed alive."""
    cuts: int = 0
    """Number of times that the turn lost its channel to a worker that stayed alive."""
    aborts: int = 0
    """Number of times that a weight update or a leaving worker interrupted the turn."""
    first_token_at: float | None = None
    """Time of its first token, in seconds since the epoch; None if unknown."""
    queued: float | None = None
    """Seconds in the first worker's queue; None if unknown."""

    @property
    def is_suspect(self) -> bool:
        """Whether two workers died while they ran the turn, so that the turn may be the cause."""
        return len(self.deaths) > 1


@dataclass(slots=True, eq=False)
class Worker:
    """One engine as the scheduler sees it; its successor after a restart is another `Worker`."""

    name: str
    engine: Engine
    supervisor: Supervisor | None = None
    """None means that each failure counts as the worker's death."""
    usable: bool = True
    """False from a failure until the supervisor has confirmed that the worker is alive, and can be
    reached from here."""
    load: float = 0.0
    """Sum of `elsewhere` and of the weights of the worker's running turns."""
    elsewhere: float = 0.0
    """Load from the turns of other processes, as of the processes' last reports."""
    index: int = -1
    """Position in the router's arrays; -1 while the worker gets no new sessions."""
    turns: int = 0
    tokens: int = 0
    load_seconds: float = 0.0
    """Integral of `load` over time."""
    failed_turns: Counter[str] = field(default_factory=Counter)
    """Number of turns that failed on the worker, by outcome; see `Scheduler.events`."""
    running: set[ScheduledTurn] = field(default_factory=set)
    suspects: list[ScheduledTurn] = field(default_factory=list)
    """Turns that were running when the worker failed, and earlier on another worker when that one
    died."""
    verdict: "asyncio.Future[bool] | None" = None
    """Future of the supervisor's answer whether the worker is lost; None if no answer is
    pending."""
    changed: float = field(default_factory=time.monotonic)
    """Time of the last change of `load`, by the event loop's clock."""
    measured: tuple[float, float] = (0.0, 0.0)
    """Turn-seconds and tokens from which `time_per_token` is computed."""
    _seen: tuple[float, int] = (0.0, 0)  # `load_seconds` and `tokens` at the last measurement

    def time_per_token(self) -> float:
        """Return the seconds that a turn takes per token; NaN until this time is known.

        By Little's law, it is the integral of the load divided by the number of tokens.
        """
        seconds, tokens = self.measured
        seconds += self.load_seconds - self._seen[0]
        tokens += self.tokens - self._seen[1]
        self._seen = (self.load_seconds, self.tokens)
        recent = tokens <= _RECENT_TOKENS
        self.measured = (seconds, tokens) if recent else (seconds / 2, tokens / 2)
        return seconds / tokens if tokens > _ENOUGH_TOKENS else math.nan

    def note_suspects(self) -> None:
        """Remember which of the running turns may have killed the worker."""
        self.suspects = [turn for turn in self.running if turn.deaths]

    def report(self, *, lost: bool) -> None:
        """Report to waiting turns whether the worker is lost."""
        waiting, self.verdict = self.verdict, None
        if waiting is not None and not waiting.done():
            waiting.set_result(lost)


class Router:
    """Loads of the usable workers, and the homes of sessions and groups.

    Args:
        events: Counts choices: sticky, moved_overload, moved_slow, moved_gone.
    """

    def __init__(self, serving: ServingConfig, events: Counter[str]) -> None:
        self.workers: dict[str, Worker] = {}
        """All workers by name, usable or not."""
        self.preferred: frozenset[str] = frozenset()
        """Names of the workers that are to get new sessions; empty means all."""
        self.sessions: OrderedDict[str, str] = OrderedDict()
        """Name of each session's worker, for the last `serving.known_sessions` sessions."""
        self.groups: OrderedDict[str, str] = OrderedDict()
        """Name of each group's worker; bounded like the sessions."""
        self._events = events
        self._overload = serving.overload
        self._known = serving.known_sessions
        self._usable: list[Worker] = []
        self._loads_W = self._averages_W = self._turns_W = self._slowness_W = np.zeros(0)
        self._stale = False  # whether the workers have changed since the arrays were built
        self._any_slow = False
        self._choices = 0  # number of choices since the speeds of workers were compared

    @property
    def usable(self) -> list[Worker]:
        """Workers that get new sessions: the usable ones in `preferred`, or all usable workers if
        no preferred one is usable."""
        if self._stale:
            self._build()
        return self._usable

    def rebuild(self) -> None:
        """Have the next choice rebuild the arrays, because the workers have changed. Thousands of
        workers that join together then cost a single rebuild."""
        self._stale = True

    def _build(self) -> None:
        self._stale = False
        averages = {worker: self._averages_W[worker.index] for worker in self._usable}
        # A new worker begins with the mean of the averages. With its present load, 0, as its
        # average, it would get all new sessions.
        usual = float(self._averages_W.mean()) if averages else 0.0
        for worker in self._usable:
            worker.index = -1  # stays -1 for workers that are not preferred
        usable = [worker for worker in self.workers.values() if worker.usable]
        self._usable = [worker for worker in usable if worker.name in self.preferred] or usable
        for index, worker in enumerate(self._usable):
            worker.index = index
        self._loads_W = np.array([worker.load for worker in self._usable], dtype=float)
        self._averages_W = np.array(
            [averages.get(worker, usual) for worker in self._usable], dtype=float
        )
        self._turns_W = np.array([worker.turns for worker in self._usable], dtype=float)
        self._compare_speeds()

    def add_load(self, worker: Worker, weight: float, now: float) -> None:
        """Change a worker's load; `now` is the event loop's time."""
        worker.load_seconds += worker.load * (now - worker.changed)
        worker.changed = now
        worker.load += weight
        if worker.index >= 0:
            self._loads_W[worker.index] = worker.load

    def schedule(self, route: Route) -> Worker:
        """Choose a worker for a turn; at least one must be usable."""
        worker = self._choose(route)
        worker.turns += 1
        if worker.index >= 0:
            self._turns_W[worker.index] += 1
        for known, key in ((self.sessions, route.session), (self.groups, route.group)):
            if key:
                known[key] = worker.name
                known.move_to_end(key)
                if len(known) > self._known:
                    known.popitem(last=False)
        return worker

    def _choose(self, route: Route) -> Worker:
        """Return the session's worker, else the group's, else the least loaded one. For a session,
        the average load counts most, because the worker will also run the session's later turns."""
        count = len(self.usable)  # first, because it may rebuild the arrays
        loads_W, averages_W = self._loads_W, self._averages_W
        averages_W += (loads_W - averages_W) / (_SMOOTHING * count)
        self._choices += 1
        if count > 1 and self._choices >= _COMPARED * count:
            self._compare_speeds()
        mean = self._mean(loads_W)
        bound = self._overload * mean + _SLACK
        known = self.sessions.get(route.session)
        if known is not None:
            home = self.workers.get(known)
            if home is None or not home.usable:
                self._events["moved_gone"] += 1
            elif home.load > bound or (
                home.index >= 0
                and home.load > _LASTING * mean
                and averages_W[home.index] > _LASTING * self._mean(averages_W)
            ):
                self._events["moved_overload"] += 1
            elif home.index >= 0 and self._slowness_W[home.index] > 1.0:
                self._events["moved_slow"] += 1
            else:
                self._events["sticky"] += 1
                return home
        else:
            together = self.workers.get(self.groups.get(route.group, ""))
            if together is not None and together.usable and together.load <= bound:
                return together
        cost_W = loads_W + _TIE * self._turns_W
        if route.session:
            cost_W += _AVERAGE_WEIGHT * averages_W
        if self._any_slow:
            cost_W = (cost_W + _BASE_LOAD * (1 + _AVERAGE_WEIGHT)) * self._slowness_W
        return self._usable[int(cost_W.argmin())]

    def _compare_speeds(self) -> None:
        """Find the workers that are slow now."""
        self._choices = 0
        times_W = np.array([worker.time_per_token() for worker in self._usable])
        known_W = ~np.isnan(times_W)
        self._slowness_W = np.ones(len(times_W))
        if known_W.any():
            median = float(np.median(times_W[known_W]))
            slow_W = known_W & (times_W > _SLOW * median)
            self._slowness_W[slow_W] = times_W[slow_W] / median
            for index in np.flatnonzero(slow_W):
                worker = self._usable[index]
                seconds, tokens = worker.measured
                worker.measured = (seconds + _FORGETTING * (median * tokens - seconds), tokens)
        self._any_slow = bool((self._slowness_W > 1.0).any())

    def _mean(self, values_W: npt.NDArray[np.float64]) -> float:
        """Return the mean over the workers that are not slow, because slow workers should have less
        load."""
        if self._any_slow:
            values_W = values_W[self._slowness_W == 1.0]
        return float(np.add.reduce(values_W)) / max(1, len(values_W))
