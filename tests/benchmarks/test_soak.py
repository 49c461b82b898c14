"""The soak test: what it makes of its samples; tests/test_short_soak.py runs it."""

from typing import Any

import pytest

from benchmarks.soak import machine
from benchmarks.soak.checks import change_of, counts_by_time, rates_of, training_claims
from benchmarks.soak.machine import MachineSpeed
from benchmarks.soak.memory import growth


def test_growth_compares_the_last_quarter_with_the_first_after_the_warm_up() -> None:
    warm = [(float(at), 1000.0) for at in range(10)]
    flat = [(float(at), 200.0) for at in range(10, 60)]
    assert growth(warm + flat, 0.0, 60.0) == 1.0
    grown = [(at, 200.0 + (at > 45) * 20.0) for at, _ in flat]
    assert growth(warm + grown, 0.0, 60.0) == pytest.approx(1.1)
    spike = [(at, 900.0 if at == 50 else value) for at, value in flat]
    assert growth(warm + spike, 0.0, 60.0) == 1.0
    assert growth(warm + grown, 0.0, 60.0, slack=20.0) == 1.0
    assert growth(warm + grown, 0.0, 60.0, min) == pytest.approx(1.1)
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
        claims = training_claims(rows, violations, 1, 8, 100.0, 1.0, judged=False)
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


def test_rates_are_of_the_last_steps_and_judged_by_sixths() -> None:
    rows = [row(1, 50.0), *(row(step, 2.0) for step in range(2, 12)), row(12, 4.0)]
    assert rates_of(rows, 24.0) == [4.0] * 10 + [2.0]
    slower = [4.0] * 5 + [3.8]
    assert change_of(slower, 1.0, judged=True).missed
    assert change_of(slower, 1.0, judged=False).goal == ""
    assert not change_of([4.0] * 5 + [3.9], 1.0, judged=True).missed
    assert not change_of(slower, 0.95, judged=True).missed, "the machine was slower as well"
    assert counts_by_time([0.1, 0.9, 59.5], 0.0, 60.0) == [2.0, *[0.0] * 58, 1.0]


def test_a_program_that_never_took_a_step_misses_its_goals() -> None:
    claims = training_claims([], float("nan"), 4, 2, 60.0, 1.0, False)
    missed = [claim.name for claim in claims if not claim.met]
    assert missed == ["exact tokens, worst step", "violations of the audit"]
