"""AdamW for weights that are kept in bfloat16.

A step is computed in float32 and rounded at random: up or down, with a probability that makes the
mean of the results the exact value. Rounding to the nearest value would lose every step below half
of the distance between two values, at least 1/512 of a weight, and steps of RL are mostly smaller.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import ParamsT

_Group = dict[str, Any]
"""A group of weights in an optimizer, with its rate."""
PART = 2**22
"""Values of a weight that a step computes at once."""
PART_BYTES = 26
"""Bytes of temporary memory for each of these values."""
_LOW_BITS = 2**16
"""Values of the bits of a float32 that a bfloat16 lacks."""


class RoundingAdamW(torch.optim.Optimizer):
    """AdamW without float32 copies of the weights; its moments have the type of the weights.

    Each step draws its random bits from torch's seed and the number of the step, so a run that
    resumes from a checkpoint repeats them.

    Source: Zamirai et al., "Revisiting BFloat16 Training", arXiv:2010.06192.

    Example:
        RoundingAdamW(model.parameters(), lr=1e-6, weight_decay=0.0, betas=(0.9, 0.95))
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
        eps: float = 1e-8,
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every weight that has a gradient."""
        assert closure is None, "steps follow a backward pass"
        generators: dict[torch.device, torch.Generator] = {}
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["step"] = torch.zeros(())
                    state["exp_avg"] = torch.zeros_like(weight)
                    state["exp_avg_sq"] = torch.zeros_like(weight)
                state["step"] += 1
                count = int(state["step"])
                if weight.device not in generators:
                    generators[weight.device] = _generator(weight.device, count)
                gradient = weight.grad.contiguous()
                tensors = (weight, gradient, state["exp_avg"], state["exp_avg_sq"])
                generator = generators[weight.device]
                for part, slope, mean, square in zip(*map(_parts, tensors), strict=True):
                    _step(part, slope, mean, square, group, count, generator)


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Return the values of this rank, in parts that bound the memory of a step."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return iter(torch.split(local.view(-1), PART))


def _generator(device: torch.device, step: int) -> torch.Generator:
    rank = dist.get_rank() if dist.is_initialized() else 0
    seed = (torch.initial_seed() + 1_000_003 * step + 10_007 * rank) % 2**63
    return torch.Generator(device).manual_seed(seed)


def _step(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    group: _Group,
    count: int,
    generator: torch.Generator,
) -> None:
    """Update a part of a weight and its moments, as torch's AdamW does, in float32."""
    rate, (first, second) = group["lr"], group["betas"]
    gradient_32 = gradient.float()
    mean_32 = mean.float().lerp_(gradient_32, 1 - first)
    square_32 = square.float().lerp_(gradient_32.square(), 1 - second)
    mean.copy_(mean_32)
    square.copy_(square_32)
    scale_32 = square_32.div(1 - second**count).sqrt_().add_(group["eps"])
    exact = weight.float().mul_(1 - rate * group["weight_decay"])
    exact.addcdiv_(mean_32, scale_32, value=-rate / (1 - first**count))
    weight.copy_(rounded(exact, generator) if weight.dtype == torch.bfloat16 else exact)


def rounded(values: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Round float32 to bfloat16 at random, so that the mean of the results is the value.

    Example:
        rounded(torch.tensor([1.001]))  # 1.0 in 7 of 8 cases, else 1.0078
    """
    noise = torch.randint(
        _LOW_BITS, values.shape, generator=generator, device=values.device, dtype=torch.int32
    )
    # A carry out of the low bits moves the value to the next one away from 0.
    bits = noise.add_(values.view(torch.int32)).bitwise_and_(-_LOW_BITS)
    return bits.view(torch.float32).bfloat16()
