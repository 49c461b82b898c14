"""Linear layers on a CPU that multiply float32 matrices with oneDNN.

torch uses MKL, which takes twice as long on AMD's processors, both forwards and backwards; the
results differ only by rounding. oneDNN compiles kernels for every number of tokens, so small layers
would gain nothing. Small layers, and layers that are not plain `nn.Linear`, still use torch's own
code.
"""

import os
from typing import Any, cast

import torch
from torch import nn

from turnwise.internals.torch import HAS_ONEDNN, multiply

ENVIRONMENT = {
    name: os.environ.get(name, "64")
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
}
"""Environment variables of a process with such layers: the number of kernels in oneDNN's cache, and
in torch's own cache of oneDNN kernels. A micro-batch needs about 15 kernels. With the default of
1,024 kernels, memory would grow for hundreds of steps."""
_SMALLEST = 2**16
"""Minimum number of values in a matrix for oneDNN to multiply it."""
_COPIED = 2**24
"""Maximum number of values of an output's gradient that oneDNN transposes, by a copy, for the
gradient of a matrix: 64 MiB. Larger gradients belong to logits, and copies of them would raise peak
memory."""


def use_onednn(module: nn.Module, device: torch.device) -> None:
    """Let oneDNN compute a module's linear layers where this is possible and faster."""
    if device.type == "cpu" and HAS_ONEDNN:
        for layer in module.modules():
            if type(layer) is nn.Linear and layer.weight.numel() >= _SMALLEST:
                layer.__class__ = _Linear


class _Linear(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        exact = {inputs.dtype, self.weight.dtype} == {torch.float32}
        if not exact or torch.is_autocast_enabled("cpu") or inputs.dim() < 2 or not inputs.numel():
            return super().forward(inputs)
        made = _Product.apply(inputs, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return cast("torch.Tensor", made)


class _Product(torch.autograd.Function):
    """The product of inputs [..., K] and a matrix [N, K], and a bias [N] or None: [..., N]."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None
    ) -> torch.Tensor:
        by_inputs, by_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(inputs if by_weight else None, weight_NK if by_inputs else None)
        return multiply(inputs, weight_NK, bias_N)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight_NK = ctx.saved_tensors
        gradient = gradients[0]
        rows_MN = gradient.flatten(0, -2)
        of_inputs = of_weight = of_bias = None
        if weight_NK is not None:
            of_inputs = multiply(gradient, weight_NK.T)
        if inputs is not None:
            inputs_MK = inputs.flatten(0, -2)
            small = rows_MN.numel() <= _COPIED
            of_weight = multiply(rows_MN.T, inputs_MK.T) if small else rows_MN.T @ inputs_MK
        if ctx.needs_input_grad[2]:
            of_bias = rows_MN.sum(0)
        return of_inputs, of_weight, of_bias
