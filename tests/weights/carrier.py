"""A transport that turnwise does not have: torch's own files, one for each version."""

from collections.abc import Iterator
from pathlib import Path

import torch

from turnwise.errors import WeightUpdateError
from turnwise.weights.manifest import Manifest, NamedTensors, lay_out
from turnwise.weights.transport import (
    Receiver,
    ReceiverOptions,
    SenderOptions,
    StoredReceiver,
    Transport,
    WeightSender,
)


class CarrierSender(WeightSender):
    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._folder = folder
        self._dtype = dtype

    def publish(self, version: int, tensors: NamedTensors) -> Manifest:
        named = {name: tensor.detach().to(self._dtype) for name, tensor in tensors}
        path = self._folder / f"{version}.pt"
        torch.save(named, path)
        entries, nbytes = lay_out(named.items(), self._dtype)
        return Manifest(version, self.transport, str(path), nbytes, entries)


class CarrierTransport(Transport):
    lasting = True

    def make_sender(self, options: SenderOptions) -> WeightSender:
        return CarrierSender(Path(options.folder), options.dtype)

    def validate(self, manifest: Manifest, options: ReceiverOptions) -> None:
        if not Path(manifest.path).exists():
            raise WeightUpdateError(f"{manifest.path} is missing")

    def receive(self, manifest: Manifest, options: ReceiverOptions, seconds: float) -> Receiver:
        tensors: Iterator[tuple[str, torch.Tensor]] = iter(torch.load(manifest.path).items())
        return StoredReceiver(manifest.version, tensors)
