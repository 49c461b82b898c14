"""The watchdog: when it speaks, what it says, and what a wait costs."""

import asyncio
import re
import threading
import time
from collections.abc import Callable

import pytest

from turnwise.core import watchdog
from turnwise.core.watchdog import made_progress, waiting, watching_progress

on_its_own_loop = pytest.mark.asyncio(loop_scope="function")
"""Tasks of other tests, whose progress would count here, wait on the session's event loop."""


class Clock:
    """The watchdog's time, which only tests move; it looks at it all the same."""

    def __init__(self) -> None:
        self.now = 100.0
        self.looks = 0
        """How often the watchdog's thread has looked."""

    def monotonic(self) -> float:
        if threading.current_thread().name == "turnwise-watchdog":
            self.looks += 1
        return self.now

    async def pass_by(self, seconds: float) -> None:
        """Let time pass, and wait until the watchdog has said all that it has to say of it."""
        self.now += seconds
        seen = self.looks
        await until(lambda: self.looks >= seen + 2)


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not done():
            await asyncio.sleep(0.001)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(watchdog, "time", clock)
    return clock


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits and progress of what else this process does are not seen here."""
    monkeypatch.setattr(watchdog, "_waits", {})
    monkeypatch.setattr(watchdog, "_moved", 0.0)


@on_its_own_loop
async def test_a_stall_is_told_once_with_who_is_waited_for(clock: Clock) -> None:
    told: list[str] = []
    async with watching_progress(0.02, told.append):
        with (
            waiting("the trainer to train"),
            waiting("sleepy of train.jsonl:7", "tool"),
            waiting("sleepy of train.jsonl:8", "tool"),
        ):
            await clock.pass_by(0.01)
            assert told == []
            await clock.pass_by(0.24)
            await clock.pass_by(0.5)
    assert told == [
        "no progress for 0.25 s; waiting for: the trainer to train (0.25 s), "
        "2 tools (sleepy of train.jsonl:7 for 0.25 s)"
    ]


@on_its_own_loop
async def test_progress_prevents_a_report_and_each_stall_gives_one(clock: Clock) -> None:
    told: list[str] = []
    async with watching_progress(0.02, told.append):
        for _ in range(16):
            await clock.pass_by(0.009)
            made_progress()
        assert told == []
        await clock.pass_by(0.03)
        with waiting("somebody who comes"):
            pass
        await clock.pass_by(0.03)
    assert len(told) == 2
    assert all("no wait is registered" in line for line in told)


@on_its_own_loop
async def test_a_wait_that_begins_after_a_stall_was_told_is_told_too(clock: Clock) -> None:
    told: list[str] = []
    async with watching_progress(0.02, told.append):
        await clock.pass_by(0.03)
        with waiting("somebody who never comes"):
            await clock.pass_by(0.03)
    assert len(told) == 2
    assert "waiting for: somebody who never comes" in told[1]


@on_its_own_loop
async def test_an_event_loop_that_is_stuck_is_told_too() -> None:
    told: list[str] = []
    end = time.monotonic() + 60
    async with watching_progress(0.1, told.append):
        with waiting("a blocking call"):
            while not told or "blocking" not in told[-1]:
                time.sleep(0.01)  # noqa: ASYNC251  (that is the point)
                assert time.monotonic() < end
    assert re.fullmatch(r"no progress for \S+ s; waiting for: a blocking call \(\S+ s\)", told[-1])


@on_its_own_loop
async def test_it_is_silent_after_its_end(clock: Clock) -> None:
    told: list[str] = []
    async with watching_progress(0.02, told.append):
        pass
    clock.now += 10
    await asyncio.sleep(0.05)
    assert told == []


@on_its_own_loop
async def test_many_kinds_are_told_in_short(clock: Clock) -> None:
    told: list[str] = []
    for number in range(20):
        waiting(f"part {number}").__enter__()
    async with watching_progress(0.02, told.append):
        await clock.pass_by(0.03)
    assert "part 7 (" in told[0]
    assert "part 8 (" not in told[0]
    assert told[0].endswith(", 12 more")


def test_a_failed_wait_is_removed_and_thousands_cost_little() -> None:
    started = time.thread_time()
    for _ in range(20_000):
        try:
            with waiting("who", "kind"):
                raise ValueError
        except ValueError:
            pass
    assert time.thread_time() - started < 2.0  # 100 µs each, of a slow processor too
    assert not watchdog._waits
