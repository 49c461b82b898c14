"""Updates with deltas over slow links: `sudo python -m benchmarks.links [--rates 1 10 25]`.

A trainer and a receiver in two network namespaces of this machine, between which the kernel limits
the rate (tc, a token bucket). Updates of 100 M parameters in bfloat16 by `weights.transport:
collective`, whole and with `weights.delta`, where one value in a hundred changes. Needs root, `ip`
and `tc`; the namespaces are removed afterwards.
"""

import ctypes
import multiprocessing
import os
import statistics
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import Claim, parser, report
from benchmarks.weights import SIZES, Named, make_tensors, receive, update
from turnwise.weights.delta import with_deltas
from turnwise.weights.transport import make_sender

HOST, GUEST = "10.97.0.1", "10.97.0.2"
NAMESPACE, OURS, THEIRS = "turnwise-guest", "turnwise-a", "turnwise-b"
PORT = 29_741
SECONDS = 600.0
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET


def run(*commands: str) -> None:
    for command in commands:
        subprocess.run(command.split(), check=True, capture_output=True)


@contextmanager
def link() -> Iterator[None]:
    """Make a network namespace with a virtual cable to it, and remove both at the end."""
    inside = f"ip netns exec {NAMESPACE}"
    try:
        run(
            f"ip netns add {NAMESPACE}",
            f"ip link add {OURS} type veth peer name {THEIRS}",
            f"ip link set {THEIRS} netns {NAMESPACE}",
            f"ip addr add {HOST}/24 dev {OURS}",
            f"ip link set {OURS} up",
            f"{inside} ip addr add {GUEST}/24 dev {THEIRS}",
            f"{inside} ip link set {THEIRS} up",
            f"{inside} ip link set lo up",
        )
        yield
    finally:
        for command in (f"ip link del {OURS}", f"ip netns del {NAMESPACE}"):
            subprocess.run(command.split(), capture_output=True)


def limit(gigabits: float) -> None:
    """Limit the rate of both ends."""
    for prefix, device in (("", OURS), (f"ip netns exec {NAMESPACE} ", THEIRS)):
        burst = int(gigabits * 1e9 / 8 / 100)  # ten milliseconds
        run(
            f"{prefix}tc qdisc replace dev {device} root tbf rate {gigabits:g}gbit "
            f"burst {burst} latency 50ms"
        )


def receive_inside(tasks: Connection, shapes: list[tuple[str, int]]) -> None:
    """Receive updates in the namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/var/run/netns", NAMESPACE).open() as file:
        if libc.setns(file.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), "setns")
    os.environ["GLOO_SOCKET_IFNAME"] = THEIRS
    receive(tasks, shapes, torch.bfloat16)


def measure(tensors: Named, child: Connection, port: int, repeats: int, delta: bool) -> float:
    """Return the median seconds of updates; the first two do not count."""
    sender = make_sender("collective", tensors, torch.bfloat16, timeout=SECONDS)
    sender = with_deltas(sender) if delta else sender
    child.send((HOST, port))
    sender.join(HOST, port, 1)
    child.recv()
    seconds = [update(sender, i, tensors, child)[0] for i in range(repeats + 2)][2:]
    sender.close()
    return statistics.median(seconds)


def main() -> None:
    """Run the benchmark and print its claims."""
    made = parser("links", __doc__)
    made.add_argument("--rates", nargs="*", type=float, default=[1.0, 10.0, 25.0], help="Gbit/s")
    options = made.parse_args()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = OURS
    tensors = make_tensors(SIZES["3 M" if options.quick else "100 M"], torch.bfloat16)
    shapes = [(name, tensor.numel()) for name, tensor in tensors]
    claims, ports = list[Claim](), iter(range(PORT, PORT + 1000))
    context: Any = multiprocessing.get_context("spawn")
    with link():
        child, theirs = context.Pipe()
        process = context.Process(target=receive_inside, args=(theirs, shapes), daemon=True)
        process.start()
        for rate in options.rates:
            limit(rate)
            whole, delta = (
                [
                    measure(tensors, child, next(ports), 1 if options.quick else 3, is_delta)
                    for _ in range(1 if options.quick else 3)
                ]
                for is_delta in (False, True)
            )
            ratios = [few / all_ for few, all_ in zip(delta, whole, strict=True)]
            claims.append(
                Claim(
                    f"delta of 1 % at {rate:g} Gbit/s",
                    "ms",
                    [one * 1e3 for one in delta],
                    "the whole update",
                    [one * 1e3 for one in whole],
                    ratios,
                )
            )
        child.send(None)
        process.join()
    report(claims, options)


if __name__ == "__main__":
    main()
