"""The `in_process` transport: the engine's worker reads the trainer's own tensors.

It serves workers inside the trainer's process. Nothing is copied, so the tensors must not change
between their publication and the end of the update; an update that finds a changed tensor fails.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from turnwise.core.json_types import dtype_name
from turnwise.errors import WeightUpdateError
from turnwise.internals.torch import changes_of
from turnwise.weights.manifest import Manifest, NamedTensors, TensorEntry
from turnwise.weights.transport import (
    Receiver,
    ReceiverOptions,
    SenderOptions,
    StoredReceiver,
    Transport,
    WeightSender,
)


@dataclass(frozen=True, slots=True)
class _Published:
    version: int
    tensors: Mapping[str, torch.Tensor]
    changes: Mapping[str, int]
    """torch's count of in-place changes of each tensor when it was published."""


_published: _Published | None = None


class InProcessTransport(Transport):
    """Memory of the trainer's process; every rank serves the worker in its own."""

    def sends_from(self, rank: int, device: torch.device) -> bool:
        return True

    def make_sender(self, options: SenderOptions) -> "InProcessSender":
        return InProcessSender()

    def validate(self, manifest: Manifest, options: ReceiverOptions) -> None:
        published(manifest.version)

    def receive(self, manifest: Manifest, options: ReceiverOptions, seconds: float) -> Receiver:
        return _InProcessReceiver(manifest.version, iter(published(manifest.version).items()))


class _InProcessReceiver(StoredReceiver):
    """Forgets the tensors that it has read: those that were made for the update are freed."""

    def end(self, error: str = "") -> None:
        global _published
        if not error and _published is not None and _published.version == self._version:
            _published = None


class InProcessSender(WeightSender):
    """Publishes named tensors, in their own type, to the worker in this process.

    Only the last version is available, and only until it is loaded. Tensors that are gathered from
    shards, or merged with an adapter, amount to a copy of the model for that time.
    """

    transport = "in_process"

    def publish(self, version: int, tensors: NamedTensors) -> Manifest:
        """Keep references to the tensors, without a copy."""
        global _published
        named = {name: tensor.detach() for name, tensor in tensors}
        changes = {name: changes_of(tensor) for name, tensor in named.items()}
        _published = _Published(version, named, changes)
        entries = tuple(
            TensorEntry(name, dtype_name(t.dtype), tuple(t.shape), 0, t.nbytes)
            for name, t in named.items()
        )
        return Manifest(version, self.transport, "", sum(e.nbytes for e in entries), entries)

    def close(self) -> None:
        global _published
        _published = None


def published(version: int) -> Mapping[str, torch.Tensor]:
    """Return the tensors of a version, by name, unless they have changed since."""
    if _published is None or _published.version != version:
        raise WeightUpdateError(f"version {version} is not published in the process of the worker")
    for name, tensor in _published.tensors.items():
        if changes_of(tensor) != _published.changes[name]:
            raise WeightUpdateError(f"{name} has changed since version {version} was published")
    return _published.tensors
