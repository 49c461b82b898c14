"""Deadlines that watch progress."""

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.virtual_time import stand_still, virtual_time
from turnwise.config import NO_DEADLINE, Config, dump_config, known_keys, load_config
from turnwise.core.deadlines import StallClock, deadline, deadline_error, trajectory_limits
from turnwise.errors import DeadlineError, TrajectoryError, first_line


@virtual_time
async def test_a_deadline_says_who_did_not_do_what_and_within_how_long() -> None:
    with pytest.raises(
        DeadlineError, match=r"^worker-0 did not start within 0\.05 s \(engine\.x\)$"
    ):
        async with deadline(0.05, "worker-0 did not start", "engine.x"):
            await asyncio.sleep(30)
    assert str(deadline_error(2.0, "it did not end")) == "it did not end within 2 s"


@virtual_time
async def test_a_timeout_of_the_work_itself_is_no_missed_deadline() -> None:
    with pytest.raises(TimeoutError, match="its own"):
        async with deadline(30.0, "it did not end"):
            raise TimeoutError("its own")
    async with deadline(None, "it did not end"):
        await asyncio.sleep(0)


async def test_an_answer_that_comes_while_the_loop_is_busy_is_in_time() -> None:
    loop = asyncio.get_running_loop()
    answer = loop.create_future()

    def hold_up() -> None:
        threading.Thread(target=loop.call_soon_threadsafe, args=(answer.set_result, 3)).start()
        time.sleep(0.05)

    async with deadline(0.02, "it did not answer"):
        loop.call_soon(hold_up)
        assert await answer == 3
    loop.call_soon(time.sleep, 0.05)
    with pytest.raises(DeadlineError, match=r"it did not answer within 0\.02 s"):
        async with deadline(0.02, "it did not answer"):
            await asyncio.sleep(30)


@virtual_time
async def test_a_stalled_wait_says_what_did_not_move() -> None:
    with pytest.raises(DeadlineError, match=r"^nothing was sampled within 0\.05 s \(a\.b\)$"):
        async with StallClock(0.05).watching("nothing was sampled", "a.b"):
            await asyncio.sleep(30)


def test_the_first_line_of_an_error_is_never_empty() -> None:
    assert first_line(ValueError("\n it is wrong \nand this is why")) == "it is wrong"
    assert first_line(ValueError()) == "ValueError"


@virtual_time
async def test_work_that_moves_takes_any_time() -> None:
    clock, loop = StallClock(0.2), asyncio.get_running_loop()
    started = loop.time()
    async with clock.watching():
        while loop.time() < started + 1.0:
            await asyncio.sleep(0.02)
            clock.moved()
    with pytest.raises(TimeoutError):
        async with clock.watching():
            await asyncio.sleep(30)


@virtual_time
async def test_one_moving_wait_saves_the_others_and_all_end_together() -> None:
    clock = StallClock(0.3)
    ended: list[str] = []

    async def wait(name: str) -> None:
        try:
            async with clock.watching() as stall:
                await asyncio.sleep(30)
        except TimeoutError:
            assert stall.expired()
            ended.append(name)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(wait("first"))
        tasks.create_task(wait("second"))
        for _ in range(20):
            await asyncio.sleep(0.05)
            clock.moved()
        assert ended == []
    assert sorted(ended) == ["first", "second"]
    async with clock.watching():  # the clock serves on
        pass


@virtual_time
async def test_a_clock_stands_still_while_it_is_held_or_stopped() -> None:
    clock = StallClock(0.1)
    async with clock.watching():
        with clock.held():
            await asyncio.sleep(0.5)
        clock.stopped = True
        await asyncio.sleep(0.5)
        clock.stopped = False
    with pytest.raises(TimeoutError):
        async with clock.watching():
            await asyncio.sleep(30)


@virtual_time
async def test_a_stalled_process_reads_its_input_before_it_judges() -> None:
    clock = StallClock(0.2)
    arrived = asyncio.get_running_loop().create_future()

    async def deliver() -> None:
        await asyncio.sleep(0.05)
        arrived.set_result(None)

    task = asyncio.create_task(deliver())
    async with clock.watching():
        await asyncio.sleep(0)
        stand_still(0.6)
        await arrived
        clock.moved()
    await task


@virtual_time
async def test_a_doubt_ends_with_the_waits_that_it_was_about() -> None:
    clock = StallClock(1.0)
    async with clock.watching():
        while not clock._doubted:
            await asyncio.sleep(0.01)
    arrived = asyncio.get_running_loop().create_future()
    async with clock.watching():
        asyncio.get_running_loop().call_later(1.2, arrived.set_result, None)
        stand_still(1.5)
        await arrived


@virtual_time
async def test_a_trajectory_ends_after_its_time_or_without_progress() -> None:
    for seconds, stall, reason in ((1.0, 5.0, "trajectory_timeout"), (5.0, 1.0, "stalled")):
        with pytest.raises(TrajectoryError) as failed:
            async with trajectory_limits(seconds, stall):
                await asyncio.sleep(30)
        assert failed.value.reason == reason
        assert failed.value.__cause__ is None
    async with trajectory_limits(5.0, 1.0) as clock:
        for _ in range(4):
            await asyncio.sleep(0.8)
            clock.moved()


DEADLINES = [
    key
    for key in known_keys()
    if key.endswith("_timeout") or key in ("serving.session_idle", "watchdog_seconds")
]


def test_every_deadline_can_be_set_to_null(
    make_config: Callable[..., Config], tmp_path: Path
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(make_config()))
    timeouts = [key for key in DEADLINES if key.endswith("_timeout")]
    assert len(timeouts) >= 8
    config = load_config(path, [f"{key}=null" for key in DEADLINES])
    for key in DEADLINES:
        section, _, name = key.rpartition(".")
        assert getattr(getattr(config, section) if section else config, name) == NO_DEADLINE, key
    path.write_text(dump_config(config))
    assert path.read_text().count("timeout: null") == len(timeouts)
    assert load_config(path) == config
