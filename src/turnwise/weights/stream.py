"""What transports share: tensors taken one at a time, chunks of bounded size, and their checks.

Over `ipc` and `collective` a trainer sends a header that names every tensor, then the tensors in
chunks that pass through two buffers in turn, so that neither side needs memory for a second
model. The engine compares the header with what it expects before it touches a weight.
"""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any

import torch

from turnwise.errors import WeightUpdateError
from turnwise.weights.manifest import TensorEntry, lay_out

BUFFER_BYTES = 64 * 2**20
"""Size of each of the two buffers, unless a tensor needs more or the model less."""
WAIT_SECONDS = 120.0

Chunk = tuple[TensorEntry, ...]
NamedTensors = Iterable[tuple[str, torch.Tensor]]
StateDictInfo = Mapping[str, tuple[tuple[int, ...], str]]
"""Shape and torch's name of the type, by tensor name."""


@dataclass(frozen=True, slots=True)
class Header:
    """One update under `version`: every tensor, and its place in the buffer of its chunk."""

    version: int
    chunks: tuple[Chunk, ...]

    @property
    def tensors(self) -> Iterator[TensorEntry]:
        return chain.from_iterable(self.chunks)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, tree: dict[str, Any]) -> "Header":
        chunks = (tuple(map(TensorEntry.from_dict, chunk)) for chunk in tree["chunks"])
        return cls(tree["version"], tuple(chunks))


def plan_chunks(
    tensors: NamedTensors, dtype: torch.dtype, buffer_bytes: int, **layout: int
) -> tuple[Chunk, ...]:
    """The tensors in their order, in chunks of `buffer_bytes` at most; a larger one is alone."""
    chunks: list[list[TensorEntry]] = []
    start = 0
    for entry in lay_out(tensors, dtype, **layout)[0]:
        if not chunks or entry.offset + entry.nbytes - start > buffer_bytes:
            chunks.append([])
            start = entry.offset
        chunks[-1].append(replace(entry, offset=entry.offset - start))
    return tuple(map(tuple, chunks))


def chunk_bytes(chunk: Chunk) -> int:
    return chunk[-1].offset + chunk[-1].nbytes


def misfit(version: int, tensors: Iterable[TensorEntry], expected: StateDictInfo | None) -> str:
    """The first tensor of an update that is not as expected, in words, or ""; None is anything."""
    seen = set()
    for entry in tensors:
        if entry.name in seen:
            return f"{entry.name} stands twice in the manifest of version {version}"
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


class Sender(ABC):
    """The trainer's side: sends named tensors, in the engines' `dtype`, through two buffers.

    Each `send` must bring the constructor's tensors in the constructor's order; they are taken
    one at a time, so a generator may gather a shard just before its turn.
    """

    def __init__(self, tensors: NamedTensors, dtype: torch.dtype, buffer_bytes: int) -> None:
        self._dtype = dtype
        self._chunks = plan_chunks(tensors, dtype, buffer_bytes)
        self._buffer_bytes = max(map(chunk_bytes, self._chunks))

    def state_dict_info(self, tensors: NamedTensors) -> StateDictInfo:
        """What an engine's `prepare_refit_info` wants to know of them."""
        kind = str(self._dtype).removeprefix("torch.")
        return {name: (tuple(tensor.shape), kind) for name, tensor in tensors}

    def send(self, version: int, tensors: NamedTensors) -> None:
        """Bring the tensors to the engine; returns when they serve there. For a thread.

        Raises:
            WeightUpdateError: when the engine refused or failed, or the tensors changed.
            DeadlineError: when the engine did not answer in time.
        """
        with taken_whole(tensors) as source:
            self._send(version, source)

    @abstractmethod
    def _send(self, version: int, source: Iterator[tuple[str, torch.Tensor]]) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


class Receiver(ABC):
    """The engine's side of one update: polled until it is ready, then read chunk by chunk.

    Args:
        expected: What the header must name.
        device: Where the engine's weights are.
        seconds: Time for the whole update.
    """

    def __init__(self, expected: StateDictInfo, device: torch.device, seconds: float) -> None:
        self.header: Header | None = None
        self._expected = expected
        self._device = device
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds

    @property
    def _seconds_left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _accept(self, header: Header) -> None:
        self.header = header
        if error := misfit(header.version, header.tensors, self._expected):
            raise WeightUpdateError(error)

    def _chunk_name(self, index: int) -> str:
        assert self.header is not None
        return f"chunk {index + 1} of {len(self.header.chunks)} of version {self.header.version}"

    def _settle(self) -> None:
        """Wait until the device has read the chunk that was used last."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    @abstractmethod
    def poll(self) -> int | None:
        """The version on offer once its header fits and its first chunk is here; never waits.

        Raises:
            WeightUpdateError: when the header does not fit, or the trainer gave up.
            DeadlineError: when the trainer's time is over.
        """

    @abstractmethod
    def chunks(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """The tensors of each chunk, valid until the next is asked for; raises as `poll` does."""

    @abstractmethod
    def end(self, error: str = "") -> None:
        """Tell the trainer how the update ended here."""


@contextmanager
def taken_whole(tensors: NamedTensors) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
    """Take named tensors to their end, whatever happens: other ranks gather each one together
    with this one, and would wait for it."""
    source = iter(tensors)
    try:
        yield source
    finally:
        deque(source, maxlen=0)


def pack(chunk: Chunk, buffer: torch.Tensor, source: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Copy the next tensors of a source into a buffer of bytes.

    Raises:
        WeightUpdateError: when they are not those of the chunk.
    """
    for entry in chunk:
        tensor = check_next(entry, source)
        entry.in_bytes(buffer).copy_(tensor)
        del tensor  # before the next one is gathered


def check_next(entry: TensorEntry, source: Iterator[tuple[str, torch.Tensor]]) -> torch.Tensor:
    """The next tensor of a source; raises `WeightUpdateError` when it is not the entry's."""
    name, tensor = next(source, ("nothing", None))
    if tensor is None or name != entry.name:
        raise WeightUpdateError(
            f"the model's tensors changed: {name} came where {entry.name} was due"
        )
    if tuple(tensor.shape) != entry.shape:
        raise WeightUpdateError(f"the shape of {entry.name} changed")
    return tensor.detach()


def check_exhausted(source: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Raises `WeightUpdateError` when the source has a tensor left."""
    for name, _ in source:
        raise WeightUpdateError(f"the model's tensors changed: {name} came after the last")


def unpack(chunk: Chunk, buffer: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a chunk where they lie in a buffer of bytes."""
    return [(entry.name, entry.in_bytes(buffer)) for entry in chunk]
