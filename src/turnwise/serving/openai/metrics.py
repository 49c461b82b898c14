"""Prometheus metrics of the server, its sessions, its workers and all engines.

Metrics of engines have the label `worker`.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

from prometheus_client import REGISTRY, CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.samples import Sample

from turnwise.engine.protocol import VLLM_METRICS, Generator
from turnwise.serving.scheduler import Scheduler

logger = logging.getLogger(__name__)

_SECONDS = 2.0
"""Time for all workers to answer: below the 10 s after which Prometheus gives up."""


@runtime_checkable
class _Measured(Protocol):
    """The part of an engine that metrics need."""

    name: str

    async def metrics(self) -> list[Metric]: ...


class EngineMetrics:
    """Collects the metrics of one engine, or of each engine of a scheduler.

    An engine that does not answer in time is left out and does not delay the others.

    Args:
        generator: The engine or scheduler that the server serves.
        seconds: Time for all engines together.
    """

    def __init__(self, generator: Generator, seconds: float = _SECONDS) -> None:
        self._generator = generator
        self._seconds = seconds
        self._asked: dict[str, asyncio.Task[list[Metric]]] = {}
        """Calls in flight, by worker; a hung worker has only one."""

    async def collect(self) -> list[Metric]:
        """Return all engines' metrics, and `turnwise_worker_metrics`: 0 if they are missing."""
        engines = self._engines()
        asked = {n: t for n, t in self._asked.items() if n in engines and not t.done()}
        for name, engine in engines.items():
            if name not in asked:
                asked[name] = asyncio.create_task(engine.metrics())
        self._asked = asked  # another call may replace it while this one waits
        if asked:
            await asyncio.wait(asked.values(), timeout=self._seconds)
        collected: dict[str, Sequence[Metric]] = {}
        for name, task in asked.items():
            if task.done() and not task.cancelled():
                if (error := task.exception()) is None:
                    collected[name] = task.result()
                else:
                    logger.debug("%s has no metrics: %s", name, error)
        return [*merged(collected), answered({name: name in collected for name in engines})]

    def _engines(self) -> Mapping[str, _Measured]:
        if isinstance(self._generator, Scheduler):
            return {worker.name: worker.engine for worker in self._generator.workers.values()}
        alone = self._generator
        return {alone.name: alone} if isinstance(alone, _Measured) else {}


def answered(by_worker: Mapping[str, bool]) -> Metric:
    """Return `turnwise_worker_metrics`: 0 for each worker whose metrics are missing."""
    gauge = GaugeMetricFamily(
        "turnwise_worker_metrics", "1 if its engine's metrics are included", labels=["worker"]
    )
    for name, included in by_worker.items():
        gauge.add_metric([name], float(included))
    return gauge


def merged(by_worker: Mapping[str, Sequence[Metric]]) -> list[Metric]:
    """Return the workers' metrics as one family for each name, with the label `worker`."""
    families: dict[str, Metric] = {}
    for worker, metrics in by_worker.items():
        for metric in metrics:
            family = families.setdefault(
                metric.name, Metric(metric.name, metric.documentation, metric.type)
            )
            family.samples += [
                Sample(sample.name, {**sample.labels, "worker": worker}, sample.value)
                for sample in metric.samples
            ]
    return list(families.values())


def process_metrics() -> Iterator[Metric]:
    """Yield the metrics of this process, without those of an engine in it."""
    for metric in REGISTRY.collect():
        if not metric.name.startswith(VLLM_METRICS):
            yield metric


def scheduler_metrics(scheduler: Scheduler) -> Iterator[Metric]:
    """Yield the metrics of a scheduler: turns by event, and its workers."""
    events = CounterMetricFamily("turnwise_turns", "Turns, by event", labels=["event"])
    for event, count in list(scheduler.events.items()):
        events.add_metric([event], count)
    yield events
    load = GaugeMetricFamily("turnwise_worker_load", "Weighted requests", labels=["worker"])
    up = GaugeMetricFamily("turnwise_worker_up", "1 if the worker takes turns", labels=["worker"])
    tokens = CounterMetricFamily("turnwise_worker_tokens", "Sampled tokens", labels=["worker"])
    for worker in list(scheduler.workers.values()):
        load.add_metric([worker.name], worker.load)
        up.add_metric([worker.name], float(worker.usable))
        tokens.add_metric([worker.name], worker.tokens)
    yield from (load, up, tokens)


def make_metrics(
    sessions: Callable[[], int], generator: Generator, counts: Counter[str]
) -> Callable[[], Awaitable[bytes]]:
    """Return a function that returns all metrics in Prometheus' text format.

    Args:
        sessions: Returns the number of open sessions.
        generator: The engine or scheduler that the server serves.
        counts: HTTP requests, by status or event.
    """
    engines = EngineMetrics(generator)

    class Collector:
        def __init__(self, of_engines: Sequence[Metric]) -> None:
            self._of_engines = of_engines

        def collect(self) -> Iterator[Metric]:
            yield from self._of_engines
            yield from process_metrics()
            yield GaugeMetricFamily("turnwise_sessions_open", "Named sessions", sessions())
            requests = CounterMetricFamily("turnwise_requests", "HTTP requests", labels=["what"])
            for what, count in counts.items():
                requests.add_metric([what], count)
            yield requests
            if isinstance(generator, Scheduler):
                yield from scheduler_metrics(generator)

    async def text() -> bytes:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(Collector(await engines.collect()))
        return generate_latest(registry)

    return text
