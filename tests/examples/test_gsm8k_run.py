"""GSM8K end to end: a small model's warm start, and a run that trains on the rows."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from examples.calculator.imitation import WarmStart
from examples.gsm8k.warm_start import make_model
from tests.conftest import ROOT
from tests.test_cli import metrics_of, turnwise
from turnwise.trajectory import Trajectory, read_jsonl

FOLDERS = (ROOT / "gsm8k", ROOT.parent / "gsm8k", ROOT.parent / "shared" / "gsm8k")
"""Places of GSM8K's own rows, as in the Makefile; they do not come with the repository."""


def even(trajectory: Trajectory, row: dict[str, Any]) -> float:
    """A signal that a model gives which has learned next to nothing."""
    return float(sum(trajectory.turns[-1].completion_token_ids) % 2)


@pytest.mark.slow  # the reward and the conversations alone: examples/test_gsm8k.py
def test_a_run_trains_on_gsm8ks_rows(tmp_path: Path) -> None:
    """The example's warm start and configuration, on the rows of `make gsm8k`; all made small."""
    folders = [Path(os.environ["DATA"])] if "DATA" in os.environ else FOLDERS
    found = [folder for folder in folders if (folder / "train.jsonl").is_file()]
    if not found:
        pytest.skip("GSM8K's rows are not there: DATA=FOLDER with train.jsonl and test.jsonl")
    train, test = found[0] / "train.jsonl", found[0] / "test.jsonl"
    rows = [json.loads(line) for line in train.open()]
    make_model(rows[:400], tmp_path / "model", 0, WarmStart(30, 8, 3e-3))
    done = turnwise(
        *("train", "examples/gsm8k/config.yaml", f"data.path={train}", f"data.eval_path={test}"),
        *(f"model.path={tmp_path / 'model'}", f"output_dir={tmp_path}", "name=rows"),
        *("data.limit=32", "data.eval_limit=4", "eval.every=2", "training.steps=2"),
        *("rollout.prompts_per_step=4", "sampling.n=4", "sampling.max_tokens=48"),
        "rollout.rewards=[{name: answer}, "
        "{function: 'tests.examples.test_gsm8k_run:even', name: even, weight: 0.1}]",
    )
    assert done.returncode == 0, done.stderr
    steps = metrics_of(tmp_path / "rows")
    assert [row["step"] for row in steps] == [0, 1, 2]
    assert [row["weight_version"] for row in steps] == [0, 1, 2]
    questions = {row["question"] for row in rows[:32]}
    for row in steps[1:]:
        assert row["dropped"] == {}
        assert row["trained_tokens"] > 0
        assert row["exact_percent"] == 100.0
        assert row["logprob_diff_max"] < 1e-3
        assert row["reward_parts"].keys() == {"answer", "even"}
        path = tmp_path / "rows" / "trajectories" / f"step-000{row['step']}.jsonl"
        trained = list(read_jsonl(path))
        assert len(trained) == 16
        for trajectory in trained:
            asked = trajectory.messages[0]["content"]
            assert any(asked.startswith(question) for question in questions)
