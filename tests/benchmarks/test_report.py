"""Claims: what meets a goal, and what a reader sees of it."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks import compare
from benchmarks.report import COLUMNS, Claim, digits, load, markdown, quotients, spread, verdict


def test_a_goal_is_of_the_median_ratio() -> None:
    claim = Claim("rollouts", "1/s", [9, 10, 20], "bare", [10, 10, 10], at_least=0.95)
    claim.ratios = quotients(claim.ours, claim.theirs)
    assert claim.judged == 1.0
    assert claim.met
    assert claim.cells()[2] == "10 (9–20)"
    assert claim.cells()[-2:] == ["≥ 0.95", "met"]
    claim.ratios = [0.9, 0.92, 0.94]
    assert not claim.met
    assert claim.cells()[-1] == "missed"


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ([0.9, 0.94, 1.5], "undecided"),
        ([0.9, 0.94, 0.949], "missed"),
        ([0.1, 0.95, 0.95], "met"),
        ([0.94], "missed"),
    ],
)
def test_a_goal_is_missed_beyond_the_range_of_the_rounds_only(
    ratios: list[float], verdict: str
) -> None:
    fast = Claim("rollouts", "1/s", [1.0], ratios=ratios, at_least=0.95)
    lost = Claim("lost", "ms", [1 - ratio for ratio in ratios], at_most=0.05 + 1e-9)
    for claim in (fast, lost):
        assert claim.cells()[-1] == verdict
        assert claim.missed is (verdict == "missed")
        assert claim.met is (verdict == "met")
    exact = Claim("parameters", "M", ratios, at_least=1.0, at_most=1.0)
    assert exact.missed is (max(ratios) < 1.0)


def test_a_claim_without_ratios_compares_its_values_to_its_goal() -> None:
    assert Claim("lost", "ms", [40, 60, 45], at_most=50).met
    assert not Claim("lost", "ms", [40, 60, 55], at_most=50).met
    told = Claim("lost", "ms", [40])
    assert told.met
    assert told.cells()[-2:] == ["", ""]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.0123456, "0.0123"),
        (0.5, "0.5"),
        (3.14159, "3.14"),
        (98.76, "98.8"),
        (123.4, "123"),
        (98_863.2, "98,863"),
        (-2.5, "-2.5"),
    ],
)
def test_numbers_have_three_digits_and_no_exponent(value: float, text: str) -> None:
    assert digits(value) == text


def test_one_round_has_no_range() -> None:
    assert spread([2.0]) == "2"
    assert spread([]) == ""


def test_results_reload_from_a_file_and_fill_the_readme_table() -> None:
    claims = [Claim("a", "s", [1.0, 2.0], "b", [2.0, 2.0], [0.5, 1.0], "times", at_most=1.0)]
    again = load(json.loads(json.dumps([asdict(claim) for claim in claims])))
    assert again == claims
    head, line, row = markdown(again).splitlines()
    assert head.count("|") == line.count("|") == row.count("|") == len(COLUMNS) + 1
    assert row.startswith("| a | s | 1.5 (1–2) | b | 2 (2–2) | 0.75 (0.5–1) times | ≤ 1 | met |")


def test_a_full_run_fails_by_goals_and_a_quick_one_by_scripts() -> None:
    met, missed = Claim("a", "s", [1.0], at_most=2.0), Claim("b", "s", [3.0], at_most=2.0)
    told = Claim("c", "s", [1.0])
    assert verdict([met], [], False) == (0, [])
    assert verdict([met, told], [], False) == (0, ["without a goal: c"])
    assert verdict([met, missed, told], [], False) == (1, ["missed: b", "without a goal: c"])
    open_ = Claim("d", "s", [1.0, 3.0, 3.0], at_most=2.0)
    assert verdict([met, open_], [], False) == (0, ["undecided: d"])
    assert verdict([met, missed, told], [], True) == (0, [])
    assert verdict([], ["start"], True) == (1, ["failed: start"])


def test_two_results_are_compared_by_the_ranges_of_their_rounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def rows(speed: list[float], lost: list[float]) -> list[Claim]:
        return [
            Claim("speed", "1/s", [1.0], "bare", [1.0], speed, at_least=0.9),
            Claim("lost", "ms", lost, at_most=50),
            Claim("memory", "GiB", lost),
        ]

    def write(name: str, claims: list[Claim]) -> str:
        tree = {"commit": name, "cores": 2, "claims": [asdict(claim) for claim in claims]}
        (tmp_path / name).write_text(json.dumps(tree))
        return str(tmp_path / name)

    old = write("old", [*rows([0.9, 0.95], [40, 50]), Claim("gone", "s", [1])])
    same = write("same", rows([0.94, 1.0], [45, 60]))
    assert compare.main([old, same]) == 0
    shown = capsys.readouterr().out
    assert "gone" in shown
    assert "0 worse" in shown
    bad = write("bad", rows([0.8, 0.89], [30, 39]))
    assert compare.main([old, bad]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert next(line for line in lines if "speed" in line).rstrip(" │").endswith("worse")
    assert next(line for line in lines if "lost" in line).rstrip(" │").endswith("better")
    assert not [line for line in lines if "memory" in line and "worse" in line]
