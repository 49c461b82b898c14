"""The `collective` transport: a process group of the trainer's rank 0 and the engines' workers.

Rank 0 broadcasts the tensors; on a CPU, large tensors are not copied to a buffer first. Messages
travel through the group's store. So an engine can wait for a trainer while it serves requests, and
an update that one engine refuses is cancelled for all engines before the first broadcast. The
trainer's other ranks only help to gather tensors. Each update is one round.

    key             written by    value, next to the number of the round
    offer           trainer       the manifest
    answer/<rank>   engine        "" (accepted), or the reason for refusing
    go              trainer       "" (broadcasts follow), or the reason for cancelling
    verdict         trainer       "" (the broadcasts were complete), or the reason for giving up
    done/<rank>     engine        "" (the version is served), or the error
    broken          trainer       the reason why no further broadcast is possible
"""

import json
import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from safetensors.torch import load

from turnwise.core.deadlines import deadline_error
from turnwise.core.json_types import dtype_name
from turnwise.errors import InputError, TurnwiseError, WeightUpdateError, text_of
from turnwise.weights.delta import HeldWeights, held_for
from turnwise.weights.manifest import (
    Chunk,
    Manifest,
    NamedTensors,
    Source,
    StateDictInfo,
    TensorEntry,
    check_exhausted,
    check_next,
    chunk_bytes,
    pack,
    split,
)
from turnwise.weights.process_group import ProcessGroup
from turnwise.weights.transport import (
    ANSWER_SHARE,
    ReceiverOptions,
    SenderOptions,
    StreamReceiver,
    StreamSender,
    Transport,
)

_ACCEPT_SHARE = 0.25
_LARGE = 4 * 2**20
"""Minimum size in bytes of a tensor that is broadcast separately, if it is on a CPU."""


class CollectiveTransport(Transport):
    """Broadcasts between hosts, over gloo or NCCL."""

    streamed = True
    needs_group = True

    def make_sender(self, options: SenderOptions) -> "CollectiveSender":
        backend = "nccl" if options.device.type == "cuda" else "gloo"
        if not dist.is_backend_available(backend):
            raise InputError(
                f"weights.transport: collective needs torch with {backend} on {options.device}"
            )
        return CollectiveSender(options)

    def receive(
        self, manifest: Manifest, options: ReceiverOptions, seconds: float
    ) -> "CollectiveReceiver":
        if options.group is None:
            raise WeightUpdateError("call init_collective before the first update")
        return CollectiveReceiver(options, options.expected_of(manifest), seconds)


class CollectiveSender(StreamSender):
    """Sender on the trainer's rank 0; call `join` before the first `send`."""

    transport = "collective"
    _rounds = 0
    _buffers: tuple[torch.Tensor, ...] = ()
    _group: ProcessGroup | None = None
    _delta = torch.empty(0, dtype=torch.uint8)

    def store(self, delta: bytes) -> str:
        self._delta = torch.frombuffer(bytearray(delta), dtype=torch.uint8)
        return ""

    def join(self, ip: str, port: int, engine_workers: int, timeout: float | None = None) -> None:
        """Create the group, with the engines' workers as ranks from 1; replace an earlier group.

        Args:
            ip: Address of this process's host.
            timeout: Seconds for an update; None keeps the timeout of the options.
        """
        self.close()
        if timeout is not None:
            self._timeout = timeout * ANSWER_SHARE
        world_size = 1 + engine_workers
        self._group = ProcessGroup(0, ip, port, world_size, 1, self._device, self._timeout)
        self._rounds = 0
        _, entries, buffer_bytes = self._layout
        # Without the large tensors, the chunks have different limits and can be larger.
        largest = max(map(chunk_bytes, _divided(entries, buffer_bytes, self._device)))
        self._buffers = _two_buffers(max(largest, self._buffer_bytes), self._device)

    def send_as(self, manifest: Manifest, source: Source, devices: Sequence[str]) -> None:
        if (group := self._group) is None:
            raise WeightUpdateError("the trainer is in no process group: call join first")
        group.check_usable()
        self._rounds += 1
        number, version = self._rounds, manifest.version
        try:
            group.put("offer", number, json.dumps(manifest.to_dict()))
            # Each engine has already confirmed that it can load the update. If an engine does not
            # answer soon, it counts as dead, so that the other engines need not wait long for it.
            seconds = self._timeout * _ACCEPT_SHARE
            group.wait_engines("answer", number, f"accept version {version}", seconds)
            if manifest.deltas:
                parts = torch.split(self._delta, self._buffer_bytes)
                source = (("delta", part) for part in parts)
            group.put("go", number, "")
            self._broadcast(group, version, _chunks_of(manifest, self._device), source)
            group.put("verdict", number, "")
            group.wait_engines("done", number, f"load version {version}", self._timeout)
        except BaseException as error:
            text = text_of(error)
            group.put("offer", number, "")
            for key in ("go", "verdict", *(["broken"] if group.broken else [])):
                group.put(key, number, text)
            raise

    def _broadcast(
        self, group: ProcessGroup, version: int, chunks: Sequence[Chunk], source: Source
    ) -> None:
        """Broadcast all chunks, even if the source fails, because the ranks must stay in step."""
        failure: Exception | None = None
        works: list[dist.Work] = []

        def wait(index: int) -> None:
            what = f"chunk {index + 1} of {len(chunks)} of version {version}"
            why = f"the engines of the process group at {group.where} did not receive {what}"
            group.wait(works[index], why, self._timeout)

        for index, chunk in enumerate(chunks):
            if index > 1:
                wait(index - 2)
            packed = content = self._buffers[index % 2][: chunk_bytes(chunk)]
            try:
                if failure is None:
                    content = _content(chunk, packed, source)
            except Exception as error:
                failure = error
            works.append(group.broadcast(content, self._timeout))
            if content is not packed:
                wait(index)  # because the source may reuse the tensor's memory after this
        for index in range(max(0, len(works) - 2), len(works)):
            wait(index)
        if failure is not None:
            raise failure
        check_exhausted(source)

    def close(self) -> None:
        self._group, self._buffers = None, ()


class CollectiveReceiver(StreamReceiver):
    _held: HeldWeights | None = None

    def __init__(self, options: ReceiverOptions, expected: StateDictInfo, seconds: float) -> None:
        super().__init__(expected, options.device, seconds)
        assert options.group is not None
        options.group.check_usable()
        self._group, self._options = options.group, options
        self._round = 0
        self._buffers: tuple[torch.Tensor, ...] = ()
        self._work: dist.Work | None = None
        self._index = 0

    def poll(self) -> int | None:
        group = self._group
        if self.manifest is None:
            number, text = group.get("offer")
            if number > group.last_round and text:
                self._round = group.last_round = number
                manifest = Manifest.from_dict(json.loads(text))
                self._accept(manifest)
                self._chunks = _chunks_of(manifest, self._device)
                if manifest.checksum is not None:
                    self._held, self.reuses_buffers = held_for(manifest, self._options), False
                    if manifest.deltas and self._held.deltas_to(manifest) is None:
                        raise WeightUpdateError("it does not have the version before")
                group.put(f"answer/{group.rank}", number, "")
        if self.manifest is not None and self._work is None:
            number, text = group.get("go")
            if number == self._round:
                if text:
                    raise WeightUpdateError(f"the trainer cancelled the update: {text}")
                self._buffers = _two_buffers(max(map(chunk_bytes, self._chunks)), self._device)
                self._begin()
        if self._work is not None:
            if self._work.is_completed():
                self._wait()
                return self._version
            group.check_not_aborted(self._round)
        if not self._seconds_left:
            what = "offer a version" if self.manifest is None else f"send {self._chunk_name(0)}"
            raise deadline_error(self._seconds, f"the trainer at {group.where} did not {what}")
        return None

    def chunks(self) -> Iterator[NamedTensors]:
        arriving = self._arriving()
        if self._held is None or self.manifest is None:
            return arriving
        parts = _decoded(arriving) if self.manifest.deltas else arriving
        return self._held.apply(self.manifest, parts)

    def _arriving(self) -> Iterator[NamedTensors]:
        for index, chunk in enumerate(self._chunks):
            self._next()
            yield from self._unpacked(chunk, self._buffers[index % 2])
        what = f"end version {self._version}"
        if error := self._group.wait_text("verdict", self._round, what, self._seconds_left):
            raise WeightUpdateError(f"the trainer gave up version {self._version}: {error}")

    def end(self, error: str = "") -> None:
        if self._held is not None and self.manifest is not None and not error:
            self._held.checksum = self.manifest.checksum
        if not self._round or self._group.broken:
            return
        if self._work is None:
            self._group.put(f"answer/{self._group.rank}", self._round, error)
            return
        try:
            while self._index < len(self._chunks):
                self._next()  # discarded: the ranks must stay in step
            self._group.put(f"done/{self._group.rank}", self._round, error)
        except TurnwiseError:
            pass  # the group is broken; its next use will report this
        self._buffers = ()

    def _begin(self) -> None:
        """Begin to receive the next chunk into the buffer that is not being read."""
        buffer = self._buffers[self._index % 2]
        nbytes = chunk_bytes(self._chunks[self._index])
        self._work = self._group.broadcast(buffer[:nbytes], self._seconds_left)

    def _next(self) -> None:
        """Wait for the chunk in flight, and begin to receive the next one."""
        self._wait()
        self._index += 1
        if self._index < len(self._chunks):
            self._begin()

    def _wait(self) -> None:
        assert self._work is not None
        what = f"the trainer at {self._group.where} did not send {self._chunk_name(self._index)}"
        self._group.wait(self._work, what, self._seconds_left, self._round)


def _content(chunk: Chunk, buffer: torch.Tensor, source: Source) -> torch.Tensor:
    """Return a chunk's bytes: the tensor's own memory, if the tensor is large, contiguous and has
    the engines' type; otherwise the buffer, after packing the chunk into it."""
    entry, *others = chunk
    if others or buffer.device.type != "cpu":
        pack(chunk, buffer, source)
        return buffer
    tensor = check_next(entry, source)
    if (
        entry.nbytes >= _LARGE
        and tensor.device.type == "cpu"
        and dtype_name(tensor.dtype) == entry.dtype
        and tensor.is_contiguous()
    ):
        return tensor.view(-1).view(torch.uint8)
    entry.in_bytes(buffer).copy_(tensor)
    return buffer


def _divided(
    entries: tuple[TensorEntry, ...], buffer_bytes: int, device: torch.device
) -> tuple[Chunk, ...]:
    """Divide tensors into chunks; on a CPU, each large tensor is a chunk by itself, so that it is
    sent without a copy."""
    return split(entries, buffer_bytes, _LARGE if device.type == "cpu" else math.inf)


def _chunks_of(manifest: Manifest, device: torch.device) -> tuple[Chunk, ...]:
    """Return the chunks to broadcast: all tensors, or a delta's bytes, divided into parts as large
    as the largest chunk of tensors."""
    if not manifest.deltas:
        return _divided(manifest.tensors, manifest.buffer_bytes, device)
    largest, nbytes = max(map(chunk_bytes, manifest.chunks)), manifest.deltas[-1].nbytes
    sizes = (min(largest, nbytes - start) for start in range(0, nbytes, largest))
    return tuple((TensorEntry("delta", "uint8", (size,), 0, size),) for size in sizes)


def _decoded(arriving: Iterator[NamedTensors]) -> Iterator[NamedTensors]:
    parts = [tensor.cpu().numpy().tobytes() for part in arriving for _, tensor in part]
    yield load(b"".join(parts)).items()


def _two_buffers(nbytes: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
