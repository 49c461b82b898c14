"""A LoRA's updates, of some layers only, in the real engine."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.weights.links import state_dict_info
from turnwise.config import Config
from turnwise.errors import WeightUpdateError
from turnwise.serving.worker_handle import WorkerHandle
from turnwise.training.rank import TrainerRank
from turnwise.weights.sync import check_canary


def moved(rank: TrainerRank, scale: float) -> None:
    """Change the adapter."""
    with torch.no_grad():
        for parameter in rank._learners["policy"].module.parameters():
            parameter += scale * torch.randn_like(parameter)
    rank.version += 1


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj"], ["up_proj", "v_proj"]], ids=str)
async def test_the_canary_tells_base_from_base_plus_adapter(
    ready: WorkerHandle, make_config: Callable[..., Config], model_path: str, targets: Any
) -> None:
    lora = {"rank": 4, "target_modules": targets}
    config = make_config(model={"path": model_path, "lora": lora}, training={"threads": 1})
    rank = TrainerRank(config)
    await ready._call("prepare_refit_info", state_dict_info(rank._tensors()))
    for version in (1, 2):
        moved(rank, 0.05)
        published = rank.publish()
        prompt, expected = published.prompt, published.logprobs
        with pytest.raises(WeightUpdateError, match="weights are not the trainer's"):
            await check_canary(ready, prompt, expected, 1e-3, version - 1)
        await ready.update_weights(published)
        assert (await check_canary(ready, prompt, expected, 1e-3, version))[1] < 1e-4
