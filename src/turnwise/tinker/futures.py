"""Requests that take a while: their results by request id, and each model's requests in order.

Ids are functions of the request, so a client that sends one again, because its connection broke,
gets the result of the first and runs nothing twice. A model's requests run in the order of their
positions, in whatever order they arrive: those after a gap wait until it is filled.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

from turnwise.core.json_types import JsonObject
from turnwise.errors import InputError, TrajectoryError, TurnwiseError, text_of, visible

logger = logging.getLogger(__name__)

WAIT_SECONDS = 20.0
"""Time that a request for a result waits for it; clients give up after 45 s and ask again."""
_MOST_KEPT = 256 * 2**20
"""Bytes of results that are kept; beyond, the oldest are dropped, first those that were sent."""


class Missing(InputError):
    """Something that does not exist for this client, or does not any more."""


class Gone(InputError):
    """A result that is not kept, or a session that has ended; a client may begin again."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The result of a request: plain values, or a message for which the client asks."""

    tree: JsonObject = field(default_factory=dict)
    message: bytes | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """The error of a request, in the protocol's form."""

    error: str
    category: Literal["user", "server", "unknown"]
    """Whether the request is wrong, or the server failed, or nobody knows."""

    @classmethod
    def of(cls, error: Exception) -> "Failure":
        if isinstance(error, InputError | TrajectoryError):
            return cls(visible(str(error)), "user")
        if isinstance(error, TurnwiseError):
            return cls(visible(str(error)), "server")
        logger.error("a request of a Tinker client failed", exc_info=error)
        return cls(f"the server has a fault: {visible(text_of(error))}", "unknown")


Outcome = Reply | Failure
Work = Callable[[], Awaitable[Reply]]


@dataclass(slots=True, eq=False)
class _Entry:
    owner: str
    model_id: str
    outcome: asyncio.Future[Outcome]
    task: asyncio.Task[None] | None = None
    sent: bool = False


class Futures:
    """The requests in progress, and the results that are kept."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._size = 0

    def begin(self, request_id: str, owner: str, work: Work, model_id: str = "") -> None:
        """Run a request, unless it runs or has run already."""
        if request_id not in self._entries:
            entry = self.promise(request_id, owner, model_id)
            entry.task = asyncio.create_task(self.run(request_id, work))

    def promise(self, request_id: str, owner: str, model_id: str = "") -> _Entry:
        """Add a request that `Turns` run later."""
        outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        entry = self._entries[request_id] = _Entry(owner, model_id, outcome)
        return entry

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    async def run(self, request_id: str, work: Work) -> None:
        """Run a promised request to its end; raises nothing."""
        if (entry := self._entries.get(request_id)) is None:
            return
        outcome: Outcome
        try:
            outcome = await work()
        except asyncio.CancelledError:
            outcome = Failure("the request was cancelled", "user")
        except Exception as error:
            outcome = Failure.of(error)
        entry.outcome.set_result(outcome)
        if request_id in self._entries:
            self._size += _size_of(entry)
            self._drop_excess()

    async def retrieve(self, request_id: str, owner: str, seconds: float) -> Outcome | None:
        """Return a request's outcome; None if it has none within `seconds`.

        Raises:
            Gone: when there is no such request of this owner, or its result is not kept any more.
        """
        entry = self._entries.get(request_id)
        if entry is None or entry.owner != owner:
            raise Gone(f"there is no result of a request {visible(request_id)[:100]}")
        done, _ = await asyncio.wait([entry.outcome], timeout=seconds)
        if not done:
            return None
        entry.sent = True
        return entry.outcome.result()

    def cancel(self, request_id: str, owner: str) -> None:
        """End a request that runs, such as a sample that nobody waits for."""
        entry = self._entries.get(request_id)
        if entry is not None and entry.owner == owner and entry.task is not None:
            entry.task.cancel()

    def forget(self, beginning: str) -> None:
        """End and drop the requests whose ids begin in this way, those of a session."""
        for name in [each for each in self._entries if each.startswith(beginning)]:
            entry = self._entries.pop(name)
            self._size -= _size_of(entry)
            if entry.task is not None:
                entry.task.cancel()

    def _drop_excess(self) -> None:
        if self._size <= _MOST_KEPT:
            return
        done = [(e.sent, name) for name, e in self._entries.items() if e.outcome.done()]
        for _, name in sorted(done, key=lambda one: not one[0]):  # stable: the oldest come first
            self._size -= _size_of(self._entries.pop(name))
            if self._size <= _MOST_KEPT // 2:
                break


def _size_of(entry: _Entry) -> int:
    outcome = entry.outcome.result() if entry.outcome.done() else None
    return 256 + len(outcome.message or b"") if isinstance(outcome, Reply) else 0


class Turns:
    """The requests of one model, which run one after the other, by their positions from 1."""

    def __init__(self) -> None:
        self.next = 1
        """Position of the request that runs, or that is waited for."""
        self._waiting: dict[int, Callable[[], Awaitable[None]]] = {}
        self._task: asyncio.Task[None] | None = None

    def add(self, position: int, run: Callable[[], Awaitable[None]]) -> None:
        """Add a request, whose `run` raises nothing. One of a position that was taken is dropped:
        the client sent it twice."""
        if position < self.next or position in self._waiting:
            return
        self._waiting[position] = run
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while (run := self._waiting.get(self.next)) is not None:
            await run()
            del self._waiting[self.next]
            self.next += 1

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
