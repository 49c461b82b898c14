"""Deadlines that watch progress: work may take any time, as long as something of it moves."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager


class StallClock:
    """Ends waits in which nothing has moved for `seconds`.

    One clock serves any number of waits, on one event loop; it costs one timer, whatever moves.

    Example:
        clock = StallClock(120.0)
        async with clock.watching():  # raises TimeoutError after 120 s without `clock.moved()`
            await answer
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.stopped = False
        """Nothing is expected to move: an engine that sleeps, for one."""
        self._holds = 0
        self._moved = 0.0
        self._doubted = False
        self._waits: set[asyncio.Timeout] = set()
        self._timer: asyncio.TimerHandle | None = None

    def moved(self) -> None:
        """Begin to count from here."""
        self._moved = asyncio.get_running_loop().time()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Stop the clock during a wait that has a deadline of its own."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
            self.moved()

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[asyncio.Timeout]:
        """Raise TimeoutError from the block when nothing moves while it runs."""
        async with asyncio.timeout(None) as wait:
            if not self._waits:
                self.moved()
            self._waits.add(wait)
            if self._timer is None:
                self._look_at(self._moved + self.seconds)
            try:
                yield wait
            finally:
                self._waits.discard(wait)
                # A timer that is left behind keeps cancelled ones, and what their requests held,
                # from being dropped by the event loop.
                if not self._waits and self._timer is not None:
                    self._timer.cancel()
                    self._timer = None
                    self._doubted = False

    def _look_at(self, when: float) -> None:
        self._timer = asyncio.get_running_loop().call_at(when, self._look)

    def _look(self) -> None:
        self._timer = None
        if not self._waits:
            return
        now = asyncio.get_running_loop().time()
        if self.stopped or self._holds:
            self.moved()
        if now < self._moved + self.seconds:
            self._doubted = False
            self._look_at(self._moved + self.seconds)
        elif not self._doubted:
            # It may be this process that stood still: what has come meanwhile is read first.
            self._doubted = True
            self._look_at(now + min(1.0, self.seconds / 10))
        else:
            self._doubted = False
            waits, self._waits = self._waits, set()
            for wait in waits:
                wait.reschedule(now)
