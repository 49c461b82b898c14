"""The streaming transports behind one face, so that both pass the same tests."""

import asyncio
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tests.weights.trainer import JOIN_SECONDS, Named, open_collective
from turnwise.core.json_types import dtype_name
from turnwise.engine.protocol import Rendezvous
from turnwise.weights.collective import CollectiveReceiver
from turnwise.weights.ipc import IpcReceiver, IpcSender
from turnwise.weights.manifest import StateDictInfo
from turnwise.weights.process_group import ProcessGroup
from turnwise.weights.transport import (
    Receiver,
    ReceiverOptions,
    SenderOptions,
    StreamReceiver,
    StreamSender,
)

if TYPE_CHECKING:
    from turnwise.serving.worker_handle import WorkerHandle

CPU = torch.device("cpu")


_held: list[socket.socket] = []


def free_port() -> int:
    """Return a port that only those who ask for it by its number get until this process ends."""
    holder = socket.socket()
    # A store sets this option too, so that it may open what is bound here, but not listened to.
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    _held.append(holder)
    port: int = holder.getsockname()[1]
    return port


def state_dict_info(tensors: Named, dtype: torch.dtype = torch.float32) -> StateDictInfo:
    """Return the shapes and types that an engine expects of a sender."""
    return {name: (tuple(tensor.shape), dtype_name(dtype)) for name, tensor in tensors}


def open_ipc(tensors: Named, address: str, **options: Any) -> IpcSender:
    return IpcSender(SenderOptions(tensors, **options), address)


class IpcLink:
    open_sender = staticmethod(open_ipc)

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="turnwise-")
        self.options: dict[str, Any] = {"address": f"ipc://{Path(self._folder.name)}/socket"}
        self.where = self.options["address"]

    def sender(self, tensors: Named, **options: Any) -> StreamSender:
        """A trainer's side, and an engine's for `receiver`."""
        return open_ipc(tensors, **self.options, **options)

    async def join(self, engine: "WorkerHandle", tensors: Named, **options: Any) -> StreamSender:
        """A trainer's side beside the engine."""
        return self.sender(tensors, **options)

    async def join_engine(self, engine: "WorkerHandle") -> None:
        pass

    def receiver(self, expected: StateDictInfo, seconds: float) -> StreamReceiver:
        return IpcReceiver(self.where, expected, CPU, seconds)

    async def update(self, engine: "WorkerHandle", seconds: float) -> None:
        await engine._call("receive_weights", "ipc", self.where, seconds)

    def close(self) -> None:
        self._folder.cleanup()


class CollectiveLink:
    open_sender = staticmethod(open_collective)

    def __init__(self) -> None:
        self.port = free_port()
        self.options: dict[str, Any] = {"ip": "127.0.0.1", "port": self.port}
        self.where = f"127.0.0.1:{self.port}"
        self._group: ProcessGroup | None = None

    def sender(self, tensors: Named, **options: Any) -> StreamSender:
        def join() -> None:
            self._group = ProcessGroup(1, "127.0.0.1", self.port, 2, 1, CPU, JOIN_SECONDS)

        thread = threading.Thread(target=join)
        thread.start()
        sender = open_collective(tensors, **self.options, **options)
        thread.join()
        return sender

    async def join(self, engine: "WorkerHandle", tensors: Named, **options: Any) -> StreamSender:
        make = asyncio.to_thread(open_collective, tensors, **self.options, **options)
        return (await asyncio.gather(make, self.join_engine(engine)))[0]

    async def join_engine(self, engine: "WorkerHandle") -> None:
        group = Rendezvous(0, "127.0.0.1", self.port, 2, 1)
        await engine._call("init_collective", group, JOIN_SECONDS)

    def receiver(self, expected: StateDictInfo, seconds: float) -> StreamReceiver:
        assert self._group is not None
        return CollectiveReceiver(ReceiverOptions(CPU, 0, group=self._group), expected, seconds)

    async def update(self, engine: "WorkerHandle", seconds: float) -> None:
        await engine._call("receive_weights", "collective", "", seconds)

    def close(self) -> None:
        self._group = None


Link = IpcLink | CollectiveLink
LINKS: dict[str, type[Link]] = {"ipc": IpcLink, "collective": CollectiveLink}


def impatient_from_chunk_2(
    sender: StreamSender, tensors: Named, received: threading.Event, seconds: float
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors; from those of the second chunk on the sender waits `seconds` for an answer.

    That chunk is packed once `received` says that engines have the first.
    """
    first = len(sender._chunks[0])
    yield from tensors[:first]
    assert received.wait(JOIN_SECONDS)
    sender._timeout = seconds  # type: ignore[attr-defined]
    yield from tensors[first:]


def hurry(receiver: StreamReceiver, seconds: float) -> None:
    """Give a receiver that stops reading little time: an abandoned broadcast lasts as long."""
    receiver._deadline = time.monotonic() + seconds


def some_tensors() -> Named:
    generator = torch.Generator().manual_seed(0)
    return [
        *((f"t{i}", torch.randn(50, 7 + i, generator=generator)) for i in range(12)),
        ("larger than a buffer", torch.randn(5000, generator=generator)),
        ("transposed", torch.randn(30, 20, generator=generator).T),
        ("scalar", torch.tensor(3.0)),
        ("empty", torch.empty(0, 4)),
    ]


def receive_stream(receiver: Receiver, pause: float = 0.0) -> tuple[int, Named]:
    """Play the engine: read every chunk twice with a pause between, and keep the second."""
    received: Named = []
    try:
        while (version := receiver.poll()) is None:
            time.sleep(0.001)
        for tensors in receiver.chunks():
            before = [tensor.clone() for _, tensor in tensors]
            time.sleep(pause)
            received += [(name, tensor.clone()) for name, tensor in tensors]
            after = [tensor for _, tensor in received[-len(before) :]]
            torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)
    except BaseException as error:
        receiver.end(str(error))
        raise
    receiver.end()
    return version, received


def assert_same(received: Named, sent: Named, dtype: torch.dtype = torch.float32) -> None:
    assert [name for name, _ in received] == [name for name, _ in sent]
    for (name, ours), (_, theirs) in zip(received, sent, strict=True):
        assert ours.dtype == dtype, name
        assert torch.equal(ours, theirs.to(dtype)), name
