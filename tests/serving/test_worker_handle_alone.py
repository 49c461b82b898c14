"""`WorkerHandle` before an actor that is none: what becomes of requests that get lost."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from turnwise.config import Config, SamplingConfig
from turnwise.core.actor import ActorHandle
from turnwise.engine import Chunk
from turnwise.errors import EngineError
from turnwise.serving import worker_handle
from turnwise.serving.worker import VllmAsyncGenerationWorker
from turnwise.serving.worker_handle import WorkerHandle


def handle_of(actor: Any) -> ActorHandle:
    return ActorHandle(actor, "worker-0", EngineError)


class Method:
    def __init__(self, call: Callable[..., Any]) -> None:
        self.remote = call


class Actor:
    """Answers every request that it gets with one token; one that holds a lock cannot be sent."""

    def __init__(self) -> None:
        self.submit, self.collect = Method(self._submit), Method(self._collect)
        self._asked: asyncio.Queue[str] = asyncio.Queue()

    def _submit(self, batch: list[Any], client: str) -> None:
        if any("lock" in sampling.logits_processor_args for _, _, sampling, *_ in batch):
            raise TypeError("cannot pickle '_thread.lock' object")
        for request_id, *_ in batch:
            self._asked.put_nowait(request_id)

    async def _collect(self, client: str) -> list[tuple[str, Chunk]]:
        return [(await self._asked.get(), Chunk([1], [-0.5], [0], "stop"))]


class Elsewhere(Actor):
    """Answers while the caller's event loop is held up for longer than the deadline."""

    async def _collect(self, client: str) -> list[tuple[str, Chunk]]:
        answer = Future[list[tuple[str, Chunk]]]()
        request_id = await self._asked.get()

        def hold_up() -> None:
            answer.set_result([(request_id, Chunk([1], [-0.5], [0], "stop"))])
            time.sleep(0.5)

        asyncio.get_running_loop().call_soon(hold_up)
        return await asyncio.wrap_future(answer)


async def test_an_answer_that_came_while_the_caller_was_held_up_is_in_time(
    make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_handle, "HEARTBEAT_SECONDS", 0.1)
    worker = WorkerHandle(handle_of(Elsewhere()), make_config(engine={"request_timeout": 0.1}))
    completion = await worker.generate([5], SamplingConfig(max_tokens=1), "request")
    assert completion.token_ids == [1]


async def test_a_request_that_cannot_be_sent_fails_alone(
    make_config: Callable[..., Config],
) -> None:
    worker = WorkerHandle(handle_of(Actor()), make_config())
    plain = SamplingConfig(max_tokens=1)
    locked = plain.model_copy(update={"logits_processor_args": {"lock": object()}})
    async with asyncio.timeout(60):
        outcomes = await asyncio.gather(
            worker.generate([5], plain, "first"),
            worker.generate([5], locked, "second"),
            worker.generate([5], plain, "third"),
            return_exceptions=True,
        )
    assert isinstance(outcomes[1], EngineError)
    assert "worker-0 cannot be asked: TypeError" in str(outcomes[1])
    assert [done.token_ids for done in (outcomes[0], outcomes[2])] == [[1], [1]]  # type: ignore[union-attr]


async def test_a_request_that_ends_without_a_reason_is_told(
    make_config: Callable[..., Config],
) -> None:
    class Mute:
        async def stream(self, *_: Any) -> Any:
            yield Chunk([1], [-0.5], [0])

    worker = VllmAsyncGenerationWorker(make_config(), name="worker-0")
    worker._engine = Mute()
    await worker.submit([("mute", [5], SamplingConfig(), None, "")])
    async with asyncio.timeout(60):
        events = await worker.collect()
        while len(events) < 2:
            events += await worker.collect()
    with pytest.raises(EngineError, match="worker-0 ended request mute without a reason"):
        raise events[1][1]  # type: ignore[misc]


class Silent(Actor):
    """Never answers."""

    async def _collect(self, client: str) -> list[tuple[str, Chunk]]:
        return await asyncio.Future()


async def test_an_actor_that_does_not_answer_is_named(
    make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_handle, "HEARTBEAT_SECONDS", 0.1)
    worker = WorkerHandle(handle_of(Silent()), make_config(engine={"request_timeout": 0.1}))
    with pytest.raises(EngineError, match=r"worker-0 did not answer within 0\.2 s"):
        await worker.generate([5], SamplingConfig(max_tokens=1), "request")
