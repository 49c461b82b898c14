"""The `shm` transport's trainer side: two shared-memory buffers, written in turn.

While an engine still reads one buffer the next version goes into the other, so a buffer is
never rewritten under a reader as long as at most one update is under way. The files have no name
once they are open: engines reach them through this process's descriptors, and nothing stays in
/dev/shm however the process ends. Works between processes of one host and one user.
"""

import mmap
import os
import tempfile
from collections.abc import Iterable

import torch

from turnwise.errors import InputError, WeightUpdateError
from turnwise.weights.manifest import Manifest, lay_out

SHARED_MEMORY = "/dev/shm"
_MIB = 2**20


class ShmSender:
    """Publishes named tensors, in the engines' `dtype`, to the engines of this host.

    Raises:
        InputError: when shared memory cannot hold two copies of the tensors.
    """

    def __init__(
        self,
        tensors: Iterable[tuple[str, torch.Tensor]],
        dtype: torch.dtype = torch.float32,
        directory: str = SHARED_MEMORY,
    ) -> None:
        self._entries, self._nbytes = lay_out(tensors, dtype)
        self._files = [open_nameless(self._nbytes, directory) for _ in range(2)]
        self._buffers = [mmap.mmap(file, self._nbytes) for file in self._files]
        self._writes = 0

    def write(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> Manifest:
        """Copy the tensors into the buffer that no engine reads, and describe it.

        Raises:
            WeightUpdateError: when names or shapes are not those of the constructor.
        """
        index = self._writes % 2
        self._writes += 1
        named = dict(tensors)
        if named.keys() != {entry.name for entry in self._entries}:
            changed = sorted(named.keys() ^ {entry.name for entry in self._entries})
            raise WeightUpdateError(f"the model's tensors changed: {', '.join(changed[:3])}")
        for entry in self._entries:
            tensor = named[entry.name].detach()
            if tuple(tensor.shape) != entry.shape:
                raise WeightUpdateError(f"the shape of {entry.name} changed")
            entry.view(self._buffers[index]).copy_(tensor)
        path = f"/proc/{os.getpid()}/fd/{self._files[index]}"
        return Manifest(version, path, self._nbytes, self._entries)

    def close(self) -> None:
        for file in self._files:
            os.close(file)
        self._files, self._buffers = [], []


def open_nameless(nbytes: int, directory: str = SHARED_MEMORY) -> int:
    """A descriptor of `nbytes` of shared memory that vanish with their last user.

    Raises:
        InputError: when the directory cannot hold two of them.
    """
    free = os.statvfs(directory)
    available = free.f_bavail * free.f_frsize
    message = (
        f"{directory} has {available / _MIB:.0f} MiB free, and two weight buffers of "
        f"{nbytes / _MIB:.0f} MiB each must fit: enlarge it (mount -o remount,size=..., or "
        "docker's --shm-size)"
    )
    if available < nbytes:
        raise InputError(message)
    file, path = tempfile.mkstemp(prefix="turnwise-", dir=directory)
    os.unlink(path)
    try:
        os.posix_fallocate(file, 0, nbytes)
    except OSError as error:
        os.close(file)
        raise InputError(message) from error
    return file
