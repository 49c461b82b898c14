"""Workers and turns of a fleet, shared by the scheduler and the manager."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from turnwise.engine.protocol import Engine, Request, Sampling


class Supervisor(Protocol):
    """The owner of a worker's process, which can restart it."""

    def report_failure(self, why: str) -> None:
        """Handle a failed request: check whether the worker is alive, then restore, suspend or
        remove it.

        Not called again before one of these methods of `Scheduler` is called in return.
        """
        ...

    def excuse_death(self) -> None:
        """Do not count the worker's last death: it was caused by a single request."""
        ...


class Follower(Protocol):
    """Another scheduler over the same workers, in another process."""

    def add(self, name: str, engine: Engine) -> None:
        """Use a worker, which has the fleet's weights; one of the same name is replaced."""
        ...

    def restore(self, name: str) -> None:
        """Use a worker again on which a request failed: it is alive.

        A follower that cannot reach it does not use it until it can.
        """
        ...

    def remove(self, name: str) -> None:
        """Use a worker no longer: it is lost."""
        ...

    def close(self, why: str) -> None:
        """Expect no further worker until one is added."""
        ...


@dataclass(slots=True, eq=False)
class Turn:
    """One request to the scheduler; it may run on several workers, one after another."""

    request: Request
    weight: float
    """Load that the turn adds to its worker."""
    rest: Sampling = field(init=False)
    """Sampling parameters of the rest that is not sampled yet."""
    sampled: list[int] = field(default_factory=list)
    """Token ids sampled so far."""
    deaths: "list[Worker]" = field(default_factory=list)
    """Workers that died while they ran the turn."""
    failures: int = 0
    """Number of failures on workers that stayed alive."""
    cuts: int = 0
    """Number of channels that were lost under it, to workers that stayed alive."""
    aborts: int = 0
    """Number of weight updates that interrupted it."""
    first_token_at: float | None = None
    """Time of its first token, in seconds since the epoch; None if it is not known."""
    queued: float | None = None
    """Seconds in the first worker's queue; None if they are not known."""

    def __post_init__(self) -> None:
        self.rest = self.request.sampling

    def attempt(self) -> Request:
        """Return the request of the next attempt, which samples the rest."""
        attempts = len(self.deaths) + self.failures + self.cuts + self.aborts
        if not attempts:
            return self.request
        return self.request._replace(
            prompt=[*self.request.prompt, *self.sampled],
            sampling=self.rest,
            id=f"{self.request.id}~{attempts}",  # an engine may still know that of an earlier one
        )

    @property
    def is_suspect(self) -> bool:
        """Whether two workers died while they ran the turn, which may be the cause."""
        return len(self.deaths) > 1

    def restart(self) -> None:
        """Discard the sampled tokens."""
        self.sampled.clear()
        self.first_token_at = None
        self.rest = self.request.sampling


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
    """Sum of the weights of its running turns, and `elsewhere`."""
    elsewhere: float = 0.0
    """Load by other processes, as of their last report."""
    index: int = -1
    """Position in the router's arrays; -1 while the worker gets no new sessions."""
    turns: int = 0
    """Number of turns given to the worker."""
    tokens: int = 0
    """Number of tokens that the worker sampled."""
    load_seconds: float = 0.0
    """Integral of `load` over time."""
    failed_turns: Counter[str] = field(default_factory=Counter)
    """Number of turns that failed on the worker, by outcome; see `Scheduler.events`."""
    running: set[Turn] = field(default_factory=set)
    suspects: list[Turn] = field(default_factory=list)
    """Turns that were running when the worker failed, and during which another one had died."""
    lost: "asyncio.Future[bool] | None" = None
    """Set by the supervisor after a failure: True if the worker is dead. None at other times."""
    _changed: float = field(default_factory=time.monotonic)
    _measured: tuple[float, float] = (0.0, 0.0)
    """Seconds and tokens of `time_per_token`."""
    _seen: tuple[float, int] = (0.0, 0)
    """`load_seconds` and `tokens` at the last measurement."""

    def add(self, weight: float, now: float) -> None:
        """Change the load; `now` is the event loop's time."""
        self.load_seconds += self.load * (now - self._changed)
        self._changed = now
        self.load += weight

    def time_per_token(self, enough: int, most: int) -> float:
        """Return the seconds that a turn takes for a token; not a number before it is known.

        By Little's law they are the load's seconds by the tokens.

        Args:
            enough: Number of tokens from which on it is known.
            most: Number of tokens whose weight is halved, so that the last ones count most.
        """
        seconds, tokens = self._measured
        seconds += self.load_seconds - self._seen[0]
        tokens += self.tokens - self._seen[1]
        self._seen = (self.load_seconds, self.tokens)
        self._measured = (seconds / 2, tokens / 2) if tokens > most else (seconds, tokens)
        return seconds / tokens if tokens > enough else math.nan

    def forget_slowness(self, median: float, share: float) -> None:
        """Take the time per token to be nearer to the median than it was measured."""
        seconds, tokens = self._measured
        self._measured = (seconds + share * (median * tokens - seconds), tokens)

    def note_suspects(self) -> None:
        """Remember which of the running turns may have killed the worker."""
        self.suspects = [turn for turn in self.running if turn.deaths]

    def settle(self, *, lost: bool) -> None:
        """Report to waiting turns whether the worker is lost."""
        waiting, self.lost = self.lost, None
        if waiting is not None and not waiting.done():
            waiting.set_result(lost)


def names_of(workers: Sequence[Worker]) -> str:
    """List workers by name: "worker-0, worker-3"."""
    return ", ".join(worker.name for worker in workers)
