"""Prometheus metrics of a training run: of its steps, its scheduler and its engines.

`GET /metrics` is answered in a thread, so a run whose event loop is stuck still shows its last
step. Counters begin at 0 when the program starts, also in a resumed run.
"""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import TimeoutError as LateError
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry, Metric, start_http_server

from turnwise.core.aio import run_in_thread
from turnwise.core.json_types import JsonObject
from turnwise.errors import InputError
from turnwise.observe.metrics import meanings, series
from turnwise.serving.openai.metrics import (
    EngineMetrics,
    Families,
    answered,
    family,
    process_metrics,
    scheduler_metrics,
)
from turnwise.serving.scheduler import Scheduler

logger = logging.getLogger(__name__)

_ENGINE_SECONDS = 5.0  # deadline for the engines' metrics: below Prometheus' 10 s


def step_families(rows: Sequence[JsonObject], skipped: int = 0) -> Callable[[], Iterator[Metric]]:
    """Return a function that yields the metrics of a run's completed steps, `rows`, except the
    first `skipped` rows. A metric that no step has reported yet has no value."""
    values: dict[str, dict[str, float]] = {}
    counted, lock = list(rows[:skipped]), threading.Lock()

    def add(row: JsonObject, *, sign: int = 1, newest: bool = True) -> None:
        for metric, each in series():
            value = row.get(metric) if each.value is None else each.value(row)
            if not each.sums:
                if newest and isinstance(value, int | float):
                    values[each.name] = {"": value}
            elif row.get("step"):  # step 0 has only held-out trajectories
                sums = values.setdefault(each.name, {})
                labelled = value if isinstance(value, dict) else {}
                parts: JsonObject = labelled if each.label else {"": value}
                for part, number in parts.items():
                    sums[part] = sums.get(part, 0.0) + sign * (number or 0.0)

    def families() -> Iterator[Metric]:
        with lock:  # requests may overlap
            for place, row in enumerate(rows):
                if place == len(counted):
                    counted.append(row)
                elif counted[place] is row:
                    continue
                else:  # an evaluation came late
                    add(counted[place], sign=-1, newest=False)
                    counted[place] = row
                add(row, newest=place == len(rows) - 1)
            for row in reversed(rows[skipped:]):
                if row.get("accuracy_heldout") is not None:
                    add({"accuracy_heldout": row["accuracy_heldout"]})
                    break
        for metric, each in series():
            found = values.get(each.name, {"": 0.0} if each.sums and not each.label else {})
            yield family(each.name, meanings()[metric], found, each.label)

    return families


@asynccontextmanager
async def serving_metrics(
    host: str,
    port: int | None,
    rows: Sequence[JsonObject],
    in_flight: Callable[[], int],
    scheduler: Scheduler,
) -> AsyncIterator[int | None]:
    """Serve a run's metrics during an `async with` block, and yield the port; with port None, serve
    nothing. Rows that exist at the start are not counted."""
    if port is None:
        yield None
        return
    steps, engines = step_families(rows, len(rows)), EngineMetrics(scheduler)
    loop = asyncio.get_running_loop()

    def families() -> Iterator[Metric]:  # in a thread; waits for the slowest engine
        yield from steps()
        groups = {"": in_flight()}
        yield family("turnwise_groups_in_flight", "Groups that are being sampled", groups)
        asked = asyncio.run_coroutine_threadsafe(engines.collect(), loop)
        try:
            yield from asked.result(_ENGINE_SECONDS)
        except LateError:
            asked.cancel()
            yield answered(dict.fromkeys(list(scheduler.workers), False))
        yield from process_metrics()
        yield from scheduler_metrics(scheduler)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Families(families))
    try:
        server, _ = start_http_server(port, host, registry)
    except (OSError, OverflowError) as error:
        raise InputError(
            f"metrics cannot be served on {host}:{port} ({error}); choose another metrics.port "
            "(0 takes a free one)"
        ) from error
    try:
        logger.info("metrics: http://%s:%d/metrics", host, server.server_port)
        yield server.server_port
    finally:
        # A request in progress may wait for the event loop.
        await run_in_thread(server.shutdown)
        server.server_close()
