"""Deltas: of a version of the weights, only what changed since the one before (`weights.delta`).

A step moves a weight by about the learning rate. Rounded to bfloat16, which keeps 8 bits of a
number, most weights stay what they were (PULSE, https://arxiv.org/abs/2602.03839). The trainer
compares each version with a copy of the one before, as bits, and sends positions and values of
those that differ. Each worker of an engine has a copy, too: positions count in the tensors of the
model's files, and vLLM shards, fuses and packs these. The delta is written into the copy, and vLLM
loads the layers that changed from there. So each side needs memory for one more model, and to load
takes as long as without deltas.

Values are replaced, not added to, so nothing drifts. Each version has a checksum of all its
tensors. A delta only fits a copy with the version and checksum of its base, and the result must
have the trainer's. A worker whose copy is another one, or that has none because it has just been
started or failed in an update, gets all tensors.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from safetensors.torch import load, save

from turnwise.core.json_types import dtype_name
from turnwise.errors import WeightUpdateError
from turnwise.weights.transport import (
    Chunk,
    Delta,
    Manifest,
    NamedTensors,
    Receiver,
    ReceiverOptions,
    SenderOptions,
    Source,
    StateDictInfo,
    StreamSender,
    TensorEntry,
    WeightSender,
    check_exhausted,
    check_next,
    drained,
    lay_out,
)

logger = logging.getLogger(__name__)

WHOLE_EVERY = 20
"""Number of versions of which one is sent whole. An engine that is started reads the last of these
and the deltas since, which at 1 % of the values each, 4 bytes per value of bfloat16, are less than
half as long. What no checksum finds lasts until then at the most."""
_GAPS, _VALUES = ":gaps", ":values"
"""Ends of a delta's names: the distance of each position from the one before it, and the values."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROW = 4096  # 8-byte words in a row of the checksum
_MASK = 2**63 - 1
_MIXER = 0x9E3779B97F4A7C15  # an odd number with bits everywhere


def layer_of(name: str) -> str:
    """Return a tensor's name up to the number of its layer; without one, the whole name."""
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[: number + 1])


class HeldWeights:
    """A copy of one version of the weights, in the host's memory.

    Args:
        info: Shape and type of each tensor, by name, in order.
    """

    def __init__(self, info: StateDictInfo) -> None:
        self.info = dict(info)
        self.version: int | None = None
        """The version; None while the copy is incomplete, or not the one that an engine loaded."""
        self.checksum = 0
        shapes = (
            (name, torch.empty(shape, dtype=getattr(torch, kind), device="meta"))
            for name, (shape, kind) in self.info.items()
        )
        entries, self.nbytes = lay_out(shapes, None)
        self._entries = {entry.name: entry for entry in entries}
        row = _ROW * 8
        self._buffer = torch.zeros(-(-self.nbytes // row) * row, dtype=torch.uint8)
        self._arrived: tuple[int, int] | None = None

    def tensors(self) -> Source:
        """Yield the tensors in order, as views of the copy."""
        return ((name, entry.in_bytes(self._buffer)) for name, entry in self._entries.items())

    def sum(self) -> int:
        """Return the checksum of all bytes: sums of rows and of columns, weighted by position."""
        words = self._buffer.view(torch.int64).view(-1, _ROW)
        rows, columns = (
            int((sums * (2 * torch.arange(len(sums)) + 1)).sum())
            for sums in (words.sum(1), words.sum(0))
        )
        return (rows * _MIXER + columns) & _MASK

    def take(self, version: int, source: Source) -> tuple[bytes, float | None]:
        """Copy the next version from a source; return the delta from the one before, in the format
        of safetensors, and the share of values that changed.

        The delta is empty, and the share None, if no version came before; the delta alone is, if it
        would be longer than half of all tensors.
        """
        first, self.version = self.version is None, None
        delta: dict[str, torch.Tensor] = {}
        changed, values, nbytes = 0, 0, 0
        for name, entry in self._entries.items():
            new, held = check_next(entry, source), self._flat(entry)
            flat = new.to("cpu", held.dtype).contiguous().view(-1)
            values += flat.numel()
            if not first:
                bits = _BITS[held.itemsize]
                differs = flat.view(bits) != held.view(bits)
                if not (count := int(torch.count_nonzero(differs))):
                    continue
                changed += count
                if nbytes * 2 < self.nbytes:  # otherwise all tensors are sent, and memory is saved
                    part = _encoded(name, flat, differs, count)
                    nbytes += sum(tensor.nbytes for tensor in part.values())
                    delta |= part
            held.copy_(flat)
        check_exhausted(source)
        self.version, self.checksum = version, self.sum()
        if first:
            return b"", None
        text = b""
        if nbytes * 2 < self.nbytes:
            text = save(delta, {"version": str(version), "checksum": str(self.checksum)})
        return (text if len(text) * 2 < self.nbytes else b""), changed / max(1, values)

    def way_to(self, manifest: Manifest) -> tuple[Delta, ...] | None:
        """Return the deltas of an update that lead from this version to its own; none if it is the
        same; None if there is no way, and all tensors are needed."""
        here = (self.version, self.checksum)
        if self.version is None or manifest.checksum is None:
            return None
        if here == (manifest.version, manifest.checksum):
            return ()
        for index, delta in reversed(list(enumerate(manifest.deltas))):
            if here == (delta.base, delta.base_checksum):
                return manifest.deltas[index:]
        return None

    def bring(
        self, manifest: Manifest, parts: Iterable[NamedTensors]
    ) -> list[tuple[str, torch.Tensor]] | None:
        """Apply what arrives of an update; return the tensors of layers that it changes, or None if
        the result has another checksum than the update's. `settle` ends the update."""
        self.version = self._arrived = None
        changed = set[str]()
        for part in parts:
            changed |= self._apply(dict(part))
        if self.sum() != manifest.checksum:
            return None
        self._arrived = manifest.version, manifest.checksum
        layers = {layer_of(name) for name in changed}
        return [(name, tensor) for name, tensor in self.tensors() if layer_of(name) in layers]

    def settle(self) -> None:
        """Keep what `bring` applied, as the version that the engine has loaded."""
        if self._arrived is not None:
            self.version, self.checksum = self._arrived

    def _apply(self, given: Mapping[str, torch.Tensor]) -> set[str]:
        """Copy whole tensors and values at positions; return the names of their tensors."""
        changed = set[str]()
        for key, tensor in given.items():
            if key.endswith(_GAPS):
                continue
            name = key.removesuffix(_VALUES)
            if (entry := self._entries.get(name)) is None:
                raise WeightUpdateError(f"{name} is in a delta, and not among the weights")
            held = self._flat(entry)
            if key == name:
                held.copy_(tensor.reshape(-1))
            else:
                held[given[name + _GAPS].to(torch.int64).cumsum(0)] = tensor
            changed.add(name)
        return changed

    def _flat(self, entry: TensorEntry) -> torch.Tensor:
        return entry.in_bytes(self._buffer).view(-1)


def _encoded(
    name: str, flat: torch.Tensor, differs: torch.Tensor, count: int
) -> dict[str, torch.Tensor]:
    """Return the values that differ, and their positions; or the whole tensor if it is shorter."""
    if count * (2 + flat.itemsize) >= flat.nbytes:
        return {name: flat.clone()}
    places = torch.from_numpy(np.flatnonzero(differs.numpy()))  # twice as fast as torch's
    gaps = torch.diff(places, prepend=places.new_zeros(1))
    largest = int(gaps.max())
    kind = torch.uint16 if largest < 2**16 else torch.int32 if largest < 2**31 else torch.int64
    return {name + _GAPS: gaps.to(kind), name + _VALUES: flat[places]}


def decoded(delta: bytes) -> NamedTensors:
    """Return the tensors of a delta as it was stored."""
    return load(delta).items()


def pieces_of(nbytes: int, buffer_bytes: int) -> tuple[Chunk, ...]:
    """Divide a delta of some bytes into chunks of a stream, which fit into buffers for the whole
    tensors: these have at least half of the limit, or, if they are one chunk, all bytes."""
    size = max(1, buffer_bytes // 2)
    sizes = [min(size, nbytes - start) for start in range(0, nbytes, size)]
    return tuple((TensorEntry(str(i), "uint8", (n,), 0, n),) for i, n in enumerate(sizes))


class DeltaSender(WeightSender):
    """Publishes versions by another sender: whole, or as deltas from the version before."""

    def __init__(self, inner: WeightSender, options: SenderOptions) -> None:
        kind = dtype_name(options.dtype)
        info = {name: (tuple(tensor.shape), kind) for name, tensor in options.tensors}
        self._held = HeldWeights(info)
        self._inner = inner
        self._whole: Manifest | None = None
        """The last version that was published whole."""
        self._deltas: tuple[Delta, ...] = ()
        """The deltas since then."""
        self._published: Manifest | None = None

    def publish(self, version: int, tensors: NamedTensors) -> Manifest:
        held = self._held
        base, base_checksum = held.version, held.checksum
        with drained(tensors) as source:
            delta, changed = held.take(version, source)
        try:
            if base is None or self._whole is None or not delta or self._due():
                self._whole, self._deltas = self._inner.publish(version, held.tensors()), ()
            else:
                path = self._inner.store(delta)
                step = Delta(base, base_checksum, held.checksum, len(delta), path)
                self._deltas = (*self._deltas, step)
        except BaseException:
            held.version = None  # no engine can have this version
            raise
        deltas = self._deltas[-1:] if self.streamed else self._deltas
        self._published = replace(
            self._whole, version=version, checksum=held.checksum, deltas=deltas, changed=changed
        )
        return self._published

    def _due(self) -> bool:
        return len(self._deltas) + 1 >= WHOLE_EVERY

    def send(self, version: int, tensors: NamedTensors, devices: Sequence[str] = ()) -> None:
        """Send the published version, from the copy: the tensors are not consumed."""
        if self._published is None or self._held.version != self._published.version:
            raise WeightUpdateError("no weights have been published that could be sent")
        if isinstance(self._inner, StreamSender):
            self._inner.send_as(self._published, self._held.tensors(), devices)

    def join(self, ip: str, port: int, engine_workers: int, timeout: float | None = None) -> None:
        self._inner.join(ip, port, engine_workers, timeout)

    def close(self) -> None:
        self._inner.close()


def held_for(manifest: Manifest, options: ReceiverOptions) -> HeldWeights:
    """Return the copy of a worker for an update's tensors; a new one if they are not its own."""
    if options.held is None or options.held.info != manifest.info:
        options.held = HeldWeights(manifest.info)
    return options.held


class DeltaReceiver(Receiver):
    """Receives an update that is stored as all tensors of some version and deltas since.

    Args:
        whole: Reads all tensors at a manifest's `path`.
        read: Reads one delta.
    """

    reports = False

    def __init__(
        self,
        manifest: Manifest,
        options: ReceiverOptions,
        whole: Callable[[Manifest], NamedTensors],
        read: Callable[[Delta], bytes],
    ) -> None:
        self._manifest, self._whole, self._read = manifest, whole, read
        self._held = held_for(manifest, options)

    def poll(self) -> int | None:
        return self._manifest.version

    def chunks(self) -> Iterator[NamedTensors]:
        manifest, held = self._manifest, self._held
        for way in dict.fromkeys((held.way_to(manifest), None)):
            changed = held.bring(manifest, self._parts(way))
            if changed is not None:
                if changed:
                    yield changed
                return
            logger.warning(different_checksum(manifest.version))
        raise WeightUpdateError(different_checksum(manifest.version))

    def _parts(self, way: tuple[Delta, ...] | None) -> Iterator[NamedTensors]:
        if way is None:
            yield from ([named] for named in self._whole(self._manifest))
            way = self._manifest.deltas
        yield from (decoded(self._read(delta)) for delta in way)

    def end(self, error: str = "") -> None:
        if not error:
            self._held.settle()


def different_checksum(version: int) -> str:
    return (
        f"the tensors of version {version} arrived with another checksum than the trainer's; they "
        "were not loaded"
    )
