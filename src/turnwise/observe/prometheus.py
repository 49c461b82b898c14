"""Prometheus metrics of a training run: those of its steps, its scheduler and its engines.

`GET /metrics` is answered in a thread, so a run whose event loop is stuck still shows its last
step. Counters begin at 0 when the program starts, also in a resumed run.
"""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import TimeoutError as LateError
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Metric, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from turnwise.core.aio import run_in_thread
from turnwise.core.json_types import JsonObject
from turnwise.errors import InputError
from turnwise.serving.openai.metrics import (
    EngineMetrics,
    answered,
    process_metrics,
    scheduler_metrics,
)
from turnwise.serving.scheduler import Scheduler

logger = logging.getLogger(__name__)

_ENGINE_SECONDS = 5.0
"""Time for the event loop to collect the engines' metrics: below Prometheus' 10 s."""

GAUGES = {
    "turnwise_step": ("step", "Training steps completed"),
    "turnwise_weight_version": ("weight_version", "Weight version of the engines"),
    "turnwise_staleness": ("staleness_max", "Largest staleness of a token of the last step"),
    "turnwise_reward": ("reward_mean", "Mean reward of the last step"),
    "turnwise_accuracy_heldout": ("accuracy_heldout", "Held-out accuracy when last measured"),
    "turnwise_entropy": ("entropy", "Mean entropy at trained tokens of the last step, in nats"),
    "turnwise_kl": ("kl", "Mean KL divergence from the reference model, in nats"),
    "turnwise_loss": ("loss", "Loss of the last step"),
    "turnwise_grad_norm": ("grad_norm", "Norm of the gradient before clipping"),
    "turnwise_clip_fraction": ("clip_fraction", "Share of trained tokens that were clipped"),
    "turnwise_logprob_diff_mean": (
        "logprob_diff_mean",
        "Mean log-prob difference between engine and trainer",
    ),
    "turnwise_logprob_diff_max": ("logprob_diff_max", "Largest such difference of a token"),
    "turnwise_exact_percent": ("exact_percent", "Trained tokens that match the sampled ones, in %"),
    "turnwise_update_seconds": ("weight_update_seconds", "Seconds of the last weight update"),
    "turnwise_step_seconds": ("step_seconds", "Seconds of the last step"),
    "turnwise_rollout_tokens_per_second": ("rollout_tokens_per_s", "Sampled tokens per second"),
    "turnwise_train_tokens_per_second": ("train_tokens_per_s", "Tokens computed per second"),
    "turnwise_groups_without_signal": ("groups_without_signal", "Such groups of the last step"),
}
"""The metric and the key of `StepMetrics` whose last value it shows, with its meaning."""
COUNTERS = {
    "turnwise_trajectories": ("trajectories", "", "Trajectories of completed steps"),
    "turnwise_sampled_tokens": ("sampled_tokens", "", "Tokens sampled"),
    "turnwise_trained_tokens": ("trained_tokens", "", "Tokens trained"),
    "turnwise_dropped": ("dropped", "reason", "Trajectories that failed for good"),
    "turnwise_retried": ("retried", "reason", "Attempts that failed and were repeated"),
    "turnwise_groups_discarded": ("groups_discarded", "reason", "Groups not trained on"),
    "turnwise_trajectory_statuses": ("statuses", "status", "Trajectories by final status"),
    "turnwise_tool_calls": ("tool_calls", "outcome", "Calls of tools"),
    "turnwise_forks": ("forked", "reason", "Branches that began because a prompt did not continue"),
    "turnwise_stale_tokens": ("staleness", "staleness", "Trained tokens by their staleness"),
    "turnwise_phase_seconds": ("phase_seconds", "phase", "Seconds by phase; see metrics.md"),
    "turnwise_tool_seconds": ("tool_seconds", "", "Seconds in tools, summed over trajectories"),
}
"""The metric (with the suffix _total), the key whose values it sums, and the label of its parts."""


@dataclass(slots=True, eq=False)
class StepCollector:
    """Metrics of the steps that a run has completed.

    Args:
        rows: Lines of metrics.jsonl, in a list that grows.
        skipped: Number of the first lines that an earlier program wrote.

    Example:
        text = generate_latest(registry)  # after registry.register(StepCollector(folder.rows))
    """

    rows: Sequence[JsonObject]
    skipped: int = 0
    _sums: dict[str, dict[str, float]] = field(default_factory=dict)
    _last: dict[str, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics; those that no step has had yet have no value."""
        with self._lock:  # two requests at once
            for row in self.rows[self.skipped :]:
                self._add({**row, **_of_tools(row)})
                self.skipped += 1
        for name, (key, meaning) in GAUGES.items():
            gauge = GaugeMetricFamily(name, meaning)
            if key in self._last:
                gauge.add_metric([], self._last[key])
            yield gauge
        for name, (key, label, meaning) in COUNTERS.items():
            counter = CounterMetricFamily(name, meaning, labels=[label] if label else [])
            for part, value in self._sums.get(key, {} if label else {"": 0.0}).items():
                counter.add_metric([part] if label else [], value)
            yield counter

    def _add(self, row: JsonObject) -> None:
        for key, _ in GAUGES.values():
            if isinstance(value := row.get(key), int | float):
                self._last[key] = value
        if not row.get("step"):
            return  # the model before training: its trajectories are held-out ones
        for key, _, _ in COUNTERS.values():
            value = row.get(key)
            parts = value if isinstance(value, Mapping) else {"": value}
            sums = self._sums.setdefault(key, {})
            for part, number in parts.items():
                sums[str(part)] = sums.get(str(part), 0.0) + (number or 0.0)


def _of_tools(row: JsonObject) -> JsonObject:
    """Return a step's tool calls by outcome, and their seconds."""
    events = row.get("events") or {}
    calls = {
        name.removeprefix("tool_"): count
        for name, count in events.items()
        if name.startswith("tool_") and name != "tool_call"
    }
    failed = sum(count for outcome, count in calls.items() if outcome != "malformed")
    calls["ok"] = events.get("tool_call", 0) - failed
    return {
        "tool_calls": calls,
        "tool_seconds": (row.get("phase_seconds") or {}).get("tools", 0.0),
    }


class RunCollector:
    """All metrics of a training run; collected in a thread.

    Args:
        steps: Metrics of its steps.
        in_flight: Returns the number of groups in flight.
        scheduler: The engines.
        loop: The event loop on which the engines answer.

    Example:
        registry.register(RunCollector(steps, in_flight, scheduler, loop))
    """

    def __init__(
        self,
        steps: StepCollector,
        in_flight: Callable[[], int],
        scheduler: Scheduler,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._steps = steps
        self._in_flight = in_flight
        self._scheduler = scheduler
        self._loop = loop
        self._engines = EngineMetrics(scheduler)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics; without the engines' own while the event loop does not answer."""
        yield from self._steps.collect()
        groups = GaugeMetricFamily("turnwise_groups_in_flight", "Groups that are being sampled")
        groups.add_metric([], self._in_flight())
        yield groups
        asked = asyncio.run_coroutine_threadsafe(self._engines.collect(), self._loop)
        try:
            yield from asked.result(_ENGINE_SECONDS)
        except LateError:
            asked.cancel()
            yield answered(dict.fromkeys(list(self._scheduler.workers), False))
        yield from process_metrics()
        yield from scheduler_metrics(self._scheduler)


@asynccontextmanager
async def serving_metrics(
    host: str,
    port: int | None,
    rows: Sequence[JsonObject],
    in_flight: Callable[[], int],
    scheduler: Scheduler,
) -> AsyncIterator[int | None]:
    """Serve a run's metrics during an `async with` block; the value is the port.

    Args:
        port: 0 picks a free one; None serves nothing.
        rows: Lines of metrics.jsonl; those that are there already are not counted.
        in_flight: Returns the number of groups in flight.

    Raises:
        InputError: when the port is taken.

    Example:
        async with serving_metrics("127.0.0.1", 9400, folder.rows, loop.in_flight, scheduler):
            await loop.run()
    """
    if port is None:
        yield None
        return
    registry = CollectorRegistry(auto_describe=False)
    steps = StepCollector(rows, len(rows))
    loop = asyncio.get_running_loop()
    registry.register(RunCollector(steps, in_flight, scheduler, loop))
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
