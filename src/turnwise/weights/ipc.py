"""The `ipc` transport: trainer and engine share a host, and on GPUs also the device.

The trainer packs tensors into two alternating buffers and sends the buffers' location over ZMQ. The
trainer rewrites a buffer only after every worker has used it. A worker that fails is left out. On a
CPU a buffer is nameless shared memory; on a GPU the engine opens it by its CUDA IPC handle. On
CPUs, rank 0 serves all workers; on GPUs, each rank serves the workers on its device.

    engine                      trainer
    hello                  ->
                           <-   manifest
    accepted or error      ->
                           <-   chunk: index, handle of its buffer
    used                   ->   (while the next chunk is packed)
                           <-   complete, or the reason for giving up
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
from collections.abc import Iterator, Sequence
from contextlib import suppress

import torch
import zmq

from turnwise.core.deadlines import deadline_error
from turnwise.core.json_types import JsonObject
from turnwise.errors import DeadlineError, InputError, TurnwiseError, WeightUpdateError, text_of
from turnwise.internals.torch import open_gpu_memory, share_gpu_memory
from turnwise.weights.manifest import (
    Manifest,
    NamedTensors,
    Source,
    StateDictInfo,
    check_exhausted,
    pack,
)
from turnwise.weights.process_group import device_name
from turnwise.weights.shm import address_of, map_whole, mapped, open_nameless
from turnwise.weights.transport import (
    ReceiverOptions,
    SenderOptions,
    StreamReceiver,
    StreamSender,
    Transport,
)

_LINGER_MS = 1000
_PING_SECONDS = 1.0  # interval at which a trainer checks that its engines are alive
_FOLDER = f"/tmp/turnwise-{os.getuid()}"  # folder of the sockets, which only this user may enter
_PRIVATE = "trainer"
_private_numbers = itertools.count()


class IpcTransport(Transport):
    """ZMQ messages and shared memory on one host; on GPUs, on one device."""

    streamed = True

    def sends_from(self, rank: int, device: torch.device) -> bool:
        return rank == 0 or device.type == "cuda"

    def make_sender(self, options: SenderOptions) -> "IpcSender":
        address = options.address
        if address is None:
            address = private_address() if options.device.type == "cpu" else ""
        return IpcSender(options, address)

    def validate(self, manifest: Manifest, options: ReceiverOptions) -> None:
        address = manifest.path or device_address(options.device, options.rank)
        if (path := _socket_path(address)) and not os.path.exists(path):
            raise WeightUpdateError(
                f"no trainer listens at {address}: trainer and engine must share a host, or a GPU"
            )

    def receive(
        self, manifest: Manifest, options: ReceiverOptions, seconds: float
    ) -> "IpcReceiver":
        address = manifest.path or device_address(options.device, options.rank)
        return IpcReceiver(address, options.expected_of(manifest), options.device, seconds)


class IpcSender(StreamSender):
    """Sender on a rank of the trainer; serves engine workers in the order in which they connect.

    It binds the ZMQ address `address`, by default the address of the options' device.
    """

    transport = "ipc"

    def __init__(self, options: SenderOptions, address: str = "") -> None:
        super().__init__(options)
        self.address = address or device_address(self._device)
        self._path = self.address if self._device.type == "cpu" else ""
        if (path := _socket_path(self.address)) and _is_answering(path):
            raise InputError(f"another trainer uses {self.address}: give each its own address")
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._callers: deque[bytes] = deque()
        self._peers: set[bytes] = set()  # workers that are served and have not failed
        self._failures: list[TurnwiseError] = []
        self._buffers: list[tuple[torch.Tensor, int]] = []
        """Flat tensors of bytes that other processes open, each with its file descriptor; on GPUs
        the descriptor is -1."""
        nbytes = self._buffer_bytes
        try:
            self._socket.bind(self.address)
            for _ in range(2):
                if self._device.type == "cuda":
                    flat = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
                    self._buffers.append((flat, -1))
                else:
                    file = open_nameless(nbytes)
                    self._buffers.append((map_whole(file, nbytes), file))
        except BaseException as error:
            self.close()
            if isinstance(error, zmq.ZMQError):
                raise InputError(f"{self.address} cannot be bound: {error}") from error
            raise

    def send_as(self, manifest: Manifest, source: Source, devices: Sequence[str]) -> None:
        """Serve all workers on this device together; if `devices` is empty, serve one worker.

        If a worker fails, the remaining workers are served before the error is raised.
        """
        due = list(devices).count(device_name(self._device)) if devices else 1
        if not due:
            return
        self._offer(manifest, due)
        version, chunks = manifest.version, self._chunks
        use = f"use chunk {{}} of {len(chunks)} of version {version}"
        try:
            handles: list[JsonObject] = []
            for index, chunk in enumerate(chunks):
                buffer, file = self._buffers[index % 2]  # every worker has used its last content
                pack(chunk, buffer, source)
                if self._device.type == "cuda":
                    torch.cuda.current_stream(buffer.device).synchronize()
                if index:
                    self._await(use.format(index))
                if index < 2:
                    if file >= 0:
                        handles.append({"address": address_of(file)})
                    else:  # a handle of CUDA IPC
                        fields = share_gpu_memory(buffer)
                        plain = [f.hex() if isinstance(f, bytes) else f for f in fields]
                        handles.append({"cuda": plain})
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

    def _offer(self, manifest: Manifest, due: int) -> None:
        """Offer the manifest to waiting workers, in order, until `due` workers have answered."""
        deadline = time.monotonic() + self._timeout
        self._peers, self._failures = set(), []
        offered: set[bytes] = set()
        while (answers := len(self._peers) + len(self._failures)) < due:
            if self._callers and len(offered) + answers < due:
                peer = self._callers.popleft()
                if self._post(peer, {"manifest": manifest.to_dict()}):
                    offered.add(peer)
            elif received := self._receive(deadline):
                peer, message = received
                if peer in offered:
                    offered.discard(peer)
                    self._peers.add(peer)
                    self._check_answer(peer, message)
            elif time.monotonic() > deadline:
                what = "accept" if offered else "request"
                late = self._late(f"{what} version {manifest.version}")
                for peer in offered:
                    self._drop(peer, late)
                self._failures.append(late)
                break
            else:  # a worker that has disconnected is replaced by the next in the queue
                offered = {peer for peer in offered if self._post(peer, {"ping": "a manifest"})}
        if not self._peers:
            raise self._failures[0]

    def _await(self, what: str) -> None:
        """Wait until every worker has answered; drop workers that do not answer in time."""
        deadline = time.monotonic() + self._timeout
        answered: set[bytes] = set()
        while waiting := self._peers - answered:
            if received := self._receive(deadline):
                peer, message = received
                if peer in waiting:
                    answered.add(peer)
                    self._check_answer(peer, message)
            elif time.monotonic() > deadline:
                for peer in waiting:
                    self._drop(peer, self._late(what))
            else:
                self._post_to_all({"ping": what})
        if not self._peers:
            raise self._failures[0]

    def _post_to_all(self, message: JsonObject) -> None:
        for peer in list(self._peers):
            if not self._post(peer, message):
                why = f"the engine at {self.address} disconnected during an update"
                self._drop(peer, WeightUpdateError(why))

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

    def _receive(self, deadline: float) -> tuple[bytes, JsonObject] | None:
        """Wait for a message; return its sender and the message, or None if no message came before
        the next ping is due."""
        wait = min(_PING_SECONDS, deadline - time.monotonic())
        if not self._socket.poll(_milliseconds(wait)):
            return None
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
        for _, file in self._buffers:
            if file >= 0:
                os.close(file)
        self._buffers = []


class IpcReceiver(StreamReceiver):
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
        self._socket.send_json({"hello": os.getpid()})

    def poll(self) -> int | None:
        while self._first is None:
            if self.manifest is None:
                if not (message := self._receive("a manifest", wait=False)):
                    return None
                self._accept(Manifest.from_dict(message["manifest"]))
                self._socket.send_json({"error": ""})
            else:
                if not (message := self._receive(self._chunk_name(0), wait=False)):
                    return None
                self._first = self._open(message, 0)
        return self._version

    def chunks(self) -> Iterator[NamedTensors]:
        assert self._first is not None
        buffer = self._first
        for index, chunk in enumerate(self._chunks):
            if index:
                buffer = self._open(self._receive(self._chunk_name(index)), index)
            yield from self._unpacked(chunk, buffer)
            self._socket.send_json({"error": ""})
        self._receive(f"the end of version {self._version}")

    def end(self, error: str = "") -> None:
        if self.manifest is not None:
            self._socket.send_json({"error": error})
        self._socket.disable_monitor()
        self._socket.close()
        self._opened, self._first = {}, None

    def _receive(self, what: str, *, wait: bool = True) -> JsonObject:
        """Return the next message; {} if `wait` is False and no message has come."""
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

    def _open(self, message: JsonObject, index: int) -> torch.Tensor:
        if message["chunk"] != index:
            raise WeightUpdateError(
                f"chunk {message['chunk'] + 1} came instead of {self._chunk_name(index)}"
            )
        handle, device = message["handle"], self._device
        key = json.dumps(handle)
        if key not in self._opened:
            if device.type == "cuda":
                fields = [bytes.fromhex(f) if isinstance(f, str) else f for f in handle["cuda"][1:]]
                number = torch.cuda.current_device() if device.index is None else device.index
                storage = open_gpu_memory(number, fields)
                opened = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
            else:
                opened = mapped(handle["address"], "the trainer's buffer")
            self._opened[key] = opened
        return self._opened[key]


def _milliseconds(seconds: float) -> int:
    return max(0, math.ceil(seconds * 1000))


def device_address(device: torch.device, rank: int = 0) -> str:
    """Return the address where the trainer and a worker on the same device meet; on CPUs each rank
    has its own address."""
    return _address(device_name(device) if device.type == "cuda" else f"{device.type}-{rank}")


def private_address() -> str:
    """Return an address that only this trainer uses; remove the sockets of trainers that were
    killed."""
    address = _address(f"{_PRIVATE}-{os.getpid()}-{next(_private_numbers)}")
    for path in glob.glob(f"{_FOLDER}/{_PRIVATE}-*"):
        if not os.path.exists(f"/proc/{path.split('-')[-2]}") and not _is_answering(path):
            with suppress(FileNotFoundError):
                os.unlink(path)
    return address


def _address(name: str) -> str:
    os.makedirs(_FOLDER, mode=0o700, exist_ok=True)
    if os.stat(_FOLDER).st_uid != os.getuid():
        raise InputError(f"{_FOLDER} belongs to another user; give the transport an address")
    return f"ipc://{_FOLDER}/{name}"


def _socket_path(address: str) -> str:
    """Return the path of an address's socket, or "" if the address is not a path."""
    return address.removeprefix("ipc://") if address.startswith("ipc://") else ""


def _is_answering(path: str) -> bool:
    """Return whether a process listens on a Unix socket; ZMQ itself would silently replace such a
    socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
    return True
