"""Cost of a weight update by transport: `python -m benchmarks.weights [--quick]`.

A trainer and a receiver in two processes of this machine. The receiver copies every tensor into
its own memory, as an engine does before it repacks; vLLM's own work is not measured. Each
transport's time is also given as a multiple of a plain copy of the same bytes in the same run
(torch's copy_, warm, in one process). Extra memory is the rise of a process's resident set above
its size before the update; pages of shared memory count in both.

Rows with "delta" measure `weights.delta`, next to whole updates of the same tensors in bfloat16:
before each update one value in a hundred changes, and the receiver copies all tensors, because each
has changed.
"""

import multiprocessing
import re
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.report import Claim, parser, report
from turnwise.core.json_types import dtype_name
from turnwise.weights.delta import with_deltas
from turnwise.weights.manifest import Manifest, numbers_of
from turnwise.weights.process_group import ProcessGroup, free_address
from turnwise.weights.transport import (
    CPU_BUFFER_BYTES,
    Receiver,
    ReceiverOptions,
    WeightSender,
    find_transport,
    make_sender,
)

GOALS = {"shm": 2.5, "ipc": 1.5, "collective": 3.0, "disk": 3.5}
"""Maximum time of an update of 100 M parameters, as a multiple of a plain copy's time."""
TRANSPORTS = tuple(GOALS)
DELTAS = ("shm", "collective", "disk")
"""Transports that send deltas."""
CHANGED = 100  # one of this number of values changes between two updates
SIZES = {"3 M": 3_000_000, "100 M": 100_000_000, "1 B": 1_000_000_000}
WIDTH = 2048
SECONDS = 600.0
CPU = torch.device("cpu")
Named = list[tuple[str, torch.Tensor]]


def make_tensors(parameters: int, dtype: torch.dtype) -> Named:
    """Return tensors of the usual size of a transformer's matrices, and one with the rest."""
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
    """Run one update; returns its seconds, the extra bytes in the trainer and in the receiver, and
    the bytes sent."""
    for _, tensor in tensors:
        part = tensor[version % CHANGED :: CHANGED]
        part.copy_(torch.rand(part.shape))
    before, started = start_of_peak(), time.perf_counter()
    manifest = sender.publish(version, iter(tensors))
    child.send(manifest)
    sender.send(version, iter(tensors), [socket.gethostname()])
    theirs = child.recv()
    return time.perf_counter() - started, peak() - before, theirs, manifest.sent_bytes


def measure(
    transport: str, tensors: Named, child: Connection, repeats: int, delta: bool = False
) -> tuple[float, ...]:
    """Return median seconds, the largest extra memory of trainer and receiver, and the bytes sent.
    The first two updates, in which the receiver maps the trainer's two buffers, do not count."""
    with tempfile.TemporaryDirectory() as folder:
        dtype = tensors[0][1].dtype
        sender = make_sender(transport, tensors, dtype, folder=folder, timeout=SECONDS)
        sender = with_deltas(sender) if delta else sender
        if transport == "collective":
            ip, port = free_address()
            child.send((ip, port))
            sender.join(ip, port, 1)
            child.recv()
        rounds = [update(sender, i, tensors, child) for i in range(repeats + 2)][2:]
        sender.close()
    seconds, ours, theirs, sent = zip(*rounds, strict=True)
    return statistics.median(seconds), max(ours), max(theirs), max(sent)


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


def by_tcp(tensors: Named, repeats: int) -> float:
    """Return median seconds of sending the tensors' bytes over a connection of this machine."""
    times, buffer = [], memoryview(bytearray(CPU_BUFFER_BYTES))
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as pool:
        ours = socket.create_connection(listening.getsockname())
        theirs, _ = listening.accept()

        def receive() -> None:
            left = sum(tensor.nbytes for _, tensor in tensors)
            while left:
                left -= theirs.recv_into(buffer[: min(left, len(buffer))])

        for _ in range(repeats):
            started, receiving = time.perf_counter(), pool.submit(receive)
            for _, tensor in tensors:
                ours.sendall(numbers_of(tensor).data)
            receiving.result()
            times.append(time.perf_counter() - started)
        ours.close()
        theirs.close()
    return statistics.median(times)


def by_file(tensors: Named, repeats: int) -> float:
    """Return median seconds of writing the tensors' bytes to a new file, and reading them."""
    times, into = [], [torch.empty_like(tensor) for _, tensor in tensors]
    with tempfile.TemporaryDirectory() as folder:
        for number in range(repeats):
            path, started = Path(folder, str(number)), time.perf_counter()
            with path.open("wb", buffering=0) as file:
                for _, tensor in tensors:
                    file.write(numbers_of(tensor).data)
            with path.open("rb", buffering=0) as file:
                for tensor in into:
                    file.readinto(numbers_of(tensor).data)
            times.append(time.perf_counter() - started)
            path.unlink()
    return statistics.median(times)


LIMITS = {
    "collective": ("a bare TCP connection", by_tcp),
    "disk": ("a file, written and read", by_file),
}


@contextmanager
def receiver_of(tensors: Named) -> Iterator[Connection]:
    """Start a process that receives these tensors."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    shapes = [(name, tensor.numel()) for name, tensor in tensors]
    arguments = (theirs, shapes, tensors[0][1].dtype)
    process: Any = context.Process(target=receive, args=arguments, daemon=True)
    process.start()
    yield ours
    ours.send(None)
    process.join()


def cells(measured: tuple[float, ...], copied: float) -> list[str]:
    """Return the columns of a row of the table, from the milliseconds on."""
    seconds, trainer, receiver, sent = measured
    memory = [f"{number / 2**20:.0f}" for number in (trainer, receiver)]
    return [f"{seconds * 1e3:.1f}", f"{seconds / copied:.1f}", *memory, f"{sent / 2**20:.1f}"]


def measure_size(size: str, repeats: int, table: Table) -> dict[str, tuple[float, float, float]]:
    """Add a size's rows, in float32, or in bfloat16 if float32 and its copies would not fit.

    Returns:
        For each transport: seconds of the transport, of a plain copy, and of the transport's limit
        in `LIMITS` (0 without a limit).
    """
    dtype = torch.bfloat16 if SIZES[size] >= SIZES["1 B"] else torch.float32
    tensors = make_tensors(SIZES[size], dtype)
    taken = {}
    with receiver_of(tensors) as child:
        copied = plain_copy(tensors, repeats)
        kind = str(dtype).removeprefix("torch.")
        table.add_row(size, kind, "plain copy", f"{copied * 1e3:.1f}", "1.0", "", "", "")
        for transport in TRANSPORTS:
            measured = measure(transport, tensors, child, repeats)
            table.add_row("", "", transport, *cells(measured, copied))
            limit = LIMITS[transport][1](tensors, repeats) if transport in LIMITS else 0.0
            taken[transport] = measured[0], copied, limit
    return taken


def measure_deltas(size: str, repeats: int, table: Table) -> dict[str, tuple[float, float, float]]:
    """Add a size's rows of deltas; return seconds of a delta, of a whole update, and of a plain
    copy."""
    tensors = make_tensors(SIZES[size], torch.bfloat16)
    taken = {}
    with receiver_of(tensors) as child:
        copied = plain_copy(tensors, repeats)
        for transport in DELTAS:
            whole = measure(transport, tensors, child, repeats)
            delta = measure(transport, tensors, child, repeats, delta=True)
            table.add_row("", "bfloat16", transport, *cells(whole, copied))
            table.add_row("", "", f"{transport}, delta", *cells(delta, copied))
            taken[transport] = delta[0], whole[0], copied
    return taken


def main() -> None:
    """Run the benchmark and print the table and its claims."""
    made = parser("weights", __doc__)
    made.add_argument("--repeats", type=int, default=4)
    made.add_argument("--sizes", nargs="*", choices=SIZES, default=["100 M"])
    options = made.parse_args()
    torch.set_num_threads(1)
    table = Table(
        "parameters", "type", "transport", "ms", "x copy", "MiB trainer", "MiB receiver", "MiB sent"
    )
    sizes = ["3 M"] if options.quick else options.sizes
    rounds, of_deltas = (1, 1) if options.quick else (5, 3)
    repeats = 2 if options.quick else options.repeats
    taken = {size: [measure_size(size, repeats, table) for _ in range(rounds)] for size in sizes}
    deltas = {
        size: [measure_deltas(size, repeats, table) for _ in range(of_deltas)] for size in sizes
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
        ]
        + [
            Claim(
                f"the same, {transport}",
                "ms",
                [seconds[transport][0] * 1e3 for seconds in taken[size]],
                limit,
                [seconds[transport][2] * 1e3 for seconds in taken[size]],
                [seconds[transport][0] / seconds[transport][2] for seconds in taken[size]],
            )
            for size in sizes
            for transport, (limit, _) in LIMITS.items()
        ]
        + [
            Claim(
                f"delta of 1 % of {size} parameters, {transport}",
                "ms",
                [seconds[transport][0] * 1e3 for seconds in deltas[size]],
                "the whole update",
                [seconds[transport][1] * 1e3 for seconds in deltas[size]],
                [seconds[transport][0] / seconds[transport][1] for seconds in deltas[size]],
            )
            for size in sizes
            for transport in DELTAS
        ]
        + [
            Claim(
                f"delta of 1 % of {size} parameters, disk",
                "ms",
                [seconds["disk"][0] * 1e3 for seconds in deltas[size]],
                "a plain copy",
                [seconds["disk"][2] * 1e3 for seconds in deltas[size]],
                [seconds["disk"][0] / seconds["disk"][2] for seconds in deltas[size]],
                at_most=3.0 if size == "100 M" else None,
            )
            for size in sizes
        ],
        options,
    )


if __name__ == "__main__":
    main()
