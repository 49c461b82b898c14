"""The results of requests that take a while, by request id.

A request's id is a function of the request, so requests are idempotent: a client that repeats a
request after a broken connection gets the first result, and nothing runs twice. A result is kept
until shortly after it was sent, or until its session ends. A client whose requests and results take
too many bytes has to wait, so that the memory of all results is limited.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import psutil

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
"""Seconds that the server waits for a result; clients give up after 45 s and ask again."""
_MAX_HELD = max(2 * 2**30, psutil.virtual_memory().total // 8)
"""Limit in bytes for requests in progress and for results. Above it, clients that hold more than an
equal share have to wait; above twice the limit, all clients have to wait."""
_SENT_SECONDS = 60.0
"""Seconds for which a sent result is kept, because it may not have arrived."""
SMALLEST = 4096
"""Minimum size in bytes that is counted for a request, because of its tasks and names."""


class Missing(InputError):
    """Something that does not exist for this client, or no longer exists."""


class Gone(InputError):
    """A result that is not kept, or a session that has ended; a client may begin again."""


class Busy(TurnwiseError):
    """A request for which there is no room now; its client waits, and then sends it again."""


Reply = JsonObject | bytes
"""The result of a request: plain values, or an encoded protobuf message."""
Work = Callable[[], Awaitable[Reply]]


def failure(error: Exception) -> JsonObject:
    """Return the result of a request that failed. The result's `category` says whether the request
    is wrong, the server failed, or the cause is unknown."""
    if isinstance(error, TurnwiseError):
        own = isinstance(error, InputError | TrajectoryError)
        return {"error": visible(str(error)), "category": "user" if own else "server"}
    logger.error("a request of a Tinker client failed", exc_info=error)
    said = f"the server has a fault: {visible(text_of(error))}"
    return {"error": said, "category": "unknown"}


@dataclass(slots=True, eq=False)
class _Entry:
    size: int
    """Bytes of the request; once the request has ended, bytes of its result."""
    result: "asyncio.Future[Reply]" = field(default_factory=asyncio.Future)
    """Cancelled when the request is dropped, even if its task has not ended yet."""
    task: "asyncio.Task[None]" = field(init=False)
    is_sent: bool = False


class Futures:
    """One session's requests in progress, and the results that are kept.

    Args:
        account: The client, who may have several sessions.
        held: Bytes of all clients' requests and results, by account.
    """

    def __init__(self, account: str, held: dict[str, int]) -> None:
        self.entries: dict[str, _Entry] = {}
        self.account, self._held = account, held

    def begin(self, request_id: str, work: Work, size: int = 0) -> None:
        """Run a request of `size` bytes, unless it runs or has run already.

        Raises:
            Busy: when the client's requests and results take too many bytes.
        """
        if request_id in self.entries:
            return
        size = min(size + SMALLEST, _MAX_HELD // 4)  # so that no estimate is refused for ever
        own, total = self._held.get(self.account, 0), sum(self._held.values())
        part = _MAX_HELD // len({*self._held, self.account})
        if total + size > _MAX_HELD and (
            (own and own + size > part) or total + size > 2 * _MAX_HELD
        ):
            raise Busy(
                f"{own >> 20:,} MB of your requests are in progress, or have results that were not "
                "fetched, or only just: wait for some of them"
            )
        entry = self.entries[request_id] = _Entry(0)
        self._resize(entry, size)
        entry.task = asyncio.create_task(self._run(entry, work))

    async def _run(self, entry: _Entry, work: Work) -> None:
        try:
            found = await work()
        except (Exception, asyncio.CancelledError) as error:
            if entry.result.done():  # it was dropped, and nobody waits
                raise
            found = failure(ordinary_error(error))
        if not entry.result.done():
            self._resize(entry, SMALLEST + (len(found) if isinstance(found, bytes) else 0))
            entry.result.set_result(found)

    def _resize(self, entry: _Entry, size: int) -> None:
        self._held[self.account] = self._held.get(self.account, 0) + size - entry.size
        entry.size = size
        if not self._held[self.account]:
            del self._held[self.account]

    async def retrieve(self, request_id: str, seconds: float = WAIT_SECONDS) -> Reply | None:
        """Return a request's result; None if there is no result within `seconds`.

        Raises:
            Gone: when there is no such request, or its result is not kept any more.
        """
        if (entry := self.entries.get(request_id)) is not None:
            await asyncio.wait([entry.result], timeout=seconds)
        if entry is None or self.entries.get(request_id) is not entry:
            raise Gone(f"there is no result of a request {visible(request_id)[:100]}")
        if not entry.result.done():
            return None
        if not entry.is_sent:
            entry.is_sent = True
            asyncio.get_running_loop().call_later(_SENT_SECONDS, self.drop, request_id)
        return entry.result.result()

    def drop(self, *request_ids: str) -> None:
        """Cancel and forget requests; ignore unknown ids."""
        for entry in filter(None, [self.entries.pop(each, None) for each in request_ids]):
            self._resize(entry, 0)
            for each in (entry.result, entry.task):  # no effect on those that have ended
                each.cancel()
