"""Learning while rollouts run ahead of the trainer, compared with learning in step."""

from pathlib import Path
from typing import Any

import pytest

from examples.calculator.prepare import prepare
from tests.test_cli import metrics_of, turnwise

STEPS = 12


@pytest.mark.slow  # the bound alone: test_cli.py::test_rollouts_run_ahead_by_at_most_the_bound
def test_rollouts_ahead_learn_as_much_as_those_in_step(tmp_path: Path) -> None:
    """The demo, from the same model and problems: both learn, and end at a like accuracy; times are
    those of `benchmarks.learning`."""
    prepare(tmp_path, seed=0)
    runs: list[list[dict[str, Any]]] = []
    for ahead in (0, 1):
        done = turnwise(
            *("train", "examples/calculator/config.yaml", f"model.path={tmp_path / 'model'}"),
            *(f"data.path={tmp_path / 'train.jsonl'}", f"output_dir={tmp_path / 'runs'}"),
            *(f"data.eval_path={tmp_path / 'heldout.jsonl'}", f"name=ahead{ahead}"),
            *(f"training.steps={STEPS}", f"training.max_staleness={ahead}"),
            *("training.lr_schedule=constant", f"eval.every={STEPS}", "eval.target=null"),
        )
        assert done.returncode == 0, done.stderr
        runs.append(metrics_of(tmp_path / "runs" / f"ahead{ahead}"))
    in_step, ahead_of_it = runs
    assert max(row["staleness_max"] for row in in_step) == 0
    assert max(row["staleness_max"] for row in ahead_of_it) > 0
    start = in_step[0]["accuracy_heldout"]
    for run in runs:
        assert run[-1]["accuracy_heldout"] > start + 0.15
        rewards = [row["reward_mean"] for row in run[1:]]
        assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.3
    assert ahead_of_it[-1]["accuracy_heldout"] > 0.85 * in_step[-1]["accuracy_heldout"]
