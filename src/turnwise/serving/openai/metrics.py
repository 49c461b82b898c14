"""Prometheus metrics of the server, its sessions, its workers and (by `worker`) its engines.

To add a metric of the server: write a `family` here; in `scheduler_metrics` if it belongs to a
run's `metrics.port`, too.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import REGISTRY, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from turnwise.core.optional import Foreign
from turnwise.engine.protocol import VLLM_METRICS, Generator
from turnwise.serving.scheduler import Scheduler

logger = logging.getLogger(__name__)

_SECONDS = 2.0  # time for all workers to answer: below the 10 s after which Prometheus gives up


@dataclass(frozen=True)
class Families(Collector):
    make: Callable[[], Iterable[Metric]]

    def collect(self) -> Iterable[Metric]:
        return self.make()


def family(name: str, meaning: str, values: Mapping[str, float], label: str = "") -> Metric:
    """Return a counter if the name ends with _total, otherwise a gauge. The keys of `values` are
    values of the label, or "" without a label."""
    kind: type[CounterMetricFamily | GaugeMetricFamily] = (
        CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    )
    made = kind(name, meaning, labels=[label] if label else [])
    for part, value in values.items():
        made.add_metric([part] if label else [], value)
    return made


class EngineMetrics:
    """Collects the metrics of one engine, or of each engine of a scheduler, except for engines that
    do not answer within `seconds`."""

    def __init__(self, generator: Generator, seconds: float = _SECONDS) -> None:
        self.generator = generator
        self._seconds = seconds
        self._asked: dict[str, asyncio.Task[list[Metric]]] = {}
        """Calls in flight, by worker; even a hung worker has only one call."""

    async def collect(self) -> list[Metric]:
        """Return all engines' metrics, and `turnwise_worker_metrics`, which is 0 for each worker
        whose metrics are missing."""
        alone: Foreign = self.generator
        engines: dict[str, Foreign] = {}
        if isinstance(alone, Scheduler):
            engines = {worker.name: worker.engine for worker in alone.workers.values()}
        elif hasattr(alone, "metrics"):
            engines = {alone.name: alone}
        asked = {n: t for n, t in self._asked.items() if n in engines and not t.done()}
        for name, engine in engines.items():
            if name not in asked:
                asked[name] = asyncio.create_task(engine.metrics())
        self._asked = asked  # another call may replace it while this one waits
        if asked:
            await asyncio.wait(asked.values(), timeout=self._seconds)
        families: dict[str, Metric] = {}  # one for each name, with the label `worker`
        included = dict.fromkeys(engines, False)
        for name, task in asked.items():
            if not task.done() or task.cancelled():
                continue
            if (error := task.exception()) is not None:
                logger.debug("%s has no metrics: %s", name, error)
                continue
            included[name] = True
            for metric in task.result():
                made = families.setdefault(
                    metric.name, Metric(metric.name, metric.documentation, metric.type)
                )
                made.samples += [
                    Sample(sample.name, {**sample.labels, "worker": name}, sample.value)
                    for sample in metric.samples
                ]
        return [*families.values(), answered(included)]


def answered(by_worker: Mapping[str, bool]) -> Metric:
    """Return `turnwise_worker_metrics`: 0 for each worker whose metrics are missing."""
    meaning = "1 if the metrics of the worker's engine are included, 0 if they are missing"
    return family("turnwise_worker_metrics", meaning, by_worker, "worker")


def process_metrics() -> Iterator[Metric]:
    """Yield the metrics of this process, except the metrics of an engine in it."""
    return (each for each in REGISTRY.collect() if not each.name.startswith(VLLM_METRICS))


def scheduler_metrics(scheduler: Scheduler) -> Iterator[Metric]:
    """Yield a scheduler's metrics: the number of turns by event, and the load, state and sampled
    tokens of each worker."""
    yield family("turnwise_turns_total", "Turns, by event", dict(scheduler.events), "event")
    workers = list(scheduler.workers.values())
    for name, meaning, values in (
        ("turnwise_worker_load", "Weighted requests", {w.name: w.load for w in workers}),
        ("turnwise_worker_up", "1 if the worker takes turns", {w.name: w.usable for w in workers}),
        ("turnwise_worker_tokens_total", "Sampled tokens", {w.name: w.tokens for w in workers}),
    ):
        yield family(name, meaning, values, "worker")


async def metrics_text(engines: EngineMetrics, sessions: int, requests: Counter[str]) -> bytes:
    """Return all metrics of a server in Prometheus' text format, including the numbers of its open
    sessions and of its requests by status or event."""
    generator = engines.generator
    families: list[Metric] = [
        *await engines.collect(),
        *process_metrics(),
        family("turnwise_sessions_open", "Named sessions", {"": sessions}),
        family("turnwise_requests_total", "HTTP requests", requests, "what"),
        *(scheduler_metrics(generator) if isinstance(generator, Scheduler) else ()),
    ]
    return generate_latest(Families(lambda: families))
