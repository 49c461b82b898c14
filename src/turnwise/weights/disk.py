"""The `disk` transport: safetensors files in a folder that trainer and engines see.

A version is a folder of shards of bounded size, in the model's order. It is written under a
temporary name and then renamed, so a visible version is complete; the last two are kept. Engines
read one tensor at a time. The other transports are cheaper; this one needs only a common file
system.
"""

import json
import os
import shutil
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from turnwise.core.json_types import JsonObject
from turnwise.errors import InputError, WeightUpdateError
from turnwise.weights.chunks import Source, check_exhausted, check_next, drained
from turnwise.weights.manifest import Chunk, Manifest, NamedTensors, chunk_bytes, plan_chunks
from turnwise.weights.transport import (
    EngineWorker,
    Receiver,
    SenderOptions,
    StoredReceiver,
    Transport,
    WeightSender,
)

SHARD_BYTES = 512 * 2**20
"""Maximum size of a file, unless a tensor is larger."""
_PART_BYTES = 2 * 2**20
"""Bytes of a tensor that are copied at once to be written."""
_KEPT = 2
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
"""safetensors' names of torch's types."""


class DiskTransport(Transport):
    """Files in a folder that trainer and engines see.

    Example:
        find_transport("disk").make_sender(options)  # writes to options.folder
    """

    lasting = True

    def make_sender(self, options: SenderOptions) -> WeightSender:
        return DiskSender(options.tensors, options.dtype, options.folder)

    def validate(self, manifest: Manifest, worker: EngineWorker) -> None:
        validate(manifest)

    def receive(self, manifest: Manifest, worker: EngineWorker, seconds: float) -> Receiver:
        return StoredReceiver(manifest.version, load(manifest))


class DiskSender(WeightSender):
    """Writes named tensors, in the engines' `dtype`, as versions in a folder.

    Example:
        sender = DiskSender(model.named_parameters(), torch.bfloat16, "/shared/weights")
        sender.publish(1, model.named_parameters()).path
        '/shared/weights/version-1'

    Raises:
        InputError: when the folder cannot be written to.
    """

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
        self._folder = Path(folder).absolute()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for left in self._folder.glob("version-*.tmp"):
                shutil.rmtree(left)
            probe = self._folder / f"version-{os.getpid()}.tmp"
            probe.mkdir()
            probe.rmdir()
        except OSError as error:
            raise InputError(f"weights.folder: {folder} cannot be written to: {error}") from error

    def publish(self, version: int, tensors: NamedTensors) -> Manifest:
        """Write a version, one tensor at a time.

        Raises:
            WeightUpdateError: when the disk is full or fails, or names, order or shapes differ
                from the constructor's; earlier versions are kept.
        """
        final = self._folder / f"version-{version}"
        temporary = final.with_name(f"{final.name}.tmp")
        with drained(tensors) as source:
            try:
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir()
                for number, shard in enumerate(self._shards, start=1):
                    write_shard(temporary / f"shard-{number:05}.safetensors", shard, source)
                check_exhausted(source)
                if final.exists():  # from an earlier run
                    shutil.rmtree(final)
                temporary.rename(final)
            except BaseException as error:
                shutil.rmtree(temporary, ignore_errors=True)
                if not isinstance(error, OSError):
                    raise
                raise WeightUpdateError(
                    f"version {version} cannot be written to {self._folder}: {error.strerror}"
                ) from error
        self._remove_old(final)
        entries = tuple(entry for shard in self._shards for entry in shard)
        nbytes = sum(map(chunk_bytes, self._shards))
        return Manifest(version, self.transport, str(final), nbytes, entries)

    def _remove_old(self, newest: Path) -> None:
        versions = [path for path in self._folder.glob("version-*") if path.suffix != ".tmp"]
        versions.sort(key=lambda path: (path == newest, path.stat().st_mtime_ns))
        for path in versions[:-_KEPT]:
            shutil.rmtree(path, ignore_errors=True)


def write_shard(path: Path, shard: Chunk, source: Source) -> None:
    """Write the next tensors of a source, which are those of the shard, to a safetensors file.

    Example:
        with drained(model.named_parameters()) as source:
            write_shard(Path("model.safetensors"), entries, source)

    Raises:
        WeightUpdateError: when they are not.
    """
    # The format: the length of the header, the header, the tensors' bytes.
    header: JsonObject = {"__metadata__": {"format": "pt"}}
    header |= {
        entry.name: {
            "dtype": _TYPES[entry.dtype],
            "shape": entry.shape,
            "data_offsets": [entry.offset, entry.offset + entry.nbytes],
        }
        for entry in shard
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file:
        _put(file.fileno(), struct.pack("<Q", len(text)) + text)
        for entry in shard:
            tensor = check_next(entry, source).to("cpu", getattr(torch, entry.dtype))
            values = tensor.contiguous().view(-1).view(torch.uint8)
            # A storage that NumPy has accessed can no longer be resized, so parts are copied.
            for part in torch.split(values, _PART_BYTES):
                _put(file.fileno(), part.clone().numpy())
            del tensor  # before the next one is gathered


def _put(file: int, data: object) -> None:
    rest = memoryview(data)  # type: ignore[arg-type]
    while rest:
        rest = rest[os.write(file, rest) :]


def validate(manifest: Manifest) -> None:
    """Check that the files of a version are complete and hold its tensors.

    Raises:
        WeightUpdateError: when they are not, or do not.
    """
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
                    if tuple(found.get_shape()) != entry.shape:
                        shape = tuple(found.get_shape())
                        raise WeightUpdateError(f"{name} is {shape} in {where}")
                    if found.get_dtype() != _TYPES[entry.dtype]:
                        raise WeightUpdateError(f"{name} is {found.get_dtype()} in {where}")
        except (OSError, SafetensorError) as error:
            raise WeightUpdateError(f"{path.name} in {where} is incomplete: {error}") from error
    if wanted:
        raise WeightUpdateError(f"{next(iter(wanted))} is missing from {where}")


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
