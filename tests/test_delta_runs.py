"""Whole runs with `weights.delta` are the runs without it, and say what changed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.test_cli import Lottery, metrics_of, turnwise, write_config
from tests.test_runs import REPEATABLE, timeless
from turnwise.config import Config

pytestmark = pytest.mark.slow

__all__ = ["Lottery"]
BFLOAT16 = (*REPEATABLE, "model.dtype=bfloat16", "training.learning_rate=0.000001")
OWN = ("weight_update_bytes", "weights_changed")
"""Metrics of the updates themselves."""


@pytest.fixture(scope="module")
def file(make_config: Callable[..., Config], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(make_config, tmp_path_factory.mktemp("delta"))


@pytest.fixture(scope="module")
def plain(file: Path) -> Path:
    """A deterministic run in bfloat16 whose updates are whole."""
    done = turnwise("train", file, *BFLOAT16, "name=plain")
    assert done.returncode == 0, done.stderr
    return file.parent / "runs" / "plain"


def same(run: Path) -> list[dict[str, Any]]:
    rows = timeless(run)
    return [{key: value for key, value in row.items() if key not in OWN} for row in rows]


@pytest.mark.parametrize("transport", ["disk", "collective", "shm"])
def test_a_run_with_deltas_matches_one_without_bit_for_bit(plain: Path, transport: str) -> None:
    options = ("weights.delta=true", f"weights.transport={transport}", f"name={transport}")
    done = turnwise("train", plain.parents[1] / "config.yaml", *BFLOAT16, *options)
    assert done.returncode == 0, done.stderr
    run = plain.with_name(transport)
    assert same(run) == same(plain)
    for kind in ("trajectories/step-0004.jsonl", "checkpoints/step-0004/model.safetensors"):
        assert (run / kind).read_bytes() == (plain / kind).read_bytes()
    whole = metrics_of(plain)[-1]["weight_update_bytes"]
    rows = metrics_of(run)
    assert 0 < max(row["weights_changed"] for row in rows) < 0.25
    assert all(row["weight_update_bytes"] < whole for row in rows)


def test_a_resumed_run_with_deltas_begins_with_all_tensors(plain: Path) -> None:
    config = plain.parents[1] / "config.yaml"
    options = ("weights.delta=true", "weights.transport=disk", "name=resumed")
    done = turnwise("train", config, *BFLOAT16, *options, "training.steps=4")
    assert done.returncode == 0, done.stderr
    run = plain.with_name("resumed")
    done = turnwise("train", "--resume", run, "training.steps=6")
    assert done.returncode == 0, done.stderr
    assert [row["weight_version"] for row in metrics_of(run)] == [1, 2, 3, 4, 5, 6]
    assert all(row["canary_diff_max"] < 0.2 for row in metrics_of(run))
