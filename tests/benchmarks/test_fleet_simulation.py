"""The simulation of a large fleet: its engines, its sessions, and the driver's own work."""

import asyncio
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fleet import (
    ANSWER,
    Part,
    SharedEngine,
    balance_perfectly,
    measure_driver,
    play_group,
    simulate,
    turns_of,
)
from tests.simulated import SimulatedEngine
from tests.virtual_time import run_virtually
from turnwise.config import ServingConfig
from turnwise.core.aio import together
from turnwise.core.slots import Slots
from turnwise.engine import generate
from turnwise.serving.scheduler import Scheduler

PART = Part(engines=16, processes=2, sessions=160, seed=3)


def test_turns_have_the_recorded_quantiles() -> None:
    turns = sorted(turns_of(number / 100_000) for number in range(100_000))
    assert (turns[0], turns[-1]) == (5, 99)
    assert [turns[int(share * len(turns))] for share in (0.5, 0.9, 0.99)] == [29, 56, 85]
    assert statistics.mean(turns) == pytest.approx(33, abs=1)


def makespan(make: Callable[[str], Any], engines: int = 4, groups: int = 12) -> float:
    """Virtual seconds of some groups on engines of a kind."""

    async def work() -> float:
        scheduler = Scheduler(ServingConfig(), 60.0)
        for index in range(engines):
            scheduler.add(f"worker-{index}", make(f"worker-{index}"))
        ask, slots = partial(generate, scheduler), Slots(16 * engines)
        await together(play_group(ask, slots, 1, number) for number in range(groups))
        return asyncio.get_running_loop().time()

    return run_virtually(work())


def test_an_engine_without_tokens_takes_the_time_of_one_that_samples_them() -> None:
    whole = makespan(lambda name: SimulatedEngine(name=name, mean_tokens=10**9))
    assert makespan(SharedEngine) == pytest.approx(whole, rel=0.1)


def test_requests_share_an_engine_and_prompts_delay_them() -> None:
    async def work(lengths: Sequence[int]) -> float:
        from turnwise.engine import Request, Route

        engine = SharedEngine("worker-0")
        sampling: Any = None
        requests = (
            Request(range(length), sampling, f"{n}", route=Route(f"s{n}", f"g{n}"))
            for n, length in enumerate(lengths)
        )
        await together(engine.compute(each) for each in requests)
        return asyncio.get_running_loop().time()

    alone, together_, long = (run_virtually(work(each)) for each in ([1], [1] * 10, [1001]))
    assert alone == pytest.approx(ANSWER * (4e-3 + 1e-4) + 2e-5)
    assert together_ == pytest.approx(ANSWER * (4e-3 + 10e-4) + 20e-5)
    assert long - alone == pytest.approx(1000 * 2e-5)


def test_a_fleet_plays_every_turn_and_what_its_processes_report_reaches_the_driver() -> None:
    fleet, perfect = simulate(PART), balance_perfectly(PART)
    assert fleet.turns == perfect.turns == fleet.events["turns"]
    assert fleet.makespan / perfect.makespan < 1.3  # with a session for each place, chance decides
    halves = [Part(**{**vars(PART), "part": part, "of": 2}) for part in (0, 1)]
    assert sum(balance_perfectly(half).turns for half in halves) == perfect.turns


async def test_the_driver_receives_groups_and_reports(tmp_path: Path) -> None:
    each, share = await measure_driver(8, 2, 4, 0.3, tmp_path)
    assert min(each, share) >= 0.0
    lines = (tmp_path / "rollouts.jsonl").read_text().splitlines()
    assert len(lines) == 4 * 8
