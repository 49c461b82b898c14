import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest

from turnwise.core.loop_thread import EventLoopThread
from turnwise.errors import DeadlineError, EngineError, InputError

SECONDS = 60
"""For what takes none."""


class Room:
    """The value of the open context manager; tests decide how it ends."""

    def __init__(self) -> None:
        self.broken = asyncio.Event()
        self.left = False
        self.thread = threading.current_thread()


@asynccontextmanager
async def open_room() -> AsyncIterator[Room]:
    room = Room()

    async def watch() -> None:
        await room.broken.wait()
        raise EngineError("the room fell down")

    try:
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(watch())
            yield room
            watching.cancel()
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        room.left = True


@pytest.fixture
def thread() -> Iterator[EventLoopThread[Room]]:
    thread = EventLoopThread(open_room, "the room")
    yield thread
    thread.stop(SECONDS)


async def answer(value: int = 42) -> int:
    await asyncio.sleep(0)
    return value


def test_what_is_submitted_runs_in_the_other_thread(thread: EventLoopThread[Room]) -> None:
    room = thread.start(SECONDS)

    async def where() -> threading.Thread:
        return threading.current_thread()

    assert (
        thread.call(where, SECONDS, "the answer") is room.thread is not threading.current_thread()
    )
    futures = [thread.submit(lambda n=n: answer(n)) for n in range(5)]
    assert [future.result(SECONDS) for future in futures] == list(range(5))


def test_stopping_leaves_the_context_and_ends_what_runs(thread: EventLoopThread[Room]) -> None:
    room = thread.start(SECONDS)
    future = thread.submit(lambda: asyncio.sleep(600))
    thread.stop(SECONDS)
    assert room.left
    assert future.cancelled()


def test_a_late_answer_names_who_was_waited_for_and_is_cancelled(
    thread: EventLoopThread[Room],
) -> None:
    thread.start(SECONDS)
    ended: list[str] = []

    async def slow() -> None:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    with pytest.raises(DeadlineError, match=r"the slow one: no answer within 0\.05 s"):
        thread.call(slow, 0.05, "the slow one")
    assert ended == ["cancelled"]


def test_an_error_is_raised_where_it_was_waited_for(thread: EventLoopThread[Room]) -> None:
    thread.start(SECONDS)

    async def fail() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        thread.call(fail, SECONDS, "it")
    assert thread.call(answer, SECONDS, "the answer") == 42


def test_all_callers_get_the_cause_then_and_later() -> None:
    thread = EventLoopThread(open_room, "the room")
    room = thread.start(SECONDS)

    async def breaks() -> None:
        room.broken.set()
        await asyncio.sleep(600)

    attempts: list[Callable[[], object]] = [
        lambda: thread.call(breaks, 600, "it"),
        lambda: thread.call(answer, SECONDS, "the answer"),
        lambda: thread.submit(answer),
        lambda: thread.stop(SECONDS),
    ]
    started = time.monotonic()
    for attempt in attempts:
        with pytest.raises(EngineError, match="the room fell down"):
            attempt()
    assert time.monotonic() - started < 300


def test_a_with_block_leaves_the_thread_which_runs_only_once() -> None:
    thread = EventLoopThread(open_room, "the room")
    with pytest.raises(InputError, match="the room does not run: use it inside its with block"):
        thread.submit(answer)
    with thread:
        room = thread.start(SECONDS)
        assert thread.opened is room
    assert room.left
    assert not thread.is_open
    with pytest.raises(InputError, match="the room does not run"):
        _ = thread.opened
    with pytest.raises(InputError, match="the room can run only once"), thread:
        pass


def test_what_cannot_be_opened_raises_its_own_error() -> None:
    @asynccontextmanager
    async def closed() -> AsyncIterator[None]:
        raise InputError("the door is locked")
        yield

    with pytest.raises(InputError, match="the door is locked"):
        EventLoopThread(closed, "the room").start(SECONDS)


def test_a_start_that_takes_too_long_can_be_stopped() -> None:
    @asynccontextmanager
    async def endless() -> AsyncIterator[None]:
        await asyncio.sleep(600)
        yield

    thread = EventLoopThread(endless, "the room")
    with pytest.raises(DeadlineError, match="waited for the room to start: no answer"):
        thread.start(0.05)
    thread.stop(SECONDS)


def test_a_thread_that_cannot_be_started_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    thread = EventLoopThread(open_room, "the room")
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"), thread:
        thread.start(SECONDS)
