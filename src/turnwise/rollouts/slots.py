"""Slots of trajectories: how many run at once, and which of those that wait begins next."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Slots:
    """At most `count` holders at a time; the others wait, each kind in the order in which it came.

    Example:
        slots = Slots(256)
        async with slots.taken(last=True):  # once nothing else waits
            ...
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._first, self._last = deque[asyncio.Future[None]](), deque[asyncio.Future[None]]()

    @asynccontextmanager
    async def taken(self, *, last: bool = False) -> AsyncIterator[None]:
        """Hold a slot for an `async with` block; one that is `last` begins after all others."""
        if self._free:
            self._free -= 1
        else:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            (self._last if last else self._first).append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():  # the slot came at the same moment
                    self._give_back()
                raise
        try:
            yield
        finally:
            self._give_back()

    def _give_back(self) -> None:
        for waiting in (self._first, self._last):
            while waiting:
                if not (turn := waiting.popleft()).done():
                    turn.set_result(None)
                    return
        self._free += 1
