"""What only the `ipc` transport does: sockets, shared memory, and who holds which end."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.weights.links import (
    CPU,
    IpcLink,
    impatient_from_chunk_2,
    open_ipc,
    receive_stream,
    some_tensors,
    state_dict_info,
)
from turnwise.errors import DeadlineError, InputError, WeightUpdateError
from turnwise.weights import ipc
from turnwise.weights.ipc import IpcReceiver, device_address, private_address
from turnwise.weights.transport import Receiver

PATIENCE = 240.0
"""Seconds for what should not take any."""


@pytest.fixture
def link() -> Iterator[IpcLink]:
    link = IpcLink()
    yield link
    link.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def until_ready(receiver: Receiver) -> Receiver:
    while receiver.poll() is None:
        time.sleep(0.001)
    return receiver


def test_a_trainer_does_not_take_the_address_of_another(link: IpcLink) -> None:
    sender = link.sender(some_tensors())
    with pytest.raises(InputError, match=f"another trainer uses {link.where}"):
        link.sender(some_tensors())
    sender.close()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            link.sender(some_tensors()).close()
            break
        except InputError:
            time.sleep(0.01)  # ZMQ closes in its own thread
    else:
        pytest.fail("the address was never free again")


def test_an_address_that_zmq_refuses_is_a_sentence(link: IpcLink) -> None:
    for address in ("ipc:///" + "x" * 200, "nowhere"):
        with pytest.raises(InputError, match=f"{address} cannot be bound"):
            open_ipc(some_tensors(), address)
    with pytest.raises(InputError, match="cannot connect to nowhere"):
        IpcReceiver("nowhere", {}, CPU, 1)


def test_devices_have_addresses_that_only_their_user_reaches() -> None:
    address = device_address(CPU, 1)
    assert address != device_address(CPU)
    assert Path(address.removeprefix("ipc://")).parent.stat().st_mode & 0o777 == 0o700


def test_an_engine_may_be_there_before_its_trainer(link: IpcLink, pool: ThreadPoolExecutor) -> None:
    tensors = some_tensors()
    expected = {name: (tuple(tensor.shape), "float32") for name, tensor in tensors}
    reader = pool.submit(receive_stream, link.receiver(expected, PATIENCE))
    time.sleep(0.05)
    sender = link.sender(tensors)
    sender.send(1, tensors)
    assert reader.result()[0] == 1
    sender.close()


def test_the_buffers_are_two_and_as_small_as_the_model(link: IpcLink) -> None:
    """By `weights.transport: ipc`."""
    tensors = [("a", torch.zeros(100)), ("b", torch.zeros(100))]
    sender = link.sender(tensors)
    assert sender._buffer_bytes < 2000
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("turnwise")]
    sender.close()


def test_a_dead_engine_is_noticed_and_the_next_one_is_served(
    link: IpcLink, pool: ThreadPoolExecutor
) -> None:
    tensors = some_tensors()
    sender = link.sender(tensors, buffer_bytes=4000, timeout=PATIENCE)
    expected = state_dict_info(tensors)
    dying = link.receiver(expected, PATIENCE)
    sending = pool.submit(sender.send, 1, tensors)
    until_ready(dying)
    reader = pool.submit(receive_stream, link.receiver(expected, PATIENCE))
    dying._socket.close(0)
    started = time.monotonic()
    with pytest.raises(WeightUpdateError, match=f"the engine at {link.where} disconnected"):
        sending.result()
    assert time.monotonic() - started < PATIENCE / 2
    sender.send(2, tensors)
    assert reader.result()[0] == 2
    sender.close()


def test_a_trainer_that_dies_is_noticed_before_the_deadline(
    link: IpcLink, pool: ThreadPoolExecutor
) -> None:
    tensors = some_tensors()
    sender = link.sender(tensors, buffer_bytes=4000, timeout=PATIENCE)
    receiver, received = link.receiver(state_dict_info(tensors), PATIENCE), threading.Event()
    source = impatient_from_chunk_2(sender, tensors, received, 0.3)
    sending = pool.submit(sender.send, 1, source)
    until_ready(receiver)
    received.set()
    with pytest.raises(DeadlineError):
        sending.result()
    sender.close()
    chunks = receiver.chunks()
    next(chunks)
    started = time.monotonic()
    with pytest.raises((DeadlineError, WeightUpdateError), match=r"trainer at .* (died|gave up)"):
        next(chunks)
    assert time.monotonic() - started < PATIENCE / 2
    receiver.end("the trainer died")


def test_a_buffer_of_another_host_is_refused(link: IpcLink) -> None:
    receiver = link.receiver({}, 1)
    message = {"chunk": 0, "handle": {"address": "/proc/self/fd/999"}}
    with pytest.raises(WeightUpdateError, match=r"No such file.* must share a host"):
        receiver._open(message, 0)  # type: ignore[attr-defined]
    receiver.end()


def test_sockets_of_trainers_that_were_killed_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ipc, "_FOLDER", str(tmp_path))
    killed, own = tmp_path / "trainer-99999999-0", tmp_path / f"trainer-{os.getpid()}-7"
    for path in (killed, own):
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    assert private_address().startswith(f"ipc://{tmp_path}/trainer-{os.getpid()}-")
    assert list(tmp_path.iterdir()) == [own]
