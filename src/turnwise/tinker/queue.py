"""The queue of the trainer: each model's requests in their order, and owners in turn.

A model's requests run in the order of their positions, in whatever order they arrive. Requests
after a gap wait until the missing request arrives, or fail once no client would still send it. The
trainer runs one call at a time, for one model. The owner who has had the fewest tokens gets the
next call, so an owner with eight models gets no more of the trainer than an owner with one.
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
"""Time that requests wait for a missing earlier one; clients retry a request for 5 minutes."""
MIN_TOKENS = 256
"""Minimum number of tokens that a call counts, for example an optimizer step."""
_CREDIT_TOKENS = 131_072
"""Maximum number of tokens by which an owner may be behind the others, so that an owner who asked
for less than its share cannot hold up all others later."""
_NEXT_SECONDS = 0.02
"""Time that the trainer waits for the next call of an owner who is behind, after that owner's call
has ended."""


class ModelOrder:
    """The requests of one model, which run one after the other, by their positions from 1."""

    def __init__(self) -> None:
        self.next = 1
        """Position of the request that runs, or for which the later requests wait."""
        self._here = dict[int, asyncio.Event]()
        self._lost = 0
        self._gap: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def turn(self, position: int) -> AsyncIterator[None]:
        """Run a block once the requests of all earlier positions have ended.

        Raises:
            InputError: when a request before this one did not come in time.
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
        """Call the next request, or wait for it if there are only later ones."""
        if self._gap is not None and (self.next in self._here or not self._here):
            self._gap.cancel()
            self._gap = None
        if self.next in self._here:
            self._here[self.next].set()
        elif self._here and self._gap is None:
            self._gap = asyncio.get_running_loop().call_later(GAP_SECONDS, self._give_up)

    def _give_up(self) -> None:
        """Fail all requests that wait now, and let later ones run."""
        self._lost, self._gap = self.next, None
        self.next = max(self.next, *self._here) + 1
        for called in self._here.values():
            called.set()


@dataclass(slots=True, eq=False)
class _Owner:
    had: float
    """Tokens that it has had, and tokens of its share that lapsed while it asked for none."""
    requests: int = 0
    """Number of its requests that run, or wait for others of their models."""
    waiting: "deque[tuple[float, asyncio.Future[None]]]" = field(default_factory=deque)
    """Tokens and turn of each of its waiting calls."""


class TrainerQueue:
    """Runs a trainer's calls one at a time; the owner who has had the fewest tokens is next."""

    def __init__(self) -> None:
        self._owners: dict[str, _Owner] = {}
        self._level = 0.0  # tokens that the owner of the last call had had before that call
        self._busy = False
        self._last: _Owner | None = None
        """Owner of the call that has just ended, who may ask for another within a moment."""
        self._moment: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def request(self, owner: str, order: ModelOrder, position: int) -> AsyncIterator[None]:
        """Run a block as an owner's request, in the order of its model; see `ModelOrder.turn`."""
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
        """Await a call of the trainer in its owner's turn. A call that is cancelled keeps its turn
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
        """Begin the next call, if none runs."""
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
            if not one.requests and one.had <= self._level:  # as a new owner begins
                del self._owners[name]

    def _stop_waiting(self) -> None:
        self._last = self._moment = None
        self._grant()
