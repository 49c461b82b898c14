"""The description of one weight update: its version, its transport, and the layout of its tensors.

Senders return a manifest, engines check it against the tensors that they expect, and receivers use
it to read the tensors. If these are sent in chunks, the manifest is sent first.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from mmap import mmap
from typing import TYPE_CHECKING

import torch

from turnwise.core.json_types import JsonObject
from turnwise.engine.protocol import dtype_name

if TYPE_CHECKING:
    from turnwise.weights.canary import Canary

_ALIGNMENT = 256

NamedTensors = Iterable[tuple[str, torch.Tensor]]
StateDictInfo = Mapping[str, tuple[tuple[int, ...], str]]
"""Shape and torch's name of the type, by tensor name."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Location of one tensor in its buffer or file: `nbytes` from byte `offset`.

    Example:
        TensorEntry("weight", "float32", (2, 3), offset=256, nbytes=24)
    """

    name: str
    dtype: str
    """torch's name of the type, such as `float32`."""
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def view(self, buffer: mmap) -> torch.Tensor:
        """Return the tensor in a writable buffer, without a copy."""
        dtype = getattr(torch, self.dtype)
        count = self.nbytes // dtype.itemsize
        flat = torch.frombuffer(buffer, dtype=dtype, count=count, offset=self.offset)
        return flat.view(self.shape)

    def in_bytes(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the tensor in a flat tensor of bytes on any device, without a copy."""
        flat = buffer[self.offset : self.offset + self.nbytes].view(getattr(torch, self.dtype))
        return flat.view(self.shape)

    @classmethod
    def from_dict(cls, tree: JsonObject) -> "TensorEntry":
        return cls(**{**tree, "shape": tuple(tree["shape"])})


Chunk = tuple[TensorEntry, ...]
"""Tensors that share one buffer or file; offsets count from its start."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """One update: the location of its bytes, and the tensors that they hold.

    Our own processes exchange it as an object; `to_dict` is for vLLM's calls and for messages.

    Example:
        manifest = ShmSender(tensors).publish(3, tensors)
        await engine.update_weights(manifest)
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
        return cls(**{**tree, "tensors": tuple(map(TensorEntry.from_dict, tree["tensors"]))})


@dataclass(frozen=True, slots=True)
class Publication:
    """A version that a trainer has prepared for engines.

    Example:
        Publication(sender.publish(3, tensors), Canary(prompt, logprobs))
    """

    manifest: Manifest
    canary: "Canary | None" = None
    """The published weights' log-probs of a fixed prompt; None if the trainer computes none."""

    @property
    def version(self) -> int:
        return self.manifest.version


def lay_out(
    tensors: NamedTensors, dtype: torch.dtype | None, alignment: int = _ALIGNMENT
) -> tuple[tuple[TensorEntry, ...], int]:
    """Return consecutive, aligned entries for named tensors, and their total size in bytes.

    Args:
        dtype: Type of all tensors; None: each has its own.
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
    """Divide tensors, in their order, into chunks of at most `buffer_bytes`.

    A larger tensor gets a chunk to itself.
    """
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
    """Return the size of a chunk in bytes."""
    return chunk[-1].offset + chunk[-1].nbytes


def mismatch(manifest: Manifest, expected: StateDictInfo | None) -> str:
    """Describe the first tensor of an update that is not as expected; "" when all are.

    Args:
        expected: The tensors that every update must contain; None allows any, each once.
    """
    seen = set()
    version = manifest.version
    for entry in manifest.tensors:
        if entry.name in seen:
            return f"{entry.name} is listed twice in the manifest of version {version}"
        seen.add(entry.name)
        if expected is None:
            continue
        if entry.name not in expected:
            return f"{entry.name} of version {version} was not expected"
        shape, dtype = expected[entry.name]
        if entry.shape != tuple(shape):
            return f"{entry.name} of version {version} is {entry.shape}, not {tuple(shape)}"
        if entry.dtype != dtype:
            return f"{entry.name} of version {version} is {entry.dtype}, not {dtype}"
    if missing := next((name for name in expected or () if name not in seen), None):
        return f"{missing} is missing from version {version}"
    return ""
