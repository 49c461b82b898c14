"""Deltas: only the weights that changed since the previous version (`weights.delta`).

A step moves a weight by about the learning rate. After rounding to bfloat16, which keeps 8 bits of
a number, most weights have not changed (PULSE, https://arxiv.org/abs/2602.03839). The trainer
compares the bits of each version with a copy of the previous version, and sends the positions and
values that differ. Positions refer to the tensors of the model's files, but vLLM shards, fuses and
packs these tensors. So each worker of an engine has such a copy too, and vLLM loads the changed
layers from the copy.

Values are replaced, not added to, so nothing drifts. A delta only fits a copy that has the checksum
of the delta's base version. The result must have the checksum of the trainer's version; otherwise
it is not loaded. A worker without a fitting copy, for example after its start or a failed update,
gets all tensors.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from safetensors.torch import load, save

from turnwise.errors import WeightUpdateError
from turnwise.weights.manifest import (
    Delta,
    Manifest,
    NamedTensors,
    Source,
    StateDictInfo,
    TensorEntry,
    check_exhausted,
    check_next,
    drained,
    lay_out,
    numbers_of,
)
from turnwise.weights.transport import Receiver, ReceiverOptions, StreamSender, WeightSender

WHOLE_EVERY = 20
"""Among this number of consecutive versions, at least one is published as all tensors."""
_GAPS, _VALUES = ":gaps", ":values"
"""Suffixes of names in a delta: for the distance of each position from the previous position, and
for the values."""
_ROW = 2**15  # bytes in a row of the matrix that the checksum sums by rows and by columns
_ROWS = 64  # rows that are summed at once, so that the second sum reads them from the CPU's cache
_BLOCK = 2**20  # bytes that are compared at once
_SPAN = 2**21  # minimum number of bytes for each thread
_THREADS = 8  # maximum; more threads would only wait for the memory
_WORD = 8  # bytes that are compared as one integer
_MANY = 16  # a block is copied whole if more than 1/16 of its values changed
_MIXER = 0x9E3779B97F4A7C15  # an odd number whose set bits are spread evenly


def layer_of(name: str) -> str:
    """Return a tensor's name up to its layer's number; "" if the name has no number."""
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), -1)
    return ".".join(parts[: number + 1])


class HeldWeights:
    """A copy of one version of the tensors of `info`, in the host's memory."""

    def __init__(self, info: StateDictInfo) -> None:
        self.info = dict(info)
        self.checksum: int | None = None
        """Checksum that identifies the version; None unless the copy is complete and equals the
        weights that the engine has loaded."""
        meta = (
            (name, torch.empty(shape, dtype=getattr(torch, kind), device="meta"))
            for name, (shape, kind) in self.info.items()
        )
        entries, self.nbytes = lay_out(meta, None)
        self._entries = {entry.name: entry for entry in entries}
        self._buffer = torch.zeros(-(-self.nbytes // _ROW) * _ROW, dtype=torch.uint8)

    def tensors(self) -> Source:
        """Yield the tensors in order, as views of the copy."""
        return ((name, entry.in_bytes(self._buffer)) for name, entry in self._entries.items())

    def sum(self) -> int:
        """Return the checksum of all bytes: the row sums and the column sums of the bytes as a
        matrix, weighted by position."""
        words = self._buffer.view(-1, _ROW).view(torch.int64)

        def sums(part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            by_row, by_column = [words.new_zeros(0)], words.new_zeros(words.shape[1])
            for block in torch.split(part, _ROWS):
                by_row.append(block.sum(1))
                by_column += block.sum(0)
            return torch.cat(by_row), by_column

        with ThreadPoolExecutor(_threads(self.nbytes)) as pool:
            parts = words.tensor_split(_threads(self.nbytes))
            by_row, by_column = zip(*pool.map(sums, parts), strict=True)
        rows, columns = (
            int((each * (2 * torch.arange(len(each)) + 1)).sum())
            for each in (torch.cat(by_row), torch.stack(by_column).sum(0))
        )
        return (rows * _MIXER + columns) & (2**63 - 1)

    def take(self, source: Source, room: float) -> tuple[bytes, float | None]:
        """Copy the next version from a source; return the delta from the previous version, in the
        format of safetensors, and the fraction of values that changed.

        The source must not write to a tensor after yielding it. The delta is empty if it would be
        longer than `room` bytes. For the first version the delta is empty and the fraction None.
        """
        first, self.checksum = self.checksum is None, None
        delta: dict[str, torch.Tensor] = {}
        changed, values, threads = 0, 0, _threads(self.nbytes)
        running: deque[Future[tuple[int, dict[str, torch.Tensor]]]] = deque()

        def finish() -> None:
            nonlocal room, changed
            count, part = running.popleft().result()
            changed += count
            room -= sum(tensor.nbytes for tensor in part.values())
            if room > 0:
                delta.update(part)

        with ThreadPoolExecutor(threads) as pool:
            for name, entry in self._entries.items():
                new, held = check_next(entry, source), self._flat(entry)
                flat = new.to("cpu", held.dtype).contiguous().view(-1)
                values += flat.numel()
                if first:
                    held.copy_(flat)
                    continue
                running.append(pool.submit(_update, name, held, flat))
                del new, flat
                if len(running) > threads:  # bounds the number of tensors in memory
                    finish()
            while running:
                finish()
        check_exhausted(source)
        self.checksum = self.sum()
        text = save(delta) if room > 0 and not first else b""
        return text, None if first else changed / max(1, values)

    def deltas_to(self, manifest: Manifest) -> tuple[Delta, ...] | None:
        """Return the update's deltas that lead from this version to the update's version: () if the
        versions are equal; None if no delta starts at this version, so that all tensors are
        needed."""
        if self.checksum == manifest.checksum:
            return ()
        for index, delta in reversed(list(enumerate(manifest.deltas))):
            if self.checksum == delta.base:
                return manifest.deltas[index:]
        return None

    def apply(self, manifest: Manifest, parts: Iterable[NamedTensors]) -> Iterator[NamedTensors]:
        """Apply the parts of an update; yield all tensors of the changed layers in one list.

        The receiver sets `checksum` once the engine has loaded the tensors. Raises
        `WeightUpdateError` if the result does not have the checksum of the trainer's version.
        """
        self.checksum, changed = None, set[str]()

        def apply(part: dict[str, torch.Tensor], key: str) -> str:
            name = key.removesuffix(_VALUES)
            if (entry := self._entries.get(name)) is None:
                raise WeightUpdateError(f"{name} is in an update, and not among the weights")
            held, values = self._flat(entry), part[key].reshape(-1)
            if key == name:
                held.copy_(values)
            else:
                places = part[name + _GAPS].numpy().cumsum(dtype=np.int64)
                numbers_of(held)[places] = numbers_of(values)
            return layer_of(name)

        with ThreadPoolExecutor(_threads(self.nbytes)) as pool:
            for part in map(dict, parts):
                keys = [key for key in part if not key.endswith(_GAPS)]
                changed.update(pool.map(partial(apply, part), keys))
        if self.sum() != manifest.checksum:
            raise WeightUpdateError(
                f"the tensors of version {manifest.version} arrived with another checksum than the "
                "trainer's, and were not loaded"
            )
        if changed:
            yield [named for named in self.tensors() if layer_of(named[0]) in changed]

    def _flat(self, entry: TensorEntry) -> torch.Tensor:
        return entry.in_bytes(self._buffer).view(-1)


def _threads(nbytes: int) -> int:
    return max(1, min(len(os.sched_getaffinity(0)), _THREADS, nbytes // _SPAN))


def _update(
    name: str, held: torch.Tensor, flat: torch.Tensor
) -> tuple[int, dict[str, torch.Tensor]]:
    """Copy the flat tensor `flat` to `held`; return the number of values whose bits differed, and
    the tensor's entries in the delta: gaps and values, or the whole tensor if it is shorter."""
    old, new = numbers_of(held), numbers_of(flat)
    lanes, block = _WORD // new.itemsize, _BLOCK // new.itemsize
    shift = lanes.bit_length() - 1
    count, max_changes = 0, new.nbytes / (2 + new.itemsize)
    found = [np.zeros(0, np.int64)]
    for start in range(0, len(new), block):
        was, now = (each[start : start + block] for each in (old, new))
        whole = len(now) // lanes * lanes
        # Compare whole words first. Only the few words that differ are divided into their values.
        were, words = (each[:whole].view(np.uint64) for each in (was, now))
        at = np.flatnonzero(words != were)
        inside = np.flatnonzero((words[at] ^ were[at]).view(now.dtype) != 0)
        places = (at[inside >> shift] << shift) + (inside & (lanes - 1))
        if whole < len(now):
            places = np.append(places, np.flatnonzero(now[whole:] != was[whole:]) + whole)
        count += len(places)
        if len(places) > len(now) / _MANY:
            was[:] = now
        else:
            was[places] = now[places]
        if count < max_changes:
            found.append(places + start)
        else:
            found.clear()
    if not count or not found:
        return count, {name: flat.clone()} if count else {}
    places = np.concatenate(found)
    gaps = np.diff(places, prepend=0)
    largest = int(gaps.max())
    kind = np.uint16 if largest < 2**16 else np.int32 if largest < 2**31 else np.int64
    return count, {
        name + _GAPS: torch.from_numpy(gaps.astype(kind)),
        name + _VALUES: torch.from_numpy(new[places]).view(flat.dtype),
    }


def held_for(manifest: Manifest, options: ReceiverOptions) -> HeldWeights:
    """Return the worker's copy if its tensors have the names, shapes and types of the update's;
    otherwise replace the copy by an empty one."""
    held = options.held
    if not isinstance(held, HeldWeights) or held.info != manifest.info:
        options.held = held = HeldWeights(manifest.info)
    return held


def with_deltas(sender: WeightSender) -> WeightSender:
    """Wrap a rank's sender (of `shm`, `collective` or `disk`) in a sender of deltas."""
    sender.streamed = False  # all ranks gather tensors in `publish`; no rank does in `send`
    return sender if type(sender) is WeightSender else DeltaSender(sender)


class DeltaSender(WeightSender):
    """Publishes each version through the sender `inner`, as all tensors (a whole version) or as a
    delta from the previous version.

    A new engine reads the last whole version and all deltas since. Each delta has at most half the
    bytes of a whole version, and these deltas together have at most as many as a whole version.
    """

    def __init__(self, inner: WeightSender) -> None:
        self._held, self._inner = HeldWeights(inner.state_dict_info), inner
        self._published: Manifest | None = None  # None if engines may lack the copy's version
        self._untried: tuple[Delta, ...] = ()  # the last delta, until a stream sends it

    def publish(self, version: int, tensors: NamedTensors) -> Manifest:
        held, last, self._published = self._held, self._published, None
        base, room = held.checksum, 0
        if last is not None and len(last.deltas) + 1 < WHOLE_EVERY:
            room = held.nbytes - sum(delta.nbytes for delta in last.deltas)
        with drained(tensors) as source:
            delta, changed = held.take(source, min(room, held.nbytes / 2))
        if last is None or base is None or not delta:
            new = self._inner.publish(version, held.tensors())
        else:
            step = Delta(base, len(delta), self._inner.store(delta))
            new = replace(last, version=version, deltas=(*last.deltas, step))
        self._published = replace(new, checksum=held.checksum, changed=changed)
        self._untried = new.deltas[-1:]
        return self._published

    def send(self, version: int, tensors: NamedTensors, devices: Sequence[str] = ()) -> None:
        """Send the published version from the copy, without consuming `tensors`. The first call
        sends the delta. A second call for the same version, made because an engine refused the
        delta or failed, sends all tensors."""
        if self._published is None:
            raise WeightUpdateError("no version has been published that could be sent")
        if isinstance(self._inner, StreamSender):
            sent = replace(self._published, deltas=self._untried)
            self._untried = ()
            self._inner.send_as(sent, self._held.tensors(), devices)

    def join(self, ip: str, port: int, engine_workers: int, timeout: float | None = None) -> None:
        self._inner.join(ip, port, engine_workers, timeout)

    def close(self) -> None:
        self._inner.close()


class DeltaReceiver(Receiver):
    """Receives an update that is stored as all tensors of a version and the deltas since then.

    It reads in a thread, so that the engine serves requests until everything has arrived.

    Args:
        find: Turns a delta's `path` into a path or file descriptor that can be opened.
    """

    reports = False

    def __init__(
        self,
        manifest: Manifest,
        options: ReceiverOptions,
        whole: Source,
        find: Callable[[str], str | int] = str,
    ) -> None:
        self._manifest, self._held = manifest, held_for(manifest, options)
        way = self._held.deltas_to(manifest)

        def parts() -> Iterator[NamedTensors]:
            if way is None:
                yield from ([named] for named in whole)
            for delta in manifest.deltas if way is None else way:
                with open(find(delta.path), "rb") as file:
                    yield load(file.read()).items()

        self._reading = ThreadPoolExecutor(1).submit(list, self._held.apply(manifest, parts()))

    def poll(self) -> int | None:
        if not self._reading.done():
            return None
        self._reading.result()  # raises the thread's error before requests are paused
        return self._manifest.version

    def chunks(self) -> Iterator[NamedTensors]:
        yield from self._reading.result()

    def end(self, error: str = "") -> None:
        wait([self._reading])  # the copy must not be used elsewhere before the thread ends
        if not error:
            self._held.checksum = self._manifest.checksum
