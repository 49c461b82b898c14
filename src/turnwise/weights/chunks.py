"""Named tensors taken one at a time, and packed into buffers of bytes.

A trainer may gather each tensor from its ranks' shards only when it is reached, so every rank
iterates over all tensors in the same order, and none holds more than one whole tensor.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from turnwise.errors import WeightUpdateError
from turnwise.weights.manifest import Chunk, NamedTensors, TensorEntry

Source = Iterator[tuple[str, torch.Tensor]]
"""Named tensors that are consumed once, in order."""


@contextmanager
def drained(tensors: NamedTensors) -> Iterator[Source]:
    """Consume named tensors to the end, even after an error.

    Other ranks gather each tensor together with this one, and would otherwise wait for it.
    """
    source = iter(tensors)
    try:
        yield source
    finally:
        deque(source, maxlen=0)


def pack(chunk: Chunk, buffer: torch.Tensor, source: Source) -> None:
    """Copy the next tensors of a source into a buffer of bytes.

    Raises:
        WeightUpdateError: when they are not those of the chunk.
    """
    for entry in chunk:
        tensor = check_next(entry, source)
        entry.in_bytes(buffer).copy_(tensor)
        del tensor  # before the next one is gathered


def unpack(chunk: Chunk, buffer: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of a chunk as views of a buffer of bytes."""
    return [(entry.name, entry.in_bytes(buffer)) for entry in chunk]


def check_next(entry: TensorEntry, source: Source) -> torch.Tensor:
    """Take the next tensor of a source.

    Raises:
        WeightUpdateError: when it is not the entry's.
    """
    name, tensor = next(source, ("nothing", None))
    if tensor is None or name != entry.name:
        raise WeightUpdateError(f"the model's tensors changed: got {name} instead of {entry.name}")
    if tuple(tensor.shape) != entry.shape:
        raise WeightUpdateError(f"the shape of {entry.name} changed")
    return tensor.detach()


def check_exhausted(source: Source) -> None:
    """Raise `WeightUpdateError` when the source has a tensor left."""
    for name, _ in source:
        raise WeightUpdateError(f"the model's tensors changed: {name} came after the last")
