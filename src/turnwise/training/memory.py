"""Estimates of a rank's memory before anything is loaded, for `turnwise plan` and a run's check.

Memory that is held between steps is a sum of sizes (`held_bytes`). Temporary memory is traced
(`activation_bytes`): the model's own code in Transformers computes a micro-batch forward and
backward on torch's fake tensors, and the bytes of live tensors are counted. As the kernels of
attention and experts differ between devices, functions with results of the same sizes replace them.
"""

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache

import psutil
import torch
from torch import nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights
from transformers.integrations.moe import ExpertsInterface

from turnwise.chat.template import load_tokenizer
from turnwise.config import (
    LoraConfig,
    ModelConfig,
    OtherModel,
    SamplingConfig,
    TrainingConfig,
)
from turnwise.errors import InputError
from turnwise.internals.torch import FakeTensorMode, TorchDispatchMode, storage_key, tree_leaves
from turnwise.training.attention import EXPERT_KEYS
from turnwise.training.loading import (
    POLICY,
    decoder_layers,
    dtype_of,
    is_classifier,
    language_model_class,
    learning_dtype,
    path_of,
    recompute,
    shared_roles,
    translate_unreadable,
)
from turnwise.training.lora import ModelName, add_adapters
from turnwise.training.model import backbone_of, chunk_rows, score_hidden
from turnwise.training.vision import vision_parameters

GIB = 2**30
_PLAIN = "turnwise_memory"  # name of the attention and experts functions in Transformers


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The number of parameters in each part of a model, and the size of its vocabulary."""

    parameters: int
    learning: int  # trained parameters: all parameters, or only the adapters'
    largest_layer: int  # parameters of the largest decoder layer
    outside: int  # parameters outside of decoder layers: embeddings and head
    largest_tensor: int  # parameters of the largest tensor
    vocabulary: int


def model_size(
    model: ModelConfig, other: OtherModel = POLICY, roles: tuple[str, ...] = ()
) -> ModelSize:
    """Return the size of a model, by default the policy."""
    lora = model.lora.model_dump_json() if roles else ""
    return _size(path_of(model, other), model.trust_remote_code, roles, lora, model.train_vision)


@cache
def _size(
    path: str, trust: bool, roles: tuple[str, ...], lora: str, train_vision: bool
) -> ModelSize:
    unseeded = torch.random.fork_rng(devices=[])  # adapters draw values that nothing uses
    with unseeded, translate_unreadable(path), torch.device("meta"):
        shape = AutoConfig.from_pretrained(path, trust_remote_code=trust)
        classifies = is_classifier(shape)
        kind = AutoModelForSequenceClassification if classifies else language_model_class(shape)
        with no_init_weights():  # some initializations need real tensors
            model = kind.from_config(shape, trust_remote_code=trust)
        model.tie_weights()  # part of the initialization
        if roles:
            add_adapters(model, LoraConfig.model_validate_json(lora), roles)
        for parameter in () if train_vision else vision_parameters(model):
            parameter.requires_grad_(False)
    counts = [(p.numel(), p.requires_grad) for p in model.parameters()]
    decoder = decoder_layers(model, of_images=False)
    layers = [sum(p.numel() for p in layer.parameters()) for layer in decoder]
    total = sum(n for n, _ in counts)
    return ModelSize(
        total,
        sum(n for n, learns in counts if learns),
        max(layers, default=total),
        total - sum(layers),
        max(n for n, _ in counts),
        shape.get_text_config().vocab_size,
    )


def held_bytes(
    model: ModelConfig,
    training: TrainingConfig,
    policies: Sequence[str],
    beside: Mapping[ModelName, OtherModel],
) -> dict[str, int]:
    """Return the number of bytes that all ranks together hold between steps, by part of memory."""
    roles = shared_roles(model, policies, beside)
    size = model_size(model, roles=roles)
    learning = learning_dtype(model, training).itemsize * size.learning
    still = dtype_of(model) if roles else learning_dtype(model, training)  # of frozen weights
    weights = learning + still.itemsize * (size.parameters - size.learning)
    others = {
        role: learning_dtype(model, training, other).itemsize * model_size(model, other).parameters
        for role, other in beside.items()
        if role not in roles
    }
    learning += others.get("value", 0)
    moments = 2 * learning
    if training.optimizer == "adamw_8bit":
        moments //= 4
    elif training.optimizer == "muon":  # one moment for matrices in layers, two for the rest
        moments = learning if model.lora.rank else learning + 4 * size.outside
    return {
        "weights": weights,
        "other models": sum(others.values()),
        "gradients": learning,
        "optimizer": moments,
    }


def check_room(
    model: ModelConfig,
    training: TrainingConfig,
    policies: Sequence[str],
    beside: Mapping[ModelName, OtherModel],
    device: torch.device,
    ranks: int,
) -> None:
    """Raise InputError if a rank lacks memory for all models and their optimizers (activations are
    ignored), or if a model in `beside` has a smaller vocabulary than the policy's tokenizer."""
    keys = {
        "reference": "algorithm.kl.model, or algorithm.teacher",
        "value": "algorithm.advantage.model",
    }
    for role, other in beside.items():
        if path_of(model, other) == path_of(model):
            continue
        words = model_size(model, other).vocabulary
        # A model's vocabulary is often a bit larger than its tokenizer's.
        if words < (tokens := len(load_tokenizer(model))):
            raise InputError(
                f"{keys[role]}: {other.path} has a vocabulary of {words:,} tokens, and the "
                f"policy's tokenizer has {tokens:,}: both models must have the same tokenizer"
            )
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = psutil.virtual_memory().available // ranks  # CPU ranks may share a machine
    held = held_bytes(model, training, policies, beside)
    needed = sum(held.values()) / ranks
    if needed > free:
        millions = model_size(model).parameters / 1e6
        raise InputError(
            f"the model {model.path} does not fit: its {millions:,.0f} M parameters "
            f"need {needed / GIB:.1f} GiB on each of {ranks} ranks (weights, gradients, moments), "
            f"and {free / GIB:.1f} GiB are free; raise training.ranks"
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
    entropy_gradient: bool = False,
) -> int:
    """Return the peak memory of one micro-batch's forward and backward pass, beyond the weights.

    Gradients of weights count only while they are computed. All weights are trained here; with
    LoRA, the peak is somewhat lower. Images are not computed here: `tokens` includes their tokens
    and patches, which are counted like tokens of text. If `sharded`, FSDP casts the weights,
    without autocast; `every` is as in `recompute`.

    Equal blocks of layers add equal bytes. Of many blocks, only the first ones are computed.
    """
    shape = AutoConfig.from_pretrained(path, trust_remote_code=trust)
    weights = getattr(torch, dtype) if sharded else torch.float32
    more = {"attn_implementation": _PLAIN}
    if any(getattr(shape.get_text_config(), name, None) for name in EXPERT_KEYS):
        more["experts_implementation"] = _PLAIN
    cast = dtype != "float32" and not sharded
    with FakeTensorMode():
        with no_init_weights():  # some initializations need real tensors
            model: PreTrainedModel = language_model_class(shape).from_config(
                shape, dtype=weights, trust_remote_code=trust, **more
            )
        model.tie_weights()  # part of the initialization
        model.eval()
        recompute(model, every)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(_forget_gradient)
        ids_BT = torch.zeros((max(1, tokens // length), min(tokens, length)), dtype=torch.long)

        def peak() -> int:
            with torch.autocast("cpu", torch.bfloat16) if cast else nullcontext():
                return _peak(model, ids_BT, entropy_gradient)

        layers, text = decoder_layers(model, of_images=False), shape.get_text_config()
        count, types = len(layers), getattr(text, "layer_types", None) or ()
        kinds = [
            ([(name, p.shape) for name, p in layer.named_parameters()], types[place : place + 1])
            for place, layer in enumerate(layers)
        ]
        period = next((p for p in range(1, count) if kinds[p:] == kinds[: count - p]), count or 1)
        block = math.lcm(period, max(1, int(every)))  # blocks of layers are alike
        few = block + count % block
        stack = next((m for m in model.modules() if [*m.children()] == layers), None)
        if not isinstance(stack, nn.ModuleList) or count <= 2 * few + block:
            return peak()
        del stack[few + block :]
        high = peak()
        del stack[few:]
        low = peak()
        return low + (high - low) * ((count - few) // block)


def _forget_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


def _peak(model: PreTrainedModel, ids_BT: torch.Tensor, entropy_gradient: bool) -> int:
    """Return the peak memory of a forward and a backward pass on fake tensors."""
    with _LiveBytes(model) as live:
        hidden_BTH = backbone_of(model)(input_ids=ids_BT, use_cache=False).last_hidden_state
        hidden_NH = hidden_BTH[:, :-1].flatten(0, 1)
        # All chunks of logits need the same memory, so three chunks suffice: each further chunk
        # adds only a few bytes per token.
        targets_N = ids_BT[:, 1:].flatten()[: 3 * chunk_rows(model)]
        logprobs_N, entropy_N = score_hidden(
            model, hidden_NH, targets_N, SamplingConfig(), entropy_gradient
        )
        (logprobs_N + entropy_N).sum().backward()  # type: ignore[no-untyped-call]
        peak: int = live.peak
    return peak


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors that are alive, except those of a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._now = 0
        self._seen: dict[int, object] = {}
        for tensor in (*model.parameters(), *model.buffers()):
            storage = tensor.untyped_storage()
            self._seen[storage_key(storage)] = storage

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
                storage = leaf.untyped_storage()
                key, nbytes = storage_key(storage), storage.nbytes()
                if key not in self._seen:
                    self._seen[key] = None
                    self._now += nbytes
                    self.peak = max(self.peak, self._now)
                    weakref.finalize(storage, self._forget, key, nbytes)
        return out

    def _forget(self, key: int, nbytes: int) -> None:
        self._seen.pop(key, None)
        self._now -= nbytes


class _Attention(torch.autograd.Function):
    """The memory of a fused attention, which keeps its inputs, its output, and a number per row."""

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
    """Send each token through the first expert, once for each expert chosen for the token."""
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
