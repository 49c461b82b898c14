"""LoRA on several ranks, sharded by FSDP2 over gloo: all of it as on one."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.training.test_rank import rewarded_at_the_end, samples_for
from tests.training.test_trainer_group import EXACT
from turnwise.config import Config
from turnwise.training import Sample, checkpoint
from turnwise.training.trainer_group import TrainerGroup
from turnwise.weights.shm import load

PPO = {
    "advantage": {"name": "gae", "learning_rate": 0.01},
    "kl": {"coef": 0.05, "where": "reward"},
}


@pytest.fixture(scope="module")
def batch(build: Path) -> list[Sample]:
    model = AutoModelForCausalLM.from_pretrained(build / "model", dtype=torch.float32).eval()
    return rewarded_at_the_end(samples_for(model, 11))


@pytest.fixture
def make_policy(
    ray_started: None, make_config: Callable[..., Config], model_path: str, tmp_path: Path
) -> Callable[..., Any]:
    @asynccontextmanager
    async def make(ranks: int, shared: int = 1) -> AsyncIterator[TrainerGroup]:
        training = {
            "learning_rate": 1e-2,
            "threads": 1,
            "updates_per_step": 2,
            "micro_batch_tokens": 150,
            "activation_checkpointing": True,
            "ranks": ranks,
            "context_parallel": shared,
        }
        model = {"path": model_path, "max_length": 512, "lora": {"rank": 4}}
        config = make_config(model=model, training=training, algorithm=PPO)
        policy = await TrainerGroup.start(config, tmp_path)
        try:
            yield policy
        finally:
            policy.kill()

    return make


@pytest.mark.slow
@pytest.mark.parametrize("shared", [1, 2])
async def test_two_ranks_match_one_and_load_each_others_checkpoint(
    make_policy: Callable[..., Any], batch: list[Sample], tmp_path: Path, shared: int
) -> None:
    metrics: dict[int, Any] = {}
    scored: dict[int, Any] = {}
    sent: dict[int, dict[str, torch.Tensor]] = {}
    saved = {ranks: tmp_path / f"step-000{ranks}" for ranks in (1, 2)}
    for ranks, folder in saved.items():
        async with make_policy(ranks, min(ranks, shared)) as policy:
            metrics[ranks] = [await policy.train(batch) for _ in range(2)]
            names = ("policy", "reference", "value")
            scored[ranks] = [await policy.forward(name, batch) for name in names]
            manifest = await policy.publish()
            sent[ranks] = {name: tensor.clone() for name, tensor in load(manifest)}
            await policy.save(checkpoint.begin(folder))
            checkpoint.commit(folder)
            metrics[ranks].append(await policy.train(batch))
    for one, two in zip(metrics[1], metrics[2], strict=True):
        for key in EXACT:
            assert two.get(key, 0) == pytest.approx(one.get(key, 0), abs=1e-4, rel=1e-4), key
    for one, two in zip(scored[1], scored[2], strict=True):
        for ours, theirs in zip(one, two, strict=True):
            assert theirs == pytest.approx(ours, abs=1e-3)
    assert [*sent[1]] == [*sent[2]]
    adapters = [load_file(folder / "adapter_model.safetensors") for folder in saved.values()]
    assert [*adapters[0]] == [*adapters[1]]
    for one, two in ((sent[1], sent[2]), adapters):
        for name, tensor in one.items():
            # AdamW's first steps divide a gradient by itself: near-zero ones can differ.
            assert (two[name] - tensor).abs().mean() < 1e-4, name
    known = [key for key in EXACT if key in metrics[2][2]]
    for ranks in (1, 2):
        async with make_policy(ranks, min(ranks, shared)) as policy:
            assert await policy.load(saved[2]) == 4
            again = await policy.train(batch)
        for key in known:
            close = pytest.approx(metrics[2][2][key], abs=1e-5, rel=1e-5)
            assert again[key] == (metrics[2][2][key] if ranks == 2 else close), key
