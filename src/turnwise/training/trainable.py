"""A trainable module: its optimizer, its schedule, and steps that skip gradients that are not
finite."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from turnwise.config import TrainingConfig
from turnwise.training.rounding import RoundingAdamW

_ADAM_BETAS = (0.9, 0.95)  # gradients of RL change too fast for torch's second 0.999


class TrainableModule:
    """A module with its optimizer and schedule.

    Args:
        rate: AdamW's learning rate after warm-up.
        total_steps: Optimizer steps of the whole run, for a rate that decays; None keeps it.
    """

    def __init__(
        self, module: nn.Module, training: TrainingConfig, rate: float, total_steps: int | None
    ) -> None:
        self.module = module
        self._max_norm = training.max_grad_norm
        kind = RoundingAdamW if training.weights_dtype == "bfloat16" else torch.optim.AdamW
        self.optimizer: torch.optim.Optimizer = kind(
            module.parameters(), lr=rate, weight_decay=training.weight_decay, betas=_ADAM_BETAS
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: _rate(step, training, total_steps)
        )

    @property
    def rate(self) -> float:
        """The learning rate of the next update."""
        return float(self.optimizer.param_groups[0]["lr"])

    def step(self) -> tuple[float, bool]:
        """Take an optimizer step; return the gradient's norm, and whether it was finite.

        A step whose norm is not finite changes nothing.
        """
        norm: torch.Tensor = nn.utils.clip_grad_norm_(self.module.parameters(), self._max_norm)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        finite = bool(torch.isfinite(norm))
        if finite:
            self.optimizer.step()
            self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm), finite


def _rate(step: int, training: TrainingConfig, total: int | None) -> float:
    """Return the fraction of the learning rate for optimizer step `step`, from 0."""
    rising = (step + 1) / (training.warmup_steps + 1)
    if training.lr_schedule == "constant" or total is None:
        return min(1.0, rising)
    return max(0.0, min(1.0, rising, (total - step) / max(1, total - training.warmup_steps)))
