"""Slots of trajectories: how many run at once, and which of those that wait begins next."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Slots:
    """At most `count` holders at a time; the others wait, each kind in the order in which it came.
    Those that are `last` begin when no other waits and fewer than `last_below` slots are taken."""

    def __init__(self, count: int, last_below: int) -> None:
        self._taken, self._most = 0, (count, min(count, last_below))
        self._waiting = deque[asyncio.Future[None]](), deque[asyncio.Future[None]]()

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
        """Give free slots to those that wait."""
        for waiting, most in zip(self._waiting, self._most, strict=True):
            while waiting and self._taken < most:
                if not (turn := waiting.popleft()).done():
                    turn.set_result(None)
                    self._taken += 1
            if waiting:
                return
