"""The soak test: what it makes of its samples; tests/test_short_soak.py runs it."""

from typing import Any

import pytest

from benchmarks.soak import machine
from benchmarks.soak.checks import (
    change_of_cost,
    counts_by_time,
    steps_within,
    training_claims,
)
from benchmarks.soak.machine import MachineSpeed
from benchmarks.soak.memory import PARTS, Memory, Watched, growth


def test_growth_is_that_of_both_halves_after_the_warm_up() -> None:
    warm = [(float(at), 1000.0) for at in range(10)]
    flat = [(float(at), 200.0) for at in range(10, 60)]
    assert growth(warm + flat, 0.0, 60.0) == 1.0
    grown = [(at, 200.0 + at) for at, _ in flat]
    assert growth(warm + grown, 0.0, 60.0) == pytest.approx(1.08, rel=0.01)
    once = [(at, 200.0 + (at > 30) * 20.0) for at, _ in flat]
    assert growth(warm + once, 0.0, 60.0) == 1.0, "a cache that fills grows in one half"
    spike = [(at, 900.0 if at == 50 else value) for at, value in flat]
    assert growth(warm + spike, 0.0, 60.0) == 1.0
    assert growth(warm + grown, 0.0, 60.0, slack=20.0) == 1.0
    assert growth(warm + grown, 0.0, 60.0, min) == pytest.approx(1.08, rel=0.01)
    assert growth(warm + spike, 0.0, 60.0, min) == 1.0
    assert growth(flat[5:], 0.0, 60.0) is None, "it began after the warm-up"
    assert growth((warm + flat)[:40], 0.0, 60.0) is None, "it did not live to the end"


def test_the_machines_speed_is_compared_by_sixths(monkeypatch: pytest.MonkeyPatch) -> None:
    speed = MachineSpeed()
    assert speed.change(0.0, 60.0) == 1.0, "nothing is known without samples"
    clock = [0.0]
    monkeypatch.setattr(machine.time, "monotonic", lambda: clock[0])
    spent = iter([0.0, 0.02] * 6 + [0.0, 0.04] * 6)
    monkeypatch.setattr(machine.time, "thread_time", lambda: next(spent))
    monkeypatch.setattr(machine, "_stolen_ticks", lambda: (0.0, clock[0]))
    for clock[0] in map(float, range(0, 60, 5)):
        speed.sample()
    assert speed.change(0.0, 60.0) == pytest.approx(0.5, rel=1e-6)


def row(step: int, seconds: float = 2.0, **changes: Any) -> dict[str, Any]:
    plain = {"dropped": {}, "retried": None, "groups_discarded": {}, "trajectories": 8}
    more = {"trajectories_discarded": None, "exact_percent": 100.0}
    return {"step": step, "step_seconds": seconds, **more, **plain, **changes}


def test_every_trajectory_is_finished_or_counted() -> None:
    def missed(rows: list[dict[str, Any]], violations: int = 0) -> list[str]:
        claims = training_claims(rows, violations, 1, 8, 100.0)
        return [claim.name for claim in claims if claim.missed]

    sound = [row(1), row(2, trajectories=6, dropped={"loop_error": 2}), row(3)]
    assert missed(sound) == []
    assert missed([*sound, row(4, trajectories=7)]) == [
        "trajectories neither finished nor counted by reason"
    ]
    failed = {"trajectories_discarded": 1, "groups_discarded": {"failed": 1}}
    assert missed([*sound, row(4, dropped={"loop_error": 7}, **failed)]) == []
    assert missed([row(1), row(3)]) == ["steps missing"]
    assert missed([row(1, exact_percent=99.9)]) == ["exact tokens, worst step"]
    assert missed(sound, violations=1) == ["violations of the audit"]
    assert missed([row(1, 101.0)]) == [], "its only step began before the test: it has no rate"


def test_costs_are_judged_by_sixths_and_the_machines_speed() -> None:
    rows = [row(1, 50.0), *(row(step, 2.0) for step in range(2, 12)), row(12, 4.0)]
    assert steps_within(rows, 24.0) == [*((2.0 * n, 8, 2.0) for n in range(1, 11)), (24.0, 8, 4.0)]
    events = [(0.1, 1.0), (0.9, 1.0), (59.5, 8.0), (60.0, 8.0)]
    assert counts_by_time(events, 0.0, 60.0) == [2.0, *[0.0] * 58, 8.0]
    counts, even = [10.0] * PARTS, [1.0] * PARTS
    dearer = [1.0] * (PARTS - 10) + [1.1] * 10
    assert change_of_cost("request", counts, dearer, 1.0, judged=True).missed
    assert change_of_cost("request", counts, dearer, 1.0, judged=False).goal == ""
    assert not change_of_cost("request", counts, even, 1.0, judged=True).missed
    assert not change_of_cost("request", counts, dearer, 0.95, judged=True).missed, "as slow"
    fewer = [5.0 if n % 2 else 10.0 for n in range(PARTS)]  # the features take the machine
    halved = [count / 10 for count in fewer]
    assert not change_of_cost("request", fewer, halved, 1.0, judged=True).missed


def test_a_programs_time_sums_its_processes_within_the_test() -> None:
    memory = Memory([])
    old = Watched("serve: driver 1", seconds=[(-5.0, 100.0), (0.5, 101.0), (30.5, 104.0)])
    young = Watched("serve: engine 2", seconds=[(30.7, 2.0), (70.0, 9.0)])
    other = Watched("train: driver 3", seconds=[(1.0, 50.0)])
    memory._watched = dict(enumerate((old, young, other)))  # type: ignore[arg-type]
    spent = memory.spent("serve", 0.0, 60.0)
    assert (spent[0], spent[30], sum(spent)) == (1.0, 5.0, 6.0)


def test_a_program_that_never_took_a_step_misses_its_goals() -> None:
    claims = training_claims([], float("nan"), 4, 2, 60.0)
    missed = [claim.name for claim in claims if not claim.met]
    assert missed == ["exact tokens, worst step", "violations of the audit"]
