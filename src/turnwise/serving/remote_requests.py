"""Requests to a worker in another process, over one channel at a time.

Requests that begin in one iteration of the event loop are sent together, and so are the chunks that
the engine returns. A channel that is lost ends the requests on it; the next one opens another.
"""

import asyncio
import contextlib
import logging
import pickle
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator

from turnwise.core.deadlines import StallClock
from turnwise.core.watchdog import made_progress
from turnwise.engine.protocol import Chunk, Request
from turnwise.errors import DeadlineError, EngineError, TurnwiseError
from turnwise.serving.channel import Channel, ChannelError
from turnwise.serving.engine_worker import Event

logger = logging.getLogger(__name__)

_BATCH = 4
"""Maximum number of requests in one message: the engine begins the first of many while the last are
still being prepared."""


class RemoteRequests(ABC):
    """The requests of this process to one worker; the base class of its handle.

    Args:
        name: The worker's name in errors.
        patience: Seconds without any message, while requests run, after which the channel is given
            up.
    """

    def __init__(self, name: str, patience: float) -> None:
        self.name = name
        self._inboxes: dict[str, asyncio.Queue[Chunk | Exception]] = {}
        self._outbox: list[Request] = []
        self._cancelled: list[str] = []
        self._failure: str | None = None
        """Reason why no request is accepted any more; None while they are."""
        self._channel: Channel | None = None
        self._clock = StallClock(patience)
        self._clock.stopped = True
        self._opened: asyncio.Future[TurnwiseError | None] | None = None
        """Set once a channel is open, or to the reason why not; None while none is wanted."""
        self._listening: asyncio.Task[None] | None = None
        self._explaining: set[asyncio.Task[None]] = set()
        """Tasks that still tell requests why their channel was lost."""

    @abstractmethod
    async def _open(self) -> Channel:
        """Open a channel.

        Raises:
            ChannelError: when the worker is alive, but no connection can be opened.
        """

    @abstractmethod
    async def _ask(self) -> None:
        """Raise an error if the worker is dead, with its cause, or `DeadlineError`."""

    async def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        if self._failure is not None:
            raise EngineError(self._failure)
        if request.id in self._inboxes:
            raise EngineError(f"{self.name} already runs a request {request.id}")
        inbox: asyncio.Queue[Chunk | Exception] = asyncio.Queue()
        self._inboxes[request.id] = inbox
        self._submit(request)
        ended = False
        try:
            while not ended:
                event = await inbox.get()
                if isinstance(event, Exception):
                    ended = True
                    raise event
                ended = event.finish_reason is not None
                yield event
        finally:
            if self._inboxes.get(request.id) is inbox:  # else its channel was lost
                del self._inboxes[request.id]
                self._clock.stopped = not self._inboxes
                if not ended:
                    self._cancel(request.id)

    def _submit(self, request: Request) -> None:
        if not self._outbox and not self._cancelled:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(request)
        if len(self._outbox) >= _BATCH:
            self._flush()
        self._clock.stopped = False
        self._begin_listening()

    def _begin_listening(self) -> "asyncio.Future[TurnwiseError | None]":
        if self._opened is None:
            self._opened = asyncio.get_running_loop().create_future()
            self._listening = asyncio.create_task(self._listen(self._opened))
        return self._opened

    async def _have_channel(self) -> None:
        """Open a channel if there is none."""
        if self._failure is not None:
            raise EngineError(self._failure)
        if (error := await asyncio.shield(self._begin_listening())) is not None:
            raise type(error)(str(error))

    def _cancel(self, request_id: str) -> None:
        if not self._outbox and not self._cancelled:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and all requests with it
                asyncio.get_running_loop().call_soon(self._flush)
        self._cancelled.append(request_id)

    def _flush(self) -> None:
        if self._channel is None:  # it is sent when there is one
            return
        batch, self._outbox = self._outbox, []
        cancelled, self._cancelled = self._cancelled, []
        packed: dict[str, bytes] = {}
        for request in batch:
            if request.id in cancelled:
                continue
            try:  # each by itself, so that what cannot be sent or read fails alone
                packed[request.id] = pickle.dumps(request, pickle.HIGHEST_PROTOCOL)
            except Exception as error:
                if (inbox := self._inboxes.get(request.id)) is not None:
                    inbox.put_nowait(EngineError(f"{self.name} cannot be asked: {error!r}"))
        if packed or cancelled:
            self._channel.send((packed, cancelled))

    async def _listen(self, opened: "asyncio.Future[TurnwiseError | None]") -> None:
        """Open a channel and pass on what comes, until it is lost, and all requests on it."""
        lost: TurnwiseError
        try:
            self._channel = channel = await self._open()
            opened.set_result(None)
            channel.received = self._receive
            self._flush()
            async with self._clock.watching(f"{self.name} did not answer"):
                why = await channel.closed
            lost = ChannelError(f"{self.name} closed its channel" + (f" ({why})" if why else ""))
        except TurnwiseError as error:
            lost = error if isinstance(error, ChannelError) else EngineError(str(error))
        except Exception as error:  # of any kind: requests wait for it
            lost = EngineError(f"the channel to {self.name} failed: {error!r}")
        logger.debug("%s", lost)
        was_open = opened.done()
        inboxes = self._take_requests(lost)
        explaining = asyncio.create_task(self._explain(lost, inboxes, was_open))
        self._explaining.add(explaining)
        explaining.add_done_callback(self._explaining.discard)

    def _take_requests(self, lost: TurnwiseError) -> list["asyncio.Queue[Chunk | Exception]"]:
        """Close the channel, if there is one; return the inboxes of all requests.

        From then on, another one can be opened.
        """
        channel, opened = self._channel, self._opened
        inboxes = list(self._inboxes.values())
        self._channel = self._opened = None
        self._inboxes = {}
        self._outbox, self._cancelled = [], []
        self._clock.stopped = True
        if channel is not None:
            channel.close()
        if opened is not None and not opened.done():
            opened.set_result(lost)
        return inboxes

    async def _explain(
        self,
        lost: TurnwiseError,
        inboxes: "list[asyncio.Queue[Chunk | Exception]]",
        was_open: bool,
    ) -> None:
        """End requests with the reason why their channel was lost: perhaps their worker died."""
        if inboxes and was_open and isinstance(lost, ChannelError):
            try:
                await self._ask()
            except DeadlineError:
                pass  # whether it is alive is the supervisor's question
            except TurnwiseError as error:
                lost = EngineError(str(error))
        for inbox in inboxes:
            inbox.put_nowait(type(lost)(str(lost)))

    def _receive(self, events: list[Event]) -> None:
        made_progress()
        self._clock.moved()
        for request_id, event in events:
            if (inbox := self._inboxes.get(request_id)) is not None:
                inbox.put_nowait(event)

    def fail(self, why: str) -> None:
        """Raise `EngineError` from every running request, and from every later one."""
        self._failure = self._failure or why
        error = EngineError(self._failure)
        if self._listening is not None:
            self._listening.cancel()
        for inbox in self._take_requests(error):
            inbox.put_nowait(EngineError(self._failure))
