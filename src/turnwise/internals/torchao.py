"""torchao: the state of its AdamW with moments of 8 bits."""

import torch
from torchao.optim import AdamW8bit

from turnwise.internals import internal

_new_buffer = internal(AdamW8bit, "_new_buffer", "self", "p", "signed")


def new_moments(optimizer: torch.optim.Optimizer, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a weight's moments before its first step, which a checkpoint's values go into; torchao
    itself makes them in that step."""
    mean, square = (_new_buffer(optimizer, weight, signed) for signed in (True, False))
    return {"step": torch.zeros(()), "exp_avg": mean, "exp_avg_sq": square}
