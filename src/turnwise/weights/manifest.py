"""The manifest of a weight update: its tensors and the location of their bytes.

Senders pack the trainer's tensors in the manifest's order, and receivers use the manifest to find
them. A `Source` yields the trainer's tensors, which may be gathered one by one.
"""

import ctypes
import math
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from turnwise.core.json_types import JsonObject, dtype_name
from turnwise.errors import WeightUpdateError
from turnwise.trajectory import Prompt

_ALIGNMENT = 256

NamedTensors = Iterable[tuple[str, torch.Tensor]]
Source = Iterator[tuple[str, torch.Tensor]]
"""Named tensors that are consumed once, in order. A trainer may gather a tensor from its ranks'
shards only when the tensor is reached. So every rank must consume all tensors, and no rank needs
memory for two whole tensors."""
StateDictInfo = Mapping[str, tuple[tuple[int, ...], str]]
"""Shape and type (by torch's name) of each tensor, by the tensor's name."""


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
        """Return the tensor as a view of a flat tensor of bytes on any device."""
        flat = buffer[self.offset : self.offset + self.nbytes].view(getattr(torch, self.dtype))
        return flat.view(self.shape)


Chunk = tuple[TensorEntry, ...]
"""Tensors that share one buffer or file; offsets count from the start of this buffer or file."""


@dataclass(frozen=True, slots=True)
class Delta:
    """The changes from one version of the weights to the next. `base` is the checksum of the
    version from which it starts. `path` is the location of the bytes; "" in a stream."""

    base: int
    nbytes: int
    path: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """One update that a trainer has prepared: its tensors, and the location of their bytes.

    Our own processes exchange manifests as objects; `to_dict` is for vLLM's calls and for messages.
    """

    version: int
    transport: str
    """Name under which `find_transport` finds the transport."""
    path: str
    """For shm, the address of the buffer; for disk, the version's folder; for ipc, the trainer's
    address, where "" means the device's address."""
    nbytes: int
    tensors: tuple[TensorEntry, ...]
    """Tensors in order. The offsets of a stream count through all chunks (see `chunks`)."""
    buffer_bytes: int = 0
    """Maximum size of a chunk of a stream; 0 if the tensors are not sent in chunks."""
    prompt: Prompt = field(default_factory=Prompt)
    """The canary: a fixed prompt, maybe with an image, whose log-probs engines must reproduce. It
    is empty if the trainer does not score a canary."""
    logprobs: Sequence[float] = ()
    """The trainer's log-probs, in nats, of tokens 1..T-1 of the canary, without image tokens."""
    adapter: str = ""
    """Name of the adapter that scores the canary; "" for the policy."""
    checksum: int | None = None
    """Checksum of all tensors (`HeldWeights.sum`); None without `weights.delta`."""
    deltas: tuple[Delta, ...] = ()
    """Consecutive deltas from the last whole version, which is at `path`, to this version. A stream
    sends only the last delta. If this is empty, all tensors are sent."""
    changed: float | None = None
    """Fraction of the values that differ from the previous version; None if not measured."""

    @property
    def sent_bytes(self) -> int:
        """Number of bytes that an engine reads if it has the previous version."""
        return self.deltas[-1].nbytes if self.deltas else self.nbytes

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """The chunks of a stream's tensors."""
        return split(self.tensors, self.buffer_bytes)

    @property
    def info(self) -> StateDictInfo:
        return {entry.name: (entry.shape, entry.dtype) for entry in self.tensors}

    def to_dict(self) -> JsonObject:
        """Return all fields as plain values, except the canary's fields, which no engine needs."""
        tree = _plain(self)  # asdict copies every value, and takes ten times as long
        del tree["prompt"], tree["logprobs"], tree["adapter"]
        tree["tensors"] = tuple(map(_plain, self.tensors))
        tree["deltas"] = tuple(map(_plain, self.deltas))
        return tree

    @classmethod
    def from_dict(cls, tree: JsonObject) -> "Manifest":
        tensors = (TensorEntry(**{**one, "shape": tuple(one["shape"])}) for one in tree["tensors"])
        deltas = tuple(Delta(**one) for one in tree.get("deltas", ()))
        return cls(**{**tree, "tensors": tuple(tensors), "deltas": deltas})

    def mismatch(self, expected: StateDictInfo | None) -> str:
        """Describe the first tensor that is not as expected; "" if all tensors are as expected.

        If `expected` is None, any tensors are allowed, but each only once.
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


def _plain(value: TensorEntry | Delta | Manifest) -> JsonObject:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def canary_prompt(vocab_size: int) -> list[int]:
    """Return 32 random token ids, which depend only on the size of the vocabulary."""
    generator = random.Random(vocab_size)
    return [generator.randrange(vocab_size) for _ in range(32)]


def lay_out(
    tensors: NamedTensors, dtype: torch.dtype | None, alignment: int = _ALIGNMENT
) -> tuple[tuple[TensorEntry, ...], int]:
    """Return consecutive, aligned entries for named tensors, and their total size in bytes.

    All entries have the type `dtype`; if it is None, each entry has its tensor's type.
    """
    entries, offset = [], 0
    for name, tensor in tensors:
        kind = dtype or tensor.dtype
        nbytes = tensor.numel() * kind.itemsize
        entries.append(TensorEntry(name, dtype_name(kind), tuple(tensor.shape), offset, nbytes))
        offset += -(-nbytes // alignment) * alignment
    return tuple(entries), offset


def plan_chunks(
    tensors: NamedTensors, dtype: torch.dtype | None, buffer_bytes: int, alignment: int = _ALIGNMENT
) -> tuple[Chunk, ...]:
    """Lay out named tensors, and `split` them into chunks."""
    return split(lay_out(tensors, dtype, alignment)[0], buffer_bytes)


def split(
    entries: tuple[TensorEntry, ...], buffer_bytes: int, alone: float = math.inf
) -> tuple[Chunk, ...]:
    """Divide entries, in order, into chunks of at most `buffer_bytes`. An entry of more than
    `buffer_bytes`, or of at least `alone` bytes, gets a chunk of its own."""
    chunks: list[list[TensorEntry]] = []
    start = 0
    for entry in entries:
        full = chunks and entry.offset + entry.nbytes - start > buffer_bytes
        if not chunks or full or max(entry.nbytes, chunks[-1][-1].nbytes) >= alone:
            chunks.append([])
            start = entry.offset
        moved = entry.name, entry.dtype, entry.shape, entry.offset - start, entry.nbytes
        chunks[-1].append(TensorEntry(*moved))  # `replace` takes three times as long
    return tuple(map(tuple, chunks))


def chunk_bytes(chunk: Chunk) -> int:
    return chunk[-1].offset + chunk[-1].nbytes


@contextmanager
def drained(tensors: NamedTensors) -> Iterator[Source]:
    """Consume named tensors to the end, even after an error. Every rank must take part in gathering
    each tensor, because the other ranks wait for it."""
    source = iter(tensors)
    try:
        yield source
    finally:
        deque(source, maxlen=0)


def pack(chunk: Chunk, buffer: torch.Tensor, source: Source) -> None:
    """Copy the next tensors of a source, which must be the chunk's tensors, into a buffer."""
    for entry in chunk:
        tensor = check_next(entry, source)
        entry.in_bytes(buffer).copy_(tensor)
        del tensor  # free it before the next tensor is gathered


def check_next(entry: TensorEntry, source: Source) -> torch.Tensor:
    """Take the next tensor of a source, which must be the tensor that the entry describes."""
    name, tensor = next(source, ("nothing", None))
    if tensor is None or name != entry.name:
        raise WeightUpdateError(f"the model's tensors changed: got {name} instead of {entry.name}")
    if tuple(tensor.shape) != entry.shape:
        raise WeightUpdateError(f"the shape of {entry.name} changed")
    return tensor.detach()


Numbers = NDArray[np.unsignedinteger]
"""The values of a flat tensor, as unsigned integers with the same bits."""


def numbers_of(flat: torch.Tensor) -> Numbers:
    """Return the values of a flat tensor on the CPU as `Numbers`, which share the tensor's memory;
    so the tensor must outlive them."""
    # Tensor.numpy is not used, because a tensor's storage cannot be resized after it.
    memory = memoryview((ctypes.c_char * flat.nbytes).from_address(flat.data_ptr()))
    return np.frombuffer(memory, np.dtype(f"u{flat.itemsize}"))


def check_exhausted(source: Source) -> None:
    """Raise `WeightUpdateError` if the source has a tensor left."""
    for name, _ in source:
        raise WeightUpdateError(f"the model's tensors changed: {name} came after the last")
