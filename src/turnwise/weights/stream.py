"""Common parts of the streaming transports: chunks of bounded size through two buffers.

Over `ipc` and `collective` a trainer sends its manifest, then the tensors in chunks that pass
through two buffers in turn, so that neither side needs memory for a second model. The engine
compares the manifest with the tensors that it expects before it touches a weight.
"""

import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence

import torch

from turnwise.errors import InputError, WeightUpdateError
from turnwise.weights.chunks import Source, drained
from turnwise.weights.manifest import (
    Chunk,
    Manifest,
    NamedTensors,
    StateDictInfo,
    chunk_bytes,
    lay_out,
    mismatch,
)
from turnwise.weights.transport import Receiver, WeightSender

ANSWER_SHARE = 0.5
"""Fraction of an update's time for each answer of a worker, so that the others can still be served
when it gives none."""


class StreamSender(WeightSender):
    """Sends named tensors, in the engines' `dtype`, through two buffers.

    Each `send` must get the constructor's tensors in the constructor's order.

    Example:
        class MySender(StreamSender):
            def _send(self, manifest, source, devices): ...  # pack, send, wait
    """

    def __init__(self, tensors: NamedTensors, dtype: torch.dtype, buffer_bytes: int) -> None:
        self._entries, self._nbytes = lay_out(tensors, dtype)
        self._bound = buffer_bytes
        self._chunks = Manifest(0, "", "", 0, self._entries, buffer_bytes).chunks
        self._buffer_bytes = max(map(chunk_bytes, self._chunks))

    def publish(self, version: int, tensors: NamedTensors) -> Manifest:
        return self._manifest(version)

    def _manifest(self, version: int) -> Manifest:
        where = self._path()
        return Manifest(version, self.transport, where, self._nbytes, self._entries, self._bound)

    def _path(self) -> str:
        return ""

    def send(self, version: int, tensors: NamedTensors, devices: Sequence[str] = ()) -> None:
        with drained(tensors) as source:
            self._send(self._manifest(version), source, devices)

    @abstractmethod
    def _send(self, manifest: Manifest, source: Source, devices: Sequence[str]) -> None: ...


class StreamReceiver(Receiver):
    """Reads chunks from a trainer.

    Args:
        expected: The tensors that the manifest must name.
        device: Device of the engine's weights.
        seconds: Time for the whole update.

    Example:
        class MyReceiver(StreamReceiver):
            def poll(self): ...
            def chunks(self): ...
    """

    reuses_buffers = True

    def __init__(self, expected: StateDictInfo, device: torch.device, seconds: float) -> None:
        self.manifest: Manifest | None = None
        """The trainer's manifest; None until it arrives."""
        self._chunks: tuple[Chunk, ...] = ()
        self._expected = expected
        self._device = device
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds

    @property
    def _seconds_left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _accept(self, manifest: Manifest) -> None:
        self.manifest, self._chunks = manifest, manifest.chunks
        if error := mismatch(manifest, self._expected):
            raise WeightUpdateError(error)

    def _chunk_name(self, index: int) -> str:
        assert self.manifest is not None
        return f"chunk {index + 1} of {len(self._chunks)} of version {self.manifest.version}"

    def _synchronize(self) -> None:
        """Wait until the device has read the chunk that was used last."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    @abstractmethod
    def chunks(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Yield the tensors of each chunk, valid until the next is requested."""


def require_cpu_or_gpu(transport: str, device: torch.device) -> None:
    """Raise `InputError` for devices that streams do not support."""
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"weights.transport: {transport} works between CPUs or GPUs, not {device}")
