"""The masks that methods of TRL's trainer compute, against TRL's own."""

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from turnwise.trl import GRPOTrainer


@pytest.fixture(scope="module")
def theirs() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        # TRL needs vLLM to sample, and nothing is sampled here.
        utils = import_module("trl.import_utils")
        patch.setattr(utils, "is_vllm_available", lambda *_, **__: False)
        return import_module("trl.trainer.grpo_trainer").GRPOTrainer


@pytest.fixture
def mask() -> torch.Tensor:
    return (torch.arange(7) < torch.tensor([[7], [3], [1], [5]])).int()


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.5, 0.8, 1.0])
def test_the_mask_of_high_entropy(theirs: Any, mask: torch.Tensor, threshold: float) -> None:
    entropies = torch.rand(4, 7, generator=torch.Generator().manual_seed(0))
    accelerator = SimpleNamespace(
        gather=lambda x: x, pad_across_processes=lambda x, dim, pad_index: x
    )
    trainer: Any = SimpleNamespace(accelerator=accelerator)
    for real in (mask, mask * 0):
        found = GRPOTrainer.get_high_entropy_mask(trainer, entropies, real, threshold)
        expected = theirs.get_high_entropy_mask(trainer, entropies, real, threshold)
        assert torch.equal(found, expected)


def test_the_mask_of_sequences_far_from_the_policy(theirs: Any, mask: torch.Tensor) -> None:
    logps = -torch.rand(4, 7, generator=torch.Generator().manual_seed(1))
    sampled = logps + torch.tensor([[1.0], [1.0], [0.2], [-1.0]])
    logps[1, 3:] = 1e4  # padding
    sampled[0, 0] = float("nan")  # an engine could not score it
    advantages = torch.tensor([[-1.0], [2.0], [-1.0], [-1.0]])
    arguments = advantages, logps, sampled, mask.float(), 0.5
    found = GRPOTrainer.get_off_policy_mask(*arguments)
    assert torch.equal(found, theirs.get_off_policy_mask(*arguments))
    assert found.flatten().tolist() == [0, 1, 1, 1]
