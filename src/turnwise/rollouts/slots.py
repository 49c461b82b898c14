"""Slots of trajectories: how many run at once, and which of those that wait begins next."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Slots:
    """At most `count` holders at a time; the others wait, each kind in the order in which it
    came."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting = deque[asyncio.Future[None]](), deque[asyncio.Future[None]]()

    @asynccontextmanager
    async def taken(self, *, last: bool = False) -> AsyncIterator[None]:
        """Hold a slot for an `async with` block; one that is `last` begins after all others."""
        if self._free:
            self._free -= 1
        else:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting[last].append(turn)
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
        for waiting in self._waiting:
            while waiting:
                if not (turn := waiting.popleft()).done():
                    turn.set_result(None)
                    return
        self._free += 1
