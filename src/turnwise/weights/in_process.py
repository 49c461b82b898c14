"""The in-process transport: the engine's worker reads the trainer's own tensors.

For a worker that lives in the trainer's process. Nothing is copied on the way, so the tensors must
stay as they were published until the update has landed; an update that finds one changed fails.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from turnwise.errors import WeightUpdateError
from turnwise.weights.manifest import Manifest, TensorEntry


@dataclass(frozen=True, slots=True)
class _Published:
    version: int
    tensors: Mapping[str, torch.Tensor]
    changes: Mapping[str, int]
    """torch's count of in-place changes of each tensor when it was published."""


_published: _Published | None = None


class InProcessSender:
    """Publishes named tensors to the worker in this process; what it published last counts."""

    def write(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> Manifest:
        """Remember the tensors, without a copy, and describe them."""
        global _published
        named = {name: tensor.detach() for name, tensor in tensors}
        changes = {name: tensor._version for name, tensor in named.items()}
        _published = _Published(version, named, changes)
        entries = tuple(
            TensorEntry(name, str(t.dtype).removeprefix("torch."), tuple(t.shape), 0, t.nbytes)
            for name, t in named.items()
        )
        return Manifest(version, "in_process", "", sum(t.nbytes for t in named.values()), entries)

    def close(self) -> None:
        global _published
        _published = None


def refusal(version: int) -> str:
    """Why a worker in this process cannot load a version, or "" when it can."""
    if _published is None or _published.version != version:
        return f"version {version} is not published in the process of the worker"
    for name, tensor in _published.tensors.items():
        if tensor._version != _published.changes[name]:
            return f"{name} has changed since version {version} was published"
    return ""


def published(version: int) -> Mapping[str, torch.Tensor]:
    """The tensors of a version, by name.

    Raises:
        WeightUpdateError: when they cannot be loaded.
    """
    if why := refusal(version):
        raise WeightUpdateError(why)
    assert _published is not None
    return _published.tensors
