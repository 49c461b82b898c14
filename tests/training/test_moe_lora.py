"""Adapters beside a mixture of experts reach vLLM's fused experts' engine, both ways."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.models import make_moe
from tests.test_cli import metrics_of, turnwise, write_config
from turnwise.config import Config


@pytest.mark.slow
@pytest.mark.parametrize("way", ["merged", "adapter"])
def test_adapters_beside_experts_reach_the_engine(
    make_config: Callable[..., Config], tokenizer: Any, tmp_path: Path, way: str
) -> None:
    path = make_moe(tokenizer, tmp_path / "moe")
    file = write_config(make_config, tmp_path)
    changes = ["training.steps=2", "training.learning_rate=0.01", "model.lora.rank=4"]
    changes += [f"weights.lora={way}", f"model.path={path}", "eval.every=0", "name=moe"]
    done = turnwise("train", file, *changes)
    assert done.returncode == 0, done.stderr
    assert "all-linear gives no adapter to experts" in done.stderr
    rows = metrics_of(tmp_path / "runs/moe")
    assert [row["weight_version"] for row in rows][-2:] == [1, 2]
    for row in rows:
        assert row["canary_diff_max"] < 1e-4
        assert row["logprob_diff_max"] < 1e-4
