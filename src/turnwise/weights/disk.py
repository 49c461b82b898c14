"""The `disk` transport: safetensors files in a folder that trainer and engines see.

Each sender has a subfolder of its own, so that runs can share the folder. The subfolder is locked
while the sender's process lives; it is removed when the process ends, or by a later run on the same
machine. A version is a folder of shards of bounded size, in the model's order. The folder is
written under a temporary name and then renamed, so a visible version is complete. The last two
versions are kept. Deltas are files in the folder of the whole version from which they start.
"""

import fcntl
import json
import os
import secrets
import shutil
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from turnwise.core.files import numbered, put_in_place, temporary
from turnwise.core.json_types import JsonObject
from turnwise.errors import InputError, WeightUpdateError, translate_unwritable
from turnwise.weights.delta import DeltaReceiver
from turnwise.weights.manifest import (
    Chunk,
    Manifest,
    NamedTensors,
    Source,
    check_exhausted,
    check_next,
    chunk_bytes,
    drained,
    numbers_of,
    plan_chunks,
)
from turnwise.weights.transport import (
    Receiver,
    ReceiverOptions,
    SenderOptions,
    StoredReceiver,
    Transport,
    WeightSender,
)

SHARD_BYTES = 512 * 2**20
"""Maximum size of a shard in bytes; only a tensor that is larger exceeds it."""
_KEPT = 2  # versions; an engine may still read the last version while the next one is written
_LOCK = "owner.lock"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_TYPES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float64": "F64",
    "int64": "I64",
    "int32": "I32",
    "uint8": "U8",
    "bool": "BOOL",
}
"""The names of torch's types in safetensors."""


class DiskTransport(Transport):
    """Files in a folder that trainer and engines see."""

    lasting = True

    def make_sender(self, options: SenderOptions) -> "DiskSender":
        return DiskSender(options.tensors, options.dtype, options.folder)

    def validate(self, manifest: Manifest, options: ReceiverOptions) -> None:
        """Check that the files of a version are complete and hold its tensors."""
        wanted = {entry.name: entry for entry in manifest.tensors}
        where = f"{manifest.path} of version {manifest.version}"
        if not (shards := _shards(manifest)):
            raise WeightUpdateError(
                f"{where} cannot be read here: trainer and engine must see the same folder"
            )
        for path in shards:
            try:
                with safe_open(path, "pt") as file:
                    for name in file.keys():  # noqa: SIM118 (not a dictionary)
                        entry, found = wanted.pop(name, None), file.get_slice(name)
                        if entry is None:
                            raise WeightUpdateError(f"{name} was not expected in {where}")
                        if (shape := tuple(found.get_shape())) != entry.shape:
                            raise WeightUpdateError(f"{name} is {shape} in {where}")
                        if found.get_dtype() != _TYPES[entry.dtype]:
                            raise WeightUpdateError(f"{name} is {found.get_dtype()} in {where}")
            except (OSError, SafetensorError) as error:
                raise WeightUpdateError(f"{path.name} in {where} is incomplete: {error}") from error
        if wanted:
            raise WeightUpdateError(f"{next(iter(wanted))} is missing from {where}")

    def receive(self, manifest: Manifest, options: ReceiverOptions, seconds: float) -> Receiver:
        if manifest.checksum is None:
            return StoredReceiver(manifest.version, load(manifest))
        return DeltaReceiver(manifest, options, load(manifest))


class DiskSender(WeightSender):
    """Writes named tensors, in the engines' `dtype`, as versions in a subfolder of a folder."""

    transport = "disk"

    def __init__(
        self,
        tensors: NamedTensors,
        dtype: torch.dtype,
        folder: str | os.PathLike[str],
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        if not os.fspath(folder):
            raise InputError("weights.transport: disk needs weights.folder")
        self._shards = plan_chunks(tensors, dtype, shard_bytes, alignment=1)
        self._newest, self._deltas = Path(), 0  # folder of the last version; number of its deltas
        shared = Path(folder).absolute()
        self._folder = shared / secrets.token_hex(4)
        try:
            self._folder.mkdir(parents=True)
            self._lock: int | None = os.open(self._folder / _LOCK, os.O_CREAT | os.O_RDWR)
            """Descriptor of a file that is locked while this process lives."""
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:  # the file system has no locks
                os.close(self._lock)
                self._lock = None
            else:
                os.write(self._lock, _boot_id())
            # Remove subfolders of senders that have ended. A free lock proves this only if the
            # sender ran on this machine since it last booted, because a network file system may not
            # show the locks of other machines.
            for path in shared.glob(f"*/{_LOCK}"):
                with suppress(OSError):  # the sender lives, or another process removed the folder
                    lock = os.open(path, os.O_RDWR)
                    try:
                        boot_id = os.read(lock, 64)
                        if boot_id and boot_id == _boot_id():
                            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                            shutil.rmtree(path.parent, ignore_errors=True)
                    finally:
                        os.close(lock)
        except OSError as error:
            raise InputError(f"weights.folder: {folder} cannot be written to: {error}") from error

    def publish(self, version: int, tensors: NamedTensors) -> Manifest:
        """Write a version, one tensor at a time; if that fails, earlier versions are kept."""
        final = self._folder / f"version-{version}"
        new = temporary(final)
        with drained(tensors) as source:
            try:
                shutil.rmtree(new, ignore_errors=True)
                new.mkdir()
                for number, shard in enumerate(self._shards, start=1):
                    write_shard(new / f"shard-{number:05}.safetensors", shard, source)
                check_exhausted(source)
                put_in_place(final, flush=False)
            except BaseException as error:
                shutil.rmtree(new, ignore_errors=True)
                if not isinstance(error, OSError):
                    raise
                raise WeightUpdateError(
                    f"version {version} cannot be written to {self._folder}: {error.strerror}"
                ) from error
        # Remove the oldest by time, not by number, because after a pipeline has loaded a
        # checkpoint, new versions have lower numbers.
        versions = numbered(self._folder, "version")
        versions.sort(key=lambda path: (path == final, path.stat().st_mtime_ns))
        for path in versions[:-_KEPT]:
            shutil.rmtree(path, ignore_errors=True)
        self._newest, self._deltas = final, 0
        entries = tuple(entry for shard in self._shards for entry in shard)
        nbytes = sum(map(chunk_bytes, self._shards))
        return Manifest(version, self.transport, str(final), nbytes, entries)

    def store(self, delta: bytes) -> str:
        self._deltas += 1
        path = self._newest / f"delta-{self._deltas:05}.safetensors"
        with translate_unwritable(path):
            path.write_bytes(delta)
        return str(path)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _boot_id() -> bytes:
    """Return the id of this machine's current boot; empty if the kernel does not report it."""
    try:
        return _BOOT_ID.read_bytes().strip()
    except OSError:
        return b""


def write_shard(path: Path, shard: Chunk, source: Source) -> None:
    """Write the next tensors of a source, which must be the shard's tensors, as safetensors."""
    # The format is: the length of the header, the header, and the tensors' bytes.
    header: JsonObject = {"__metadata__": {"format": "pt"}}
    for entry in shard:
        offsets = [entry.offset, entry.offset + entry.nbytes]
        kind = _TYPES[entry.dtype]
        header[entry.name] = {"dtype": kind, "shape": entry.shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for entry in shard:
            tensor = check_next(entry, source).to("cpu", getattr(torch, entry.dtype))
            values = tensor.contiguous()
            file.write(numbers_of(values.view(-1)).data)
            del tensor, values  # free them before the next tensor is gathered


def load(manifest: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a version, one at a time, in the trainer's order."""
    for path in _shards(manifest):
        with safe_open(path, "pt") as file:
            for name in file.offset_keys():
                yield name, file.get_tensor(name)


def _shards(manifest: Manifest) -> list[Path]:
    with suppress(OSError):
        return sorted(Path(manifest.path).glob("shard-*.safetensors"))
    return []
