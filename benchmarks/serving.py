"""Cost of the serving plane: `python -m benchmarks.serving [--quick]`.

Requests of 50 + 24 tokens, closed loops of 64 callers (or `--callers`), four ways in
turn: the bare engine (vLLM's AsyncLLM in the caller's process), the same engine as a worker
behind the scheduler, and the OpenAI server in front of either, with a client in the same process
over HTTP. Ratios are medians over alternating rounds, so that slow phases of the machine cancel
out. Added latency is relative to the bare engine.

`--statistics` measures one thing only: the processor time of a request through a bare engine that
collects vLLM's statistics (`engine.metrics`), and through one that does not, in turn.
"""

import asyncio
import itertools
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import ray
from rich.console import Console
from rich.table import Table

from benchmarks.models import as_in_a_worker, cpu_seconds, make_model
from benchmarks.report import Claim, parser, quotients, report
from turnwise.config import Config, SamplingConfig, parse_config
from turnwise.core.aio import run as run_loop
from turnwise.core.ray import start_ray
from turnwise.engine import Generator, Request, generate
from turnwise.engine.vllm_engine import VllmEngine
from turnwise.run.fleet import make_manager
from turnwise.serving.openai.server import OpenAIServer
from turnwise.trajectory import Prompt
from turnwise.weights import WORKER_EXTENSION

PROMPT_TOKENS, NEW_TOKENS = 50, 24
CALLERS = (64,)
SAMPLING = SamplingConfig(max_tokens=NEW_TOKENS, ignore_eos=True)
Ask = Callable[[list[int], str], Awaitable[None]]


@dataclass
class Measured:
    """Results of one way at one number of callers: requests/s by round, seconds by request."""

    rates: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)

    def percentile(self, p: int) -> float:
        return statistics.quantiles(self.latencies, n=100)[p - 1] * 1e3


async def measure(ask: Ask, callers: int, seconds: float, into: Measured) -> None:
    """Keep `callers` requests in flight for a while."""
    generator = random.Random(time.perf_counter_ns())
    numbers, end = itertools.count(), time.perf_counter() + seconds
    done = 0

    async def call() -> None:
        nonlocal done
        while time.perf_counter() < end:
            prompt = [generator.randrange(5, 200) for _ in range(PROMPT_TOKENS)]
            started = time.perf_counter()
            await ask(prompt, f"{started}-{next(numbers)}")
            into.latencies.append(time.perf_counter() - started)
            done += 1

    started = time.perf_counter()
    await asyncio.gather(*(call() for _ in range(callers)))
    into.rates.append(done / (time.perf_counter() - started))


async def beside_a_long_one(generator: Generator, rounds: int) -> list[float]:
    """Run 63 short requests next to one of 400 tokens; returns the ratios of the short requests'
    time to their time alone."""
    numbers = itertools.count()

    async def ask(tokens: int) -> None:
        number = next(numbers)
        prompt = [5 + (number * 31 + i) % 200 for i in range(PROMPT_TOKENS)]
        sampling = SamplingConfig(max_tokens=tokens, ignore_eos=True)
        await generate(generator, Request(Prompt(prompt), sampling, f"long-{number}"))

    async def short_ones() -> float:
        started = time.perf_counter()
        await asyncio.gather(*(ask(NEW_TOKENS) for _ in range(63)))
        return time.perf_counter() - started

    ratios = []
    for _ in range(rounds):
        alone = await short_ones()
        long = asyncio.create_task(ask(400))
        await asyncio.sleep(0.05)
        beside = await short_ones()
        assert not long.done()
        await long
        ratios.append(beside / alone)
    return ratios


async def of_statistics(config: Config, rounds: int, seconds: float) -> list[Claim]:
    """Measure the processor time of a request, engine process and caller together, in ms."""
    collecting = config.engine.model_copy(update={"metrics": True})
    engines = [VllmEngine(config.model, each) for each in (collecting, config.engine)]
    spent: list[list[float]] = [[], []]
    for number in range(rounds + 1):
        for engine, into in zip(engines, spent, strict=True):

            async def ask(prompt: list[int], name: str, engine: VllmEngine = engine) -> None:
                await generate(engine, Request(Prompt(prompt), SAMPLING, name))

            measured, before = Measured(), sum(cpu_seconds(os.getpid()).values())
            await measure(ask, 64, seconds, measured)
            after = sum(cpu_seconds(os.getpid()).values())
            if number:  # the first round warms up
                into.append((after - before) / len(measured.latencies) * 1e3)
    for engine in engines:
        await engine.shutdown()
    name = "processor time of a request, vLLM's statistics collected"
    return [Claim(name, "ms", spent[0], "not collected", spent[1], quotients(*spent))]


async def run(
    config: Config, all_callers: Sequence[int], rounds: int, seconds: float
) -> list[Claim]:
    console, claims = Console(width=100), list[Claim]()
    start_ray(None)
    bare = VllmEngine(config.model, config.engine, worker_extension=WORKER_EXTENSION)
    async with make_manager(config, 0).running() as manager:
        servers = [OpenAIServer(config, manager.scheduler), OpenAIServer(config, bare)]
        fleet_url, engine_url = [await server.start() for server in servers]
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as http:

            async def engine(prompt: list[int], name: str) -> None:
                await generate(bare, Request(Prompt(prompt), SAMPLING, name))

            async def scheduler(prompt: list[int], name: str) -> None:
                await generate(manager.scheduler, Request(Prompt(prompt), SAMPLING, name))

            async def over_http(url: str, prompt: list[int]) -> None:
                body = {
                    "model": config.model.path,
                    "prompt": prompt,
                    "max_tokens": NEW_TOKENS,
                    "ignore_eos": True,
                }
                async with http.post(f"{url}/completions", json=body) as response:
                    answer = json.loads(await response.read())
                    assert answer["usage"]["completion_tokens"] == NEW_TOKENS, answer

            ways: dict[str, Ask] = {
                "engine": engine,
                "scheduler": scheduler,
                "HTTP, engine": lambda prompt, _: over_http(engine_url, prompt),
                "HTTP, scheduler": lambda prompt, _: over_http(fleet_url, prompt),
            }
            for ask in ways.values():
                await measure(ask, 64, 1.0, Measured())
            table = Table("callers", "way", "requests/s", "of bare", "p50 ms", "p99 ms",
                          "added p50", "added p99")  # fmt: skip
            for callers in all_callers:
                measured = {name: Measured() for name in ways}
                for _ in range(rounds):
                    for name, ask in ways.items():
                        await measure(ask, callers, seconds, measured[name])
                _add_rows(table, callers, measured)
                claims += _claims(callers, measured)
            console.print(table)
            ratios = await beside_a_long_one(manager.scheduler, rounds)
            beside = "63 short requests beside a long one"
            claims.append(Claim(beside, "of their time alone", ratios, at_most=1.1))
        for server in servers:
            await server.stop()
    await bare.shutdown()
    ray.shutdown()
    return claims


def _add_rows(table: Table, callers: int, measured: dict[str, Measured]) -> None:
    base = measured["engine"]
    for name, way in measured.items():
        ratio = statistics.median(
            mine / bare for mine, bare in zip(way.rates, base.rates, strict=True)
        )
        table.add_row(
            str(callers),
            name,
            f"{statistics.median(way.rates):.1f}",
            f"{ratio:.2f}",
            f"{way.percentile(50):.1f}",
            f"{way.percentile(99):.1f}",
            f"{way.percentile(50) - base.percentile(50):+.1f}",
            f"{way.percentile(99) - base.percentile(99):+.1f}",
        )


def _claims(callers: int, measured: dict[str, Measured]) -> list[Claim]:
    bare = measured["engine"].rates
    return [
        Claim(
            f"requests through {name}, {callers} callers",
            "1/s",
            measured[way].rates,
            "bare engine",
            bare,
            quotients(measured[way].rates, bare),
            at_least=goal,
        )
        for way, name, goal in (
            ("scheduler", "the scheduler", 0.95),
            ("HTTP, scheduler", "the OpenAI server", 0.7),
        )
    ]


def main() -> None:
    """Run the benchmark and print the table and its claims."""
    made = parser("serving", __doc__)
    made.add_argument("--callers", type=int, nargs="*", default=CALLERS)
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--seconds", type=float, default=1.0)
    made.add_argument("--statistics", action="store_true", help="measure engine.metrics only")
    options = made.parse_args()
    as_in_a_worker()
    callers, rounds, seconds = options.callers, options.rounds, options.seconds
    if options.quick:
        callers, rounds, seconds = [8], 1, 0.5
    with tempfile.TemporaryDirectory() as folder:
        config = parse_config(
            {
                "environment": "none",
                "data": {"path": "none"},
                "model": {"path": str(make_model("0.7 M", Path(folder))), "max_length": 512},
                "serving": {"port": 0},
            }
        )
        if options.statistics:
            claims = run_loop(of_statistics(config, rounds, seconds))
        else:
            claims = run_loop(run(config, callers, rounds, seconds))
        report(claims, options)


if __name__ == "__main__":
    main()
