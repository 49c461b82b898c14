"""User code away from the event loop: what it raises, how it is abandoned, and what is told."""

import asyncio
import errno
import re
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from tests.blocking import NeverIdle
from turnwise.core import aio
from turnwise.core import user_code as tasks
from turnwise.core.user_code import (
    call_user_code,
    describe_user_error,
    run_abandonable,
    stuck_calls,
    unreturned_calls,
    use_daemon_threads,
)
from turnwise.errors import DeadlineError, TurnwiseError, describe_error, where_in_user_code

HERE = "tests/core/test_user_code.py:"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "GRACE_SECONDS", 0.2)
    monkeypatch.setattr(tasks, "BLOCKED_SECONDS", 0.5)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that other tests left behind are not counted."""
    monkeypatch.setattr(tasks, "_running", {})
    monkeypatch.setattr(tasks, "_stuck", {})


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """A gate that blocked calls wait for; it opens at the end of the test."""
    event = threading.Event()
    yield event
    event.set()
    until(lambda: not unreturned_calls())


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


async def missed(call: Callable[[], Awaitable[object]], begun: threading.Event) -> str:
    """Make a call that misses its deadline, again while it did not even begin; return the error."""
    for _ in range(100):
        with pytest.raises((DeadlineError, TimeoutError)) as error:
            await call()
        if begun.is_set():
            return str(error.value)
    pytest.fail("it never began")


async def cancel_yourself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(600)


async def await_a_cancelled_task() -> None:
    other = asyncio.ensure_future(asyncio.sleep(600))
    other.cancel()
    await other


async def leave() -> None:
    raise SystemExit(3)


def leave_at_once() -> None:
    raise KeyboardInterrupt


def take_from_nothing() -> Any:
    return next(iter([]))


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (cancel_yourself, "RuntimeError: raised CancelledError()"),
        (await_a_cancelled_task, "RuntimeError: raised CancelledError()"),
        (leave, "RuntimeError: raised SystemExit(3)"),
        (leave_at_once, "RuntimeError: raised KeyboardInterrupt()"),
        (take_from_nothing, "RuntimeError: raised StopIteration()"),
    ],
)
async def test_any_exception_of_user_code_is_an_error_with_its_line(
    function: Callable[[], Any], text: str
) -> None:
    with pytest.raises(RuntimeError) as raised:
        await call_user_code(function, name="it", seconds=60)
    assert describe_error(raised.value).startswith(f"{text} ({HERE}")
    with pytest.raises(RuntimeError) as raised:
        await run_abandonable(
            lambda: call_user_code(function, name="it", seconds=60), name="around it", seconds=60
        )
    assert text in describe_error(raised.value)
    assert (
        await call_user_code(threading.get_ident, name="the next", seconds=60)
        != threading.get_ident()
    )


async def test_coroutines_share_one_loop_that_is_not_the_callers() -> None:
    async def here() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    async def raise_in_a_task_of_its_own() -> None:
        await asyncio.ensure_future(leave())

    first = await call_user_code(here, name="here", seconds=60)
    with pytest.raises(RuntimeError, match="SystemExit"):
        await call_user_code(raise_in_a_task_of_its_own, name="it", seconds=60)
    assert await call_user_code(lambda: here(), name="here", seconds=60) is first
    assert first is not asyncio.get_running_loop()


async def test_a_coroutine_that_swallows_cancellation_is_abandoned(
    quick: None,
) -> None:
    done = threading.Event()

    for run in (
        lambda nap: call_user_code(nap, name="the tool nap", seconds=0.1),
        lambda nap: asyncio.wait_for(run_abandonable(nap, name="the tool nap", seconds=60), 0.1),
    ):
        begun = threading.Event()

        async def nap(begun: threading.Event = begun) -> None:
            begun.set()
            while not done.is_set():
                try:
                    await asyncio.sleep(0.05)
                except asyncio.CancelledError:
                    continue

        await missed(lambda run=run, nap=nap: run(nap), begun)
    twice = r"2 calls have not returned: the tool nap \(2 times(, at \S+)?\)"
    assert re.fullmatch(twice, stuck_calls())
    assert stuck_calls(since=time.monotonic()) == "", "a later command is not held up by them"
    done.set()
    while stuck_calls():
        await asyncio.sleep(0.01)


async def test_clean_up_after_a_deadline_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "GRACE_SECONDS", 60.0)
    begun = threading.Event()
    cleaned = []

    async def tidy() -> None:
        begun.set()
        try:
            await asyncio.sleep(600)
        finally:
            await asyncio.sleep(0.05)
            cleaned.append(True)

    call = lambda: call_user_code(tidy, name="the tool tidy", seconds=0.05)  # noqa: E731
    assert await missed(call, begun) == "the tool tidy did not answer within 0.05 s"
    assert cleaned
    assert not stuck_calls()


async def test_a_blocked_loop_is_replaced_for_later_calls(
    quick: None, gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    begun = threading.Event()

    async def block() -> None:
        begun.set()
        gate.wait()

    async def answer() -> int:
        return 7

    await missed(lambda: call_user_code(block, name="the tool block", seconds=0.1), begun)
    assert stuck_calls().startswith(f"1 call has not returned: the tool block (at {HERE}")
    assert await call_user_code(answer, name="the tool answer", seconds=60) == 7
    assert "was replaced (1 call has not returned: the tool block (at" in caplog.text


async def test_threads_that_never_return_are_bounded(
    monkeypatch: pytest.MonkeyPatch, gate: threading.Event
) -> None:
    monkeypatch.setattr(tasks, "MAX_STUCK", 3)
    for _ in range(3):
        with pytest.raises(DeadlineError):
            await call_user_code(gate.wait, name="the tool hang", seconds=0.05)
    with pytest.raises(TurnwiseError, match="the tool add is not called, because 3 calls have not"):
        await call_user_code(lambda: 1, name="the tool add", seconds=60)
    gate.set()
    until(lambda: not stuck_calls())
    assert await call_user_code(lambda: 1, name="the tool add", seconds=60) == 1


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


def test_an_error_is_described_whatever_it_is() -> None:
    assert describe_error(Unspeakable()) == (
        "Unspeakable: (its message cannot be read: __str__ raised ValueError)"
    )
    assert len(describe_error(ValueError("x" * 10**7))) < 3000
    with pytest.raises(ValueError, match="int") as raised:
        int("x", base=99)
    assert where_in_user_code(raised.value).startswith(HERE)


@pytest.mark.parametrize("where", ["user loop", "this loop"])
async def test_hanging_user_threads_are_counted_and_block_no_others(
    where: str, quick: None, gate: threading.Event
) -> None:
    """Calls that hang in `asyncio.to_thread` leave threads for others on either loop."""

    async def hang() -> None:
        await asyncio.to_thread(gate.wait)

    async def answer() -> int:
        return await asyncio.to_thread(lambda: 7)

    async def on_its_loop(work: Callable[[], Awaitable[Any]], seconds: float) -> Any:
        if where == "user loop":
            return await call_user_code(work, name="the tool search", seconds=seconds)
        return await run_abandonable(work, name="the loop of mine", seconds=seconds)

    # More than the threads that asyncio's own executor may have.
    hung = [asyncio.ensure_future(on_its_loop(hang, 1.0)) for _ in range(40)]
    for call in hung:
        with pytest.raises(DeadlineError):
            await call
    assert await on_its_loop(answer, 60) == 7
    who = "the tool search" if where == "user loop" else "the loop of mine"
    assert f"40 calls have not returned: a thread of {who} (40 times" in stuck_calls()


async def test_a_thread_of_the_executor_is_stuck_once_it_is_cancelled(
    gate: threading.Event,
) -> None:
    use_daemon_threads(asyncio.get_running_loop())
    with pytest.raises(ValueError, match="its own"):
        await asyncio.to_thread(raises)
    waiting = asyncio.get_running_loop().run_in_executor(None, gate.wait)
    until(lambda: any(call.running() for call in tasks._running))
    assert unreturned_calls()
    assert not stuck_calls()
    waiting.cancel()
    async with asyncio.timeout(60):
        while not stuck_calls():
            await asyncio.sleep(0)
    assert stuck_calls() == "1 call has not returned: a thread for Event.wait"


def raises() -> None:
    raise ValueError("its own")


@pytest.mark.parametrize("missing", ["for a moment", "for long"])
async def test_a_thread_that_cannot_be_started_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """The system's limit of processes is reached, as Python reports it."""
    refused: list[str] = []
    start = threading.Thread.start

    def starts(thread: threading.Thread) -> None:
        if thread.name == "turnwise-call" and (missing == "for long" or len(refused) < 3):
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(aio, "_idle_threads", NeverIdle())
    monkeypatch.setattr(aio, "_THREAD_SECONDS", 0.3 if missing == "for long" else 60)
    monkeypatch.setattr(threading.Thread, "start", starts)
    if missing == "for a moment":
        assert await aio.run_in_thread(lambda: 7) == 7
        assert await call_user_code(lambda: 7, name="the tool", seconds=60) == 7
        assert len(refused) == 3
    else:
        with pytest.raises(OSError, match=r"no thread can be started .*pids\.max") as raised:
            await call_user_code(lambda: 7, name="the tool", seconds=60)
        assert raised.value.errno == errno.EAGAIN
        assert await describe_user_error(ValueError("it")) == "ValueError"
    assert not unreturned_calls()
