"""The `collective` transport: a process group of the trainer's ranks and the engines' workers.

Tensors travel by broadcasts from the trainer's rank 0, over gloo between CPUs and over NCCL
between GPUs; what is said about them travels through the group's store. So an engine can wait
for a trainer while it serves, and an update that one engine refuses is called off in all of them
before the first broadcast. The group stands beside any that vLLM or the trainer has. NCCL was
never run.

    key             written by    what it says, together with the number of its round
    offer           trainer       the header
    answer/<rank>   engine        "" or why it refuses
    go              trainer       "" (broadcasts follow) or why not
    verdict         trainer       "" (what was broadcast was whole) or why not
    done/<rank>     engine        "" (it serves it) or why not
    result          trainer       how it ended, for the trainer's other ranks
    broken          trainer       why no broadcast will be made any more
"""

import json
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from turnwise.errors import DeadlineError, InputError, TurnwiseError, WeightUpdateError
from turnwise.weights.meeting import join_store, open_store, private
from turnwise.weights.stream import (
    BUFFER_BYTES,
    WAIT_SECONDS,
    Header,
    NamedTensors,
    Receiver,
    Sender,
    StateDictInfo,
    check_exhausted,
    chunk_bytes,
    pack,
    unpack,
)

_WORK_POLL_SECONDS = 0.0005
_STORE_POLL_SECONDS = 0.002
_LOOK_SECONDS = 0.25
_ACCEPT_SHARE = 0.25
_LINGER_SECONDS = 0.5
"""A broadcast that nobody waits for any more ends by itself, just after its deadline."""


class Group:
    """One rank's place in the process group of a trainer and its engines.

    The trainer's ranks come first; its rank 0 opens the store at `ip` and `port`.

    Raises:
        InputError: when the rank is taken or lies beyond the group, or the port is in use.
        DeadlineError: when a rank has not joined within `seconds`; it names the first.
    """

    def __init__(
        self,
        rank: int,
        ip: str,
        port: int,
        world_size: int,
        train_world_size: int,
        device: torch.device,
        seconds: float,
    ) -> None:
        self.rank = rank
        self.where = f"{ip}:{port}"
        self.engine_ranks = range(train_world_size, world_size)
        self.last_round = 0
        self.broken = ""
        if rank >= world_size:
            raise InputError(f"rank {rank} lies beyond the process group of {world_size}")
        deadline = time.monotonic() + seconds
        limit = timedelta(seconds=seconds)
        if rank:
            self._knock(ip, port, seconds)
        try:
            store = join_store(ip, port, limit) if rank else open_store(ip, port, limit)
            self._store = private(store)
            if self._store.add(f"joined/{rank}", 1) > 1:
                raise InputError(f"rank {rank} has joined already: each engine needs its own ranks")
            while not self._joined(range(world_size)):
                if time.monotonic() > deadline:
                    missing = next(r for r in range(world_size) if not self._joined([r]))
                    raise DeadlineError(
                        f"{self._name(missing)} did not join the process group at {self.where} "
                        f"within {seconds:g} s"
                    )
                time.sleep(_STORE_POLL_SECONDS)
            self._group: Any = _process_group(self._store, rank, world_size, device, limit)
        except (RuntimeError, OSError) as error:
            raise InputError(
                f"no process group could be made at {self.where}: {_first_line(error)}"
            ) from error

    def _knock(self, ip: str, port: int, seconds: float) -> None:
        """Wait for the trainer's store; torch's own wait overruns its deadline."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                socket.create_connection((ip, port), max(0.1, deadline - time.monotonic())).close()
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    raise DeadlineError(
                        f"the trainer did not open the process group at {self.where} "
                        f"within {seconds:g} s"
                    ) from error
            time.sleep(_STORE_POLL_SECONDS)

    def _joined(self, ranks: Iterable[int]) -> bool:
        return bool(self._store.check([f"joined/{rank}" for rank in ranks]))

    def _name(self, rank: int) -> str:
        return f"{'engine' if rank in self.engine_ranks else 'trainer'} rank {rank}"

    def check_whole(self) -> None:
        if self.broken:
            raise WeightUpdateError(
                f"the process group at {self.where} broke ({self.broken}): make a new one"
            )

    def put(self, key: str, round_number: int, text: str) -> None:
        self._guarded("set", key, json.dumps([round_number, text]))

    def get(self, key: str) -> tuple[int, str]:
        """What stands under a key, and of which round it is; round 0 when nothing does."""
        if not self._guarded("check", [key]):
            return 0, ""
        round_number, text = json.loads(self._guarded("get", key))
        return round_number, text

    def wait_text(self, key: str, round_number: int, what: str, seconds: float) -> str:
        """A trainer's word of a round."""
        deadline = time.monotonic() + seconds
        while True:
            found, text = self.get(key)
            if found == round_number:
                return text
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"the trainer at {self.where} did not {what} within {seconds:g} s"
                )
            time.sleep(_STORE_POLL_SECONDS)

    def wait_engines(self, key: str, round_number: int, what: str, seconds: float) -> None:
        """Wait until every engine has said ""; raises `WeightUpdateError` when one says more."""
        deadline = time.monotonic() + seconds
        waiting = list(self.engine_ranks)
        while True:
            for rank in list(waiting):
                found, text = self.get(f"{key}/{rank}")
                if found == round_number:
                    if text:
                        raise WeightUpdateError(f"{self._name(rank)} refused: {text}")
                    waiting.remove(rank)
            if not waiting:
                return
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"{self._name(waiting[0])} of the process group at {self.where} did not {what} "
                    f"within {seconds:g} s"
                )
            time.sleep(_STORE_POLL_SECONDS)

    def broadcast(self, buffer: torch.Tensor, seconds: float) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = timedelta(seconds=seconds + _LINGER_SECONDS)
        return self._group.broadcast([buffer], options)

    def wait(self, work: Any, what: str, seconds: float, round_number: int = 0) -> None:
        """Wait for a broadcast of a round; the trainer's rank 0 gives none.

        Raises:
            DeadlineError: when it fails or is not done in time, which is the end of the group.
            WeightUpdateError: when rank 0 found that the group is broken.
        """
        deadline = time.monotonic() + seconds
        next_look = time.monotonic() + _LOOK_SECONDS
        while not work.is_completed():
            if time.monotonic() > deadline:
                self.broken = f"{what} within {seconds:g} s"
                self._group.abort()
                raise DeadlineError(self.broken)
            if round_number and time.monotonic() > next_look:
                self.check_kept(round_number)
                next_look = time.monotonic() + _LOOK_SECONDS
            time.sleep(_WORK_POLL_SECONDS)
        try:
            work.wait()
        except RuntimeError as error:
            self.broken = f"{what}: {_first_line(error)}"
            raise DeadlineError(self.broken) from error

    def check_kept(self, round_number: int) -> None:
        """Raises `WeightUpdateError` when rank 0 found that the group is broken."""
        found, text = self.get("broken")
        if found == round_number:
            self.broken = text
            raise WeightUpdateError(f"the trainer at {self.where} gave up: {text}")

    def _guarded(self, operation: str, *args: Any) -> Any:
        try:
            return getattr(self._store, operation)(*args)
        except RuntimeError as error:
            self.broken = f"the trainer at {self.where} did not keep its store open"
            raise DeadlineError(self.broken) from error


class CollectiveSender(Sender):
    """One trainer rank's side; every rank of the trainer makes one and calls `send` on it.

    Only rank 0's tensors travel. Making it waits until every rank and engine has joined: the
    engines' `init_collective` runs meanwhile.

    Args:
        tensors: What every update will bring.
        dtype: The type that the engines load.
        ip: Address of rank 0.
        port: Free port of rank 0.
        world_size: Ranks of the trainer and workers of all engines.
        train_world_size: Ranks of the trainer.
        rank: This one.
        buffer_bytes: Bound of each of the two buffers; a larger tensor enlarges them.
        device: Where the buffers are; its type must be that of the engines.
        timeout: Seconds that the others have for joining and for each answer.

    Raises:
        InputError: when the group cannot be made.
        DeadlineError: when a rank or an engine does not join.
    """

    def __init__(
        self,
        tensors: NamedTensors,
        dtype: torch.dtype = torch.float32,
        *,
        ip: str,
        port: int,
        world_size: int,
        train_world_size: int = 1,
        rank: int = 0,
        buffer_bytes: int = BUFFER_BYTES,
        device: torch.device | None = None,
        timeout: float = WAIT_SECONDS,
    ) -> None:
        super().__init__(tensors, dtype, buffer_bytes)
        device = device or torch.device("cpu")
        self._timeout = timeout
        self._rounds = 0
        self._buffers = _two_buffers(self._buffer_bytes, device)
        self._group = Group(rank, ip, port, world_size, train_world_size, device, timeout)

    def _send(self, version: int, source: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._group.check_whole()
        self._rounds += 1
        if self._group.rank:
            self._follow(version, source)
        else:
            self._lead(version, source)

    def _lead(self, version: int, source: Iterator[tuple[str, torch.Tensor]]) -> None:
        group, number = self._group, self._rounds
        offer = json.dumps(Header(version, self._chunks).to_dict())
        try:
            group.put("offer", number, offer)
            # They have been asked before: who is late now is dead, and the others wait for it.
            seconds = self._timeout * _ACCEPT_SHARE
            group.wait_engines("answer", number, f"accept version {version}", seconds)
            group.put("go", number, "")
            self._broadcast(version, source)
            group.put("verdict", number, "")
            group.wait_engines("done", number, f"load version {version}", self._timeout)
            group.put("result", number, "")
        except BaseException as error:
            text = str(error) or type(error).__name__
            group.put("offer", number, "")
            for key in ("go", "verdict", "result", *(["broken"] if group.broken else [])):
                group.put(key, number, text)
            raise

    def _follow(self, version: int, source: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._wait_for_lead("go", f"offer version {version}")
        self._broadcast(version, source)
        self._wait_for_lead("result", f"end version {version}")

    def _wait_for_lead(self, key: str, what: str) -> None:
        seconds = 2 * self._timeout  # rank 0 itself waits for the engines
        if error := self._group.wait_text(key, self._rounds, what, seconds):
            raise WeightUpdateError(f"the trainer's rank 0 gave up: {error}")

    def _broadcast(self, version: int, source: Iterator[tuple[str, torch.Tensor]]) -> None:
        """All chunks, whatever happens to the source: the ranks must not get out of step."""
        failure: Exception | None = None
        works: list[Any] = []
        for index, chunk in enumerate(self._chunks):
            buffer = self._buffers[index % 2]
            if index > 1:
                self._wait(works, index - 2, version)
            try:
                if failure is None:
                    pack(chunk, buffer, source)
            except Exception as error:
                failure = error
            works.append(self._group.broadcast(buffer[: chunk_bytes(chunk)], self._timeout))
        for index in range(max(0, len(works) - 2), len(works)):
            self._wait(works, index, version)
        if failure is not None:
            raise failure
        check_exhausted(source)

    def _wait(self, works: Sequence[Any], index: int, version: int) -> None:
        what = f"chunk {index + 1} of {len(self._chunks)} of version {version}"
        self._group.wait(
            works[index],
            f"the engines of the process group at {self._group.where} did not take {what}",
            self._timeout,
            self._rounds if self._group.rank else 0,
        )

    def close(self) -> None:
        del self._group


class CollectiveReceiver(Receiver):
    """An engine worker's side of one update."""

    def __init__(
        self, group: Group, expected: StateDictInfo, device: torch.device, seconds: float
    ) -> None:
        super().__init__(expected, device, seconds)
        group.check_whole()
        self._group = group
        self._round = 0
        self._buffers: list[torch.Tensor] = []
        self._work: Any = None
        self._index = 0

    def poll(self) -> int | None:
        while self._step():
            pass
        if self.header and self._work is not None and self._work.is_completed():
            self._wait()
            return self.header.version
        if self._work is not None:
            self._group.check_kept(self._round)
        if not self._seconds_left:
            what = "offer a version" if self.header is None else f"send {self._chunk_name(0)}"
            raise DeadlineError(
                f"the trainer at {self._group.where} did not {what} within {self._seconds:g} s"
            )
        return None

    def _step(self) -> bool:
        """One step towards the first chunk, if the trainer has made its own."""
        if self.header is None:
            number, text = self._group.get("offer")
            if number <= self._group.last_round or not text:
                return False
            self._round = self._group.last_round = number
            self._accept(Header.from_dict(json.loads(text)))
            self._group.put(f"answer/{self._group.rank}", self._round, "")
            return True
        if self._work is None:
            number, text = self._group.get("go")
            if number != self._round:
                return False
            if text:
                raise WeightUpdateError(f"the trainer called the update off: {text}")
            nbytes = max(map(chunk_bytes, self.header.chunks))
            self._buffers = _two_buffers(nbytes, self._device)
            self._begin()
            return True
        return False

    def chunks(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        assert self.header is not None
        for index, chunk in enumerate(self.header.chunks):
            self._next()
            yield unpack(chunk, self._buffers[index % 2])
            self._settle()
        what = f"end version {self.header.version}"
        if error := self._group.wait_text("verdict", self._round, what, self._seconds_left):
            raise WeightUpdateError(f"the trainer gave up version {self.header.version}: {error}")

    def end(self, error: str = "") -> None:
        if not self._round or self._group.broken:
            return
        if self._work is None:
            self._group.put(f"answer/{self._group.rank}", self._round, error)
            return
        try:
            while self.header and self._index < len(self.header.chunks):
                self._next()  # unread: the ranks must not get out of step
            self._group.put(f"done/{self._group.rank}", self._round, error)
        except TurnwiseError:
            pass  # the group is broken, and says so to whoever uses it next
        self._buffers = []

    def _begin(self) -> None:
        """Receive the next chunk into the buffer that is not being read."""
        assert self.header is not None
        buffer = self._buffers[self._index % 2]
        nbytes = chunk_bytes(self.header.chunks[self._index])
        self._work = self._group.broadcast(buffer[:nbytes], self._seconds_left)

    def _next(self) -> None:
        """Wait for the chunk that is under way, and begin the one after it."""
        assert self.header is not None
        self._wait()
        self._index += 1
        if self._index < len(self.header.chunks):
            self._begin()

    def _wait(self) -> None:
        what = f"the trainer at {self._group.where} did not send {self._chunk_name(self._index)}"
        self._group.wait(self._work, what, self._seconds_left, self._round)


def _process_group(
    store: Store, rank: int, world_size: int, device: torch.device, limit: timedelta
) -> Any:
    """A group that torch's registry knows nothing of, so that it disturbs no default group."""
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        return dist.ProcessGroupNCCL(store, rank, world_size, options)
    return dist.ProcessGroupGloo(store, rank, world_size, limit)


def _two_buffers(nbytes: int, device: torch.device) -> list[torch.Tensor]:
    return [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
