"""Cost of a weight update by transport: `python -m benchmarks.weights [--quick]`.

A trainer and a receiver in two processes of this machine. The receiver copies every tensor into
its own memory, as an engine does before it repacks; vLLM's own work is not measured. Each
transport's time is also given as a multiple of a plain copy of the same bytes in the same run
(torch's copy_, warm, in one process). Extra memory is the rise of a process's resident set above
its size before the update; pages of shared memory count in both.
"""

import multiprocessing
import re
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.report import Claim, parser, report
from turnwise.core.json_types import dtype_name
from turnwise.weights.process_group import ProcessGroup, free_address
from turnwise.weights.transport import (
    Manifest,
    Receiver,
    ReceiverOptions,
    WeightSender,
    find_transport,
    make_sender,
)

GOALS = {"shm": 3.0, "ipc": 1.5, "collective": 4.0, "disk": 3.5}
"""Largest times of an update of 100 M parameters, in plain copies."""
TRANSPORTS = tuple(GOALS)
SIZES = {"3 M": 3_000_000, "100 M": 100_000_000, "1 B": 1_000_000_000}
WIDTH = 2048
SECONDS = 600.0
CPU = torch.device("cpu")
Named = list[tuple[str, torch.Tensor]]


def make_tensors(parameters: int, dtype: torch.dtype) -> Named:
    """Return matrices of a transformer's usual size, and one for the rest."""
    block = min(WIDTH**2, parameters // 8)
    count, rest = divmod(parameters, block)
    sizes = [block] * count + ([rest] if rest else [])
    return [(f"layer.{i}", torch.rand(size).to(dtype)) for i, size in enumerate(sizes)]


def receive(tasks: Connection, shapes: list[tuple[str, int]], dtype: torch.dtype) -> None:
    """Receive updates in the receiver's process; reports the peak bytes of each."""
    torch.set_num_threads(1)
    weights = {name: torch.zeros(size, dtype=dtype) for name, size in shapes}
    options = ReceiverOptions(CPU, 0, {name: ((size,), dtype_name(dtype)) for name, size in shapes})
    while (task := tasks.recv()) is not None:
        if not isinstance(task, Manifest):
            ip, port = task
            options.group = ProcessGroup(1, ip, port, 2, 1, CPU, SECONDS)
            tasks.send("joined")
            continue
        before = start_of_peak()
        receiver = find_transport(task.transport).receive(task, options, SECONDS)
        for name, tensor in arriving(receiver):
            weights[name].copy_(tensor)
            del tensor
        receiver.end()
        tasks.send(peak() - before)


def arriving(receiver: Receiver) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of an update, as an engine's worker receives them."""
    while receiver.poll() is None:
        time.sleep(0.001)
    for tensors in receiver.chunks():
        yield from tensors


def start_of_peak() -> int:
    """Reset this process's peak; returns its current bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def update(
    sender: WeightSender, version: int, tensors: Named, child: Connection
) -> tuple[float, ...]:
    """Run one update; returns its seconds, and the extra bytes in the trainer and the receiver."""
    before, started = start_of_peak(), time.perf_counter()
    child.send(sender.publish(version, iter(tensors)))
    sender.send(version, iter(tensors), [socket.gethostname()])
    theirs = child.recv()
    return time.perf_counter() - started, peak() - before, theirs


def measure(transport: str, tensors: Named, child: Connection, repeats: int) -> tuple[float, ...]:
    """Return median seconds, and both sides' largest memory; the first update is not counted."""
    with tempfile.TemporaryDirectory() as folder:
        dtype = tensors[0][1].dtype
        sender = make_sender(transport, tensors, dtype, folder=folder, timeout=SECONDS)
        if transport == "collective":
            ip, port = free_address()
            child.send((ip, port))
            sender.join(ip, port, 1)
            child.recv()
        rounds = [update(sender, i, tensors, child) for i in range(repeats + 1)][1:]
        sender.close()
    seconds, ours, theirs = zip(*rounds, strict=True)
    return statistics.median(seconds), max(ours), max(theirs)


def plain_copy(tensors: Named, repeats: int) -> float:
    """Return median seconds of a copy into existing memory."""
    copies = [tensor.clone() for _, tensor in tensors]
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        for copy, (_, tensor) in zip(copies, tensors, strict=True):
            copy.copy_(tensor)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def measure_size(size: str, repeats: int, table: Table) -> dict[str, tuple[float, float]]:
    """Add a size's rows: float32, and bfloat16 where float32 would not fit beside its copies.

    Returns:
        Seconds of each transport, and of a plain copy.
    """
    dtype = torch.bfloat16 if SIZES[size] >= SIZES["1 B"] else torch.float32
    tensors = make_tensors(SIZES[size], dtype)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    shapes = [(name, tensor.numel()) for name, tensor in tensors]
    process: Any = context.Process(target=receive, args=(theirs, shapes, dtype), daemon=True)
    process.start()
    copied = plain_copy(tensors, repeats)
    kind = str(dtype).removeprefix("torch.")
    table.add_row(size, kind, "plain copy", f"{copied * 1e3:.1f}", "1.0", "", "")
    taken = {}
    for transport in TRANSPORTS:
        seconds, trainer, receiver = measure(transport, tensors, ours, repeats)
        megabytes = (f"{trainer / 2**20:.0f}", f"{receiver / 2**20:.0f}")
        row = (f"{seconds * 1e3:.1f}", f"{seconds / copied:.1f}", *megabytes)
        table.add_row("", "", transport, *row)
        taken[transport] = seconds, copied
    ours.send(None)
    process.join()
    return taken


def main() -> None:
    """Run the benchmark and print the table and its claims."""
    made = parser("weights", __doc__)
    made.add_argument("--repeats", type=int, default=2)
    made.add_argument("--sizes", nargs="*", choices=SIZES, default=["100 M"])
    options = made.parse_args()
    torch.set_num_threads(1)
    table = Table("parameters", "type", "transport", "ms", "x copy", "MiB trainer", "MiB receiver")
    sizes = ["3 M"] if options.quick else options.sizes
    rounds = 1 if options.quick else 5
    taken = {
        size: [
            measure_size(size, 2 if options.quick else options.repeats, table)
            for _ in range(rounds)
        ]
        for size in sizes
    }
    Console().print(table)
    report(
        [
            Claim(
                f"weight update of {size} parameters, {transport}",
                "ms",
                [seconds[transport][0] * 1e3 for seconds in taken[size]],
                "a plain copy",
                [seconds[transport][1] * 1e3 for seconds in taken[size]],
                [seconds[transport][0] / seconds[transport][1] for seconds in taken[size]],
                at_most=GOALS[transport] if size == "100 M" else None,
            )
            for size in sizes
            for transport in TRANSPORTS
        ],
        options,
    )


if __name__ == "__main__":
    main()
