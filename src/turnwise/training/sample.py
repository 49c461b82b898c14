"""A training sample: one trajectory's tokens with what the loss needs of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Sample:
    """`T` tokens; the masked ones are trained."""

    token_ids: list[int]
    response_mask: list[int]
    logprobs: list[float]
    """The engine's, 0.0 where the mask is 0."""
    weight_versions: list[int]
    advantage: float

    def __post_init__(self) -> None:
        lengths = [len(self.token_ids), len(self.response_mask)]
        lengths += [len(self.logprobs), len(self.weight_versions)]
        assert len(set(lengths)) == 1, f"a sample's lengths differ: {lengths}"


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """`B` samples padded on the right to `T` tokens. The mask marks *targets*: position t is
    scored from the logits at t - 1."""

    token_ids_BT: torch.Tensor
    mask_BT: torch.Tensor
    logprobs_BT: torch.Tensor
    advantages_BT: torch.Tensor


def micro_batches(
    samples: Sequence[Sample], max_tokens: int, device: torch.device
) -> list[MicroBatch]:
    """Cut samples, sorted by length, into batches of at most `max_tokens`, padding included.

    A single sample longer than that makes a batch of its own.
    """
    buckets: list[list[Sample]] = []
    for sample in sorted(samples, key=lambda s: len(s.token_ids)):
        bucket = buckets[-1] if buckets else None
        # Sorted: the newest sample is the longest of its bucket.
        if bucket is None or (len(bucket) + 1) * len(sample.token_ids) > max_tokens:
            buckets.append([sample])
        else:
            bucket.append(sample)
    return [_pad(bucket, device) for bucket in buckets]


def _pad(samples: list[Sample], device: torch.device) -> MicroBatch:
    length = max(len(sample.token_ids) for sample in samples)

    def padded(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.zeros(len(rows), length, dtype=dtype)
        for i, row in enumerate(rows):
            tensor[i, : len(row)] = torch.tensor(row, dtype=dtype)
        return tensor.to(device)

    mask_BT = padded([s.response_mask for s in samples], torch.bool)
    mask_BT[:, 0] = False  # nothing precedes the first token
    advantages_B1 = torch.tensor([[s.advantage] for s in samples], device=device)
    return MicroBatch(
        token_ids_BT=padded([s.token_ids for s in samples], torch.long),
        mask_BT=mask_BT,
        logprobs_BT=padded([s.logprobs for s in samples], torch.float32),
        advantages_BT=advantages_B1.expand(-1, length),
    )
