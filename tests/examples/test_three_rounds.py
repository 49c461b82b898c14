"""The three rounds by callbacks: as a program of plain calls, and in a training run."""

import subprocess
from collections.abc import Callable
from pathlib import Path

from examples.calculator.three_rounds import FOLLOW_UPS
from tests.conftest import ROOT, command_environment, python
from tests.test_cli import metrics_of, turnwise, write_config
from turnwise.config import Config
from turnwise.trajectory import audit, read_jsonl


def test_the_example_holds_a_conversation_and_makes_a_batch(model_path: str) -> None:
    """A manager for plain calls, asleep and awake, with its workers' addresses."""
    overrides = [
        *(f"model.path={model_path}", "sampling.max_tokens=8"),
        "engine.kv_cache_gib=0.0625",
    ]
    done = subprocess.run(
        [*python(), "-m", "examples.calculator.three_rounds", *overrides],
        cwd=ROOT,
        env=command_environment(),
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout
    assert said.count("user: ") == said.count("assistant: ") == 3
    assert all(f"user: {question}" in said for question in FOLLOW_UPS)
    shapes = dict(line.split(": ") for line in said.splitlines() if line.endswith("]"))
    rows, width = shapes["prompts"].strip("[]").split(", ")
    length = shapes["responses"].strip("[]").split(", ")[1]
    assert rows == "4"
    assert shapes["input_ids"] == f"[4, {int(width) + int(length)}]"
    assert shapes["response_mask"] == shapes["rollout_log_probs"] == shapes["responses"]
    assert said.count("a worker serves http://127.0.0.1:") == 1


def test_a_run_trains_on_the_rounds(make_config: Callable[..., Config], tmp_path: Path) -> None:
    """`rollout.chat_scheduler` in `turnwise train`."""
    done = turnwise(
        "train",
        write_config(make_config, tmp_path),
        "rollout.loop=chat_scheduler",
        "rollout.chat_scheduler=examples.calculator.three_rounds:ThreeRounds",
        *("training.steps=2", "eval.every=0", "name=rounds"),
    )
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "rounds"
    rows = metrics_of(run)
    assert [row["weight_version"] for row in rows] == [1, 2]
    for step, row in enumerate(rows, start=1):
        assert row["dropped"] == {}
        assert row["logprob_diff_max"] < 1e-4  # for each round's tokens
        trajectories = list(read_jsonl(run / "trajectories" / f"step-000{step}.jsonl"))
        assert len(trajectories) == 16
        for trajectory in trajectories:
            assert audit(trajectory).first_violation is None
            assert len(trajectory.turns) == 3
            assert len(trajectory.samples()) == 1
            versions = {v for turn in trajectory.turns for v in turn.weight_versions}
            assert versions == {step - 1}
