"""The example of evaluations beside training: its sets, its table, and both of its runs."""

import json
import subprocess
from pathlib import Path

import pytest

from examples.calculator.prepare import prepare
from examples.evaluation.run import CONFIG, SETS, table, write_sets
from tests.conftest import ROOT, command_environment, python
from turnwise.config import load_config


def test_each_set_has_the_problems_of_its_number_of_calls(tmp_path: Path) -> None:
    prepare(tmp_path, train=1, heldout=40)
    found = write_sets(tmp_path)
    assert found.keys() == load_config(CONFIG).data.eval_sets.keys() == SETS.keys()
    rows = {name: [json.loads(line) for line in path.open()] for name, path in found.items()}
    assert sum(map(len, rows.values())) == 40
    for name, calls in SETS.items():
        assert {len(row["steps"]) for row in rows[name]} == {calls}


def test_the_table_lists_each_evaluation_and_the_step_seconds() -> None:
    sets = {"two": {"accuracy": 0.5, "pass@4": 0.75}}
    step = {"step_seconds": 2.0, "phase_seconds": {"evaluate": 0.5}}
    rows = [
        {"step": 0, "heldout_sets": sets, **step},
        {"step": 1, "step_seconds": 1.0, "phase_seconds": {}},
        {"step": 2, "heldout_sets": sets, **step},
    ]
    assert table(rows) == [
        "step   0   two: accuracy 0.500 pass@4 0.750",
        "step   2   two: accuracy 0.500 pass@4 0.750",
        "3.0 s in 2 steps, 0.5 s of them for evaluations",
    ]


@pytest.mark.slow
def test_both_runs_measure_both_sets(tmp_path: Path) -> None:
    small = ("rollout.prompts_per_step=4", "training.steps=3", "data.eval_limit=8", "eval.every=1")
    done = subprocess.run(
        [
            *(*python(), "-m", "examples.evaluation.run", "--build", str(tmp_path)),
            *(*small, f"output_dir={tmp_path}/runs"),
        ],
        cwd=ROOT,
        env=command_environment(),
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert done.returncode == 0, done.stderr
    for name in ("between", "beside"):
        lines = (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        assert [row["step"] for row in rows] == [0, 1, 2, 3]
        assert all(row["heldout_sets"].keys() == SETS.keys() for row in rows)
    assert done.stdout.count("in 3 steps") == 2
    assert done.stdout.count("evaluated beside training") == 2
