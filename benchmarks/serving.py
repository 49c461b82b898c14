"""What the serving plane costs: `python -m benchmarks.serving MODEL_FOLDER`.

Requests of 50 + 24 tokens, closed loops of 1, 8, 64 and 256 callers, four ways in turn: the bare
engine (vLLM's AsyncLLM in the caller's process), the same engine as a worker behind the scheduler,
and the OpenAI server before either, asked over HTTP by a client in the same process. Ratios are
medians over rounds that alternate, so that the machine's mood cancels out. Added latency is
against the bare engine's.
"""

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import aiohttp
import ray
from rich.console import Console
from rich.table import Table

from turnwise.config import Config, SamplingConfig, ServingConfig, parse_config
from turnwise.engine import Generator, Route
from turnwise.engine.simulated import SimulatedEngine
from turnwise.engine.vllm_engine import VllmEngine
from turnwise.machinery import make_manager
from turnwise.ray_calls import start_ray
from turnwise.serving.openai_server import OpenAIServer
from turnwise.serving.scheduler import Scheduler
from turnwise.weights import BACKEND, WORKER_EXTENSION

PROMPT_TOKENS, NEW_TOKENS = 50, 24
CALLERS = (1, 8, 64, 256)
SAMPLING = SamplingConfig(max_tokens=NEW_TOKENS, ignore_eos=True)
Ask = Callable[[list[int], str], Awaitable[None]]


@dataclass
class Measured:
    """One way at one number of callers."""

    rates: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)

    def percentile(self, p: int) -> float:
        return statistics.quantiles(self.latencies, n=100)[p - 1] * 1e3


async def measure(ask: Ask, callers: int, seconds: float, into: Measured) -> None:
    """Keep `callers` requests under way for a while."""
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
    """63 short requests beside one of 400 tokens: the time of the short ones by that alone."""
    numbers = itertools.count()

    async def ask(tokens: int) -> None:
        number = next(numbers)
        prompt = [5 + (number * 31 + i) % 200 for i in range(PROMPT_TOKENS)]
        sampling = SamplingConfig(max_tokens=tokens, ignore_eos=True)
        await generator.generate(prompt, sampling, f"long-{number}")

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


async def decisions_per_second(workers: int = 8, count: int = 200_000) -> float:
    """How fast the scheduler chooses, for sessions of eight turns in groups of eight."""
    scheduler = Scheduler(ServingConfig(), 60.0)
    for index in range(workers):
        scheduler.add(f"worker-{index}", SimulatedEngine())
    routes = [Route(f"s{index // 8}", f"g{index // 64}") for index in range(count)]
    started = time.perf_counter()
    for route in routes:
        await scheduler._pick(route, "r")
    return count / (time.perf_counter() - started)


async def run(config: Config, rounds: int, seconds: float) -> None:
    console = Console(width=100)
    console.print(f"{await decisions_per_second():,.0f} scheduler decisions/s (8 workers)")
    start_ray(None)
    bare = VllmEngine(
        config.model, config.engine, worker_extension=WORKER_EXTENSION, weight_backend=BACKEND
    )
    async with make_manager(config, 0).running() as manager:
        servers = [OpenAIServer(config, manager.scheduler), OpenAIServer(config, bare)]
        fleet_url, engine_url = [await server.start() for server in servers]
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as http:

            async def engine(prompt: list[int], name: str) -> None:
                await bare.generate(prompt, SAMPLING, name)

            async def scheduler(prompt: list[int], name: str) -> None:
                await manager.scheduler.generate(prompt, SAMPLING, name)

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
                await measure(ask, 64, 3.0, Measured())
            table = Table("callers", "way", "requests/s", "of bare", "p50 ms", "p99 ms",
                          "added p50", "added p99")  # fmt: skip
            for callers in CALLERS:
                measured = {name: Measured() for name in ways}
                for _ in range(rounds):
                    for name, ask in ways.items():
                        await measure(ask, callers, seconds, measured[name])
                _add_rows(table, callers, measured)
            console.print(table)
            ratios = await beside_a_long_one(manager.scheduler, 4 * rounds)
            console.print(
                f"63 short requests beside one long: {statistics.median(ratios):.3f} of their time "
                f"alone (median of {len(ratios)})"
            )
        for server in servers:
            await server.stop()
    await bare.shutdown()
    ray.shutdown()


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="examples/calculator/build/model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    arguments = parser.parse_args()
    config = parse_config(
        {
            "environment": "none",
            "data": {"path": "none"},
            "model": {"path": arguments.model, "max_length": 512},
            "serving": {"port": 0},
        }
    )
    asyncio.run(run(config, arguments.rounds, arguments.seconds))


if __name__ == "__main__":
    sys.exit(main())
