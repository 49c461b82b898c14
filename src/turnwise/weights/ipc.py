"""The `ipc` transport: trainer and engine share a host, and on GPUs the device.

The trainer packs tensors into two buffers in turn and sends over ZMQ where they lie; each engine
worker answers once it has used a buffer, and when all have, that buffer is written again. A
worker that fails is left out, and the others go on. On a CPU a buffer is nameless shared memory,
on a GPU it is memory that the engine opens by its CUDA IPC handle; the protocol is the same.

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
import glob
import itertools
import json
import math
import os
import socket
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
import zmq

from turnwise.errors import DeadlineError, InputError, TurnwiseError, WeightUpdateError
from turnwise.weights.ipc_buffer import Buffer, CpuBuffer, CudaBuffer
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
_PRIVATE = "trainer"
_addresses = itertools.count()
_LINGER_MS = 1000
_PING_SECONDS = 1.0
"""How soon a trainer learns that its engine died."""


def device_address(device: torch.device, rank: int = 0) -> str:
    """Where the trainer on a device meets the engine's worker on it; on CPUs ranks tell them apart.

    Raises:
        InputError: when the folder for sockets belongs to another user.
    """
    return _address(device_name(device) if device.type == "cuda" else f"{device.type}-{rank}")


def private_address() -> str:
    """An address that no other trainer of this user binds; raises as `device_address` does.

    Sockets of trainers that were killed are removed on the way.
    """
    address = _address(f"{_PRIVATE}-{os.getpid()}-{next(_addresses)}")
    for path in glob.glob(f"{_FOLDER}/{_PRIVATE}-*"):
        if not os.path.exists(f"/proc/{path.split('-')[-2]}") and not _answers(path):
            with suppress(FileNotFoundError):
                os.unlink(path)
    return address


def device_name(device: torch.device) -> str:
    """What has to be the same at both ends: the GPU, by its UUID, or the host of CPUs."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_properties(device).uuid)
    return socket.gethostname()


def _address(name: str) -> str:
    os.makedirs(_FOLDER, mode=0o700, exist_ok=True)
    if os.stat(_FOLDER).st_uid != os.getuid():
        raise InputError(f"{_FOLDER} belongs to another user; give the transport an address")
    return f"ipc://{_FOLDER}/{name}"


def refusal(address: str) -> str:
    """Why no trainer can be there, or "" when one can."""
    if address.startswith("ipc://") and not os.path.exists(address.removeprefix("ipc://")):
        return f"no trainer is at {address}: trainer and engine must share a host, or a GPU"
    return ""


class IpcSender(Sender):
    """The trainer's side; serves those engine workers that asked first.

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
        make = CudaBuffer if device.type == "cuda" else CpuBuffer
        self._callers: deque[bytes] = deque()
        self._due = 1
        self._peers: set[bytes] = set()
        """Workers that are being served, and have not failed."""
        self._failures: list[TurnwiseError] = []
        self._buffers: list[Buffer] = []
        try:
            self._buffers += [make(self._buffer_bytes, device) for _ in range(2)]
        except BaseException:
            self.close()
            raise

    def send(self, version: int, tensors: NamedTensors, workers: int = 1) -> None:
        """Bring the tensors to so many workers at once; otherwise as any sender does.

        When a worker fails the others are served all the same, and then its error is raised.
        """
        self._due = workers
        super().send(version, tensors)

    def _send(self, version: int, source: Iterator[tuple[str, torch.Tensor]]) -> None:
        header = Header(version, self._chunks)
        self._greet(header)
        use = f"use chunk {{}} of {len(header.chunks)} of version {version}"
        try:
            handles: list[dict[str, Any]] = []
            for index, chunk in enumerate(header.chunks):
                buffer = self._buffers[index % 2]  # its last use was acknowledged a round ago
                pack(chunk, buffer.bytes, source)
                buffer.settle()
                if index:
                    self._await(use.format(index))
                if index < 2:
                    handles.append(buffer.handle())
                self._tell({"chunk": index, "handle": handles[index % 2]})
            check_exhausted(source)
            self._await(use.format(len(header.chunks)))
        except BaseException as error:
            for peer in self._peers:
                self._post(peer, {"abort": _words(error)})
            raise
        self._tell({"complete": version})
        self._await(f"load version {version}")
        if self._failures:
            raise self._failures[0]

    def _greet(self, header: Header) -> None:
        """Offer the header to those who asked first, until as many have accepted as are due.

        One that leaves before it answers has given up, maybe just before this update began, and
        the next one takes its place.
        """
        deadline = time.monotonic() + self._timeout
        self._peers, self._failures = set(), []
        offered: set[bytes] = set()
        while (answers := len(self._peers) + len(self._failures)) < self._due:
            if self._callers and len(offered) + answers < self._due:
                peer = self._callers.popleft()
                if self._post(peer, {"header": header.to_dict()}):
                    offered.add(peer)
            elif self._readable(deadline):
                peer, message = self._receive()
                if peer in offered:
                    offered.discard(peer)
                    self._peers.add(peer)
                    self._check_answer(peer, message)
            elif time.monotonic() > deadline:
                late = self._late(f"{'accept' if offered else 'ask for'} version {header.version}")
                for peer in offered:
                    self._drop(peer, late)
                self._failures.append(late)
                break
            else:
                offered = {peer for peer in offered if self._post(peer, {"ping": "a header"})}
        self._check_anyone()

    def _await(self, what: str) -> None:
        """Wait until every worker has answered; one that does not is left out."""
        deadline = time.monotonic() + self._timeout
        answered: set[bytes] = set()
        while waiting := self._peers - answered:
            if self._readable(deadline):
                peer, message = self._receive()
                if peer in waiting:
                    answered.add(peer)
                    self._check_answer(peer, message)
            elif time.monotonic() > deadline:
                for peer in waiting:
                    self._drop(peer, self._late(what))
            else:
                self._tell({"ping": what})
        self._check_anyone()

    def _tell(self, message: dict[str, Any]) -> None:
        for peer in list(self._peers):
            if not self._post(peer, message):
                why = f"the engine at {self.address} left in the middle of an update"
                self._drop(peer, WeightUpdateError(why))
        self._check_anyone()

    def _check_answer(self, peer: bytes, answer: dict[str, Any]) -> None:
        if answer["error"]:
            why = f"the engine at {self.address} refused: {answer['error']}"
            self._drop(peer, WeightUpdateError(why))

    def _late(self, what: str) -> DeadlineError:
        return DeadlineError(
            f"the engine at {self.address} did not {what} within {self._timeout:g} s"
        )

    def _drop(self, peer: bytes, error: TurnwiseError) -> None:
        self._peers.discard(peer)
        self._post(peer, {"abort": str(error)})
        self._failures.append(error)

    def _check_anyone(self) -> None:
        if not self._peers:
            raise self._failures[0]

    def _readable(self, deadline: float) -> bool:
        """Wait for a message, but only until the next ping is due."""
        wait = min(_PING_SECONDS, deadline - time.monotonic())
        return bool(self._socket.poll(_milliseconds(wait)))

    def _receive(self) -> tuple[bytes, dict[str, Any]]:
        """The next message, and whose it is."""
        peer, body = self._socket.recv_multipart()
        message: dict[str, Any] = json.loads(body)
        if "hello" in message:
            self._callers.append(peer)
        return peer, message

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
            kind = CudaBuffer if self._device.type == "cuda" else CpuBuffer
            self._opened[key] = kind.open(message["handle"], self._device)
        return self._opened[key]


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


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__


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
