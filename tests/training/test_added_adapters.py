"""Adapters that are added to a trainer while it runs, on one rank and on several."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.training.test_rank import samples_for
from turnwise.config import AlgorithmConfig, Config
from turnwise.errors import InputError
from turnwise.training import Sample
from turnwise.training.adapters import AdapterSpec
from turnwise.training.algorithms import weighted_logprobs
from turnwise.training.algorithms.losses import CrossEntropyLoss
from turnwise.training.reports import OptimSettings
from turnwise.training.trainer_group import TrainerGroup

PLAIN = weighted_logprobs(AlgorithmConfig())
STEP = OptimSettings(1e-2, (0.9, 0.95), 1e-8, 0.0, 1e9)


@pytest.fixture(scope="module")
def batch(build: Path) -> list[Sample]:
    model = AutoModelForCausalLM.from_pretrained(build / "model", dtype=torch.float32).eval()
    return samples_for(model, 7)


@pytest.mark.parametrize(
    ("ranks", "shared"), [(2, 1), pytest.param(2, 2, marks=pytest.mark.slow)], ids=str
)
async def test_adapters_on_two_ranks_train_as_on_one(
    ray_started: None,
    make_config: Callable[..., Config],
    model_path: str,
    batch: list[Sample],
    tmp_path: Path,
    ranks: int,
    shared: int,
) -> None:
    found: dict[int, list[Any]] = {}
    files: dict[int, dict[str, torch.Tensor]] = {}
    for count, own in ((1, 1), (ranks, shared)):
        training = {"threads": 1, "ranks": count, "context_parallel": own}
        training |= {"micro_batch_tokens": 150, "activation_checkpointing": True}
        model = {"path": model_path, "max_length": 512, "lora": {"rank": 4}}
        trainer = await TrainerGroup.start(make_config(model=model, training=training), tmp_path)
        found[count] = metrics = []
        try:
            assert await trainer.begin_adapters() > 600
            for name, seed in (("one.a", 1), ("two.b", 2)):
                await trainer.adapter("add", name, AdapterSpec(4, seed))
            for name, parts in (("one.a", [batch[:3], batch[3:]]), ("two.b", [batch[:1]])):
                for _ in range(2):
                    for part in parts:  # of which one may be too small for all ranks
                        how = PLAIN, CrossEntropyLoss(), name
                        metrics.append((await trainer.forward_backward(part, *how))["loss"])
                    metrics.append((await trainer.optim_step(STEP, name))["grad_norm"])
            how = PLAIN, CrossEntropyLoss(), "one.a", False
            metrics.append((await trainer.forward_backward(batch, *how))["loss"])
            with pytest.raises(InputError, match=r"no adapter three: it was removed"):
                await trainer.adapter("write", "three", tmp_path)
            place = tmp_path / f"saved{count}"
            await trainer.adapter("write", "one.a", place, True)
            await trainer.adapter("remove", "two.b")
            await trainer.adapter("read", "one.a", place, True)
            metrics.append((await trainer.forward_backward(batch, *how))["loss"])
            assert metrics[-1] == metrics[-2]
        finally:
            trainer.kill()
        files[count] = load_file(place / "adapter_model.safetensors")
    assert found[ranks] == pytest.approx(found[1], rel=1e-4, abs=1e-4)
    assert files[1].keys() == files[ranks].keys()
    for name, tensor in files[1].items():
        torch.testing.assert_close(files[ranks][name], tensor, rtol=1e-3, atol=1e-4)
