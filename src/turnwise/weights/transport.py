"""Transports: ways to send weights from a trainer to its engines.

A transport is one class. It makes the `WeightSender` of a trainer's rank, which describes an update
by a `Manifest`, and the `Receiver` of it in each engine's worker. To add one, write a file with a
subclass of `Transport`, and name it in `TRANSPORTS`, or only in the configuration. A stream (`ipc`,
`collective`) sends its manifest, then the tensors in chunks that pass through two buffers in turn,
so that neither side needs memory for a second model.
"""

import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from turnwise.core.json_types import dtype_name
from turnwise.core.optional import load_object
from turnwise.errors import InputError, WeightUpdateError, describe_error, ordinary_error
from turnwise.weights.manifest import (
    Chunk,
    Manifest,
    NamedTensors,
    Source,
    StateDictInfo,
    chunk_bytes,
    drained,
    lay_out,
    split,
)

if TYPE_CHECKING:
    from turnwise.weights.process_group import ProcessGroup

TRANSPORTS = {
    "shm": "turnwise.weights.shm:ShmTransport",
    "ipc": "turnwise.weights.ipc:IpcTransport",
    "collective": "turnwise.weights.collective:CollectiveTransport",
    "disk": "turnwise.weights.disk:DiskTransport",
    "in_process": "turnwise.weights.in_process:InProcessTransport",
}
"""Transports that have a short name. The trainer chooses `in_process` by itself if an engine's
worker is in its process."""

BUFFER_BYTES = 64 * 2**20
"""Size of each of a stream's two buffers on GPUs, unless a tensor needs more or the model less."""
CPU_BUFFER_BYTES = 16 * 2**20
"""The same on CPUs, whose caches can hold it: what one side packs, the other reads from there."""
WAIT_SECONDS = 120.0
ANSWER_SHARE = 0.5
"""Fraction of an update's time for each answer of a worker to a stream, so that the others can
still be served when it gives none."""
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class SenderOptions:
    """The parts of a trainer's rank that a transport needs."""

    tensors: Sequence[tuple[str, torch.Tensor]]
    """Names and shapes, without data, of the tensors of every update, in their order."""
    dtype: torch.dtype = torch.float32
    """Type that the engines load."""
    device: torch.device = _CPU
    """Device of this rank's tensors."""
    folder: str | os.PathLike[str] = ""
    """Folder for transports that write files; "" is none."""
    buffer_bytes: int = BUFFER_BYTES
    """Maximum size of each of a stream's two buffers; a larger tensor enlarges them."""
    timeout: float = WAIT_SECONDS
    """Seconds for an update; in the sender of a stream, for each answer of an engine."""
    address: str | None = None
    """Address at which `ipc` listens: "" is the device's own, where a worker looks that has no
    manifest; None is one for this sender alone, or on GPUs the device's."""


@dataclass(slots=True)
class ReceiverOptions:
    """The parts of an engine's worker that a transport needs."""

    device: torch.device
    rank: int
    """Rank among the engine's workers."""
    expected: StateDictInfo | None = None
    """The tensors that every update must contain; None allows any, each once."""
    group: "ProcessGroup | None" = None
    """The process group with the trainer; None before `init_collective`."""
    held: object = None
    """The last version that arrived (`HeldWeights`); None without `weights.delta`."""

    def expected_of(self, manifest: Manifest) -> StateDictInfo:
        """Return the tensors of an update's stream: `expected`, or those of its manifest."""
        if self.expected is None and not manifest.tensors:
            raise WeightUpdateError("call prepare_refit_info before the first update")
        return manifest.info if self.expected is None else self.expected


class WeightSender:
    """Sender on one rank of the trainer.

    The base class itself serves the ranks that send nothing: it consumes the tensors, so that the
    other ranks can gather them. A subclass consumes them one at a time and to the end (`drained`),
    even after an error, since a generator gathers each when it is reached.

    Methods raise `WeightUpdateError` when tensors cannot be written, have changed, or a worker
    refused them, and `DeadlineError` when a worker did not answer in time.
    """

    transport = ""
    """Name under which engines find the transport; `make_sender` sets it. A class sets it only for
    senders that tests make directly."""
    streamed = False
    """`Transport.streamed`; `make_sender` sets it."""
    state_dict_info: StateDictInfo
    """Tensors of every update, for `prepare_refit_info`; `make_sender` sets it."""

    def publish(self, version: int, tensors: NamedTensors) -> Manifest:
        """Prepare a version; engines get rank 0's manifest. Streams consume tensors in `send`.

        Tensors may be on a GPU, in another type than `SenderOptions.dtype`, and empty. A version
        may be published again after a failure, which leaves the earlier ones as they were.
        """
        if not self.streamed:
            deque(tensors, maxlen=0)
        return Manifest(version, self.transport, "", 0, ())

    def send(self, version: int, tensors: NamedTensors, devices: Sequence[str] = ()) -> None:
        """Send the tensors to workers on these devices (`Engine.check_update`) while they load."""
        if self.streamed:
            deque(tensors, maxlen=0)

    def store(self, delta: bytes) -> str:
        """Keep a delta from the last version; return its path. Only of transports that
        `weights.delta` may have."""
        raise NotImplementedError

    def join(self, ip: str, port: int, engine_workers: int, timeout: float | None = None) -> None:
        """Create a process group of rank 0 and the engines' workers; replaces an earlier one."""
        return

    def close(self) -> None:
        """Release the transport's memory and addresses."""
        return


class Receiver(ABC):
    """One engine worker's receiver of one update: polled until ready, then read, then ended."""

    reuses_buffers = False
    """Whether tensors are overwritten once the next chunk is requested."""
    reports = True
    """Whether `end` reports to a trainer that waits for it."""

    @abstractmethod
    def poll(self) -> int | None:
        """Return the version once its tensors can be read, else None; never blocks.

        Raises:
            WeightUpdateError: when the update does not fit, or the trainer gave up.
            DeadlineError: when the trainer did not send in time.
        """

    @abstractmethod
    def chunks(self) -> Iterator[NamedTensors]:
        """Yield the tensors of each chunk; raises as `poll` does."""

    def end(self, error: str = "") -> None:
        """Report to the trainer how the update ended here; "" is success."""
        return


class StoredReceiver(Receiver):
    """A receiver of tensors that are available at once, in one chunk.

    Args:
        loaded: Called once the engine has loaded the tensors.
    """

    reports = False

    def __init__(
        self, version: int, tensors: Source, loaded: Callable[[], None] = lambda: None
    ) -> None:
        self._version, self._tensors, self._loaded = version, tensors, loaded

    def poll(self) -> int | None:
        return self._version

    def chunks(self) -> Iterator[NamedTensors]:
        yield self._tensors

    def end(self, error: str = "") -> None:
        if not error:
            self._loaded()


class Transport(Protocol):
    """One way to send weights; a transport is a subclass.

    Example:
        class MySender(WeightSender):
            def __init__(self, options):
                self.options = options
            def publish(self, version, tensors):
                path = f"{self.options.folder}/{version}.pt"
                kept = {name: tensor.to("cpu", self.options.dtype) for name, tensor in tensors}
                torch.save(kept, path)
                entries, nbytes = lay_out(kept.items(), self.options.dtype)
                return Manifest(version, self.transport, path, nbytes, entries)

        class MyTransport(Transport):
            def make_sender(self, options):
                return MySender(options)
            def validate(self, manifest, options):
                if not Path(manifest.path).exists():
                    raise WeightUpdateError(f"{manifest.path} is missing")
            def receive(self, manifest, options, seconds):
                return StoredReceiver(manifest.version, iter(torch.load(manifest.path).items()))
    """

    streamed: bool = False
    """Whether `WeightSender.send` sends the tensors while engines load."""
    lasting: bool = False
    """Whether engines can still read a version after the trainer has changed its weights, until the
    second version after it is published: an engine that starts late reads the last one."""
    needs_group: bool = False
    """Whether trainer and engines must be in one process group."""

    def sends_from(self, rank: int, device: torch.device) -> bool:
        """Return whether a rank of the trainer sends; the others only help to gather tensors."""
        return rank == 0

    @abstractmethod
    def make_sender(self, options: SenderOptions) -> WeightSender:
        """Make the sender of a rank; raises `InputError` where the transport cannot be used."""

    def validate(self, manifest: Manifest, options: ReceiverOptions) -> None:
        """Raise `WeightUpdateError` if an engine's worker cannot load an update. The caller has
        compared names, shapes and types with `options.expected`."""
        return

    @abstractmethod
    def receive(self, manifest: Manifest, options: ReceiverOptions, seconds: float) -> Receiver:
        """Start to receive an update in an engine's worker, within `seconds`.

        The manifest of a stream may have only a transport and a path.
        """


class StreamSender(WeightSender):
    """Sends named tensors, in the engines' `dtype`, through two buffers.

    Each `send` must get the tensors of the options, in their order. The device's type must be that
    of the engines.
    """

    def __init__(self, options: SenderOptions) -> None:
        self._device = options.device
        if self._device.type not in ("cpu", "cuda"):
            raise InputError(
                f"weights.transport: {self.transport} works between CPUs or GPUs, not "
                f"{self._device}"
            )
        entries, nbytes = lay_out(options.tensors, options.dtype)
        self._layout = nbytes, entries, options.buffer_bytes
        self._chunks = split(entries, options.buffer_bytes)
        self._buffer_bytes = max(map(chunk_bytes, self._chunks))
        self._timeout = options.timeout
        self._path = ""  # address at which engines find this sender, for their manifest

    def publish(self, version: int, tensors: NamedTensors) -> Manifest:
        return Manifest(version, self.transport, self._path, *self._layout)

    def send(self, version: int, tensors: NamedTensors, devices: Sequence[str] = ()) -> None:
        with drained(tensors) as source:
            self.send_as(self.publish(version, ()), source, devices)

    @abstractmethod
    def send_as(self, manifest: Manifest, source: Source, devices: Sequence[str]) -> None: ...


class StreamReceiver(Receiver):
    """Reads chunks from a trainer, whose manifest must name the `expected` tensors."""

    reuses_buffers = True

    def __init__(self, expected: StateDictInfo, device: torch.device, seconds: float) -> None:
        self.manifest: Manifest | None = None
        """The trainer's manifest; None until it arrives."""
        self._version = 0
        self._chunks: tuple[Chunk, ...] = ()
        self._expected, self._device = expected, device
        self._seconds, self._deadline = seconds, time.monotonic() + seconds

    @property
    def _seconds_left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _accept(self, manifest: Manifest) -> None:
        self.manifest, self._version, self._chunks = manifest, manifest.version, manifest.chunks
        if error := manifest.mismatch(self._expected):
            raise WeightUpdateError(error)

    def _chunk_name(self, index: int) -> str:
        return f"chunk {index + 1} of {len(self._chunks)} of version {self._version}"

    def _unpacked(self, chunk: Chunk, buffer: torch.Tensor) -> Iterator[NamedTensors]:
        """Yield a chunk's tensors as views of a buffer; end once the device has read them."""
        yield [(entry.name, entry.in_bytes(buffer)) for entry in chunk]
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def find_transport(name: str) -> Transport:
    """Return the transport of a short name, or of `package.module:Class`."""
    path = TRANSPORTS.get(name, name)
    if ":" not in path:
        raise InputError(
            f"weights.transport: {name} is none of {', '.join(TRANSPORTS)}, nor "
            "package.module:Class"
        )
    made = load_object(path, "weights.transport")
    try:
        transport: Transport = made()
    except BaseException as error:  # the class's own code may raise anything
        why = describe_error(ordinary_error(error))
        raise InputError(f"weights.transport: {name} cannot be loaded: {why}") from error
    return transport


def make_sender(
    transport: str,
    tensors: NamedTensors,
    dtype: torch.dtype = torch.float32,
    *,
    device: torch.device | None = None,
    rank: int = 0,
    folder: str | os.PathLike[str] = "",
    buffer_bytes: int | None = None,
    timeout: float = WAIT_SECONDS,
    address: str | None = None,
) -> WeightSender:
    """Make the sender of one trainer rank; the other arguments are those of `SenderOptions`.

    Args:
        transport: `weights.transport`, or `in_process` where engines live in the trainer's
            processes.
        tensors: The tensors of every update; DTensors have the shapes of the whole.
    """
    chosen = find_transport(transport)
    device = device or _CPU
    if buffer_bytes is None:
        buffer_bytes = CPU_BUFFER_BYTES if device.type == "cpu" else BUFFER_BYTES
    # Without data: a sender must not keep the model's tensors alive.
    shapes = [(name, torch.empty(t.shape, device="meta")) for name, t in tensors]
    timeout *= ANSWER_SHARE if chosen.streamed else 1.0
    options = SenderOptions(shapes, dtype, device, folder, buffer_bytes, timeout, address)
    sends = chosen.sends_from(rank, device)
    sender = chosen.make_sender(options) if sends else WeightSender()
    sender.transport, sender.streamed = transport, chosen.streamed
    sender.state_dict_info = {name: (tuple(t.shape), dtype_name(dtype)) for name, t in shapes}
    return sender


def refit_sender(
    transport: str,
    tensors: NamedTensors,
    dtype: torch.dtype,
    *,
    device: torch.device | None = None,
    rank: int = 0,
    timeout: float = WAIT_SECONDS,
) -> WeightSender:
    """Make the sender of one rank of your own trainer, for a `VllmAsyncGenerationWorker`.

    Its `state_dict_info` is for `prepare_refit_info_async`, `send` for one of the two updates, and
    with `collective`, `join` for `init_collective_async`.

    Args:
        transport: `ipc` or `collective`.
        tensors: Names, as in the model's files, and shapes of the whole tensors of every update, in
            their order.
        dtype: Type that the engine loads.
        device: Device of the tensors; None is the CPU.
        rank: This rank of the trainer. All must send; on a CPU only those of rank 0 arrive.
        timeout: Seconds for an update.

    Raises:
        InputError: when the transport is another one, or cannot be used here.

    Example:
        sender = refit_sender("ipc", model.named_parameters(), model.dtype)
        sender.send(1, ((name, p.detach()) for name, p in model.named_parameters()))
    """
    if transport not in ("ipc", "collective"):
        raise InputError(f"refit_sender sends by ipc or collective, not by {transport}")
    return make_sender(
        transport, tensors, dtype, device=device, rank=rank, timeout=timeout, address=""
    )
