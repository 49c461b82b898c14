"""A mixture of experts trains on two ranks: its weights reach vLLM's fused experts, and log-probs
of engine and trainer agree after every update."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.models import make_moe
from tests.test_cli import metrics_of, turnwise, write_config
from turnwise.config import Config


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "shared", "shards"), [("shm", 1, 1), ("collective", 2, 1), ("collective", 1, 2)]
)
def test_a_mixture_of_experts_trains_and_updates_the_engine(
    make_config: Callable[..., Config],
    tokenizer: Any,
    tmp_path: Path,
    transport: str,
    shared: int,
    shards: int,
) -> None:
    path = make_moe(tokenizer, tmp_path / "moe")
    file = write_config(make_config, tmp_path)
    changes = ["training.steps=3", "training.ranks=2", "training.learning_rate=0.01"]
    changes += [f"training.context_parallel={shared}", f"engine.tensor_parallel_size={shards}"]
    changes += [f"weights.transport={transport}", f"model.path={path}", "name=moe"]
    done = turnwise("train", file, *changes)
    assert done.returncode == 0, done.stderr
    rows = metrics_of(tmp_path / "runs/moe")
    assert [row["weight_version"] for row in rows] == [0, 1, 2, 3]
    for row in rows:
        assert row["logprob_diff_max"] < 1e-4
    before, after = (
        load_file(folder / "model.safetensors")
        for folder in (Path(path), tmp_path / "runs/moe/checkpoints/step-0003")
    )
    assert before.keys() == after.keys()
    experts = [name for name in before if ".mlp.experts." in name]
    assert len(experts) == 2 * 8 * 3
    changed = sum(not torch.equal(before[name], after[name]) for name in experts)
    assert changed > len(experts) // 2
    folder = tmp_path / "runs/moe/checkpoints/step-0003"
    _, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
