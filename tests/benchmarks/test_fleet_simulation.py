"""The simulation of a large fleet: its engines, its sessions, and the driver's own work."""

import asyncio
import statistics
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fleet import (
    SAMPLING,
    Part,
    TokenlessEngine,
    balance_perfectly,
    measure_driver,
    play_group,
    simulate,
    turns_of,
)
from benchmarks.scale import make_engines, schedule
from tests.simulated import SimulatedEngine
from tests.virtual_time import run_virtually
from turnwise.core.admission import Admission, Limits
from turnwise.core.aio import together
from turnwise.engine import Request, Route, generate

PART = Part(engines=16, processes=2, sessions=160, seed=3)


def test_turns_have_the_recorded_quantiles() -> None:
    turns = sorted(turns_of(number / 100_000) for number in range(100_000))
    assert (turns[0], turns[-1]) == (5, 99)
    assert [turns[int(share * len(turns))] for share in (0.5, 0.9, 0.99)] == [29, 56, 85]
    assert statistics.mean(turns) == pytest.approx(33, abs=1)


def makespan(kind: type[SimulatedEngine]) -> float:
    """Virtual seconds of some groups on engines of a kind, whose cache is large enough."""

    async def work() -> float:
        scheduler, admission = schedule(make_engines(4, kind=kind)), Admission(Limits(64))
        await together(play_group(scheduler, admission, 1, number) for number in range(12))
        return asyncio.get_running_loop().time()

    return run_virtually(work())


class Endless(SimulatedEngine):
    """One that never samples the token which ends an answer."""

    def __init__(self, **options: Any) -> None:
        super().__init__(mean_tokens=10**9, **options)


def test_a_tokenless_engine_takes_as_long_as_one_that_samples() -> None:
    """But for the answers, which it remembers with their prompts."""
    assert makespan(TokenlessEngine) == pytest.approx(makespan(Endless), rel=0.1)


def test_a_tokenless_engine_forgets_what_it_used_longest_ago() -> None:
    plays = (("sa", "ga", 100), ("sc", "ga", 100), ("sa", "ga", 150), ("sb", "gb", 250))

    async def work() -> list[int]:
        engine, cached = TokenlessEngine(cache_blocks=20), list[int]()  # of 32 tokens
        for session, group, length in (*plays, ("sa", "ga", 200)):
            request = Request(range(length), SAMPLING, session, route=Route(session, group))
            cached.append((await generate(engine, request)).cached_tokens)
        return cached

    # With the answer's 32; a group's prompt but for its last token; the last turn finds nothing.
    assert run_virtually(work()) == [0, 99, 132, 0, 0]


def test_a_fleet_plays_every_turn_and_reports_it_to_the_driver() -> None:
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
