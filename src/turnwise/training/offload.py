"""Offloading between training steps, so that other processes can use the memory of tensors.

Values on a GPU move to pinned host memory, and values on a CPU move to a file. A tensor keeps its
identity, shape and views, because only its storage is emptied, and later filled again.
"""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import torch
from torch.distributed.tensor import DTensor

from turnwise.core.process import trim_memory
from turnwise.errors import TurnwiseError
from turnwise.internals.torch import storage_key

_PART_BYTES = 16 * 2**20


_Away = tuple[Any, int, torch.Tensor | None]
"""A storage, its size in bytes, and its values in host memory; None if the values are in the
file."""


class Offload:
    """Offloads tensors and brings them back, by kind; each kind has a function that lists its
    tensors.

    Values of tensors on a CPU are in files in the folder. The files have no names, so that they
    disappear with the process.
    """

    def __init__(
        self, tensors: Mapping[str, Callable[[], Iterable[torch.Tensor]]], folder: Path
    ) -> None:
        self._tensors = tensors
        self._folder = folder
        self._away: dict[str, tuple[list[_Away], IO[bytes]]] = {}
        """Offloaded storages by kind, and a file with all values that are not in host memory, in
        the order of the storages."""

    def put_away(self, kinds: Iterable[str]) -> int:
        """Offload these kinds; return the number of bytes of all offloaded kinds. If the values of
        a kind cannot be written, its tensors stay as they were."""
        for kind in kinds:
            if kind in self._away:
                continue
            parts: list[_Away] = []
            seen: set[int] = set()  # tied weights share a storage
            for tensor in self._tensors[kind]():
                local: Any = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                storage = local.untyped_storage()
                if not storage.nbytes() or (key := storage_key(storage)) in seen:
                    continue
                if not storage.resizable():  # such as the storages that torch.load makes
                    raise TurnwiseError(
                        f"the trainer's {kind} have a storage that cannot be resized"
                    )
                seen.add(key)
                host = None
                if storage.is_cuda:
                    host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
                    host.copy_(_bytes(storage))
                parts.append((storage, storage.nbytes(), host))
            try:
                with ExitStack() as opened:
                    file = opened.enter_context(TemporaryFile(dir=self._folder))
                    for storage in (storage for storage, _, host in parts if host is None):
                        for values in torch.split(_bytes(storage), _PART_BYTES):
                            # A storage that NumPy has accessed can no longer be resized.
                            file.write(values.clone().numpy().tobytes())
                    file.flush()
                    opened.pop_all()  # it stays open
            except OSError as error:
                raise TurnwiseError(
                    f"the trainer's {kind} cannot be offloaded to {self._folder}: {error}"
                ) from error
            for storage, _, _ in parts:
                storage.resize_(0)
            self._away[kind] = parts, file
            # The allocators return free memory to the device, and to the system.
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            trim_memory()
        return sum(nbytes for parts, _ in self._away.values() for _, nbytes, _ in parts)

    @contextmanager
    def brought_back(self, kinds: Iterable[str]) -> Iterator[None]:
        """Bring these kinds back for a `with` block; kinds that were offloaded before are offloaded
        again afterwards, also when the block fails."""
        away = [kind for kind in kinds if kind in self._away]
        self.bring_back(away)
        try:
            yield
        except BaseException:
            with suppress(TurnwiseError):  # the disk may be full; raise the block's error instead
                self.put_away(away)
            raise
        self.put_away(away)

    def bring_back(self, kinds: Iterable[str]) -> None:
        """Fill the storages of these kinds again if they are offloaded; a kind whose file cannot be
        read stays offloaded."""
        for kind in kinds:
            if kind not in self._away:
                continue
            parts, file = self._away[kind]
            try:
                file.seek(0)
                for storage, nbytes, host in parts:
                    storage.resize_(nbytes)
                    if host is not None:
                        _bytes(storage).copy_(host, non_blocking=True)
                        continue
                    for values in torch.split(_bytes(storage), _PART_BYTES):
                        data = file.read(len(values))
                        if len(data) < len(values):
                            raise OSError("it is too short")
                        values.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            except OSError as error:
                raise TurnwiseError(
                    f"the trainer's {kind} cannot be read back from its file: {error}"
                ) from error
            if any(host is not None for _, _, host in parts):
                torch.cuda.synchronize()
            del self._away[kind]
            file.close()

    def forget(self, kind: str) -> None:
        """Drop the values of a kind if it is offloaded."""
        if (away := self._away.pop(kind, None)) is not None:
            away[1].close()


def _bytes(storage: Any) -> torch.Tensor:
    """Return a storage's contents: [nbytes], uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
