"""The `ipc` transport: trainer and engine share a host, and on GPUs the device.

The trainer packs tensors into two buffers in turn and sends their location over ZMQ; each engine
worker answers once it has used a buffer, and when all have, that buffer is written again. A
worker that fails is left out, and the others continue. On a CPU a buffer is nameless shared
memory, on a GPU it is memory that the engine opens by its CUDA IPC handle; the protocol is the
same. Rank 0 on CPUs, and each rank on GPUs, serves the workers on its device.

    engine                      trainer
    hello                  ->
                           <-   manifest
    accepted or error      ->
                           <-   chunk: index, handle of its buffer
    used                   ->   (while the next one is packed)
                           <-   complete, or the reason why not
    loaded or error        ->
"""

import errno
import json
import math
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence

import torch
import zmq

from turnwise.core.deadlines import deadline_error
from turnwise.core.json_types import JsonObject
from turnwise.errors import DeadlineError, InputError, TurnwiseError, WeightUpdateError, text_of
from turnwise.weights.chunks import Source, check_exhausted, pack, unpack
from turnwise.weights.ipc_address import (
    device_address,
    device_name,
    is_answering,
    private_address,
    socket_path,
)
from turnwise.weights.ipc_buffer import Buffer, CpuBuffer, CudaBuffer
from turnwise.weights.manifest import Manifest, NamedTensors, StateDictInfo
from turnwise.weights.stream import (
    ANSWER_SHARE,
    StreamReceiver,
    StreamSender,
    require_cpu_or_gpu,
)
from turnwise.weights.transport import (
    BUFFER_BYTES,
    WAIT_SECONDS,
    EngineWorker,
    SenderOptions,
    Transport,
)

_LINGER_MS = 1000
_PING_SECONDS = 1.0
"""Interval at which a trainer checks that its engines are alive."""


class IpcTransport(Transport):
    """ZMQ and memory that both sides map, on one host; on GPUs, one device.

    Example:
        find_transport("ipc").make_sender(options)
    """

    streamed = True

    def sends_from(self, rank: int, device: torch.device) -> bool:
        return rank == 0 or device.type == "cuda"

    def make_sender(self, options: SenderOptions) -> "IpcSender":
        require_cpu_or_gpu("ipc", options.device)
        return IpcSender(
            options.tensors,
            options.dtype,
            address=private_address() if options.device.type == "cpu" else "",
            buffer_bytes=options.buffer_bytes,
            device=options.device,
            timeout=options.timeout * ANSWER_SHARE,
        )

    def validate(self, manifest: Manifest, worker: EngineWorker) -> None:
        address = manifest.path or device_address(worker.device, worker.rank)
        if (path := socket_path(address)) and not os.path.exists(path):
            raise WeightUpdateError(
                f"no trainer listens at {address}: trainer and engine must share a host, or a GPU"
            )

    def receive(self, manifest: Manifest, worker: EngineWorker, seconds: float) -> "IpcReceiver":
        address = manifest.path or device_address(worker.device, worker.rank)
        return IpcReceiver(address, worker.require_expected(), worker.device, seconds)


class IpcSender(StreamSender):
    """Sender on a rank of the trainer; serves engine workers in the order in which they connect.

    Args:
        tensors: The tensors of every update.
        dtype: The type that the engine loads.
        address: ZMQ's address to bind; by default that of `device`.
        buffer_bytes: Maximum size of each of the two buffers; a larger tensor enlarges them.
        device: Device of the buffers: that of the engine.
        timeout: Seconds for each answer of the engine.

    Raises:
        InputError: when the address is taken, or the buffers do not fit.

    Example:
        sender = IpcSender(model.named_parameters())
        sender.send(1, model.named_parameters())  # while the engine loads
    """

    transport = "ipc"

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
        self._device = device
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

    def _path(self) -> str:
        return self.address if self._device.type == "cpu" else ""

    def _send(self, manifest: Manifest, source: Source, devices: Sequence[str]) -> None:
        """Serve the workers on this device side by side; one worker if no devices are given.

        When a worker fails, the others are still served before its error is raised.
        """
        self._due = list(devices).count(device_name(self._device)) if devices else 1
        if not self._due:
            return
        self._offer(manifest)
        version, chunks = manifest.version, self._chunks
        use = f"use chunk {{}} of {len(chunks)} of version {version}"
        try:
            handles: list[JsonObject] = []
            for index, chunk in enumerate(chunks):
                buffer = self._buffers[index % 2]  # its last use was acknowledged a round ago
                pack(chunk, buffer.bytes, source)
                buffer.synchronize()
                if index:
                    self._await(use.format(index))
                if index < 2:
                    handles.append(buffer.handle())
                self._post_to_all({"chunk": index, "handle": handles[index % 2]})
            check_exhausted(source)
            self._await(use.format(len(chunks)))
        except BaseException as error:
            for peer in self._peers:
                self._post(peer, {"abort": text_of(error)})
            raise
        self._post_to_all({"complete": version})
        self._await(f"load version {version}")
        if self._failures:
            raise self._failures[0]

    def _offer(self, manifest: Manifest) -> None:
        """Offer the manifest to waiting workers, in order, until the expected number accept.

        A worker that disconnects before it answers has given up, maybe before this update began,
        and the next one takes its place.
        """
        deadline = time.monotonic() + self._timeout
        self._peers, self._failures = set(), []
        offered: set[bytes] = set()
        while (answers := len(self._peers) + len(self._failures)) < self._due:
            if self._callers and len(offered) + answers < self._due:
                peer = self._callers.popleft()
                if self._post(peer, {"manifest": manifest.to_dict()}):
                    offered.add(peer)
            elif self._readable(deadline):
                peer, message = self._receive()
                if peer in offered:
                    offered.discard(peer)
                    self._peers.add(peer)
                    self._check_answer(peer, message)
            elif time.monotonic() > deadline:
                late = self._late(
                    f"{'accept' if offered else 'request'} version {manifest.version}"
                )
                for peer in offered:
                    self._drop(peer, late)
                self._failures.append(late)
                break
            else:
                offered = {peer for peer in offered if self._post(peer, {"ping": "a manifest"})}
        self._check_anyone()

    def _await(self, what: str) -> None:
        """Wait until every worker has answered; drop those that do not in time."""
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
                self._post_to_all({"ping": what})
        self._check_anyone()

    def _post_to_all(self, message: JsonObject) -> None:
        for peer in list(self._peers):
            if not self._post(peer, message):
                why = f"the engine at {self.address} disconnected during an update"
                self._drop(peer, WeightUpdateError(why))
        self._check_anyone()

    def _check_answer(self, peer: bytes, answer: JsonObject) -> None:
        if answer["error"]:
            why = f"the engine at {self.address} refused: {answer['error']}"
            self._drop(peer, WeightUpdateError(why))

    def _late(self, what: str) -> DeadlineError:
        return deadline_error(self._timeout, f"the engine at {self.address} did not {what}")

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

    def _receive(self) -> tuple[bytes, JsonObject]:
        """Return the next message, and its sender."""
        peer, body = self._socket.recv_multipart()
        message: JsonObject = json.loads(body)
        if "hello" in message:
            self._callers.append(peer)
        return peer, message

    def _post(self, peer: bytes, message: JsonObject) -> bool:
        """Send a message; return whether the peer is still connected."""
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


class IpcReceiver(StreamReceiver):
    """Receiver of one update in an engine's worker.

    Example:
        receiver = IpcReceiver(address, expected, device, seconds=120.0)  # then as `Receiver`
    """

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
            raise InputError(f"cannot connect to {address}: {error}") from error
        self._reply({"hello": os.getpid()})

    def poll(self) -> int | None:
        while self._first is None:
            if self.manifest is None:
                if not (message := self._receive("a manifest", wait=False)):
                    return None
                self._accept(Manifest.from_dict(message["manifest"]))
                self._reply({"error": ""})
            else:
                if not (message := self._receive(self._chunk_name(0), wait=False)):
                    return None
                self._first = self._open(message, 0)
        assert self.manifest is not None
        return self.manifest.version

    def chunks(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        assert self.manifest is not None
        assert self._first is not None
        buffer = self._first
        for index, chunk in enumerate(self._chunks):
            if index:
                buffer = self._open(self._receive(self._chunk_name(index)), index)
            yield unpack(chunk, buffer)
            self._synchronize()
            self._reply({"error": ""})
        self._receive(f"the end of version {self.manifest.version}")

    def end(self, error: str = "") -> None:
        if self.manifest is not None:
            self._reply({"error": error})
        self._socket.disable_monitor()
        self._socket.close()
        self._opened, self._first = {}, None

    def _receive(self, what: str, *, wait: bool = True) -> JsonObject:
        """Return the next message; empty if there is none and `wait` is False."""
        while True:
            ready = dict(self._poller.poll(_milliseconds(self._seconds_left) if wait else 0))
            if self._socket in ready:
                message: JsonObject = json.loads(self._socket.recv())
                if "abort" in message:
                    raise WeightUpdateError(
                        f"the trainer at {self._address} gave up: {message['abort']}"
                    )
                if "ping" not in message:
                    return message
            elif ready:
                raise DeadlineError(f"the trainer at {self._address} died before it sent {what}")
            elif not self._seconds_left:
                raise deadline_error(
                    self._seconds, f"the trainer at {self._address} did not send {what}"
                )
            elif not wait:
                return {}

    def _reply(self, message: JsonObject) -> None:
        self._socket.send(json.dumps(message).encode())

    def _open(self, message: JsonObject, index: int) -> torch.Tensor:
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
    if (path := socket_path(address)) and is_answering(path):
        raise InputError(f"another trainer uses {address}: give each its own address")
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
