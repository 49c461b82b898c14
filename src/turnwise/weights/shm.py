"""The `shm` transport: two shared-memory buffers, written in turn and mapped by engines.

While an engine still reads one buffer, the next version is written to the other buffer. So a buffer
is never rewritten while an engine reads it, as long as at most one update is in progress. Deltas
are separate files, each kept as long as the buffer from which it starts. The names of all files are
removed as soon as the files are open. Engines reach the files through this process's descriptors,
so nothing stays in /dev/shm, however the process ends. The transport works between processes of one
host and one user.

A worker keeps both buffers mapped as long as the trainer lives, because mapping a buffer of 400 MB
takes twice as long as copying its bytes.
"""

import mmap
import os
import select
import tempfile
import threading
from collections.abc import Iterator, Sequence

import torch

from turnwise.errors import InputError, WeightUpdateError
from turnwise.weights.delta import DeltaReceiver
from turnwise.weights.manifest import (
    Manifest,
    NamedTensors,
    check_exhausted,
    drained,
    lay_out,
    pack,
)
from turnwise.weights.transport import (
    Receiver,
    ReceiverOptions,
    SenderOptions,
    StoredReceiver,
    Transport,
    WeightSender,
)

_FOLDER = "/dev/shm"
_MIB = 2**20
_mapped: dict[str, torch.Tensor] = {}
"""The buffers of one trainer that this process has mapped, by address."""


class ShmTransport(Transport):
    """Shared memory of one host."""

    lasting = True

    def make_sender(self, options: SenderOptions) -> "ShmSender":
        return ShmSender(options.tensors, options.dtype)

    def validate(self, manifest: Manifest, options: ReceiverOptions) -> None:
        what = f"the buffer of version {manifest.version}"
        for entry in manifest.tensors:
            if entry.offset + entry.nbytes > manifest.nbytes:
                raise WeightUpdateError(f"{entry.name} lies beyond {what}")
        file = open_address(manifest.path, what)
        size = os.fstat(file).st_size
        os.close(file)
        if size < manifest.nbytes:
            raise WeightUpdateError(f"{what} is {size} bytes, not {manifest.nbytes}")

    def receive(self, manifest: Manifest, options: ReceiverOptions, seconds: float) -> Receiver:
        if manifest.checksum is None:
            return StoredReceiver(manifest.version, load(manifest))
        return DeltaReceiver(manifest, options, load(manifest), open_address)


class ShmSender(WeightSender):
    """Publishes named tensors, in the engines' `dtype`, to the engines of this host."""

    transport = "shm"

    def __init__(self, tensors: NamedTensors, dtype: torch.dtype = torch.float32) -> None:
        self._entries, self._nbytes = lay_out(tensors, dtype)
        self._files = [open_nameless(self._nbytes) for _ in range(2)]
        self._buffers = [map_whole(file, self._nbytes) for file in self._files]
        self._writes = 0
        self._deltas: list[list[int]] = [[], []]  # files, by the buffer from which they start

    def publish(self, version: int, tensors: NamedTensors) -> Manifest:
        """Copy the tensors, one at a time, into the buffer that is not being read."""
        index = self._writes % 2
        while self._deltas[index]:
            os.close(self._deltas[index].pop())
        with drained(tensors) as source:
            pack(self._entries, self._buffers[index], source)
            check_exhausted(source)
        self._writes += 1  # after a failure, the same buffer is next
        address = address_of(self._files[index])
        return Manifest(version, self.transport, address, self._nbytes, self._entries)

    def store(self, delta: bytes) -> str:
        number = open_nameless(len(delta))
        self._deltas[(self._writes - 1) % 2].append(number)
        with open(number, "wb", closefd=False) as file:
            file.write(delta)
        return address_of(number)

    def close(self) -> None:
        for file in (*self._files, *self._deltas[0], *self._deltas[1]):
            os.close(file)
        self._files, self._buffers, self._deltas = [], [], [[], []]


def load(manifest: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a version, as views of its buffer."""
    buffer = mapped(manifest.path, f"the buffer of version {manifest.version}")
    return ((entry.name, entry.in_bytes(buffer)) for entry in manifest.tensors)


def mapped(address: str, what: str) -> torch.Tensor:
    """Map a trainer's buffer, unless it is mapped already; `what` names it in errors."""
    file = open_address(address, what)
    try:
        buffer = _mapped.get(address)
        if buffer is None:
            buffer = torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8)
            _keep(address, buffer)
    finally:
        os.close(file)
    return buffer


def _keep(address: str, buffer: torch.Tensor) -> None:
    """Keep a mapped buffer, and forget it when its trainer ends, because its memory is not freed
    while it is mapped."""
    trainer = _process(address)

    def forget(keeping: Sequence[str] = ()) -> None:
        for other in list(_mapped):
            if other not in keeping:
                _mapped.pop(other, None)

    if trainer not in map(_process, list(_mapped)):
        forget()
        try:
            alive = os.pidfd_open(trainer)
        except OSError:  # where a sandbox forbids pidfd_open, the buffer is not kept
            return

        def watch() -> None:
            ended = select.poll()
            ended.register(alive, select.POLLIN)
            ended.poll()
            os.close(alive)
            forget([other for other in list(_mapped) if _process(other) != trainer])

        threading.Thread(target=watch, name=f"the end of {trainer}", daemon=True).start()
    forget(list(_mapped)[-1:])  # a sender has two buffers; older buffers are an earlier sender's
    _mapped[address] = buffer


def address_of(file: int) -> str:
    """Return the address at which other processes of this host can open a file of this process."""
    return f"/proc/{os.getpid()}/fd/{file}#{_identity(file)}"


def _process(address: str) -> int:
    return int(address.split("/")[2])


def open_address(address: str, what: str = "a delta") -> int:
    """Open another process's file by the address that `address_of` returned there; `what` names the
    file in errors."""
    path, _, identity = address.partition("#")
    try:
        file = os.open(path, os.O_RDWR)
    except OSError as error:
        raise WeightUpdateError(
            f"{what} cannot be opened ({error.strerror}); trainer and engine must share a host"
        ) from error
    if _identity(file) != identity:  # in a container, the id may belong to another process
        os.close(file)
        raise WeightUpdateError(
            f"{what} is another file here; trainer and engine must share a host, and see the same "
            "processes"
        )
    return file


def _identity(file: int) -> str:
    status = os.fstat(file)
    return f"{status.st_dev}:{status.st_ino}"


def map_whole(file: int, nbytes: int) -> torch.Tensor:
    """Map a file as bytes, and load all of its pages, so that the first write does not wait."""
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
    return torch.frombuffer(mmap.mmap(file, nbytes, flags), dtype=torch.uint8)


def open_nameless(nbytes: int) -> int:
    """Return a descriptor of `nbytes` of shared memory; the memory is freed once no process uses
    it."""
    try:
        free = os.statvfs(_FOLDER)
    except OSError as error:
        raise InputError(f"this machine has no shared memory at {_FOLDER}: {error}") from error
    available = free.f_bavail * free.f_frsize
    message = (
        f"{_FOLDER} has {available / _MIB:.0f} MiB free, and weight buffers of "
        f"{nbytes / _MIB:.0f} MiB each must fit: enlarge it (mount -o remount,size=..., or "
        "docker's --shm-size)"
    )
    if available < nbytes:
        raise InputError(message)
    file, path = tempfile.mkstemp(prefix="turnwise-", dir=_FOLDER)
    os.unlink(path)
    try:
        os.posix_fallocate(file, 0, nbytes)
    except OSError as error:
        os.close(file)
        raise InputError(message) from error
    return file
