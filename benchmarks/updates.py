"""Cost of a weight update for requests in flight: `python -m benchmarks.updates [--quick]`.

64 callers keep requests of 50 + 128 tokens in flight on the demo's architecture (0.7 M parameters)
while a trainer in this process publishes its weights by shm and the manager brings them to the
worker. In-flight requests freeze and resume, with their cache (weights.in_flight=keep_cache) or
with a cache that is recomputed under the new weights (keep, the default). Windows of a second with
one update alternate with windows without; the cost of an update is the time that the missing tokens
would have taken. Each round is 3 pairs. Against keep_cache: the same update of the engine while it
is idle. Against keep: the time to recompute the requests' cache. It is measured separately, with as
many prompts as callers, each as long as a request at its middle, and one sampled token.

The time of an update itself, until the engine serves again, is also measured on an idle engine with
100 M parameters, against a plain copy of as many. Unlike the times of `benchmarks.weights` it
includes vLLM's repacking of the weights, the check that the engine has them, and the calls. The
same is measured with `weights.delta`, where one value in a hundred changes.
"""

import asyncio
import itertools
import random
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from transformers import AutoModelForCausalLM

from benchmarks.models import make_model
from benchmarks.report import Claim, parser, quotients, report, spread
from benchmarks.weights import CHANGED, SIZES, make_tensors, plain_copy
from turnwise.config import Config, SamplingConfig, parse_config
from turnwise.core.ray import start_ray
from turnwise.engine.protocol import Engine, InFlight, Request, generate
from turnwise.run.fleet import make_manager
from turnwise.serving.manager import AsyncLLMServerManager
from turnwise.trajectory import Prompt
from turnwise.weights.delta import with_deltas
from turnwise.weights.manifest import Manifest
from turnwise.weights.sync import UpdateResults, WeightSync
from turnwise.weights.transport import make_sender

CALLERS, PROMPT_TOKENS, NEW_TOKENS = 64, 50, 128
WINDOW = 1.0


class Trainer:
    """A trainer in this process whose weights change a little at every version.

    Args:
        delta: Whether it changes only one value in `CHANGED`, and sends only the changed values.
    """

    def __init__(self, path: Path, delta: bool = False) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self._named = list(model.named_parameters())
        sender = make_sender("shm", self._named, torch.float32, timeout=30)
        self._sender = with_deltas(sender) if delta else sender
        self._every = CHANGED if delta else 1
        self.version = 0

    def train(self) -> None:
        """Change the weights; the time of this does not count as part of an update."""
        self.version += 1
        with torch.no_grad():
            for _, parameter in self._named:
                parameter.view(-1)[self.version % self._every :: self._every].mul_(1.0 + 1e-6)

    async def publish(self) -> Manifest:
        return self._sender.publish(self.version, iter(self._named))

    async def send(self, devices: Sequence[str]) -> None: ...

    async def rendezvous(self) -> tuple[str, int]:
        raise AssertionError("shm needs no meeting")

    async def join(self, ip: str, port: int, engine_workers: int, timeout: float) -> None: ...


class Policy(WeightSync):
    """Updates with its own policy for requests in flight, and ignores the configured one."""

    in_flight: InFlight = "keep"

    async def update(
        self, engines: Iterable[Engine], in_flight: InFlight, *given: Any
    ) -> UpdateResults:
        return await super().update(engines, self.in_flight, *given)


def configuration(path: Path) -> Config:
    return parse_config(
        {
            "environment": "none",
            "data": {"path": "none"},
            "model": {"path": str(path), "max_length": 512},
        }
    )


@dataclass
class Measured:
    """Milliseconds by round: by policy, lost to an update and from publishing to serving; for
    recomputing the cache; and for an update while the engine is idle."""

    lost: dict[InFlight, list[float]]
    took: dict[InFlight, list[float]]
    recompute: list[float]
    idle: list[float]


async def measure(config: Config, rounds: int, pairs: int) -> Measured:
    trainer = Trainer(Path(config.model.path))
    sync = Policy(trainer, 30.0, 30.0)
    sampling = SamplingConfig(max_tokens=NEW_TOKENS, ignore_eos=True)
    numbers = itertools.count()
    async with make_manager(config, 0).running() as manager:
        (worker,) = manager.scheduler.workers.values()

        async def caller() -> None:
            await asyncio.sleep(random.random())
            while True:
                prompt = [random.randrange(5, 500) for _ in range(PROMPT_TOKENS)]
                await generate(
                    manager.scheduler, Request(Prompt(prompt), sampling, f"r{next(numbers)}")
                )

        async def window(update: bool) -> tuple[int, float]:
            if update:
                trainer.train()
            started, before, took = time.perf_counter(), worker.tokens, 0.0
            if update:
                await sync.publish()
                await manager.update_weights(sync)
                took = time.perf_counter() - started
            await asyncio.sleep(max(0.0, started + WINDOW - time.perf_counter()))
            return worker.tokens - before, took

        async def recompute() -> float:
            one, started = SamplingConfig(max_tokens=1), time.perf_counter()
            prompts = [
                [random.randrange(5, 500) for _ in range(PROMPT_TOKENS + NEW_TOKENS // 2)]
                for _ in range(CALLERS)
            ]
            await asyncio.gather(
                *(
                    generate(manager.scheduler, Request(Prompt(p), one, f"r{next(numbers)}"))
                    for p in prompts
                )
            )
            return (time.perf_counter() - started) * 1e3

        recomputing = [await recompute() for _ in range(rounds + 1)][1:]
        idle = await idle_updates(manager, trainer, sync, rounds)
        callers = [asyncio.create_task(caller()) for _ in range(CALLERS)]
        for update in (True, False, True, False):
            await window(update)
        policies: tuple[InFlight, ...] = ("keep_cache", "keep")
        measured = Measured({p: [] for p in policies}, {p: [] for p in policies}, recomputing, idle)
        for sync.in_flight in policies * rounds:
            tokens, seconds = {True: 0, False: 0}, 0.0
            for _ in range(pairs):
                for update in random.sample((True, False), 2):
                    sampled, spent = await window(update)
                    tokens[update] += sampled
                    seconds += spent
            lost = (tokens[False] - tokens[True]) / tokens[False] * WINDOW * 1e3
            measured.lost[sync.in_flight].append(lost)
            measured.took[sync.in_flight].append(seconds / pairs * 1e3)
        for task in callers:
            task.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
        assert not manager.failures, manager.failures
    return measured


async def idle_updates(
    manager: AsyncLLMServerManager, trainer: Trainer, sync: WeightSync, count: int
) -> list[float]:
    """Measure updates of an idle engine, in milliseconds. The first two, in which the engine maps
    the trainer's two buffers, do not count."""
    took = []
    for _ in range(2 + count):
        trainer.train()
        started = time.perf_counter()
        await sync.publish()
        await manager.update_weights(sync)
        took.append((time.perf_counter() - started) * 1e3)
    return took[2:]


async def large_updates(config: Config, count: int, delta: bool = False) -> list[float]:
    """Measure updates of a larger model on an idle engine, in milliseconds."""
    trainer = Trainer(Path(config.model.path), delta)
    sync = WeightSync(trainer, 60.0, 60.0)
    async with make_manager(config, 0).running() as manager:
        return await idle_updates(manager, trainer, sync, count)


def main() -> None:
    """Run the benchmark and print its claims."""
    options = parser("updates", __doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = configuration(make_model("0.7 M", Path(folder)))
        start_ray(None)
        rounds, pairs = (1, 1) if options.quick else (3, 3)
        measured = asyncio.run(measure(config, rounds, pairs))
        alone, changed, copied = list[float](), list[float](), list[float]()
        if not options.quick:
            large = configuration(make_model("100 M", Path(folder)))
            alone = asyncio.run(large_updates(large, 5))
            changed = asyncio.run(large_updates(large, 5, delta=True))
            tensors = make_tensors(SIZES["100 M"], torch.float32)
            copied = [plain_copy(tensors, 2) * 1e3 for _ in alone]
        ray.shutdown()
    lost, took = measured.lost, measured.took
    claims = [
        Claim(
            "generation lost to an update, cache kept", "ms", lost["keep_cache"],
            "an update while idle", measured.idle, quotients(lost["keep_cache"], measured.idle),
            at_most=1.3, note=f"from publishing to serving: {spread(took['keep_cache'])} ms",
        ),
        Claim(
            "generation lost to an update, cache recomputed", "ms", lost["keep"],
            "recomputing alone", measured.recompute, quotients(lost["keep"], measured.recompute),
            at_most=1.1, note=f"from publishing to serving: {spread(took['keep'])} ms",
        ),
    ]  # fmt: skip
    if alone:
        claims += [
            Claim(
                "update of 100 M parameters by shm, repacking included", "ms", alone,
                "a plain copy", copied, quotients(alone, copied), at_most=5.0,
            ),
            Claim(
                "the same with weights.delta, 1 % changed", "ms", changed,
                "the whole update", alone, quotients(changed, alone),
            ),
        ]  # fmt: skip
    report(claims, options)


if __name__ == "__main__":
    main()
