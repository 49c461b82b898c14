"""Weights from one process to another on the device, by every transport."""

import multiprocessing
import socket
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection

import torch

from benchmarks.gpu.device import GIB, NotRun, Place, require
from turnwise.core.json_types import dtype_name
from turnwise.weights.manifest import Manifest
from turnwise.weights.process_group import LOOPBACK, ProcessGroup, device_name
from turnwise.weights.transport import ReceiverOptions, WeightSender, find_transport, make_sender

SECONDS = 60.0
DTYPE = torch.bfloat16
VERSIONS = 3
Named = list[tuple[str, torch.Tensor]]


def tensors(place: Place, version: int) -> Named:
    """Return a version's float32 tensors; the same on both sides of the same kind of device."""
    generator = torch.Generator(place.device).manual_seed(version)
    width, count = place.size(2048, 32), place.size(140, 6)
    return [
        (f"layer.{i}", torch.rand(width, width + i % 3, device=place.device, generator=generator))
        for i in range(count)
    ]


def receive(place: Place, tasks: Connection) -> None:
    """Receive versions as an engine's worker does; report whether each arrived, and the memory."""
    torch.set_num_threads(1)
    expected = {n: (tuple(t.shape), dtype_name(DTYPE)) for n, t in tensors(place, 0)}
    options = ReceiverOptions(place.device, 0, expected)
    tasks.send(device_name(place.device))
    while (task := tasks.recv()) is not None:
        if not isinstance(task, Manifest):
            ip, port = task
            options.group = ProcessGroup(1, ip, port, 2, 1, place.device, SECONDS)
            tasks.send("joined")
            continue
        try:
            tasks.send(_load(place, task, options))
        except Exception as error:
            tasks.send(f"{type(error).__name__}: {error}")


def _load(place: Place, manifest: Manifest, options: ReceiverOptions) -> str:
    """Load one update; return the first tensor that is not as sent, or ""."""
    transport = find_transport(manifest.transport)
    transport.validate(manifest, options)
    receiver = transport.receive(manifest, options, SECONDS)
    while receiver.poll() is None:
        time.sleep(0.0005)
    loaded: dict[str, torch.Tensor] = {}
    for arrived in receiver.chunks():
        for name, tensor in arrived:
            own = torch.empty(tensor.shape, dtype=tensor.dtype, device=place.device)
            loaded[name] = own.copy_(tensor)
            del tensor
    place.synchronize()
    receiver.end()
    for name, tensor in tensors(place, manifest.version):
        if not torch.equal(loaded[name], tensor.to(DTYPE)):
            return f"{name} of version {manifest.version} arrived with other values"
    return ""


def pair(place: Place, transport: str, other: Place | None = None) -> str:
    """Send versions to a second process; return the figure."""
    ours, theirs = multiprocessing.Pipe()
    process = place.start(receive, other or place, theirs)
    theirs.close()
    if place.gpu:
        torch.cuda.set_device(place.device)
    sender = _sender(place, transport)
    try:
        there = _answer(ours)
        if transport == "collective":
            port = free_port()
            ours.send((LOOPBACK, port))
            sender.join(LOOPBACK, port, 1, SECONDS)
            _answer(ours)
        seconds = []
        for version in range(1, VERSIONS + 1):
            sent = tensors(place, version)
            place.synchronize()
            started = time.perf_counter()
            ours.send(sender.publish(version, iter(sent)))
            sender.send(version, iter(sent), [there])
            seconds.append(time.perf_counter() - started)
            require(not (wrong := _answer(ours)), wrong)
        ours.send(None)
        process.join(SECONDS)
        require(process.exitcode == 0, f"the receiver ended with exit code {process.exitcode}")
    finally:
        sender.close()
    nbytes = sum(t.numel() for _, t in sent) * DTYPE.itemsize
    taken = statistics.median(seconds[1:])
    return f"{nbytes / GIB:.3g} GiB sent in {taken:.3f} s, {nbytes / taken / 1e9:.3g} GB/s"


def _sender(place: Place, transport: str) -> WeightSender:
    return make_sender(
        transport,
        tensors(place, 0),
        DTYPE,
        device=place.device,
        folder=place.folder,
        timeout=2 * SECONDS,
    )


def _answer(ours: Connection) -> str:
    require(ours.poll(SECONDS), f"the receiver did not answer within {SECONDS:g} s")
    answer: str = ours.recv()
    return answer


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
    return port


def shm(place: Place) -> Iterator[str]:
    yield pair(place, "shm")


def disk(place: Place) -> Iterator[str]:
    yield pair(place, "disk")


def ipc(place: Place) -> Iterator[str]:
    yield pair(place, "ipc")


def collective(place: Place) -> Iterator[str]:
    """A group of one; then two processes, on two GPUs, since NCCL refuses two on one GPU."""
    second = torch.cuda.device_count() > 1
    figure = pair(place, "collective", _second(place)) if second or not place.gpu else ""
    sender = _sender(place, "collective")
    sender.join(LOOPBACK, free_port(), 0, SECONDS)
    sent = tensors(place, 1)
    seconds = [place.seconds(lambda: sender.send(1, iter(sent))) for _ in range(VERSIONS)]
    sender.close()
    nbytes = sum(t.numel() for _, t in sent) * DTYPE.itemsize
    yield f"{nbytes / statistics.median(seconds) / 1e9:.3g} GB/s"
    if not figure:
        raise NotRun("there is one GPU, and NCCL needs one for each process")
    yield figure


def _second(place: Place) -> Place:
    return replace(place, device=torch.device("cuda", 1)) if place.gpu else place


def in_process(place: Place) -> Iterator[str]:
    """An engine's worker reads the trainer's own tensors."""
    sent = tensors(place, 1)
    sender = make_sender("in_process", sent, DTYPE, device=place.device)
    manifest = sender.publish(1, iter(sent))
    options = ReceiverOptions(place.device, 0)
    receiver = find_transport("in_process").receive(manifest, options, SECONDS)
    require(receiver.poll() == 1, "version 1 is not there")
    seconds = place.seconds(
        lambda: [t.to(DTYPE) for arrived in receiver.chunks() for _, t in arrived]
    )
    sender.close()
    yield f"{sum(t.nbytes for _, t in sent) / seconds / 1e9:.3g} GB/s"
