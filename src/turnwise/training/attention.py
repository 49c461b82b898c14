"""Attention of packed rows without a mask.

Transformers separates the sequences of a packed row by a mask of [T, T], which costs memory and
prevents torch from using its fastest kernels. Here each sequence attends on its own: the results
are the same, memory grows linearly with T, and pairs of tokens in different sequences cost no work.
Transformers' own implementations (`training.attention`) compute all sequences at once.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from turnwise.errors import InputError, first_line
from turnwise.internals.transformers import attention_of, set_text_attention
from turnwise.training.batching import Columns, Costs
from turnwise.training.vision import decoder_layers

CONTEXT_KEY = "training.context_parallel"
_NAME = "turnwise_packed"  # name of `packed_attention` in Transformers
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of the number of experts in a model's configuration."""
_MASK_ROWS = 1024  # maximum number of queries in one mask, where masks are needed
_expected: ContextVar[Columns | None] = ContextVar("_expected", default=None)
"""Columns that a model's layers must pass on to attention in this forward pass, if any."""


def use_packed_attention(model: PreTrainedModel, name: str = "auto") -> bool:
    """Make a model's layers attend within sequences if they use torch's attention; return whether
    they now attend within sequences.

    Models with attention of their own (soft caps, for instance) keep it. `name` is
    `training.attention`: with any name other than "auto", a model gets Transformers' implementation
    of this name instead.
    """
    if name != "auto":
        try:
            model.set_attn_implementation(name)
        except (ImportError, ValueError) as error:
            raise InputError(f"training.attention: {first_line(error)}") from error
        return False
    capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
    if not capped:
        set_packed(model, True)
    return is_packed(model)


def check_attention_name(name: str) -> None:
    """Raise an `InputError` for a `training.attention` that Transformers does not know. A name with
    a slash is not checked, because it is a kernel of the Hugging Face Hub."""
    others = (key for key in AttentionInterface().valid_keys() if key != _NAME and "|" not in key)
    known = ["auto", "eager", *others]
    if name not in known and "/" not in name:
        raise InputError(
            f"training.attention should be one of {', '.join(known)}, or a kernel of the Hugging "
            f"Face Hub, not {name!r}"
        )


def is_packed(model: PreTrainedModel) -> bool:
    return attention_of(model) == _NAME


def set_packed(model: PreTrainedModel, packed: bool) -> None:
    """Make a model attend within sequences or with a mask, unless it has attention of its own."""
    if attention_of(model) in (_NAME, "sdpa"):
        set_text_attention(model, _NAME if packed else "sdpa")


def attention_costs(model: PreTrainedModel, device: torch.device) -> Costs:
    """Return the costs of a model's attention, for the choice of the layout of micro-batches.

        a pair of a query and a key in a layer    4 * heads * head_dim operations
        a token in a layer                        2 * parameters, of experts only the token's

    On a CPU, an operation of torch's attention takes as long as an operation of torch's matrix
    products. The pairs above the diagonal are computed too, with a mask or without, and the calls
    for a sequence take as long as two tokens. On a GPU, a causal kernel skips the pairs above the
    diagonal, and a kernel with a mask took 3 times as long for a pair (one measurement on an H100:
    two thirds more time for the second of two sequences). On a GPU, the calls for a sequence count
    as 16 tokens, which is an estimate.
    """
    text = model.config.get_text_config()

    def first(*names: str) -> int:  # a few models have a list in place of a number, or no such key
        values = (getattr(text, name, None) for name in names)
        return next((value for value in values if isinstance(value, int) and value), 0)

    heads = first("num_attention_heads")
    width = heads and (heads * first("head_dim") or first("hidden_size"))
    experts = first(*EXPERT_KEYS) or 1
    met = (first("num_experts_per_tok") or experts) / experts
    layers = decoder_layers(model, of_images=False)
    parameters = sum(
        parameter.numel() * (met if ".experts." in name else 1.0)
        for layer in layers
        for name, parameter in layer.named_parameters()
    )
    each = 2 * width * len(layers) / max(1.0, parameters)
    rows = attention_of(model) in ("sdpa", "eager")  # with a mask, over the whole row
    if device.type == "cuda":
        return Costs(each / 2, 3 * each, 16.0, rows)
    return Costs(each, each, 2.0, rows)


def check_divisible(model: PreTrainedModel, size: int, exchanges: bool) -> None:
    """Raise an `InputError` if the `size` ranks of a context group cannot share a model's
    sequences; `exchanges` says whether the model's attention exchanges columns for heads."""
    if size == 1:
        return
    text, name = model.config.get_text_config(), model.config.model_type
    if not exchanges:
        raise InputError(
            f"{CONTEXT_KEY}: a {name} model combines tokens in another way than by torch's "
            "attention, the only one that is divided over ranks: set it to 1"
        )
    heads: int = text.num_attention_heads
    shared: int = getattr(text, "num_key_value_heads", None) or heads
    sizes = [
        n for n in range(1, heads + 1) if heads % n == 0 and max(shared, n) % min(shared, n) == 0
    ]
    if size not in sizes:
        raise InputError(
            f"{CONTEXT_KEY}: {size} ranks cannot share {heads} attention heads with {shared} of "
            f"keys and values: set it to one of {sizes}"
        )


@contextmanager
def attending(model: PreTrainedModel, columns: Columns) -> Iterator[dict[str, Columns]]:
    """Yield the argument by which a model's layers learn the sequences of a packed row and the
    ranks that share the row. Yield no argument if the row is not packed and no ranks share it, or
    if the model does not use `packed_attention`."""
    if (columns.lengths is None and columns.group is None) or not is_packed(model):
        yield {}
        return
    before = _expected.set(columns)
    try:
        yield {"columns": columns}
    finally:
        _expected.reset(before)


def packed_attention(
    module: nn.Module,
    query_BHTD: torch.Tensor,
    key_BHTD: torch.Tensor,
    value_BHTD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    columns: Columns | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Compute the attention of one layer, as Transformers' layers call it.

    Without `columns`, each row is one whole sequence. The outputs are [B, T, H, D].
    """
    if columns is None and _expected.get() is not None:
        raise InputError("its layers do not pass to attention where sequences begin")
    assert attention_mask is None, "packed attention needs no mask"
    tensors = [query_BHTD, key_BHTD, value_BHTD]
    group = columns.group if columns is not None else None
    if group is not None:
        tensors = [group.heads(tensor) for tensor in tensors]
    lengths = (columns.lengths if columns is not None else None) or [tensors[0].shape[2]]
    sizes = [lengths, lengths, lengths]
    if columns is not None and columns.column_S is not None and columns.own is not None:
        sizes[0] = columns.own  # each sample's own queries; keys and values of all its tokens
        tensors[1:] = [tensor.index_select(2, columns.column_S) for tensor in tensors[1:]]
    sequences = [torch.split(t, size, dim=2) for t, size in zip(tensors, sizes, strict=True)]
    causal = getattr(module, "is_causal", True)
    outputs = [
        _attention(query, key, value, scaling, sliding_window, causal)
        for query, key, value in zip(*sequences, strict=True)
        if query.shape[2]
    ]
    out_BHTD = torch.cat(outputs, dim=2)
    if group is not None:
        out_BHTD = group.columns(out_BHTD)
    return out_BHTD.transpose(1, 2).contiguous(), None


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    window: int | None,
    causal: bool,
) -> torch.Tensor:
    """Attend within one sequence; the queries are the sequence's last tokens."""
    length = key.shape[2]
    before = length - query.shape[2]
    if not before and (window is None or length <= window):
        return scaled_dot_product_attention(
            query, key, value, is_causal=causal, scale=scale, enable_gqa=True
        )
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    outputs = []
    for start in range(before, length, _MASK_ROWS):
        end = min(start + _MASK_ROWS, length)
        distance = torch.arange(start, end, device=query.device)[:, None]
        distance = distance - torch.arange(end, device=query.device)
        seen = (distance >= 0) & (distance < (window or length))
        rows = query[:, :, start - before : end - before]
        outputs.append(
            scaled_dot_product_attention(
                rows, key[:, :, :end], value[:, :, :end], attn_mask=seen, scale=scale
            )
        )
    return torch.cat(outputs, dim=2)


AttentionInterface.register(_NAME, packed_attention)
