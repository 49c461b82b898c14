"""The queue of the trainer: each model's requests run in order, and owners take turns.

A model's requests run in the order of their positions, in whatever order they arrive. Requests
after a gap wait until the missing request arrives, or fail once no client would still send it. The
trainer runs one call at a time, for one model. The owner who has received the fewest tokens gets
the next call, so an owner with eight models gets no more of the trainer than an owner with one.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from turnwise.core.optional import Foreign
from turnwise.errors import InputError

_T = TypeVar("_T")
GAP_SECONDS = 360.0
"""Seconds that requests wait for a missing earlier request; clients retry for 5 minutes."""
MIN_TOKENS = 256
"""Minimum number of tokens that are counted for a call, such as an optimizer step."""
_CREDIT_TOKENS = 131_072
"""Maximum number of tokens by which an owner may be behind the other owners. Without a maximum, an
owner who asked for less than its share could later hold up all other owners."""
_NEXT_SECONDS = 0.02
"""Seconds that the trainer waits for the next call of an owner who is behind, after a call of that
owner has ended."""


class ModelOrder:
    """The requests of one model, which run one after the other, by their positions from 1."""

    def __init__(self) -> None:
        self.next = 1
        """Position of the running request, or of the missing one for which later requests wait."""
        self._here = dict[int, asyncio.Event]()
        self._lost = 0
        self._gap: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def turn(self, position: int) -> AsyncIterator[None]:
        """Run a block once the requests of all earlier positions have ended.

        Raises:
            InputError: when an earlier request of the model did not arrive in time.
        """
        called = self._here[position] = asyncio.Event()
        if position < self.next:  # its position was given up a moment ago
            called.set()
        self._call()
        try:
            await called.wait()
            if position < self.next:
                raise InputError(
                    f"the model's earlier request {self._lost} did not arrive "
                    f"within {GAP_SECONDS:.0f} s: go on from a saved state"
                )
            yield
        finally:
            del self._here[position]
            self.next += position == self.next
            self._call()

    def _call(self) -> None:
        """Call the next request, or wait for it if only later requests have arrived."""
        if self._gap is not None and (self.next in self._here or not self._here):
            self._gap.cancel()
            self._gap = None
        if self.next in self._here:
            self._here[self.next].set()
        elif self._here and self._gap is None:
            self._gap = asyncio.get_running_loop().call_later(GAP_SECONDS, self._give_up)

    def _give_up(self) -> None:
        """Fail all requests that wait now, and let requests at later positions run."""
        self._lost, self._gap = self.next, None
        self.next = max(self.next, *self._here) + 1
        for called in self._here.values():
            called.set()


@dataclass(slots=True, eq=False)
class _Owner:
    had: float
    """Tokens that it has received, plus tokens of its share that it forfeited while it was idle."""
    requests: int = 0
    """Number of its requests and calls that run or wait."""
    waiting: "deque[tuple[float, asyncio.Future[None]]]" = field(default_factory=deque)
    """Number of tokens of each waiting call, and the future that gives the call its turn."""


class TrainerQueue:
    """Runs a trainer's calls one at a time; the owner who received the fewest tokens is next."""

    def __init__(self) -> None:
        self._owners: dict[str, _Owner] = {}
        self._level = 0.0  # tokens that the last call's owner had received before that call
        self._busy = False
        self._last: _Owner | None = None
        """Owner of the call that has just ended, who may ask for another within a moment."""
        self._moment: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def request(self, owner: str, order: ModelOrder, position: int) -> AsyncIterator[None]:
        """Run a block as an owner's request, in the order of the model's requests; see
        `ModelOrder.turn`."""
        async with self._present(owner), order.turn(position):
            yield

    @asynccontextmanager
    async def _present(self, name: str) -> AsyncIterator[_Owner]:
        owner = self._owners.setdefault(name, _Owner(self._level))
        if not owner.requests:  # it asked for nothing for a while
            owner.had = max(owner.had, self._level)
        owner.requests += 1
        try:
            yield owner
        finally:
            owner.requests -= 1

    async def call(self, owner: str, tokens: int, work: Coroutine[Foreign, Foreign, _T]) -> _T:
        """Await a call of the trainer when its owner's turn comes. A cancelled call keeps the turn
        until the trainer has ended it."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        async with self._present(owner) as own:
            own.waiting.append((max(MIN_TOKENS, tokens), turn))
            self._grant()
            try:
                try:
                    await turn
                except BaseException:
                    work.close()
                    raise
                call = asyncio.ensure_future(work)
                try:
                    return await asyncio.shield(call)
                except asyncio.CancelledError:
                    await asyncio.wait([call])
                    raise
            finally:
                if not turn.cancelled():
                    self._busy, self._last = False, own
                    self._grant()

    def _grant(self) -> None:
        """Begin the next call if none is running."""
        if self._busy:
            return
        for owner in self._owners.values():
            while owner.waiting and owner.waiting[0][1].done():  # cancelled
                owner.waiting.popleft()
        waiting = [owner for owner in self._owners.values() if owner.waiting]
        if not waiting:
            return
        owner, last = min(waiting, key=lambda each: each.had), self._last
        if last is not None and last.requests and not last.waiting and last.had < owner.had:
            if self._moment is None:
                loop = asyncio.get_running_loop()
                self._moment = loop.call_later(_NEXT_SECONDS, self._stop_waiting)
            return
        self._last = None
        if self._moment is not None:
            self._moment.cancel()
            self._moment = None
        tokens, turn = owner.waiting.popleft()
        owner.had = max(owner.had, self._level - _CREDIT_TOKENS)
        self._level = max(self._level, owner.had)
        owner.had += tokens
        self._busy = True
        turn.set_result(None)
        for name, one in list(self._owners.items()):
            if not one.requests and one.had <= self._level:  # a new owner begins there too
                del self._owners[name]

    def _stop_waiting(self) -> None:
        self._last = self._moment = None
        self._grant()
