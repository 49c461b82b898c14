"""What only the `collective` transport does: ranks, and a group that breaks as one."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.weights.links import (
    CPU,
    assert_same,
    free_port,
    hurry,
    impatient_from_chunk_2,
    receive_stream,
    some_tensors,
    state_dict_info,
)
from tests.weights.trainer import JOIN_SECONDS, Named, open_collective
from turnwise.engine.protocol import Rendezvous
from turnwise.errors import DeadlineError, InputError, WeightUpdateError
from turnwise.internals.torch import GLOO_INTERFACE
from turnwise.serving.openai.address import reachable
from turnwise.serving.worker_handle import WorkerHandle
from turnwise.weights import collective, process_group
from turnwise.weights.collective import CollectiveReceiver
from turnwise.weights.process_group import (
    ProcessGroup,
    check_own_gpus,
    join_store,
    open_store,
    own_address,
)
from turnwise.weights.transport import ReceiverOptions

HERE = "127.0.0.1"
PATIENCE = 240.0
"""Seconds for what should not take any."""


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


class World:
    """A trainer and two engines, all in this process."""

    def __init__(self, pool: ThreadPoolExecutor, tensors: Named, **options: Any) -> None:
        port = free_port()
        rest = (HERE, port, 3, 1, CPU, JOIN_SECONDS)
        engines = [pool.submit(ProcessGroup, rank, *rest) for rank in (1, 2)]
        self.sender = open_collective(tensors, HERE, port, 2, **options)
        self.groups = [engine.result() for engine in engines]
        self.expected = state_dict_info(tensors)

    def receivers(self, seconds: float = PATIENCE) -> list[CollectiveReceiver]:
        return [
            CollectiveReceiver(ReceiverOptions(CPU, 0, group=group), self.expected, seconds)
            for group in self.groups
        ]


def test_all_engines_get_the_tensors_without_a_default_group(
    pool: ThreadPoolExecutor,
) -> None:
    tensors = some_tensors()
    world = World(pool, tensors, buffer_bytes=4000, timeout=PATIENCE)
    for version in (1, 2, 3):
        readers = [pool.submit(receive_stream, receiver) for receiver in world.receivers()]
        world.sender.send(version, tensors)
        for reader in readers:
            arrived, received = reader.result()
            assert arrived == version
            assert_same(received, tensors)
    assert not dist.is_initialized()


@pytest.mark.parametrize("given", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "sizes",
    # In the second, the small ones alone fill a larger chunk than with the large one before them.
    [[10, 1000, 2000, 999, 1, 1500, 5000, 3], [1024, 576, 576, 576]],
)
def test_a_source_may_use_the_memory_of_a_large_tensor_again(
    pool: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    sizes: list[int],
    given: torch.dtype,
) -> None:
    monkeypatch.setattr(collective, "_LARGE", 4000)
    tensors = [(f"{index}", torch.rand(size)) for index, size in enumerate(sizes)]
    world = World(pool, tensors, buffer_bytes=8000, timeout=PATIENCE)
    scratch = torch.empty(max(sizes), dtype=given)

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            yield name, scratch[: len(tensor)].copy_(tensor)

    for version in (1, 2):
        readers = [pool.submit(receive_stream, receiver) for receiver in world.receivers()]
        world.sender.send(version, source())
        for reader in readers:
            assert_same(reader.result()[1], tensors)


def test_two_ranks_on_one_gpu_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "device_name", lambda device: f"GPU-{device.index % 2}")
    store, names = dist.HashStore(), ["trainer rank 0", "engine rank 1", "engine rank 2"]
    for rank in (1, 2):
        store.set(f"device/{rank}", f"GPU-{rank % 2}")
    with pytest.raises(InputError, match="trainer rank 0 and engine rank 2 are on the same GPU"):
        check_own_gpus(store, 0, names, torch.device("cuda", 0))
    check_own_gpus(store, 0, names[:2], torch.device("cuda", 0))


def test_a_group_listens_where_its_trainer_is_reached(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not at the address of the machine's name, which is a loopback one on many."""
    monkeypatch.delenv(GLOO_INTERFACE, raising=False)
    address, port = reachable("0.0.0.0"), free_port()
    assert own_address(address) == address

    def listening() -> set[tuple[str, int]]:
        own = psutil.Process().net_connections("tcp")
        return {tuple(one.laddr) for one in own if one.status == psutil.CONN_LISTEN}

    before = listening()
    rest = (address, port, 2, 1, CPU, JOIN_SECONDS)
    groups = [*pool.map(lambda rank: ProcessGroup(rank, *rest), (0, 1))]
    assert {host for host, _ in listening() - before} == {address}
    assert [group.broken for group in groups] == ["", ""]
    name = process_group._interface(address)
    assert address in {each.address for each in psutil.net_if_addrs()[name]}


def test_what_one_engine_refuses_is_called_off_everywhere(pool: ThreadPoolExecutor) -> None:
    tensors = some_tensors()
    world = World(pool, tensors, timeout=PATIENCE)
    first, second = world.receivers()
    second._expected = {**world.expected, "more": ((1,), "float32")}
    sending = pool.submit(world.sender.send, 1, tensors)
    accepting = pool.submit(receive_stream, first)
    while first.manifest is None:  # an offer that was withdrawn before concerns it no more
        time.sleep(0.001)
    refusing = pool.submit(receive_stream, second)
    with pytest.raises(WeightUpdateError, match="engine rank 2 refused: more is missing"):
        sending.result()
    for reader in (accepting, refusing):
        with pytest.raises(WeightUpdateError, match="more is missing"):
            reader.result()
    assert first._work is None


def test_a_refusal_is_told_before_all_have_answered(pool: ThreadPoolExecutor) -> None:
    tensors = some_tensors()
    world = World(pool, tensors, timeout=4 * PATIENCE)
    refusing = world.receivers()[1]
    refusing._expected = {}
    reader = pool.submit(receive_stream, refusing)
    started = time.monotonic()
    for waiting in (pool.submit(world.sender.send, 1, tensors), reader):
        with pytest.raises(WeightUpdateError, match="t0 of version 1 was not expected"):
            waiting.result()
    assert time.monotonic() - started < PATIENCE / 2


def test_an_engine_that_does_not_come_is_named_to_all(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = some_tensors()
    world = World(pool, tensors, timeout=0.5)
    group = world.sender._group
    assert group is not None
    wait_engines = group.wait_engines

    def once_the_other_has_come(key: str, number: int, what: str, seconds: float) -> None:
        while group.get(f"{key}/1")[0] != number:
            time.sleep(0.001)
        wait_engines(key, number, what, seconds)

    monkeypatch.setattr(group, "wait_engines", once_the_other_has_come)
    reader = pool.submit(receive_stream, world.receivers()[0])
    message = r"engine rank 2 of the process group at \S+ did not accept version 1 within 0\.125 s"
    with pytest.raises(DeadlineError, match=message):
        world.sender.send(1, tensors)
    with pytest.raises(WeightUpdateError, match=message):
        reader.result()


def test_a_broken_group_says_so_until_a_new_one_is_made(pool: ThreadPoolExecutor) -> None:
    tensors = some_tensors()
    world = World(pool, tensors, buffer_bytes=4000, timeout=PATIENCE)
    receivers, received = world.receivers(), threading.Event()
    source = impatient_from_chunk_2(world.sender, tensors, received, 1)
    sending = pool.submit(world.sender.send, 1, source)
    while not all([receiver.poll() for receiver in receivers]):
        time.sleep(0.001)
    for receiver in receivers:
        hurry(receiver, 2)
    received.set()
    with pytest.raises(DeadlineError, match="did not receive chunk 2"):
        sending.result()
    with pytest.raises(WeightUpdateError, match=r"broke .*did not receive chunk 2.*make a new one"):
        world.sender.send(2, tensors)
    for receiver in receivers:
        receiver.end("too late")


@pytest.fixture
def slow_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines are those of joining; to reach a store that is open has none."""
    monkeypatch.setattr(process_group, "open_store", lambda ip, port, _: open_store(ip, port))
    limit = timedelta(seconds=PATIENCE)
    monkeypatch.setattr(
        process_group, "join_store", lambda ip, port, _: join_store(ip, port, limit)
    )


@pytest.mark.usefixtures("slow_stores")
def test_joining_has_a_deadline_that_names_who_is_missing() -> None:
    port = free_port()
    with pytest.raises(DeadlineError, match=rf"trainer did not open .*{port} within 0\.3 s"):
        ProcessGroup(1, HERE, port, 2, 1, CPU, 0.3)
    with pytest.raises(DeadlineError, match=r"engine rank 1 did not join .* within 0\.3 s"):
        ProcessGroup(0, HERE, port, 2, 1, CPU, 0.3)


@pytest.mark.usefixtures("slow_stores")
def test_ranks_are_taken_once_and_lie_within_the_group() -> None:
    port = free_port()
    with pytest.raises(InputError, match="rank 2 is outside the process group of 2"):
        ProcessGroup(2, HERE, port, 2, 1, CPU, 1)
    store = open_store(HERE, port)
    store.add("joined/0", 1)  # a stranger's word, which does not have the run's secret
    with pytest.raises(DeadlineError, match="trainer rank 0 did not join the process group"):
        ProcessGroup(1, HERE, port, 2, 1, CPU, 1)
    with pytest.raises(InputError, match="rank 1 has joined already"):
        ProcessGroup(1, HERE, port, 2, 1, CPU, 1)
    with pytest.raises(InputError, match=f"no process group could be made at {HERE}:{port}"):
        ProcessGroup(0, HERE, port, 2, 1, CPU, 1)


async def test_an_engine_waits_for_its_group_only_until_the_deadline(
    engine: WorkerHandle,
) -> None:
    port = free_port()
    with pytest.raises(DeadlineError, match=rf"worker-0: the trainer did not open .*{port}"):
        await engine._call("init_collective", Rendezvous(0, HERE, port, 2, 1), 0.5)
    with pytest.raises(InputError, match="worker-0: rank 4 is outside the process group of 2"):
        await engine._call("init_collective", Rendezvous(3, HERE, port, 2, 1), 0.5)
    with pytest.raises(WeightUpdateError, match="call init_collective before"):
        await engine._call("receive_weights", "collective", "", 1.0)
