"""`WorkerHandle` before an actor that is none: the ends of requests that get lost."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from turnwise.config import Config, SamplingConfig
from turnwise.core.actor import ActorHandle
from turnwise.engine import Chunk, Request, generate
from turnwise.errors import EngineError
from turnwise.serving import worker_handle
from turnwise.serving.channel import Address, Channel, listen
from turnwise.serving.engine_host import EngineHost, Mailbox
from turnwise.serving.worker_handle import WorkerHandle

SECONDS = 60.0


def handle_of(actor: Any) -> ActorHandle:
    return ActorHandle(actor, "worker-0", EngineError)


class Method:
    def __init__(self, call: Callable[..., Any]) -> None:
        self.remote = call


class Actor:
    """Answers every request with one token."""

    def __init__(self) -> None:
        self.address, self.call = Method(self._address), Method(self._call)
        self.running = 0

    async def _address(self) -> Address:
        return await listen("127.0.0.1", self._accept)

    def _accept(self, channel: Channel) -> None:
        self.channel = channel
        Mailbox(channel, self._run)

    async def _run(self, mailbox: Mailbox, request: Request) -> None:
        mailbox.add(request.id, Chunk([1], [-0.5], [0], "stop"))

    async def _call(self, method: str) -> int:
        return 0


class Elsewhere(Actor):
    """Answers, and then holds up the caller's event loop for longer than the deadline."""

    async def _run(self, mailbox: Mailbox, request: Request) -> None:
        await super()._run(mailbox, request)
        asyncio.get_running_loop().call_soon(time.sleep, 0.5)


async def test_an_answer_received_while_the_caller_stalls_is_in_time(
    make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_handle, "HEARTBEAT_SECONDS", 0.1)
    worker = WorkerHandle(handle_of(Elsewhere()), 0.1)
    completion = await generate(worker, Request([5], SamplingConfig(max_tokens=1), "request"))
    assert completion.token_ids == [1]
    worker.fail("the test is over")


async def test_a_request_that_cannot_be_sent_fails_alone(
    make_config: Callable[..., Config],
) -> None:
    worker = WorkerHandle(handle_of(Actor()), SECONDS)
    plain = SamplingConfig(max_tokens=1)
    locked = plain.model_copy(update={"logits_processor_args": {"lock": threading.Lock()}})
    async with asyncio.timeout(60):
        outcomes = await asyncio.gather(
            generate(worker, Request([5], plain, "first")),
            generate(worker, Request([5], locked, "second")),
            generate(worker, Request([5], plain, "third")),
            return_exceptions=True,
        )
    assert isinstance(outcomes[1], EngineError)
    assert "the request cannot be sent to worker-0: TypeError" in str(outcomes[1])
    assert [done.token_ids for done in (outcomes[0], outcomes[2])] == [[1], [1]]  # type: ignore[union-attr]
    worker.fail("the test is over")


async def test_a_request_that_ends_without_a_reason_is_told(
    make_config: Callable[..., Config],
) -> None:
    class Mute:
        async def stream(self, request: Request) -> Any:
            yield Chunk([1], [-0.5], [0])

    class Box:
        events: ClassVar[list[Any]] = []

        def add(self, request_id: str, event: Any) -> None:
            self.events.append(event)

    worker = EngineHost(make_config(), name="worker-0")
    worker._engine = Mute()
    await worker._run(Box(), Request([5], SamplingConfig(), "mute"))
    with pytest.raises(EngineError, match="worker-0 ended request mute without a reason"):
        raise Box.events[1]


class Silent(Actor):
    """Never answers."""

    async def _run(self, mailbox: Mailbox, request: Request) -> None:
        self.running += 1
        try:
            await asyncio.Future()
        finally:
            self.running -= 1


async def test_an_actor_that_does_not_answer_is_named(
    make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_handle, "HEARTBEAT_SECONDS", 0.1)
    worker = WorkerHandle(handle_of(Silent()), 0.1)
    with pytest.raises(EngineError, match=r"worker-0 did not answer within 0\.2 s"):
        await generate(worker, Request([5], SamplingConfig(max_tokens=1), "request"))


async def test_a_worker_that_closes_its_channel_is_named(
    make_config: Callable[..., Config],
) -> None:
    actor = Silent()
    worker = WorkerHandle(handle_of(actor), SECONDS)
    request = asyncio.ensure_future(
        generate(worker, Request([5], SamplingConfig(max_tokens=1), "request"))
    )
    async with asyncio.timeout(60):
        while not actor.running:
            await asyncio.sleep(0.01)
        actor.channel.close()
        with pytest.raises(EngineError, match="worker-0 closed its channel"):
            await request


async def test_the_requests_of_a_client_that_is_gone_are_cancelled(
    make_config: Callable[..., Config],
) -> None:
    actor = Silent()
    worker = WorkerHandle(handle_of(actor), SECONDS)
    sampling = SamplingConfig(max_tokens=1)
    requests = [
        asyncio.ensure_future(generate(worker, Request([5], sampling, f"{n}"))) for n in range(8)
    ]
    async with asyncio.timeout(60):
        while actor.running < 8:
            await asyncio.sleep(0.01)
        requests[0].cancel()
        while actor.running == 8:
            await asyncio.sleep(0.01)
        assert actor.running == 7
        worker.fail("the client is gone")
        while actor.running:
            await asyncio.sleep(0.01)
    with pytest.raises(EngineError, match="the client is gone"):
        await requests[1]
    await asyncio.gather(*requests, return_exceptions=True)
