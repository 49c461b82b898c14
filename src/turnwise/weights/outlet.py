"""One trainer rank's side of any transport.

Tensors come as named items that are taken one at a time, since each may be gathered from the
ranks' shards by a collective at its turn: every rank takes them in the same order and to the end,
whatever fails, and only rank 0 writes or sends (over `ipc` between GPUs: each rank, to the workers
on its own). So no rank ever holds more than one whole tensor and the transport's buffers.
"""

import os
import socket
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from turnwise.errors import InputError, WeightUpdateError
from turnwise.weights.collective import CollectiveSender
from turnwise.weights.disk import DiskSender
from turnwise.weights.in_process import InProcessSender
from turnwise.weights.ipc import IpcSender, device_name, private_address
from turnwise.weights.manifest import Manifest, lay_out
from turnwise.weights.shm import ShmSender
from turnwise.weights.stream import (
    BUFFER_BYTES,
    WAIT_SECONDS,
    NamedTensors,
    StateDictInfo,
    taken_whole,
)

TRANSPORTS = ("shm", "ipc", "collective", "disk", "in_process")

_ANSWER_SHARE = 0.5
"""Of the time for an update: what a worker has for each of its answers, so that the others can
still be served when it gives none."""


class Outlet:
    """What a rank does for an update; made by `make_outlet`.

    Args:
        tensors: Names and shapes of what every update will bring; DTensors have those of the whole.
        dtype: The type that the engines load.
    """

    transport = ""

    def __init__(self, tensors: NamedTensors, dtype: torch.dtype, rank: int) -> None:
        # Without data: what is kept here must not keep the model's tensors alive.
        self._tensors = [(name, torch.empty(t.shape, device="meta")) for name, t in tensors]
        self._dtype = dtype
        self._rank = rank

    def publish(self, version: int, tensors: NamedTensors) -> dict[str, Any]:
        """Make a version ready for engines, which are given what rank 0 returns.

        `shm`, `disk` and `in_process` take the tensors now; the others leave them to `send`.

        Raises:
            WeightUpdateError: when they cannot be written, or are not those of the constructor.
        """
        entries, nbytes = lay_out(self._tensors, self._dtype)
        return Manifest(version, self.transport, self._where(), nbytes, entries).to_dict()

    def send(self, version: int, tensors: NamedTensors, devices: Sequence[str]) -> None:
        """Bring the tensors to the engines' workers while these load; `shm`, `disk` and
        `in_process` have nothing to send.

        Args:
            devices: Where each worker is that loads them, as engines tell it (`check_update`).

        Raises:
            WeightUpdateError: when a worker refused or failed, or the tensors changed.
            DeadlineError: when a worker did not answer in time.
        """

    def rendezvous(self) -> tuple[str, int]:
        """The address of this node and a free port of it, for `join`; asked of rank 0."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            port: int = probe.getsockname()[1]
        from ray.util import get_node_ip_address  # reads the environment when it is imported

        return get_node_ip_address(), port

    def join(self, ip: str, port: int, engine_workers: int, timeout: float | None = None) -> None:
        """collective: make the group of rank 0 and so many workers of engines, and leave the one
        before it; does nothing elsewhere.

        Raises:
            InputError: when the group cannot be made.
            DeadlineError: when a worker has not joined within half of `timeout` seconds.
        """

    def state_dict_info(self) -> StateDictInfo:
        """Shape and type of what arrives, by name."""
        kind = str(self._dtype).removeprefix("torch.")
        return {name: (tuple(tensor.shape), kind) for name, tensor in self._tensors}

    def close(self) -> None:
        """Give the transport's memory and addresses back."""

    def _where(self) -> str:
        return ""


class _Writer(Protocol):
    def write(self, version: int, tensors: NamedTensors) -> Manifest: ...

    def close(self) -> None: ...


class _Written(Outlet):
    """shm, disk: rank 0 writes, engines read later."""

    def __init__(
        self,
        transport: str,
        tensors: NamedTensors,
        dtype: torch.dtype,
        rank: int,
        folder: str | os.PathLike[str],
    ) -> None:
        super().__init__(tensors, dtype, rank)
        self.transport = transport
        self._writer: _Writer | None = None
        if rank == 0 and transport == "shm":
            self._writer = ShmSender(self._tensors, dtype)
        elif rank == 0:
            self._writer = DiskSender(self._tensors, dtype, folder)

    def publish(self, version: int, tensors: NamedTensors) -> dict[str, Any]:
        if self._writer is not None:
            return self._writer.write(version, tensors).to_dict()
        with taken_whole(tensors):
            return {}

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class _InProcess(Outlet):
    """Every rank publishes to the worker in its own process; where the tensors are gathered, that
    is a whole copy until the next version. They arrive as they are, in their own type."""

    transport = "in_process"

    def __init__(self, tensors: NamedTensors, dtype: torch.dtype, rank: int) -> None:
        named = list(tensors)
        super().__init__(named, dtype, rank)
        self._info = {
            name: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in named
        }
        self._sender = InProcessSender()

    def publish(self, version: int, tensors: NamedTensors) -> dict[str, Any]:
        return self._sender.write(version, tensors).to_dict()

    def state_dict_info(self) -> StateDictInfo:
        return self._info

    def close(self) -> None:
        self._sender.close()


class _Ipc(Outlet):
    """Rank 0 on CPUs, and each rank on GPUs, serves the workers of its own device at once."""

    transport = "ipc"

    def __init__(
        self,
        tensors: NamedTensors,
        dtype: torch.dtype,
        rank: int,
        device: torch.device,
        buffer_bytes: int,
        timeout: float,
    ) -> None:
        super().__init__(tensors, dtype, rank)
        self._device = device_name(device)
        self._alone = device.type == "cpu"
        self._sender: IpcSender | None = None
        if rank == 0 or not self._alone:
            self._sender = IpcSender(
                self._tensors,
                dtype,
                address=private_address() if self._alone else "",
                buffer_bytes=buffer_bytes,
                device=device,
                timeout=timeout * _ANSWER_SHARE,
            )

    def _where(self) -> str:
        return self._sender.address if self._sender is not None and self._alone else ""

    def send(self, version: int, tensors: NamedTensors, devices: Sequence[str]) -> None:
        here = list(devices).count(self._device)
        if self._sender is not None and here:
            self._sender.send(version, tensors, here)
            return
        with taken_whole(tensors):
            pass

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()


class _Collective(Outlet):
    """Rank 0 and the engines' workers are one process group; the other ranks only gather."""

    transport = "collective"

    def __init__(
        self,
        tensors: NamedTensors,
        dtype: torch.dtype,
        rank: int,
        device: torch.device,
        buffer_bytes: int,
        timeout: float,
    ) -> None:
        super().__init__(tensors, dtype, rank)
        self._device = device
        self._buffer_bytes = buffer_bytes
        self._timeout = timeout
        self._sender: CollectiveSender | None = None

    def join(self, ip: str, port: int, engine_workers: int, timeout: float | None = None) -> None:
        self.close()
        if self._rank:
            return
        self._sender = CollectiveSender(
            self._tensors,
            self._dtype,
            ip=ip,
            port=port,
            world_size=1 + engine_workers,
            buffer_bytes=self._buffer_bytes,
            device=self._device,
            timeout=(timeout or self._timeout) * _ANSWER_SHARE,
        )

    def send(self, version: int, tensors: NamedTensors, devices: Sequence[str]) -> None:
        if self._sender is not None:
            self._sender.send(version, tensors)
            return
        with taken_whole(tensors):
            if not self._rank:
                raise WeightUpdateError("the trainer is in no process group: join comes first")

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None


def make_outlet(
    transport: str,
    tensors: NamedTensors,
    dtype: torch.dtype = torch.float32,
    *,
    device: torch.device | None = None,
    rank: int = 0,
    folder: str | os.PathLike[str] = "",
    buffer_bytes: int = BUFFER_BYTES,
    timeout: float = WAIT_SECONDS,
) -> Outlet:
    """A rank's outlet.

    Args:
        transport: One of `TRANSPORTS`: `weights.transport`, or `in_process` where engines live in
            the trainer's processes.
        tensors: Names and shapes of what every update will bring, in their order.
        dtype: The type that the engines load.
        device: Where this rank's tensors are, a CPU if None.
        folder: disk: where versions are written.
        buffer_bytes: ipc, collective: bound of each of two buffers.
        timeout: Seconds for an update to land.

    Raises:
        InputError: when this machine cannot do the transport.
    """
    device = device or torch.device("cpu")
    if transport in ("shm", "disk"):
        return _Written(transport, tensors, dtype, rank, folder)
    if transport == "in_process":
        return _InProcess(tensors, dtype, rank)
    if transport not in TRANSPORTS:
        raise InputError(f"weights.transport: {transport} is none of {', '.join(TRANSPORTS)}")
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"weights.transport: {transport} works between CPUs or GPUs, not {device}")
    if transport == "ipc":
        return _Ipc(tensors, dtype, rank, device, buffer_bytes, timeout)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if not dist.is_backend_available(backend):
        raise InputError(f"weights.transport: collective needs torch with {backend} on {device}")
    return _Collective(tensors, dtype, rank, device, buffer_bytes, timeout)
