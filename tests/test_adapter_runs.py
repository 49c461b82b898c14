"""Whole runs whose engines apply the adapter of each version beside the base model."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.test_cli import Lottery, metrics_of, turnwise, write_config
from turnwise.config import Config
from turnwise.trajectory import audit, read_jsonl

pytestmark = pytest.mark.slow

__all__ = ["Lottery"]
ADAPTER = (
    "model.lora.rank=4",
    "weights.lora=adapter",
    "training.learning_rate=0.01",
    "training.threads=1",
    "sampling.n=4",
)


@pytest.fixture(scope="module")
def file(make_config: Callable[..., Config], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(make_config, tmp_path_factory.mktemp("adapter"))


def exact(run: Path, steps: int) -> None:
    """Check the canary, the log-probs and the audit, and that a turn has one version."""
    rows = metrics_of(run)[-steps:]
    assert [row["weight_version"] for row in rows] == list(range(1, steps + 1))
    for row in rows:
        assert row["canary_diff_max"] < 1e-4
        assert row["logprob_diff_max"] < 1e-4 or row["staleness_max"]
    for path in sorted((run / "trajectories").glob("step-*.jsonl")):
        for trajectory in read_jsonl(path):
            assert audit(trajectory).violations == 0
            for turn in trajectory.turns:
                assert len(set(turn.weight_versions)) == 1


@pytest.mark.parametrize(
    "options",
    [
        ("weights.transport=shm", "serving.workers=2"),
        ("weights.transport=ipc", "training.ranks=2"),
        ("weights.transport=collective", "model.lora.rslora=true"),
        ("weights.transport=disk", "model.lora.target_modules=[q_proj, down_proj]"),
        ("training.colocated=true", "training.offload=[params, optimizer]"),
        ("training.colocated=true", "training.ranks=2", "engine.tensor_parallel_size=2"),
    ],
    ids=["shm", "ipc-ranks", "collective-rslora", "disk-layers", "in-process", "sharded"],
)
def test_a_run_samples_from_the_adapter_of_each_version(
    file: Path, options: tuple[str, ...]
) -> None:
    name = "-".join(options[0].split("=")) + str(len(options))
    done = turnwise("train", file, *ADAPTER, "eval.every=0", f"name={name}", *options)
    assert done.returncode == 0, done.stderr
    exact(file.parent / "runs" / name, 2)


def test_a_run_ahead_with_adapters_evaluates_like_its_checkpoint(
    file: Path,
) -> None:
    options = ("training.max_staleness=1", "training.steps=6", "eval.every=6", "name=ahead")
    done = turnwise("train", file, *ADAPTER, *options)
    assert done.returncode == 0, done.stderr
    run = file.parent / "runs" / "ahead"
    exact(run, 6)
    assert max(row["staleness_max"] for row in metrics_of(run)) == 1

    checkpoint = run / "checkpoints" / "step-0006"
    done = turnwise("eval", file, f"model.path={checkpoint}", "name=alone")
    assert done.returncode == 0, done.stderr
    ours = {t.problem_id: t for t in read_jsonl(run / "trajectories" / "eval-0006.jsonl")}
    alone = list(read_jsonl(run.with_name("alone") / "eval.jsonl"))
    assert len(alone) == len(ours) == 16
    for trajectory in alone:
        answer = trajectory.turns[0].completion_token_ids
        assert answer == ours[trajectory.problem_id].turns[0].completion_token_ids


def test_merged_weights_and_an_adapter_give_the_same_run(file: Path) -> None:
    answers = []
    for way in ("adapter", "merged"):
        options = ("deterministic=true", f"weights.lora={way}", "eval.every=2", f"name={way}")
        done = turnwise("train", file, *ADAPTER, *options)
        assert done.returncode == 0, done.stderr
        run = file.parent / "runs" / way
        exact(run, 2)
        evaluated = read_jsonl(run / "trajectories" / "eval-0002.jsonl")
        answers.append([t.turns[0].completion_token_ids for t in evaluated])
    assert answers[0] == answers[1]
