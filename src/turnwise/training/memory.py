"""Memory of a rank, without loading or computing anything.

The forward and backward pass of a micro-batch runs on tensors without data (torch's fake tensors),
while the bytes of all tensors that are alive are counted. So the figure is that of the model's own
code in Transformers, whatever its architecture. Attention and experts are replaced by functions
whose results have the same sizes: their kernels differ between devices.
"""

import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import FunctionCtx
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights
from transformers.integrations.moe import ExpertsInterface

from turnwise.config import Config, SamplingConfig
from turnwise.core.gguf import resolve_model
from turnwise.training.layers import backbone_of, decoder_layers, recompute
from turnwise.training.lora import Role, add_adapters
from turnwise.training.scoring import score_hidden

_PLAIN = "turnwise_footprint"
"""Name of the attention and experts functions in Transformers."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Numbers of a model's parameters."""

    parameters: int
    learning: int
    """Those that are trained: all, or the adapters'."""
    largest_layer: int
    """Those of the largest decoder layer."""
    outside: int
    """Those outside of decoder layers: embeddings and head."""
    largest_tensor: int


def model_size(config: Config, roles: tuple[Role, ...]) -> ModelSize:
    """Return the size of the policy.

    Args:
        roles: Roles of its adapters; none without LoRA.
    """
    path, trust = resolve_model(config.model.path), config.model.trust_remote_code
    if not roles:
        return _plain_size(path, trust)
    with torch.device("meta"):
        model = _empty(AutoConfig.from_pretrained(path, trust_remote_code=trust), trust)
    add_adapters(model, config.model.lora, roles)
    return _size(model)


@cache
def _plain_size(path: str, trust: bool) -> ModelSize:
    with torch.device("meta"):
        return _size(_empty(AutoConfig.from_pretrained(path, trust_remote_code=trust), trust))


def _size(model: nn.Module) -> ModelSize:
    counts = [(p.numel(), p.requires_grad) for p in model.parameters()]
    layers = [sum(p.numel() for p in layer.parameters()) for layer in decoder_layers(model)]
    total = sum(n for n, _ in counts)
    return ModelSize(
        total,
        sum(n for n, learns in counts if learns),
        max(layers, default=total),
        total - sum(layers),
        max(n for n, _ in counts),
    )


@cache
def activation_bytes(
    path: str,
    trust: bool,
    dtype: str,
    sharded: bool,
    tokens: int,
    length: int,
    every: bool | int,
) -> int:
    """Return the peak memory of one micro-batch's forward and backward pass, beyond the weights.

    Gradients of weights count only while they are computed. All weights learn: with LoRA, it is
    somewhat less.

    Args:
        path: Folder or name of the model.
        dtype: Precision of the forward pass.
        sharded: Whether FSDP casts the weights, not autocast.
        tokens: Size of the micro-batch.
        length: Tokens of a sequence.
        every: Layers whose activations are recomputed in the backward pass: all, none, or every
            N-th.
    """
    lower = dtype != "float32"
    shape = AutoConfig.from_pretrained(path, trust_remote_code=trust)
    weights = getattr(torch, dtype) if sharded else torch.float32
    with FakeTensorMode():
        model = _empty(shape, trust, weights)
        recompute(model, every)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(_forget_gradient)
        rows = max(1, tokens // length)
        ids_BT = torch.zeros((rows, min(tokens, length)), dtype=torch.long)
        casting = torch.autocast("cpu", torch.bfloat16) if lower and not sharded else nullcontext()
        with _LiveBytes(model) as live:
            with casting:
                hidden_BTH = backbone_of(model)(input_ids=ids_BT, use_cache=False).last_hidden_state
                hidden_NH = hidden_BTH[:, :-1].flatten(0, 1)
                targets_N = ids_BT[:, 1:].flatten()
                logprobs_N, _ = score_hidden(model, hidden_NH, targets_N, SamplingConfig())
            logprobs_N.sum().backward()  # type: ignore[no-untyped-call]
            peak: int = live.peak
        return peak


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors that are alive, except those of a model.

    Example:
        with _LiveBytes(model) as live: ...
        live.peak
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._now = 0
        self._seen: dict[int, object] = {}
        for tensor in (*model.parameters(), *model.buffers()):
            storage = tensor.untyped_storage()
            self._seen[storage._cdata] = storage

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen[key] = None
        self._now += nbytes
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._forget, key, nbytes)

    def _forget(self, key: int, nbytes: int) -> None:
        self._seen.pop(key, None)
        self._now -= nbytes


def _forget_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


def _empty(
    shape: PretrainedConfig, trust: bool, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    more = {"attn_implementation": _PLAIN}
    if _has_experts(shape):
        more["experts_implementation"] = _PLAIN
    with no_init_weights():  # some ways to draw them need values
        model = AutoModelForCausalLM.from_config(
            shape, dtype=dtype, trust_remote_code=trust, **more
        )
    model.tie_weights()  # part of the initialization
    return model.eval()


def _has_experts(shape: PretrainedConfig) -> bool:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return any(getattr(shape.get_text_config(), name, None) for name in names)


class _Attention(torch.autograd.Function):
    """A fused attention's sizes: it keeps its inputs, its output, and a number for each row."""

    @staticmethod
    def forward(ctx: FunctionCtx, *inputs: torch.Tensor) -> torch.Tensor:
        query = inputs[0]
        out = torch.empty_like(query)
        rows = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
        ctx.save_for_backward(*inputs, out, rows)
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, *_: object) -> tuple[torch.Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])  # type: ignore[attr-defined]


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_: object,
    **__: object,
) -> tuple[torch.Tensor, None]:
    out: torch.Tensor = _Attention.apply(query, key, value)  # type: ignore[no-untyped-call]
    return out.transpose(1, 2).contiguous(), None


def _experts(
    module: PreTrainedModel,
    hidden_NH: torch.Tensor,
    chosen_NK: torch.Tensor,
    weights_NK: torch.Tensor,
) -> torch.Tensor:
    """Send every token through the first expert, as often as it has experts."""
    inputs = hidden_NH.repeat_interleave(chosen_NK.shape[1], dim=0)
    turned = getattr(module, "is_transposed", False)
    up, down = module.gate_up_proj[0], module.down_proj[0]
    both = functional.linear(inputs, up.T if turned else up)
    gate, values = both.chunk(2, dim=-1)
    inner = functional.silu(gate) * values
    out = functional.linear(inner, down.T if turned else down)
    out = out * weights_NK.flatten()[:, None]
    return out.view(*chosen_NK.shape, -1).sum(1).to(hidden_NH.dtype)


AttentionInterface.register(_PLAIN, _attention)
ExpertsInterface.register(_PLAIN, _experts)
