"""A trainable module: its optimizer, its schedule, and steps that skip gradients that are not
finite."""

import re
from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from turnwise.config import TrainingConfig
from turnwise.training.rounding import RoundingAdamW

_ADAM_BETAS = (0.9, 0.95)  # gradients of RL change too fast for torch's second 0.999
_SPARED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Names of parameters that do not decay, as in Transformers' trainer."""


class TrainableModule:
    """A module with its optimizer and schedule.

    Args:
        rate: AdamW's learning rate after warm-up.
        total_updates: Optimizer steps of the whole run, for a rate that decays; None keeps it.
    """

    def __init__(
        self, module: nn.Module, training: TrainingConfig, rate: float, total_updates: int | None
    ) -> None:
        self.module = module
        self.updates = 0
        """Optimizer steps taken so far; the position in the schedule."""
        self._training = training
        self._rate = rate
        self._total = total_updates
        kind = RoundingAdamW if training.weights_dtype == "bfloat16" else torch.optim.AdamW
        self.optimizer: torch.optim.Optimizer = kind(
            decay_groups(module, training.weight_decay), lr=rate, weight_decay=0, betas=_ADAM_BETAS
        )
        self._set_rate()

    @property
    def rate(self) -> float:
        """The learning rate of the next update."""
        return float(self.optimizer.param_groups[0]["lr"])

    def resume(self, moments: Mapping[str, Mapping[str, torch.Tensor]], updates: int) -> None:
        """Continue after some updates; rates and decay stay those of the configuration.

        Args:
            moments: AdamW's state of each parameter that has been updated, by name.
        """
        self.optimizer.state.clear()
        for name, parameter in self.module.named_parameters():
            if name in moments:
                self.optimizer.state[parameter] = dict(moments[name])
        self.updates = updates
        self._set_rate()

    def forget_gradients(self) -> None:
        """Drop the gradients of an update that failed, if there are any."""
        self.optimizer.zero_grad(set_to_none=True)

    def step(self) -> tuple[float, bool]:
        """Take an optimizer step; return the gradient's norm, and whether it was finite.

        A step whose norm is not finite changes nothing.
        """
        norm: torch.Tensor = nn.utils.clip_grad_norm_(
            self.module.parameters(), self._training.max_grad_norm
        )
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        finite = bool(torch.isfinite(norm))
        if finite:
            self.optimizer.step()
            self.updates += 1
            self._set_rate()
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm), finite

    def _set_rate(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate * _share(self.updates, self._training, self._total)


def decay_groups(module: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Return an optimizer's groups of parameters: those that decay, and norms and biases."""
    norms = [part for part in module.modules() if isinstance(part, nn.LayerNorm)]
    spared = {id(parameter) for norm in norms for parameter in norm.parameters()}
    groups: dict[float, list[nn.Parameter]] = {weight_decay: [], 0.0: []}
    for name, parameter in module.named_parameters():
        # With adapters, names have slashes for dots.
        plain = _SPARED.search(name.replace("/", ".").lower()) or id(parameter) in spared
        groups[0.0 if plain else weight_decay].append(parameter)
    return [
        {"params": parameters, "weight_decay": decay}
        for decay, parameters in groups.items()
        if parameters
    ]


def _share(update: int, training: TrainingConfig, total: int | None) -> float:
    """Return the fraction of the learning rate for optimizer step `update`, from 0.

    Updates after the last one of a linear decay have the rate of the last one: only a program's own
    loop takes any, and a rate of 0 would train nothing.
    """
    rising = (update + 1) / (training.warmup_steps + 1)
    if training.lr_schedule == "constant" or total is None:
        return min(1.0, rising)
    left = max(1, total - update)
    return min(1.0, rising, left / max(1, total - training.warmup_steps))
