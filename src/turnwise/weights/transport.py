"""Transports: ways to send weights from a trainer to its engines.

A transport is one class, found by its short name or as `package.module:Class`. It makes the
`WeightSender` of a trainer's rank, and in each engine worker the `Receiver` of an update. To add
one, write a file with a subclass of `Transport`, and name it in `TRANSPORTS`, or in the
configuration alone: `weights.transport: my_package.my_module:MyTransport`.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from turnwise.core.optional import load_object
from turnwise.errors import InputError, WeightUpdateError
from turnwise.weights.chunks import drained
from turnwise.weights.manifest import Manifest, NamedTensors, StateDictInfo

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
"""Size of each of a stream's two buffers, unless a tensor needs more or the model less."""
WAIT_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class SenderOptions:
    """The parts of a trainer's rank that a transport needs.

    Args:
        tensors: Names and shapes, without data, of the tensors of every update, in their order.
        dtype: Type that the engines load.
        device: Device of this rank's tensors.
        folder: Folder for transports that write files; "" is none.
        buffer_bytes: Maximum size of each of a stream's two buffers.
        timeout: Seconds for an update.

    Example:
        SenderOptions(list(model.named_parameters()), torch.bfloat16, torch.device("cuda"))
    """

    tensors: Sequence[tuple[str, torch.Tensor]]
    dtype: torch.dtype
    device: torch.device
    folder: str | os.PathLike[str] = ""
    buffer_bytes: int = BUFFER_BYTES
    timeout: float = WAIT_SECONDS


@dataclass(slots=True)
class EngineWorker:
    """The parts of an engine's worker that a transport needs.

    Example:
        EngineWorker(torch.device("cpu"), rank=0, expected={"weight": ((2, 3), "float32")})
    """

    device: torch.device
    rank: int
    """Rank among the engine's workers."""
    expected: StateDictInfo | None = None
    """The tensors that every update must contain; None before `prepare_refit_info`."""
    group: "ProcessGroup | None" = None
    """The process group with the trainer; None before `init_collective`."""

    def require_expected(self) -> StateDictInfo:
        """Return `expected`.

        Raises:
            WeightUpdateError: when it is not known yet.
        """
        if self.expected is None:
            raise WeightUpdateError("call prepare_refit_info before the first update")
        return self.expected


class WeightSender(ABC):
    """Sender on one rank of the trainer.

    It consumes tensors one at a time and to the end, so a generator may gather each when needed.

    Example:
        sender = make_sender("shm", model.named_parameters())
        manifest = sender.publish(1, model.named_parameters())
        sender.send(1, model.named_parameters(), devices)  # does nothing with shm
        sender.close()
    """

    transport = ""
    """Name under which engines find the transport; `make_sender` sets it."""

    @abstractmethod
    def publish(self, version: int, tensors: NamedTensors) -> Manifest:
        """Prepare a version; engines are given the manifest that rank 0 returns.

        A streaming transport consumes the tensors in `send` instead.

        Raises:
            WeightUpdateError: when the tensors cannot be written, or have changed.
        """

    def send(self, version: int, tensors: NamedTensors, devices: Sequence[str] = ()) -> None:
        """Send the tensors to the engines' workers while they load; for streaming transports.

        Args:
            devices: Device of each worker that loads them, as `Engine.check_update` returns it.

        Raises:
            WeightUpdateError: when a worker refused or failed, or the tensors have changed.
            DeadlineError: when a worker did not answer in time.
        """
        return

    def join(self, ip: str, port: int, engine_workers: int, timeout: float | None = None) -> None:
        """Create a process group of rank 0 and the engines' workers; replaces an earlier one.

        Does nothing in transports without `needs_group`.

        Raises:
            InputError: when the group cannot be made.
            DeadlineError: when a worker has not joined in time.
        """
        return

    def close(self) -> None:
        """Release the transport's memory and addresses."""
        return


class Receiver(ABC):
    """One engine worker's receiver of one update: polled until ready, then read.

    Example:
        receiver = find_transport(manifest.transport).receive(manifest, worker, 120.0)
        while receiver.poll() is None:
            ...
        for tensors in receiver.chunks():
            model.load_weights(tensors)
        receiver.end()
    """

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
    def chunks(self) -> Iterator[Iterable[tuple[str, torch.Tensor]]]:
        """Yield the tensors of each chunk; raises as `poll` does."""

    def end(self, error: str = "") -> None:
        """Report to the trainer how the update ended here; "" is success."""
        return


class StoredReceiver(Receiver):
    """A receiver of tensors that are available at once, in one chunk.

    Example:
        StoredReceiver(manifest.version, iter(torch.load(manifest.path).items()))
    """

    reports = False

    def __init__(self, version: int, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._version = version
        self._tensors = tensors

    def poll(self) -> int | None:
        return self._version

    def chunks(self) -> Iterator[Iterable[tuple[str, torch.Tensor]]]:
        yield self._tensors


class Transport(Protocol):
    """One way to send weights.

    Example:
        class MyTransport(Transport):
            def make_sender(self, options):
                return MySender(options.tensors)
            def validate(self, manifest, worker):
                if not Path(manifest.path).exists():
                    raise WeightUpdateError(f"{manifest.path} is missing")
            def receive(self, manifest, worker, seconds):
                return StoredReceiver(manifest.version, my_tensors(manifest))
    """

    streamed: bool = False
    """Whether `WeightSender.send` sends the tensors while engines load."""
    lasting: bool = False
    """Whether engines can still read a version after the trainer has changed its weights."""
    needs_group: bool = False
    """Whether trainer and engines must be in one process group."""

    def sends_from(self, rank: int, device: torch.device) -> bool:
        """Return whether a rank of the trainer sends; the others only help to gather tensors."""
        return rank == 0

    @abstractmethod
    def make_sender(self, options: SenderOptions) -> WeightSender:
        """Make the sender of a rank.

        Raises:
            InputError: when the transport cannot be used on this machine.
        """
        ...

    def validate(self, manifest: Manifest, worker: EngineWorker) -> None:
        """Check in an engine's worker, before weights are touched, that the update can be loaded.

        Raises:
            WeightUpdateError: when it cannot.
        """
        return

    @abstractmethod
    def receive(self, manifest: Manifest, worker: EngineWorker, seconds: float) -> Receiver:
        """Start to receive an update in an engine's worker, within `seconds`.

        Streams may be opened with a manifest that has only a transport and a path.
        """
        ...


class GatheringSender(WeightSender):
    """The sender of a rank that only helps to gather tensors.

    Example:
        make_sender("shm", model.named_parameters(), rank=1)  # makes one
    """

    def __init__(self, streamed: bool) -> None:
        self._streamed = streamed

    def publish(self, version: int, tensors: NamedTensors) -> Manifest:
        """Return a manifest without tensors."""
        if not self._streamed:
            with drained(tensors):
                pass
        return Manifest(version, self.transport, "", 0, ())

    def send(self, version: int, tensors: NamedTensors, devices: Sequence[str] = ()) -> None:
        if self._streamed:
            with drained(tensors):
                pass


def find_transport(name: str) -> Transport:
    """Return the transport of a short name, or of `package.module:Class`.

    Example:
        find_transport("shm").lasting
        True

    Raises:
        InputError: when there is none.
    """
    path = TRANSPORTS.get(name, name)
    if ":" not in path:
        raise InputError(
            f"weights.transport: {name} is none of {', '.join(TRANSPORTS)}, nor "
            "package.module:Class"
        )
    transport: Transport = load_object(path, "weights.transport")()
    return transport


def make_sender(
    transport: str,
    tensors: NamedTensors,
    dtype: torch.dtype = torch.float32,
    *,
    device: torch.device | None = None,
    rank: int = 0,
    folder: str | os.PathLike[str] = "",
    buffer_bytes: int = BUFFER_BYTES,
    timeout: float = WAIT_SECONDS,
) -> WeightSender:
    """Make the sender of one trainer rank.

    Args:
        transport: `weights.transport`, or `in_process` where engines live in the trainer's
            processes.
        tensors: Names and shapes of the tensors of every update, in their order; DTensors have
            those of the whole.
        device: Device of this rank's tensors; None is a CPU.

    The other arguments are those of `SenderOptions`.

    Raises:
        InputError: when the transport cannot be used on this machine.

    Example:
        sender = make_sender("disk", model.named_parameters(), folder="/shared/weights")
    """
    chosen = find_transport(transport)
    device = device or torch.device("cpu")
    # Without data: a sender must not keep the model's tensors alive.
    shapes = [(name, torch.empty(t.shape, device="meta")) for name, t in tensors]
    options = SenderOptions(shapes, dtype, device, folder, buffer_bytes, timeout)
    sender: WeightSender = GatheringSender(chosen.streamed)
    if chosen.sends_from(rank, device):
        sender = chosen.make_sender(options)
    sender.transport = transport
    return sender
