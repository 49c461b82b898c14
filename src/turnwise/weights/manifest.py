"""One weight update: its version and transport, the layout of its tensors, and how they are packed.

Senders return a manifest, engines check it against the tensors that they expect, and receivers use
it to read the tensors. If these are sent in chunks, the manifest is sent first.

A trainer may gather each tensor from its ranks' shards only when it is reached, so every rank
iterates over all tensors in the same order, and none holds more than one whole tensor.
"""

import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

import torch

from turnwise.core.json_types import JsonObject, dtype_name
from turnwise.errors import WeightUpdateError

_ALIGNMENT = 256

NamedTensors = Iterable[tuple[str, torch.Tensor]]
Source = Iterator[tuple[str, torch.Tensor]]
"""Named tensors that are consumed once, in order."""
StateDictInfo = Mapping[str, tuple[tuple[int, ...], str]]
"""Shape and torch's name of the type, by tensor name."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Location of one tensor in its buffer or file: `nbytes` from byte `offset`."""

    name: str
    dtype: str
    """torch's name of the type, such as `float32`."""
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def in_bytes(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the tensor in a flat tensor of bytes on any device, without a copy."""
        flat = buffer[self.offset : self.offset + self.nbytes].view(getattr(torch, self.dtype))
        return flat.view(self.shape)


Chunk = tuple[TensorEntry, ...]
"""Tensors that share one buffer or file; offsets count from its start."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """One update: the location of its bytes, and the tensors that they hold.

    Our own processes exchange it as an object; `to_dict` is for vLLM's calls and for messages.
    """

    version: int
    transport: str
    """Name under which `find_transport` finds the transport."""
    path: str
    """shm: the buffer. disk: the folder of the version. ipc: the trainer's address, or "" for the
    device's."""
    nbytes: int
    tensors: tuple[TensorEntry, ...]
    """Tensors in order; the offsets of a stream count through all chunks, see `chunks`."""
    buffer_bytes: int = 0
    """Maximum size of a chunk of a stream; 0 if the tensors are not sent in chunks."""

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """The tensors of a stream, by chunk."""
        return _split(self.tensors, self.buffer_bytes)

    def to_dict(self) -> JsonObject:
        return asdict(self)

    @classmethod
    def from_dict(cls, tree: JsonObject) -> "Manifest":
        tensors = (TensorEntry(**{**one, "shape": tuple(one["shape"])}) for one in tree["tensors"])
        return cls(**{**tree, "tensors": tuple(tensors)})

    def mismatch(self, expected: StateDictInfo | None) -> str:
        """Describe the first tensor that is not as expected; "" when all are.

        If nothing is `expected`, any tensors are right, each once.
        """
        seen = set()
        for entry in self.tensors:
            what = f"{entry.name} of version {self.version}"
            if entry.name in seen:
                return f"{entry.name} is listed twice in the manifest of version {self.version}"
            seen.add(entry.name)
            if expected is None:
                continue
            if entry.name not in expected:
                return f"{what} was not expected"
            shape, dtype = expected[entry.name]
            if entry.shape != tuple(shape):
                return f"{what} is {entry.shape}, not {tuple(shape)}"
            if entry.dtype != dtype:
                return f"{what} is {entry.dtype}, not {dtype}"
        if missing := next((name for name in expected or () if name not in seen), None):
            return f"{missing} is missing from version {self.version}"
        return ""


def canary_prompt(vocab_size: int) -> list[int]:
    """Return 32 token ids, the same in every run with this size of vocabulary."""
    generator = random.Random(vocab_size)
    return [generator.randrange(vocab_size) for _ in range(32)]


@dataclass(frozen=True, slots=True)
class Publication:
    """A version that a trainer has prepared for engines."""

    manifest: Manifest
    prompt: Sequence[int] = ()
    """Token ids of the canary, a fixed prompt; empty if the trainer scores none."""
    logprobs: Sequence[float] = ()
    """The log-probs that the trainer gives to its tokens 1..T-1, in nats."""

    @property
    def version(self) -> int:
        return self.manifest.version


def lay_out(
    tensors: NamedTensors, dtype: torch.dtype | None, alignment: int = _ALIGNMENT
) -> tuple[tuple[TensorEntry, ...], int]:
    """Return consecutive, aligned entries for named tensors, and their total size in bytes.

    They are all of `dtype`, or each has its own.
    """
    entries, offset = [], 0
    for name, tensor in tensors:
        kind = dtype or tensor.dtype
        nbytes = tensor.numel() * kind.itemsize
        entries.append(TensorEntry(name, dtype_name(kind), tuple(tensor.shape), offset, nbytes))
        offset += -(-nbytes // alignment) * alignment
    return tuple(entries), offset


def plan_chunks(
    tensors: NamedTensors,
    dtype: torch.dtype | None,
    buffer_bytes: int,
    alignment: int = _ALIGNMENT,
) -> tuple[Chunk, ...]:
    """Divide tensors, in order, into chunks of at most `buffer_bytes`, or one larger tensor."""
    return _split(lay_out(tensors, dtype, alignment)[0], buffer_bytes)


def _split(entries: tuple[TensorEntry, ...], buffer_bytes: int) -> tuple[Chunk, ...]:
    chunks: list[list[TensorEntry]] = []
    start = 0
    for entry in entries:
        if not chunks or entry.offset + entry.nbytes - start > buffer_bytes:
            chunks.append([])
            start = entry.offset
        chunks[-1].append(replace(entry, offset=entry.offset - start))
    return tuple(map(tuple, chunks))


def chunk_bytes(chunk: Chunk) -> int:
    return chunk[-1].offset + chunk[-1].nbytes


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
    """Copy the next tensors of a source, which must be those of the chunk, into a buffer."""
    for entry in chunk:
        tensor = check_next(entry, source)
        entry.in_bytes(buffer).copy_(tensor)
        del tensor  # before the next one is gathered


def check_next(entry: TensorEntry, source: Source) -> torch.Tensor:
    """Take the next tensor of a source, which must be the entry's."""
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
