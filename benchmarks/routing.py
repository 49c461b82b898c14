"""The scheduler against vllm-router: `python -m benchmarks.routing [--quick]`.

Four dummy upstreams answer any request over HTTP at once with a fixed completion. The same client
code sends requests to them over kept connections in three ways: directly, through vllm-router
(Rust, one more hop; round robin, its fastest policy), and with Turnwise's scheduler choosing the
upstream in the client's process, as it does in training. Upstreams, router and client are separate
processes; all of them share the machine.

1. 64 callers, each with one request at a time: requests/s.
2. Requests that arrive at random, 1,000 a second: the 99th percentile of latency, and the latency
   that each way adds to direct requests.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import multiprocessing
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.report import Claim, parser, quotients, report
from turnwise.config import SamplingConfig, ServingConfig
from turnwise.engine import Chunk, Request, Route, generate
from turnwise.serving.scheduler import Scheduler
from turnwise.trajectory import Prompt

UPSTREAMS = 4
CALLERS = 64
ARRIVALS = 1000.0
SAMPLING = SamplingConfig(max_tokens=24)
ANSWER = json.dumps({"choices": [{"text": "yes", "token_ids": [*range(24)]}]}).encode()
BODY = json.dumps({"model": "m", "prompt": [*range(50)], "max_tokens": 24}).encode()
ROUTER = Path(__file__).parent.parent / ".venv-bench" / "bin" / "vllm-router"
Ask = Callable[[str], Awaitable[None]]


class Upstream(asyncio.Protocol):
    """Answers each whole request with `ANSWER`."""

    reply = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (
        len(ANSWER),
        ANSWER,
    )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._buffer = b""

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            length = 0
            if (at := head.find(b"content-length:")) >= 0:
                length = int(head[at + 15 :].split(b"\r\n", 1)[0])
            if len(self._buffer) < end + 4 + length:
                return
            self._buffer = self._buffer[end + 4 + length :]
            self._transport.write(self.reply)


def serve_upstreams(ports: Connection) -> None:
    """Run the upstreams, in their own process."""

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        servers = [await loop.create_server(Upstream, "127.0.0.1", 0) for _ in range(UPSTREAMS)]
        ports.send([server.sockets[0].getsockname()[1] for server in servers])
        await asyncio.Event().wait()

    uvloop.run(serve())


class Client(asyncio.Protocol):
    """One kept connection; one request at a time."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._buffer = b""
        self._answered: asyncio.Future[None] | None = None

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if ANSWER in self._buffer:
            ended = self._buffer.endswith(ANSWER) or self._buffer.endswith(b"0\r\n\r\n")
            if ended and self._answered is not None:
                assert self._buffer.startswith(b"HTTP/1.1 200"), self._buffer
                self._buffer = b""
                self._answered.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(error or ConnectionError("closed"))

    async def ask(self, session: str) -> None:
        self._answered = asyncio.get_running_loop().create_future()
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: upstream\r\ncontent-type: application/json\r\n"
            f"x-session-id: {session}\r\ncontent-length: {len(BODY)}\r\n\r\n"
        )
        self._transport.write(head.encode() + BODY)
        await self._answered


class Pool:
    """Kept connections to one port, one for each concurrent request."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._free: list[Client] = []

    async def ask(self, session: str) -> None:
        if self._free:
            client = self._free.pop()
        else:
            loop = asyncio.get_running_loop()
            _, client = await loop.create_connection(Client, "127.0.0.1", self._port)
        await client.ask(session)
        self._free.append(client)


class HttpEngine:
    """An upstream, with the part of an engine's interface that the scheduler needs without
    failures."""

    name = "upstream"

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._chunk = Chunk([*range(24)], [0.0] * 24, [0] * 24, "length")

    async def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        await self._pool.ask(request.route.session)
        yield self._chunk


def three_ways(ports: Sequence[int], router: int) -> dict[str, Ask]:
    """Return the ways to send a request, by name."""
    pools, turns, names = [Pool(port) for port in ports], itertools.count(), itertools.count()
    scheduler = Scheduler(ServingConfig(), 60.0)
    for index, port in enumerate(ports):
        engine: Any = HttpEngine(Pool(port))
        scheduler.add(f"upstream-{index}", engine)
    prompt, through = [*range(50)], Pool(router)

    async def direct(session: str) -> None:
        await pools[next(turns) % UPSTREAMS].ask(session)

    async def scheduled(session: str) -> None:
        name = f"r{next(names)}"
        await generate(scheduler, Request(Prompt(prompt), SAMPLING, name, route=Route(session)))

    return {"direct": direct, "turnwise": scheduled, "vllm-router": through.ask}


def sessions() -> Callable[[], str]:
    """Return a function that returns the session name of each request; sessions have four."""
    numbers, tag = itertools.count(), random.getrandbits(40)
    return lambda: f"{tag:x}-{next(numbers) // 4}"


async def closed(ask: Ask, seconds: float) -> float:
    """Return requests/s of all callers together."""
    name, end, done = sessions(), time.perf_counter() + seconds, 0

    async def caller() -> None:
        nonlocal done
        while time.perf_counter() < end:
            await ask(name())
            done += 1

    started = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(CALLERS)))
    return done / (time.perf_counter() - started)


async def open_loop(ask: Ask, seconds: float) -> float:
    """Return the 99th percentile of milliseconds from a request's due time to its answer."""
    name, latencies = sessions(), list[float]()

    async def one(due: float) -> None:
        await ask(name())
        latencies.append(time.perf_counter() - due)

    due, end = time.perf_counter(), time.perf_counter() + seconds
    async with asyncio.TaskGroup() as tasks:
        while due < end:
            due += random.expovariate(ARRIVALS)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.create_task(one(due))
    return statistics.quantiles(latencies, n=100)[98] * 1e3


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def wait_for(port: int, process: "subprocess.Popen[bytes]", seconds: float = 30) -> None:
    """Wait until the router listens."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end and process.poll() is None:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            return
        await asyncio.sleep(0.1)
    raise SystemExit(f"vllm-router did not listen on port {port} within {seconds:g} s")


def start(command: list[str]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


async def run(ports: Sequence[int], options: argparse.Namespace) -> list[Claim]:
    port = free_port()
    command = [str(options.router), "--port", str(port), "--policy", "round_robin"]
    command += ["--prometheus-port", str(free_port()), "--log-level", "error"]
    command += ["--worker-urls", *(f"http://127.0.0.1:{upstream}" for upstream in ports)]
    process = start(command)
    try:
        await wait_for(port, process)
        ways = three_ways(ports, port)
        seconds, rounds = (0.3, 1) if options.quick else (1.0, 5)
        rates: dict[str, list[float]] = {way: [] for way in ways}
        tails: dict[str, list[float]] = {way: [] for way in ways}
        for ask in ways.values():
            await closed(ask, seconds / 4)
        for _ in range(rounds):
            for way, ask in random.sample(list(ways.items()), len(ways)):
                rates[way].append(await closed(ask, seconds))
                tails[way].append(await open_loop(ask, seconds))
    finally:
        process.terminate()
        process.wait(10)
    added = {
        way: [mine - bare for mine, bare in zip(tails[way], tails["direct"], strict=True)]
        for way in ("turnwise", "vllm-router")
    }
    direct = statistics.median(tails["direct"])
    return [
        Claim(
            f"routed requests, {CALLERS} callers",
            "1/s",
            rates["turnwise"],
            "vllm-router",
            rates["vllm-router"],
            quotients(rates["turnwise"], rates["vllm-router"]),
            at_least=1.0,
            note=f"direct, {statistics.median(rates['direct']):,.0f}/s",
        ),
        Claim(
            f"routing, p99 of latency at {ARRIVALS:,.0f} requests/s",
            "ms",
            tails["turnwise"],
            "vllm-router",
            tails["vllm-router"],
            quotients(tails["turnwise"], tails["vllm-router"]),
            at_most=1.0,
            note=f"direct, {direct:.2f} ms; added "
            + ", ".join(f"{way} {statistics.median(ms):.2f} ms" for way, ms in added.items()),
        ),
    ]


def main() -> None:
    """Run the benchmark and print its claims."""
    made = parser("routing", __doc__)
    made.add_argument("--router", type=Path, default=ROUTER, help="vllm-router's command")
    options = made.parse_args()
    if not options.router.exists():
        sys.exit(f"{options.router} is not there; `make bench` installs it")
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    upstreams = context.Process(target=serve_upstreams, args=(theirs,), daemon=True)
    upstreams.start()
    claims = uvloop.run(run(ours.recv(), options))
    upstreams.terminate()
    report(claims, options)


if __name__ == "__main__":
    main()
