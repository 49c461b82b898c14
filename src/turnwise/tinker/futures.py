"""Requests that take a while: their results by request id, and each model's requests in order.

Ids are functions of the request, so a client that sends one again, because its connection broke,
gets the result of the first and runs nothing twice. A model's requests run in the order of their
positions, in whatever order they arrive: those after a gap wait until it is filled, or fail once no
client would still fill it. A result is kept until shortly after it was sent, or its session ends; a
client with too much here has to wait, so what all of them leave is limited.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from turnwise.core.aio import is_cancelled, set_within
from turnwise.core.json_types import JsonObject
from turnwise.errors import (
    InputError,
    TrajectoryError,
    TurnwiseError,
    ordinary_error,
    text_of,
    visible,
)

logger = logging.getLogger(__name__)

WAIT_SECONDS = 20.0
"""Time that a request for a result waits for it; clients give up after 45 s and ask again."""
GAP_SECONDS = 360.0
"""Time that requests wait for one before them; clients try to send one for 5 minutes."""
_MOST = 2 * 2**30
"""Bytes of requests in progress and results. A client with more than its part, an equal one and at
most a quarter, has to wait."""
_SENT_SECONDS = 60.0
"""Time for which a result is kept that was sent but may not have arrived."""
SMALLEST = 4096
"""Bytes that every request counts, for its tasks and names."""


class Missing(InputError):
    """Something that does not exist for this client, or does not any more."""


class Gone(InputError):
    """A result that is not kept, or a session that has ended; a client may begin again."""


class Busy(TurnwiseError):
    """A request for which there is no room now: its client waits, and sends it again."""


Reply = JsonObject | bytes
"""The result of a request: plain values, or a message for which the client asks."""
Work = Callable[[], Awaitable[Reply]]


def failure(error: Exception) -> JsonObject:
    """Return the result of a request that failed; its category says whether the request is wrong,
    or the server failed, or nobody knows."""
    if isinstance(error, TurnwiseError):
        own = isinstance(error, InputError | TrajectoryError)
        return {"error": visible(str(error)), "category": "user" if own else "server"}
    logger.error("a request of a Tinker client failed", exc_info=error)
    said = f"the server has a fault: {visible(text_of(error))}"
    return {"error": said, "category": "unknown"}


@dataclass(slots=True, eq=False)
class _Entry:
    size: int
    """Bytes of the request, and once it has ended of its result."""
    task: "asyncio.Task[Reply]" = field(init=False)
    is_sent: bool = False


class Futures:
    """The requests of one session in progress, and the results that are kept."""

    def __init__(self) -> None:
        self.entries: dict[str, _Entry] = {}

    def begin(self, request_id: str, work: Work, size: int = 0, sharing: int = 1) -> None:
        """Run a request of some bytes, unless it runs or has run already; `sharing` is the number
        of sessions that have requests.

        Raises:
            Busy: when its client has too much in progress.
        """
        if request_id in self.entries:
            return
        held = sum(each.size for each in self.entries.values())
        if held > _MOST // max(4, sharing):
            raise Busy(
                f"{held >> 20:,} MB of this session's requests are in progress, or have results "
                "that were not fetched, or only just: wait for some of them"
            )
        entry = self.entries[request_id] = _Entry(SMALLEST + size)
        entry.task = asyncio.create_task(self._run(entry, work))

    async def _run(self, entry: _Entry, work: Work) -> Reply:
        try:
            found = await work()
        except (Exception, asyncio.CancelledError) as error:
            if is_cancelled():  # it was dropped, and nobody waits
                raise
            found = failure(ordinary_error(error))
        entry.size = SMALLEST + (len(found) if isinstance(found, bytes) else 0)
        return found

    async def retrieve(self, request_id: str, seconds: float = WAIT_SECONDS) -> Reply | None:
        """Return a request's result; None if it has none within `seconds`.

        Raises:
            Gone: when there is no such request, or its result is not kept any more.
        """
        if (entry := self.entries.get(request_id)) is not None:
            await asyncio.wait([entry.task], timeout=seconds)
        if entry is None or self.entries.get(request_id) is not entry:
            raise Gone(f"there is no result of a request {visible(request_id)[:100]}")
        if not entry.task.done():
            return None
        if not entry.is_sent:
            entry.is_sent = True
            asyncio.get_running_loop().call_later(_SENT_SECONDS, self.drop, request_id)
        return entry.task.result()

    def drop(self, *request_ids: str) -> None:
        """End and forget requests that there are."""
        for entry in filter(None, [self.entries.pop(each, None) for each in request_ids]):
            entry.task.cancel()  # no effect on one that has ended


class Turns:
    """The requests of one model, which run one after the other, by their positions from 1."""

    def __init__(self) -> None:
        self.next = 1
        """Position of the request that runs, or that is waited for."""
        self._here = set[int]()
        self._moved = asyncio.Event()

    @asynccontextmanager
    async def turn(self, position: int) -> AsyncIterator[None]:
        """Run a block once those of all positions before have ended.

        Raises:
            InputError: when a request before this one did not come in time.
        """
        self._here.add(position)
        try:
            awaited = self.next
            while position > self.next:
                awaited = self.next
                seconds = None if awaited in self._here else GAP_SECONDS
                came = await set_within(self._moved, seconds) or awaited in self._here
                if not came and awaited == self.next:  # all that wait fail, and later ones run
                    self._go_on(max(self._here) + 1)
            if position < self.next:
                raise InputError(
                    f"the request {awaited} of this model, before this one, did not arrive within "
                    f"{GAP_SECONDS:.0f} s: go on from a saved state"
                )
            yield
        finally:
            self._here.discard(position)
            if position == self.next:
                self._go_on(position + 1)

    def _go_on(self, position: int) -> None:
        self.next = position
        self._moved.set()
        self._moved = asyncio.Event()
