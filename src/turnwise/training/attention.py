"""Attention of packed rows without a mask.

Transformers separates the sequences of a packed row by a mask of [T, T], which costs memory and
keeps torch from its fastest kernels. Here each sequence attends on its own: the same numbers,
memory that grows with T, and no work for pairs of tokens in different sequences.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from turnwise.errors import InputError

_NAME = "turnwise_packed"
"""Name of the function in Transformers."""
_in_packed_row: ContextVar[bool] = ContextVar("_in_packed_row", default=False)


def use_packed_attention(model: PreTrainedModel) -> None:
    """Make a model's layers attend within sequences, if torch's attention computes them.

    Models with attention of their own (soft caps, for instance) keep it.
    """
    texts = model.config.get_text_config()
    capped = getattr(texts, "attn_logit_softcapping", None)
    if model.config._attn_implementation == "sdpa" and not capped:
        model.set_attn_implementation(_NAME)


@contextmanager
def packed_row(
    model: PreTrainedModel, position_ids_1T: torch.Tensor
) -> Iterator[dict[str, Sequence[int]]]:
    """Yield the argument that tells a model's layers the sequences of a packed row.

    It is empty for a model that separates them by a mask.

    Args:
        position_ids_1T: Positions, which start again at 0 in each sequence.
    """
    if model.config._attn_implementation != _NAME:
        yield {}
        return
    starts = (position_ids_1T[0] == 0).nonzero()[:, 0].tolist()
    ends = [*starts[1:], position_ids_1T.shape[1]]
    before = _in_packed_row.set(True)
    try:
        yield {"sequence_lengths": [end - start for start, end in zip(starts, ends, strict=True)]}
    finally:
        _in_packed_row.reset(before)


def packed_attention(
    module: nn.Module,
    query_BHTD: torch.Tensor,
    key_BHTD: torch.Tensor,
    value_BHTD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    sequence_lengths: Sequence[int] | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Compute the attention of one layer, as Transformers' layers call it.

    Args:
        sequence_lengths: Lengths of the sequences of a packed row; None: each row is a sequence.
        sliding_window: Number of last tokens that a token attends to; None: all.

    Returns:
        The outputs: [B, T, H, D].

    Raises:
        InputError: when the model's layers do not pass on the lengths of a packed row.
    """
    if sequence_lengths is None and _in_packed_row.get():
        raise InputError("this model cannot compute packed rows: set training.packing to padded")
    assert attention_mask is None, "packed attention needs no mask"
    lengths = list(sequence_lengths or [query_BHTD.shape[2]])
    tensors = (query_BHTD, key_BHTD, value_BHTD)
    parts = zip(*(torch.split(tensor, lengths, dim=2) for tensor in tensors), strict=True)
    causal = getattr(module, "is_causal", True)
    outputs = [
        _attention(query, key, value, scaling, sliding_window, causal)
        for query, key, value in parts
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    window: int | None,
    causal: bool,
) -> torch.Tensor:
    length = query.shape[2]
    if window is None or length <= window:
        return scaled_dot_product_attention(
            query, key, value, is_causal=causal, scale=scale, enable_gqa=True
        )
    distance_TT = torch.arange(length, device=query.device)
    distance_TT = distance_TT[:, None] - distance_TT
    seen_TT = (distance_TT >= 0) & (distance_TT < window)
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    return scaled_dot_product_attention(query, key, value, attn_mask=seen_TT, scale=scale)


AttentionInterface.register(_NAME, packed_attention)
