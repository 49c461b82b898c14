"""What one weight update carries: names, types, shapes and places of its tensors, and a version.

Engines are given it as a plain dictionary, and choose by its `transport` how they load it.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch

_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor's place in its buffer or file: `nbytes` from byte `offset`."""

    name: str
    dtype: str
    """torch's name of the type, such as `float32`."""
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def view(self, buffer: Any) -> torch.Tensor:
        """The tensor in a writable buffer, without a copy."""
        dtype = getattr(torch, self.dtype)
        count = self.nbytes // dtype.itemsize
        flat = torch.frombuffer(buffer, dtype=dtype, count=count, offset=self.offset)
        return flat.view(self.shape)

    def in_bytes(self, buffer: torch.Tensor) -> torch.Tensor:
        """The tensor in a flat tensor of bytes on any device, without a copy."""
        flat = buffer[self.offset : self.offset + self.nbytes].view(getattr(torch, self.dtype))
        return flat.view(self.shape)

    @classmethod
    def from_dict(cls, tree: dict[str, Any]) -> "TensorEntry":
        return cls(**{**tree, "shape": tuple(tree["shape"])})


@dataclass(frozen=True, slots=True)
class Manifest:
    """One update under `version`: where its bytes lie, or come from, and what they mean."""

    version: int
    transport: str
    path: str
    """shm: the buffer. disk: the folder of the version. ipc: the trainer's address, "" where it
    is that of the device."""
    nbytes: int
    tensors: tuple[TensorEntry, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, tree: dict[str, Any]) -> "Manifest":
        tensors = tuple(map(TensorEntry.from_dict, tree["tensors"]))
        return cls(tree["version"], tree["transport"], tree["path"], tree["nbytes"], tensors)


def lay_out(
    tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype, alignment: int = _ALIGNMENT
) -> tuple[tuple[TensorEntry, ...], int]:
    """Entries for named tensors one after the other, aligned, and the bytes that they take."""
    entries, offset = [], 0
    for name, tensor in tensors:
        nbytes = tensor.numel() * dtype.itemsize
        kind = str(dtype).removeprefix("torch.")
        entries.append(TensorEntry(name, kind, tuple(tensor.shape), offset, nbytes))
        offset += -(-nbytes // alignment) * alignment
    return tuple(entries), offset
