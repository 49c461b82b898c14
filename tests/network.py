"""Machines of a network on this one: network namespaces, and a switch between them.

    python -m tests.network 3

starts a network of so many nodes. Each has an address of its own, a loopback interface, and one
other: a TUN device, whose packets all pass this program. So it delays or loses them, or cuts a node
off without a word to either end, as a cable that is pulled does. Kernels can do the same (netem),
but many, such as those of small virtual machines, are built without it. Lines on standard input are
orders; a namespace ends with the last process in it, so nothing stays behind.
"""

import ctypes
import fcntl
import heapq
import json
import os
import random
import selectors
import shutil
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.conftest import ROOT

SUBNET = "10.213.77"
MSS = 1448
"""Bytes that a packet of TCP carries, of 1,500 with its headers and time stamps."""
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_BURST = 256  # packets that are read from one node before the others' turn
_CONTROL = "/proc/sys/net/ipv4/tcp_congestion_control"


class NoNetworkError(Exception):
    """The reason why there can be no such network here."""


class Network:
    """Nodes 1, 2, ... of a network, as a context; raises `NoNetworkError`.

    Example:
        with Network(2) as network:
            subprocess.run([*network.on(1), "ip", "address"])
            network.set(delay=0.05, loss=0.01)
            network.set(cut=[2])
    """

    def __init__(self, nodes: int) -> None:
        for program in ("ip", "nsenter"):
            if shutil.which(program) is None:
                raise NoNetworkError(f"there is no program {program} (iproute2, util-linux)")
        if os.geteuid():
            raise NoNetworkError("network namespaces need root")
        self._switch = subprocess.Popen(
            [sys.executable, "-m", "tests.network", str(nodes)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        answer = self._answer()
        if "error" in answer:
            self.close()
            raise NoNetworkError(answer["error"])
        self._descriptors: list[int] = answer["namespaces"]

    def address(self, node: int) -> str:
        return f"{SUBNET}.{node}"

    def on(self, node: int) -> list[str]:
        """Return the beginning of a command that runs on a node."""
        own = f"/proc/{self._switch.pid}/fd/{self._descriptors[node - 1]}"
        return ["nsenter", f"--net={own}", "--"]

    def set(
        self, *, delay: float | None = None, loss: float | None = None, cut: Sequence[int] = ()
    ) -> dict[str, Any]:
        """Change what happens to packets; return what has happened so far.

        Args:
            delay: Seconds that each takes; None leaves it.
            loss: Share of packets that are lost; None leaves it.
            cut: Nodes that nothing leaves or reaches; all others are connected.
        """
        assert self._switch.stdin is not None
        order = {"delay": delay, "loss": loss, "cut": list(cut)}
        self._switch.stdin.write(json.dumps(order) + "\n")
        self._switch.stdin.flush()
        return self._answer()

    def close(self) -> None:
        with suppress(BrokenPipeError):
            self._switch.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._switch.stdout is not None
        answer: dict[str, Any] = json.loads(self._switch.stdout.readline() or "{}")
        return answer or {"error": "the switch ended"}

    def __enter__(self) -> "Network":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()


class Switch:
    """Passes packets on between the devices of namespaces that it makes."""

    def __init__(self, nodes: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self.namespaces: list[int] = []
        self._devices: list[int] = []
        for node in range(1, nodes + 1):
            if libc.unshare(_CLONE_NEWNET):
                raise OSError(f"unshare(CLONE_NEWNET): {os.strerror(ctypes.get_errno())}")
            self.namespaces.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY))
            device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            request = struct.pack("16sH22x", b"net0", _IFF_TUN | _IFF_NO_PI)
            fcntl.ioctl(device, _TUNSETIFF, request)
            self._devices.append(device)
            for command in (
                "link set lo up",
                f"address add {SUBNET}.{node}/24 dev net0",
                "link set net0 up",
                "route add default dev net0",
            ):
                subprocess.run(["ip", *command.split()], check=True)
            with suppress(OSError):  # for it a loss is congestion, as in the formula
                Path(_CONTROL).write_text("reno")
        self._delay = self._loss = 0.0
        self._cut: set[int] = set()
        self._random = random.Random(0)
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._counts: Counter[str] = Counter()

    def run(self) -> None:
        """Serve until standard input ends."""
        with selectors.DefaultSelector() as selector:
            selector.register(sys.stdin, selectors.EVENT_READ)
            for device in self._devices:
                selector.register(device, selectors.EVENT_READ)
            while True:
                wait = None
                if self._waiting:
                    wait = max(0.0, self._waiting[0][0] - time.monotonic())
                for key, _ in selector.select(wait):
                    if key.fileobj is not sys.stdin:
                        self._read(key.fd)
                    elif not (line := sys.stdin.readline()):
                        return
                    else:
                        self._obey(json.loads(line))
                self._deliver()

    def _obey(self, order: dict[str, Any]) -> None:
        if (delay := order["delay"]) is not None:
            self._delay = delay
        if (loss := order["loss"]) is not None:
            self._loss = loss
        self._cut = set(order["cut"])
        say(dict(self._counts))

    def _read(self, device: int) -> None:
        due = time.monotonic() + self._delay
        for _ in range(_BURST):
            try:
                packet = os.read(device, 65_536)
            except BlockingIOError:
                return
            source, target = packet[15], packet[19]
            if packet[0] >> 4 != 4 or not 1 <= target <= len(self._devices):
                continue
            self._counts["packets"] += 1
            self._counts["bytes"] += len(packet)
            if not self._cut.isdisjoint((source, target)):
                self._counts["cut"] += 1
            elif self._loss and self._random.random() < self._loss:
                self._counts["lost"] += 1
            else:
                number = self._counts["packets"]
                heapq.heappush(self._waiting, (due, number, target, packet))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now:
            _, _, target, packet = heapq.heappop(self._waiting)
            with suppress(OSError):  # its queue is full, or the node's device is down
                os.write(self._devices[target - 1], packet)


def say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def main(nodes: int) -> None:
    try:
        switch = Switch(nodes)
    except (OSError, subprocess.CalledProcessError) as error:
        say({"error": str(error)})
        return
    say({"namespaces": switch.namespaces})
    switch.run()


if __name__ == "__main__":
    main(int(sys.argv[1]))
