"""Memory that another process on this host opens by a handle: shared memory, or a GPU's.

The half for GPUs, `CudaBuffer`, has never been run.
"""

import mmap
import os
from typing import Protocol

import torch

from turnwise.core.json_types import JsonObject
from turnwise.internals.torch import open_gpu_memory, share_gpu_memory
from turnwise.weights.shm import address_of, map_whole, open_address, open_nameless

_CUDA_HANDLE = (
    "device",
    "handle",
    "nbytes",
    "offset",
    "counter_handle",
    "counter_offset",
    "event_handle",
    "event_sync_required",
)
"""The fields of torch's handle of CUDA memory, in their order."""


class Buffer(Protocol):
    """A flat tensor of bytes that another process can open.

    Example:
        buffer = CpuBuffer(2**20, torch.device("cpu"))
        same = CpuBuffer.open(buffer.handle(), torch.device("cpu"))  # in the other process
    """

    bytes: torch.Tensor

    def handle(self) -> JsonObject:
        """Return the handle by which another process opens the buffer, for one update."""
        ...

    def synchronize(self) -> None:
        """Wait until all writes are done."""
        ...

    def close(self) -> None: ...


class CpuBuffer:
    """Nameless shared memory."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._file = open_nameless(nbytes)
        self.bytes = map_whole(self._file, nbytes)

    def handle(self) -> JsonObject:
        return {"address": address_of(self._file)}

    def synchronize(self) -> None:
        pass

    def close(self) -> None:
        os.close(self._file)

    @staticmethod
    def open(handle: JsonObject, device: torch.device) -> torch.Tensor:
        file = open_address(handle["address"], "the trainer's buffer")
        try:
            return torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8)
        finally:
            os.close(file)


class CudaBuffer:
    """Memory of a GPU, opened by its CUDA IPC handle."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def handle(self) -> JsonObject:
        fields = share_gpu_memory(self.bytes)
        return {
            name: value.hex() if isinstance(value, bytes) else value
            for name, value in zip(_CUDA_HANDLE, fields, strict=True)
        }

    def synchronize(self) -> None:
        torch.cuda.current_stream(self.bytes.device).synchronize()

    def close(self) -> None:
        pass

    @staticmethod
    def open(handle: JsonObject, device: torch.device) -> torch.Tensor:
        fields = [
            bytes.fromhex(value) if isinstance(value, str) else value
            for value in map(handle.__getitem__, _CUDA_HANDLE[1:])
        ]
        index = torch.cuda.current_device() if device.index is None else device.index
        storage = open_gpu_memory(index, fields)
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
