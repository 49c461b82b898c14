"""Bounded waits: by time (`deadline`), or by lack of progress (`StallClock`)."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from turnwise.errors import DeadlineError, TrajectoryError

_LATE_SECONDS = 1.0  # lateness of a timer that shows that the event loop was held up


@asynccontextmanager
async def deadline(seconds: float | None, missed: str, key: str = "") -> AsyncIterator[None]:
    """Raise DeadlineError from the block when it takes longer than `seconds`.

    A TimeoutError that the block itself raises passes unchanged. If the event loop was blocked, or
    the process stopped, when the deadline passed, an answer that came meanwhile is still read.

    Args:
        seconds: None waits indefinitely.
        missed: Beginning of the message, in the past tense: "worker-0 did not start".
        key: Configuration key of this deadline, for the message.
    """
    if seconds is None:
        yield
        return
    loop = asyncio.get_running_loop()
    due = loop.time() + seconds

    def expire() -> None:
        late = loop.time() - due > _LATE_SECONDS
        timeout.reschedule(loop.time() + (min(_LATE_SECONDS, seconds / 10) if late else 0.0))

    timer = loop.call_at(due, expire)
    try:
        async with asyncio.timeout(None) as timeout:
            yield
    except TimeoutError:
        if not timeout.expired():
            raise
        raise deadline_error(seconds, missed, key) from None
    finally:
        timer.cancel()


def deadline_error(seconds: float, missed: str, key: str = "") -> DeadlineError:
    """Return the error that `deadline` raises, for waits outside an event loop."""
    return DeadlineError(f"{missed} within {seconds:g} s" + (f" ({key})" if key else ""))


class StallClock:
    """Ends waits when there is no progress for `seconds`. One timer serves any number of waits on
    one event loop."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._stopped = False
        self._holds = 0
        self._moved = 0.0
        self._doubted = False
        self._waits: set[asyncio.Timeout] = set()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def stopped(self) -> bool:
        """True while no progress is expected, such as while an engine sleeps. No timer is set in
        that case: while a timer is pending, the event loop does not free cancelled timers that are
        due after it, nor the objects of their requests."""
        return self._stopped

    @stopped.setter
    def stopped(self, value: bool) -> None:
        if self._stopped and not value and self._waits:
            self.moved()
        self._stopped = value
        self._set_timer()

    def moved(self) -> None:
        """Record progress, which restarts the countdown."""
        self._moved = asyncio.get_running_loop().time()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Stop the clock during a wait that has its own deadline."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
            self.moved()

    @asynccontextmanager
    async def watching(self, missed: str = "", key: str = "") -> AsyncIterator[asyncio.Timeout]:
        """Raise from the block when there is no progress for `seconds`: DeadlineError with `missed`
        and `key`, as `deadline` raises it, or TimeoutError if `missed` is empty."""
        try:
            async with asyncio.timeout(None) as wait:
                if not self._waits:
                    self.moved()
                self._waits.add(wait)
                self._set_timer()
                try:
                    yield wait
                finally:
                    self._waits.discard(wait)
                    self._set_timer()
        except TimeoutError:
            if not missed or not wait.expired():
                raise
            raise deadline_error(self.seconds, missed, key) from None

    def _set_timer(self) -> None:
        """Keep a timer running while something waits, unless the clock is stopped."""
        wanted = bool(self._waits) and not self._stopped
        if wanted and self._timer is None:
            due = self._moved + self.seconds
            self._timer = asyncio.get_running_loop().call_at(due, self._look)
        elif not wanted and self._timer is not None:
            self._timer.cancel()
            self._timer, self._doubted = None, False

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        if self._holds:
            self.moved()
        due = self._moved + self.seconds
        if now < due:
            self._doubted = False
        elif not self._doubted:
            # This process may itself have been stopped: let the loop read pending events first.
            self._doubted, due = True, now + min(1.0, self.seconds / 10)
        else:
            self._timer, self._doubted = None, False
            waits, self._waits = self._waits, set()
            for wait in waits:
                wait.reschedule(now)
            return
        self._timer = loop.call_at(due, self._look)


@asynccontextmanager
async def trajectory_limits(seconds: float, stall_seconds: float) -> AsyncIterator[StallClock]:
    """Raise TrajectoryError from the block of one trajectory: `trajectory_timeout` after `seconds`,
    and `stalled` after `stall_seconds` without progress, which the block reports to the clock."""
    clock = StallClock(stall_seconds)
    try:
        async with asyncio.timeout(seconds), clock.watching() as stall:
            yield clock
    except TimeoutError:
        if stall.expired():
            message = f"it made no progress for {stall_seconds:g} s (rollout.stall_timeout)"
            raise TrajectoryError("stalled", message) from None
        raise TrajectoryError("trajectory_timeout", f"not done after {seconds:g} s") from None
