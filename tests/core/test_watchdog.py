"""The watchdog: when it speaks, what it says, and what a wait costs."""

import asyncio
import re
import time

from turnwise.core.watchdog import Watchdog, made_progress, waiting


async def test_a_stall_is_told_once_with_who_is_waited_for() -> None:
    told: list[str] = []
    async with Watchdog(0.2, told.append):
        with (
            waiting("the trainer to train"),
            waiting("sleepy of train.jsonl:7", "tool"),
            waiting("sleepy of train.jsonl:8", "tool"),
        ):
            await asyncio.sleep(0.9)
    (line,) = told
    assert re.fullmatch(
        r"no progress for 0\.\d+ s; waiting for: the trainer to train \(0\.\d+ s\), "
        r"2 tools \(sleepy of train\.jsonl:7 for 0\.\d+ s\)",
        line,
    )


async def test_progress_keeps_it_quiet_and_a_second_stall_is_told_again() -> None:
    told: list[str] = []
    async with Watchdog(0.5, told.append):
        for _ in range(16):
            await asyncio.sleep(0.05)
            made_progress()
        assert told == []
        await asyncio.sleep(0.8)
        with waiting("somebody who comes"):
            pass
        await asyncio.sleep(0.8)
    assert len(told) == 2
    assert all("no wait is registered" in line for line in told)


async def test_a_wait_that_begins_after_a_stall_was_told_is_told_too() -> None:
    told: list[str] = []
    async with Watchdog(0.2, told.append):
        await asyncio.sleep(0.5)
        with waiting("somebody who never comes"):
            await asyncio.sleep(0.6)
    assert len(told) == 2
    assert "waiting for: somebody who never comes" in told[1]


async def test_an_event_loop_that_is_stuck_is_told_too() -> None:
    told: list[str] = []
    async with Watchdog(0.2, told.append):
        with waiting("a blocking call"):
            time.sleep(1.0)  # noqa: ASYNC251  (that is the point)
            assert len(told) == 1


async def test_it_is_silent_after_its_end() -> None:
    told: list[str] = []
    async with Watchdog(0.1, told.append):
        pass
    await asyncio.sleep(0.3)
    assert told == []


async def test_many_kinds_are_told_in_short() -> None:
    told: list[str] = []
    waits = [waiting(f"part {number}") for number in range(20)]
    for wait in waits:
        wait.__enter__()
    async with Watchdog(0.1, told.append):
        await asyncio.sleep(0.5)
    for wait in waits:
        wait.__exit__(None, None, None)
    assert "part 7 (" in told[0]
    assert "part 8 (" not in told[0]
    assert told[0].endswith(", 12 more")


def test_a_wait_that_failed_is_no_wait_any_more_and_thousands_cost_little() -> None:
    started = time.perf_counter()
    for _ in range(20_000):
        try:
            with waiting("who", "kind"):
                raise ValueError
        except ValueError:
            pass
    assert time.perf_counter() - started < 2.0  # 100 µs each, on a machine under load
    from turnwise.core import watchdog

    assert not watchdog._waits
