"""The `in_process` transport: an engine's worker in the trainer's process reads the trainer's own
tensors.

Nothing is copied, so the tensors must not change between their publication and the end of the
update; if a tensor has changed, the update fails.
"""

from collections.abc import Mapping

import torch

from turnwise.errors import WeightUpdateError
from turnwise.internals.torch import changes_of
from turnwise.weights.manifest import Manifest, NamedTensors, lay_out
from turnwise.weights.transport import (
    Receiver,
    ReceiverOptions,
    SenderOptions,
    StoredReceiver,
    Transport,
    WeightSender,
)

_published: tuple[int, dict[str, tuple[torch.Tensor, int]]] | None = None
"""The last version, and its tensors by name; with each tensor is the number of in-place changes
that torch had counted when it was published."""


class InProcessTransport(Transport):
    """Memory of the trainer's process; every rank serves the worker in its own process."""

    def sends_from(self, rank: int, device: torch.device) -> bool:
        return True

    def make_sender(self, options: SenderOptions) -> "InProcessSender":
        return InProcessSender()

    def validate(self, manifest: Manifest, options: ReceiverOptions) -> None:
        published(manifest.version)

    def receive(self, manifest: Manifest, options: ReceiverOptions, seconds: float) -> Receiver:
        tensors = published(manifest.version)

        def loaded() -> None:  # frees tensors that were made only for the update
            global _published
            if _published is not None and _published[0] == manifest.version:
                _published = None

        return StoredReceiver(manifest.version, iter(tensors.items()), loaded)


class InProcessSender(WeightSender):
    """Publishes named tensors, in their own type, to the worker in this process. Only the last
    version is held, and only until the worker has loaded it."""

    transport = "in_process"

    def publish(self, version: int, tensors: NamedTensors) -> Manifest:
        """Keep references to the tensors, without a copy."""
        global _published
        named = {name: tensor.detach() for name, tensor in tensors}
        _published = version, {name: (t, changes_of(t)) for name, t in named.items()}
        entries, nbytes = lay_out(named.items(), None, alignment=1)
        return Manifest(version, self.transport, "", nbytes, entries)

    def close(self) -> None:
        global _published
        _published = None


def published(version: int) -> Mapping[str, torch.Tensor]:
    """Return the tensors of a version by name; raise `WeightUpdateError` if one has changed since
    its publication."""
    if _published is None or _published[0] != version:
        raise WeightUpdateError(f"version {version} is not published in the process of the worker")
    for name, (tensor, changes) in _published[1].items():
        if changes_of(tensor) != changes:
            raise WeightUpdateError(f"{name} has changed since version {version} was published")
    return {name: tensor for name, (tensor, _) in _published[1].items()}
