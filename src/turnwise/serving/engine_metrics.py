"""The statistics of every worker's engine as Prometheus' metrics, with a label for the worker."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.samples import Sample

from turnwise.engine.protocol import Engine, Generator
from turnwise.serving.scheduler import Scheduler

logger = logging.getLogger(__name__)

_SECONDS = 2.0
"""For all workers together to answer: below the 10 s after which Prometheus gives up."""


class EngineMetrics:
    """Asks the engine, or each of a scheduler's; one that does not answer holds up nothing.

    Args:
        generator: What the server serves.
    """

    def __init__(self, generator: Generator, seconds: float = _SECONDS) -> None:
        self._generator = generator
        self._seconds = seconds
        self._asked: dict[str, asyncio.Task[list[Metric]]] = {}
        """Calls in flight by the worker's name: a worker that hangs is asked once."""

    async def collect(self) -> list[Metric]:
        """The metrics of all engines, and `turnwise_worker_metrics`, 0 for a worker without."""
        engines = self._engines()
        asked = {n: t for n, t in self._asked.items() if n in engines and not t.done()}
        for name, engine in engines.items():
            if name not in asked:
                asked[name] = asyncio.create_task(engine.metrics())
        self._asked = asked  # another call may put its own there while this one waits
        if asked:
            await asyncio.wait(asked.values(), timeout=self._seconds)
        told: dict[str, Sequence[Metric]] = {}
        for name, task in asked.items():
            if task.done() and not task.cancelled():
                if (error := task.exception()) is None:
                    told[name] = task.result()
                else:
                    logger.debug("%s has no metrics: %s", name, error)
        answered = GaugeMetricFamily(
            "turnwise_worker_metrics", "1 if its engine's metrics are here", labels=["worker"]
        )
        for name in engines:
            answered.add_metric([name], float(name in told))
        return [*merged(told), answered]

    def _engines(self) -> dict[str, Engine]:
        if isinstance(self._generator, Scheduler):
            return {worker.name: worker.engine for worker in self._generator.workers.values()}
        alone: Any = self._generator
        return {alone.name: alone} if hasattr(alone, "metrics") else {}


def merged(by_worker: Mapping[str, Sequence[Metric]]) -> list[Metric]:
    """The workers' metrics, one family of each name, whose samples carry the label `worker`."""
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
