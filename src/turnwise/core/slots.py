"""Slots of trajectories: how many run at once, and which of those that wait begins next."""

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Slots:
    """At most `count` holders at a time; the others wait, each kind in its order. Those that are
    `last` begin when no other waits and fewer than `last_below` slots are taken."""

    def __init__(self, count: int, last_below: float = math.inf) -> None:
        self._first_count = self._count = count
        self._last_below = last_below
        self._taken = 0
        self._waiting = deque[asyncio.Future[None]](), deque[asyncio.Future[None]]()

    def grow(self, factor: float) -> None:
        """Have `factor` times the first number of slots from now on; fewer than are taken take
        none away."""
        self._count = int(self._first_count * factor)
        self._grant()

    @asynccontextmanager
    async def taken(self, *, last: bool = False) -> AsyncIterator[None]:
        """Wait for a slot, and hold it for an `async with` block."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[last].append(turn)
        self._grant()
        try:
            await turn
            yield
        finally:
            if not turn.cancelled():  # it got a slot, perhaps at the moment of its cancellation
                self._taken -= 1
                self._grant()

    def _grant(self) -> None:
        for waiting, most in zip(self._waiting, (math.inf, self._last_below), strict=True):
            while waiting and self._taken < min(self._count, most):
                if not (turn := waiting.popleft()).done():
                    turn.set_result(None)
                    self._taken += 1
            if waiting:
                return
