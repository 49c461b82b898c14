"""Transports: ways to send weights from a trainer to its engines.

A transport is one class. It makes a `WeightSender` for each rank of the trainer, which describes an
update by a `Manifest`, and a `Receiver` of the update for each engine's worker. To add a transport,
write a subclass of `Transport`, and name it in `TRANSPORTS`, or only in the configuration. A
streamed transport (`ipc`, `collective`) sends the manifest, then the tensors in chunks through two
alternating buffers, so that neither trainer nor engine needs memory for a second model.

To add a weight transport: write a file in this folder, register it with one line here, and add its
name to `config/serving.py`; or name it as `package.module:Class`.
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
"""Transports with a short name. The trainer itself chooses `in_process` if an engine's worker is in
the trainer's process."""

BUFFER_BYTES = 64 * 2**20
"""Size in bytes of each of a stream's two buffers on GPUs. A buffer is larger if a tensor needs
more, and smaller if the whole model needs less."""
CPU_BUFFER_BYTES = 16 * 2**20
"""Size in bytes of each buffer on CPUs. It fits in a CPU's cache, so that the engine reads the
packed tensors from the cache."""
WAIT_SECONDS = 120.0
ANSWER_SHARE = 0.5
"""Fraction of an update's time that a worker has for each answer to a stream. If the worker does
not answer, time remains to serve the other workers."""
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class SenderOptions:
    """The settings of a trainer's rank that a transport needs."""

    tensors: Sequence[tuple[str, torch.Tensor]]
    """Names and shapes of the tensors of every update, in order; the tensors have no data."""
    dtype: torch.dtype = torch.float32
    """Type in which the engines load the tensors."""
    device: torch.device = _CPU
    """Device of this rank's tensors."""
    folder: str | os.PathLike[str] = ""
    """Folder for transports that write files; "" if it is not set."""
    buffer_bytes: int = BUFFER_BYTES
    """Maximum size in bytes of each of a stream's two buffers; a larger tensor enlarges them."""
    timeout: float = WAIT_SECONDS
    """Seconds for an update; for a stream, seconds for each answer of an engine."""
    address: str | None = None
    """Address at which `ipc` listens. "" is the device's address, which a worker without a manifest
    uses. With None, a sender on CPUs gets an address of its own, and a sender on a GPU uses the
    device's address."""


@dataclass(slots=True)
class ReceiverOptions:
    """The settings and state of an engine's worker that a transport needs."""

    device: torch.device
    rank: int
    """Rank among the engine's workers."""
    expected: StateDictInfo | None = None
    """The tensors that every update must contain; None allows any tensors, but each only once."""
    group: "ProcessGroup | None" = None
    """The process group with the trainer; None before `init_collective`."""
    held: object = None
    """The last version that arrived (`HeldWeights`); None without `weights.delta`."""

    def expected_of(self, manifest: Manifest) -> StateDictInfo:
        """Return the tensors of an update's stream: `expected`, or else the manifest's tensors."""
        if self.expected is None and not manifest.tensors:
            raise WeightUpdateError("call prepare_refit_info before the first update")
        return manifest.info if self.expected is None else self.expected


class WeightSender:
    """Sender on one rank of the trainer.

    Ranks that send nothing use the base class itself, which consumes the tensors, so that the other
    ranks can gather them. A subclass consumes the tensors one at a time and to the end (`drained`),
    even after an error, because a generator gathers each tensor only when it is reached.

    Methods raise `WeightUpdateError` when tensors cannot be written or have changed, or when a
    worker refused them, and `DeadlineError` when a worker did not answer in time.
    """

    transport = ""
    """Name under which engines find the transport; `make_sender` sets it. The values in subclasses
    are used only by senders that tests make directly."""
    streamed = False
    """Equals `Transport.streamed`; `make_sender` sets it."""
    state_dict_info: StateDictInfo
    """The tensors of every update, for `prepare_refit_info`; `make_sender` sets it."""

    def publish(self, version: int, tensors: NamedTensors) -> Manifest:
        """Prepare a version and return its manifest; engines get the manifest of rank 0.

        A streamed transport does not consume the tensors here, but in `send`. Tensors may be on a
        GPU, may have a type different from `SenderOptions.dtype`, and may be empty. After a failure
        the version may be published again; a failure does not change earlier versions.
        """
        if not self.streamed:
            deque(tensors, maxlen=0)
        return Manifest(version, self.transport, "", 0, ())

    def send(self, version: int, tensors: NamedTensors, devices: Sequence[str] = ()) -> None:
        """Send the tensors, while workers on these devices (`Engine.check_update`) load them."""
        if self.streamed:
            deque(tensors, maxlen=0)

    def store(self, delta: bytes) -> str:
        """Keep a delta from the last version; return its path. Only transports that work with
        `weights.delta` implement this method."""
        raise NotImplementedError

    def join(self, ip: str, port: int, engine_workers: int, timeout: float | None = None) -> None:
        """Create a process group of rank 0 and the engines' workers; replace an earlier group."""
        return

    def close(self) -> None:
        """Release the transport's memory and addresses."""
        return


class Receiver(ABC):
    """Receiver of one update in one engine worker. The worker calls `poll` until the update is
    ready, then reads `chunks`, then calls `end`."""

    reuses_buffers = False
    """Whether a chunk's tensors are overwritten once the next chunk is requested."""
    reports = True
    """Whether `end` reports to a trainer, which waits for the report."""

    @abstractmethod
    def poll(self) -> int | None:
        """Return the version once its tensors can be read, else None; never block.

        Raises:
            WeightUpdateError: when the update does not fit the engine, or the trainer gave up.
            DeadlineError: when the trainer did not send in time.
        """

    @abstractmethod
    def chunks(self) -> Iterator[NamedTensors]:
        """Yield the tensors of each chunk; raise the same errors as `poll`."""

    def end(self, error: str = "") -> None:
        """Report the update's result to the trainer: an error, or "" for success."""
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
    """Whether engines can read a version even after the trainer has changed its weights, until two
    more versions have been published. If True, an engine that starts late reads the last
    version."""
    needs_group: bool = False
    """Whether trainer and engines must be in one process group."""

    def sends_from(self, rank: int, device: torch.device) -> bool:
        """Return whether a rank of the trainer sends; ranks that do not send only help to gather
        tensors."""
        return rank == 0

    @abstractmethod
    def make_sender(self, options: SenderOptions) -> WeightSender:
        """Make the sender of a rank; raise `InputError` if the transport cannot be used there."""

    def validate(self, manifest: Manifest, options: ReceiverOptions) -> None:
        """Raise `WeightUpdateError` if an engine's worker cannot load an update. The caller has
        already compared the tensors' names, shapes and types with `options.expected`."""
        return

    @abstractmethod
    def receive(self, manifest: Manifest, options: ReceiverOptions, seconds: float) -> Receiver:
        """Start to receive an update in an engine's worker, within `seconds`.

        The manifest of a stream may contain only a transport and a path.
        """


class StreamSender(WeightSender):
    """Sends named tensors, in the engines' `dtype`, through two buffers.

    Each `send` must get the tensors that the options list, in the same order. The trainer's device
    and the engines' devices must be of the same type (CPU or GPU).
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
        self._path = ""  # address at which engines find this sender; part of the manifest

    def publish(self, version: int, tensors: NamedTensors) -> Manifest:
        return Manifest(version, self.transport, self._path, *self._layout)

    def send(self, version: int, tensors: NamedTensors, devices: Sequence[str] = ()) -> None:
        with drained(tensors) as source:
            self.send_as(self.publish(version, ()), source, devices)

    @abstractmethod
    def send_as(self, manifest: Manifest, source: Source, devices: Sequence[str]) -> None: ...


class StreamReceiver(Receiver):
    """Reads chunks from a trainer; the trainer's manifest must name the `expected` tensors."""

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
        """Yield a chunk's tensors as views of a buffer; end only when the device has read them."""
        yield [(entry.name, entry.in_bytes(buffer)) for entry in chunk]
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def find_transport(name: str) -> Transport:
    """Return the transport with a short name, or an instance of the class
    `package.module:Class`."""
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
    """Make the sender of one trainer rank. `SenderOptions` describes the remaining arguments.

    Args:
        transport: `weights.transport`, or `in_process` if engines are in the trainer's processes.
        tensors: The tensors of every update; for a DTensor, the whole tensor's shape is used.
    """
    chosen = find_transport(transport)
    device = device or _CPU
    if buffer_bytes is None:
        buffer_bytes = CPU_BUFFER_BYTES if device.type == "cpu" else BUFFER_BYTES
    # Keep only shapes, because a sender must not keep the model's tensors alive.
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

    Pass the sender's `state_dict_info` to `prepare_refit_info_async`. Call the sender's `send`
    while the worker runs one of its two update methods. With `collective`, also call the sender's
    `join` while the worker runs `init_collective_async`.

    Args:
        transport: `ipc` or `collective`.
        tensors: The tensors of every update, in order, with the names of the model's files and the
            shapes of the whole tensors.
        dtype: Type in which the engine loads the tensors.
        device: Device of the tensors; None is the CPU.
        rank: This rank of the trainer. All ranks must call `send`; on a CPU only rank 0 sends.
        timeout: Seconds for an update.

    Raises:
        InputError: when the transport is neither `ipc` nor `collective`, or cannot be used here.

    Example:
        sender = refit_sender("ipc", model.named_parameters(), model.dtype)
        sender.send(1, ((name, p.detach()) for name, p in model.named_parameters()))
    """
    if transport not in ("ipc", "collective"):
        raise InputError(f"refit_sender sends by ipc or collective, not by {transport}")
    return make_sender(
        transport, tensors, dtype, device=device, rank=rank, timeout=timeout, address=""
    )
