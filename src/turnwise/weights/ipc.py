"""The `ipc` transport: trainer and engine share a host, and on GPUs the device.

The trainer packs tensors into two buffers in turn and sends over ZMQ where they lie; the engine
answers once it has used a buffer, and only then is that buffer written again. On a CPU a buffer
is nameless shared memory, on a GPU it is memory that the engine opens by its CUDA IPC handle;
the protocol is the same. The GPU's half, `_CudaBuffer`, was never run.

    engine                      trainer
    hello                  ->
                           <-   header
    accepted or error      ->
                           <-   chunk: index, handle of its buffer
    used                   ->   (while the next one is packed)
                           <-   complete, or the reason why not
    loaded or error        ->
"""

import errno
import json
import math
import mmap
import os
import socket
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

import torch
import zmq

from turnwise.errors import DeadlineError, InputError, WeightUpdateError
from turnwise.weights.shm import open_nameless
from turnwise.weights.stream import (
    BUFFER_BYTES,
    WAIT_SECONDS,
    Header,
    NamedTensors,
    Receiver,
    Sender,
    StateDictInfo,
    check_exhausted,
    pack,
    unpack,
)

_FOLDER = f"/tmp/turnwise-{os.getuid()}"
_LINGER_MS = 1000
_PING_SECONDS = 1.0
"""How soon a trainer learns that its engine died."""
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


def device_address(device: torch.device, rank: int = 0) -> str:
    """Where the trainer on a device meets the engine's worker on it; on CPUs ranks tell them apart.

    Raises:
        InputError: when the folder for sockets belongs to another user.
    """
    if device.type == "cuda":
        name = str(torch.cuda.get_device_properties(device).uuid)
    else:
        name = f"{device.type}-{rank}"
    os.makedirs(_FOLDER, mode=0o700, exist_ok=True)
    if os.stat(_FOLDER).st_uid != os.getuid():
        raise InputError(f"{_FOLDER} belongs to another user; give the transport an address")
    return f"ipc://{_FOLDER}/{name}"


class IpcSender(Sender):
    """The trainer's side; serves one engine worker at a time, the one that asked first.

    Args:
        tensors: What every update will bring.
        dtype: The type that the engine loads.
        address: ZMQ's address to bind; by default that of `device`.
        buffer_bytes: Bound of each of the two buffers; a larger tensor enlarges them.
        device: Where the buffers are: that of the engine.
        timeout: Seconds that the engine has for each answer.

    Raises:
        InputError: when the address is taken, or the buffers do not fit.
    """

    def __init__(
        self,
        tensors: NamedTensors,
        dtype: torch.dtype = torch.float32,
        *,
        address: str = "",
        buffer_bytes: int = BUFFER_BYTES,
        device: torch.device | None = None,
        timeout: float = WAIT_SECONDS,
    ) -> None:
        super().__init__(tensors, dtype, buffer_bytes)
        device = device or torch.device("cpu")
        self.address = address or device_address(device)
        self._timeout = timeout
        self._socket = _bind(self.address)
        make = _CudaBuffer if device.type == "cuda" else _CpuBuffer
        self._callers: deque[bytes] = deque()
        self._buffers: list[_Buffer] = []
        try:
            self._buffers += [make(self._buffer_bytes, device) for _ in range(2)]
        except BaseException:
            self.close()
            raise

    def _send(self, version: int, source: Iterator[tuple[str, torch.Tensor]]) -> None:
        header = Header(version, self._chunks)
        peer = self._greet(header)
        awaited = f"accept version {version}"
        try:
            handles: list[dict[str, Any]] = []
            for index, chunk in enumerate(header.chunks):
                buffer = self._buffers[index % 2]  # its last use was acknowledged a round ago
                pack(chunk, buffer.bytes, source)
                buffer.settle()
                self._await(peer, awaited)
                if index < 2:
                    handles.append(buffer.handle())
                self._tell(peer, {"chunk": index, "handle": handles[index % 2]})
                awaited = f"use chunk {index + 1} of {len(header.chunks)} of version {version}"
            check_exhausted(source)
            self._await(peer, awaited)
        except BaseException as error:
            self._post(peer, {"abort": str(error) or type(error).__name__})
            raise
        self._tell(peer, {"complete": version})
        self._await(peer, f"load version {version}")

    def _greet(self, header: Header) -> bytes:
        """Send the header to the first engine that is there; returns its ZMQ identity."""
        deadline = time.monotonic() + self._timeout
        while True:
            if not self._callers:
                self._receive(b"", deadline, f"ask for version {header.version}")
            elif self._post(peer := self._callers.popleft(), {"header": header.to_dict()}):
                return peer

    def _await(self, peer: bytes, what: str) -> None:
        deadline = time.monotonic() + self._timeout
        while not (message := self._receive(peer, deadline, what)):
            pass
        if message["error"]:
            raise WeightUpdateError(f"the engine at {self.address} refused: {message['error']}")

    def _receive(self, peer: bytes, deadline: float, what: str) -> dict[str, Any]:
        """The peer's next message, or an empty one when another engine called."""
        while not self._socket.poll(_milliseconds(min(_PING_SECONDS, deadline - time.monotonic()))):
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"the engine at {self.address} did not {what} within {self._timeout:g} s"
                )
            if peer:
                self._tell(peer, {"ping": what})
        sender, body = self._socket.recv_multipart()
        message: dict[str, Any] = json.loads(body)
        if "hello" in message:
            self._callers.append(sender)
        return message if sender == peer else {}

    def _tell(self, peer: bytes, message: dict[str, Any]) -> None:
        if not self._post(peer, message):
            raise WeightUpdateError(f"the engine at {self.address} left in the middle of an update")

    def _post(self, peer: bytes, message: dict[str, Any]) -> bool:
        """Whether the peer is still there to be told."""
        try:
            self._socket.send_multipart([peer, json.dumps(message).encode()])
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            return False
        return True

    def close(self) -> None:
        self._socket.close(_LINGER_MS)
        for buffer in self._buffers:
            buffer.close()
        self._buffers = []


class IpcReceiver(Receiver):
    """The engine's side of one update."""

    def __init__(
        self, address: str, expected: StateDictInfo, device: torch.device, seconds: float
    ) -> None:
        super().__init__(expected, device, seconds)
        self._address = address
        self._opened: dict[str, torch.Tensor] = {}
        self._first: torch.Tensor | None = None
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED), zmq.POLLIN)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self._socket.disable_monitor()
            self._socket.close()
            raise InputError(f"{address} is no address to connect to: {error}") from error
        self._reply({"hello": os.getpid()})

    def poll(self) -> int | None:
        while self._first is None:
            if self.header is None:
                if not (message := self._receive("a header", wait=False)):
                    return None
                self._accept(Header.from_dict(message["header"]))
                self._reply({"error": ""})
            else:
                if not (message := self._receive(self._chunk_name(0), wait=False)):
                    return None
                self._first = self._open(message, 0)
        assert self.header is not None
        return self.header.version

    def chunks(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        assert self.header is not None
        assert self._first is not None
        buffer = self._first
        for index, chunk in enumerate(self.header.chunks):
            if index:
                buffer = self._open(self._receive(self._chunk_name(index)), index)
            yield unpack(chunk, buffer)
            self._settle()
            self._reply({"error": ""})
        self._receive(f"the end of version {self.header.version}")

    def end(self, error: str = "") -> None:
        if self.header is not None:
            self._reply({"error": error})
        self._socket.disable_monitor()
        self._socket.close()
        self._opened, self._first = {}, None

    def _receive(self, what: str, *, wait: bool = True) -> dict[str, Any]:
        """The next message; empty when none is there and it should not be waited for."""
        while True:
            ready = dict(self._poller.poll(_milliseconds(self._seconds_left) if wait else 0))
            if self._socket in ready:
                message: dict[str, Any] = json.loads(self._socket.recv())
                if "abort" in message:
                    raise WeightUpdateError(
                        f"the trainer at {self._address} gave up: {message['abort']}"
                    )
                if "ping" not in message:
                    return message
            elif ready:
                raise DeadlineError(f"the trainer at {self._address} died before it sent {what}")
            elif not self._seconds_left:
                raise DeadlineError(
                    f"the trainer at {self._address} did not send {what} within {self._seconds:g} s"
                )
            elif not wait:
                return {}

    def _reply(self, message: dict[str, Any]) -> None:
        self._socket.send(json.dumps(message).encode())

    def _open(self, message: dict[str, Any], index: int) -> torch.Tensor:
        if message["chunk"] != index:
            raise WeightUpdateError(
                f"chunk {message['chunk'] + 1} came instead of {self._chunk_name(index)}"
            )
        key = json.dumps(message["handle"])
        if key not in self._opened:
            kind = _CudaBuffer if self._device.type == "cuda" else _CpuBuffer
            self._opened[key] = kind.open(message["handle"], self._device)
        return self._opened[key]


class _Buffer(Protocol):
    bytes: torch.Tensor

    def handle(self) -> dict[str, Any]:
        """What another process opens it by, for one update."""
        ...

    def settle(self) -> None:
        """Wait until what was written is there."""
        ...

    def close(self) -> None: ...


class _CpuBuffer:
    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._file = open_nameless(nbytes)
        self.bytes = torch.frombuffer(mmap.mmap(self._file, nbytes), dtype=torch.uint8)

    def handle(self) -> dict[str, Any]:
        return {"path": f"/proc/{os.getpid()}/fd/{self._file}"}

    def settle(self) -> None:
        pass

    def close(self) -> None:
        os.close(self._file)

    @staticmethod
    def open(handle: dict[str, Any], device: torch.device) -> torch.Tensor:
        try:
            file = os.open(handle["path"], os.O_RDWR)
        except OSError as error:
            raise WeightUpdateError(
                f"the trainer's buffer cannot be opened ({error.strerror}); "
                "trainer and engine must share a host"
            ) from error
        try:
            return torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8)
        finally:
            os.close(file)


class _CudaBuffer:
    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def handle(self) -> dict[str, Any]:
        fields = self.bytes.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
        return {
            name: value.hex() if isinstance(value, bytes) else value
            for name, value in zip(_CUDA_HANDLE, fields, strict=True)
        }

    def settle(self) -> None:
        torch.cuda.current_stream(self.bytes.device).synchronize()

    def close(self) -> None:
        pass

    @staticmethod
    def open(handle: dict[str, Any], device: torch.device) -> torch.Tensor:
        fields = [
            bytes.fromhex(value) if isinstance(value, str) else value
            for value in map(handle.__getitem__, _CUDA_HANDLE[1:])
        ]
        storage = torch.UntypedStorage._new_shared_cuda(device.index, *fields)
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _bind(address: str) -> "zmq.Socket[bytes]":
    if address.startswith("ipc://") and _answers(address.removeprefix("ipc://")):
        raise InputError(f"another trainer is at {address}: give each its own address")
    router: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    try:
        router.bind(address)
    except zmq.ZMQError as error:
        router.close()
        raise InputError(f"{address} cannot be bound: {error}") from error
    return router


def _milliseconds(seconds: float) -> int:
    return max(0, math.ceil(seconds * 1000))


def _answers(path: str) -> bool:
    """ZMQ itself would silently take the place of whoever listens there."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
    return True
