"""The display of a run's progress: a live table on a terminal, else lines."""

import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.live import Live
from rich.table import Table

from turnwise.core.json_types import JsonObject
from turnwise.errors import visible
from turnwise.observe.conversations import conversation
from turnwise.observe.metrics import StepMetrics, shown_interval
from turnwise.trajectory import Trajectory

_QUIET_SECONDS = 10.0  # without a terminal: longest silence during startup
_QUIET_STEP_SECONDS = 60.0  # without a terminal: longest silence after the first step
_NO_SIGNAL = (
    "; the problems may be too easy or too hard for this model, or the reward may not tell its "
    "answers apart"
)
_Result = TypeVar("_Result")


class Display:
    """Context manager that shows the startup, phases and steps of a run (0 steps: no training)."""

    def __init__(self, name: str, steps: int, console: Console, success_reward: float) -> None:
        self._name = name
        self._steps = steps
        self._console = console
        self._success = f"reward ≥ {success_reward:g}"
        self._parts: dict[str, float] = {}  # start time of each part in progress, by its name
        self._phase, self._done, self._total = "start", 0, 0
        self._last: StepMetrics | None = None
        self._accuracy: float | None = None
        self._started = self._phase_began = self._printed = time.perf_counter()
        self._first_step: float | None = None
        self._steps_here = 0  # steps done by this process; a resumed run begins at a later step
        self._ended = threading.Event()
        self._live = Live(
            console=console,
            refresh_per_second=4,
            get_renderable=self._table,
            transient=True,
        )

    def __enter__(self) -> "Display":
        if self._console.is_terminal:
            self._live.start()
        else:
            threading.Thread(target=self._beat, daemon=True, name="turnwise-display").start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._live.stop()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Show a startup task ("starting Ray") while it runs; several tasks may overlap."""
        began = self._parts[name] = time.perf_counter()
        self._print(f"{name} ...")
        try:
            yield
            self._print(f"{name}: {time.perf_counter() - began:.1f} s")
        finally:
            self._parts.pop(name, None)

    def phase(self, name: str, total: int = 0) -> None:
        """Begin a phase of `total` parts; a `total` of 0 means that the parts cannot be counted."""
        self._phase, self._done, self._total = name, 0, total
        self._phase_began = time.perf_counter()
        if name in ("rollout", "read") and self._first_step is None:
            self._first_step = self._phase_began

    def advance(self) -> None:
        self._done += 1

    def step(self, metrics: StepMetrics) -> None:
        """Show the metrics of a completed step, or (step 0) of the first evaluation."""
        self._last = metrics
        self._steps_here += bool(metrics.step)
        environments = metrics.environments or {}
        parts = [f"step {metrics.step or 0:>4}/{self._steps}"]
        train = f"train {metrics.train_tokens_per_s:6,.0f} tok/s"
        if metrics.reward_mean is None:  # supervised training
            parts += [f"epoch {metrics.epoch or 0:.2f}", f"loss {_known(metrics.loss)}", train]
            if metrics.loss_heldout is not None:
                parts.append(f"held-out loss {metrics.loss_heldout:.4f}")
        else:
            parts += [
                f"reward {metrics.reward_mean:.3f}{_of_each(environments, 'reward_mean')}",
                f"rollout {metrics.rollout_tokens_per_s or 0:6,.0f} tok/s",
                train,
                f"stale {metrics.staleness_max}",
            ]
        parts.append(f"{metrics.step_seconds or 0:.1f} s")
        if left := self._time_left():
            parts.append(f"left {left}")
        parts += self._heldout(metrics)
        if why := why_untrained([metrics.to_json()]):
            parts.append(f"nothing trained: {why}")
        if metrics.dropped:
            reasons = ", ".join(f"{k} {v}" for k, v in metrics.dropped.items())
            of_each = [
                f"{name} {own['dropped']}"
                for name, own in environments.items()
                if own.get("dropped")
            ]
            parts.append(f"dropped: {reasons}" + (f" ({', '.join(of_each)})" if of_each else ""))
        if failed := (metrics.groups_discarded or {}).get("failed"):
            parts.append(f"groups failed: {failed}")
        self._print("  ".join(parts))

    def evaluated(self, metrics: StepMetrics) -> None:
        """Show the evaluation of an earlier step's weights, which ran beside training."""
        head = f"step {metrics.step or 0:>4}/{self._steps}"
        self._print("  ".join([head, *self._heldout(metrics), "evaluated beside training"]))

    def _heldout(self, metrics: StepMetrics) -> list[str]:
        if (accuracy := metrics.accuracy_heldout) is None:
            return []
        self._accuracy = accuracy
        heldout = {n: own.get("heldout", {}) for n, own in (metrics.environments or {}).items()}
        each = _of_each({**heldout, **(metrics.heldout_sets or {})}, "accuracy")
        interval = shown_interval(metrics.heldout)
        parts = [f"held-out accuracy ({self._success}) {accuracy:.3f}{interval}{each}"]
        if metrics.heldout_dropped and metrics.step:  # at step 0, `dropped` has them
            parts.append(f"held-out dropped: {sum(metrics.heldout_dropped.values())}")
        return parts

    def samples(self, samples: Mapping[str, Sequence[Trajectory]]) -> None:
        """Show conversations of the step, by a label such as "best"."""
        for label, trajectories in samples.items():
            for trajectory in trajectories:
                self._console.print(conversation(trajectory, label), end="", soft_wrap=True)

    def note(self, text: str) -> None:
        """Show a fact about the run that its configuration leaves open."""
        self._print(text)

    def warn(self, text: str) -> None:
        """Show an urgent message; may be called from any thread."""
        self._print(text, style="yellow")

    def _print(self, text: str, style: str | None = None) -> None:
        self._printed = time.perf_counter()
        self._console.print(
            visible(text), style=style, highlight=False, soft_wrap=True, markup=False
        )

    def _beat(self) -> None:
        """Print, without a terminal, the current activity after a long silence."""
        while True:
            quiet = _QUIET_STEP_SECONDS if self._last else _QUIET_SECONDS
            if self._ended.wait(max(0.0, self._printed + quiet - time.perf_counter())):
                return
            now = time.perf_counter()
            if now - self._printed >= quiet:
                parts = sorted(list(self._parts.items()), key=lambda part: part[1])
                parts = parts or [(f"{self._phase}{self._progress}", self._phase_began)]
                said = ", ".join(f"{name} ({now - began:.0f} s)" for name, began in parts)
                self._print(f"{now - self._started:.0f} s: {said}")

    @property
    def _progress(self) -> str:
        return f" {self._done}/{self._total}" if self._total else ""

    def _time_left(self) -> str:
        step = (self._last.step if self._last else None) or 0
        if self._first_step is None or not self._steps_here:
            return ""
        each = (time.perf_counter() - self._first_step) / self._steps_here
        return _clock(each * (self._steps - step))

    def _table(self) -> Table:
        table = Table(title=f"turnwise · {self._name}", title_justify="left")
        last = self._last
        columns = {
            "now": "\n".join(list(self._parts)) or f"{self._phase}{self._progress}",
            "elapsed": _clock(time.perf_counter() - self._started),
        }
        if self._steps:
            columns |= {
                "step": f"{last.step or 0 if last else 0}/{self._steps}",
                "reward": _known(last.reward_mean if last else None),
                "held-out": _known(self._accuracy),
                "rollout tok/s": f"{last.rollout_tokens_per_s or 0:,.0f}" if last else "–",
                "train tok/s": f"{last.train_tokens_per_s:,.0f}" if last else "–",
                "staleness": str(last.staleness_max) if last else "–",
                "left": self._time_left() or "–",
            }
        for name in columns:
            table.add_column(name, justify="right")
        table.add_row(*columns.values())
        return table


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _known(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _of_each(environments: Mapping[str, JsonObject], key: str) -> str:
    """Return the number `key` of each environment in parentheses; "" if no environment has this
    key."""
    found = [f"{name} {own[key]:.3f}" for name, own in environments.items() if key in own]
    return f" ({', '.join(found)})" if found else ""


def why_untrained(steps: Sequence[JsonObject]) -> str:
    """Return why no step in these lines of metrics.jsonl trained a token; "" if one did."""
    steps = [metrics for metrics in steps if metrics["step"] > 0]
    if not steps or any(metrics["trained_tokens"] for metrics in steps):
        return ""
    equal = sum(metrics["groups_without_signal"] for metrics in steps)
    stale = sum(metrics["stale_groups"] for metrics in steps)
    reasons = []
    if equal:
        means = {f"{metrics['reward_mean']:.3f}" for metrics in steps}
        mean = f", {means.pop()} on average" if len(means) == 1 else ""
        groups = "1 group" if equal == 1 else f"{equal:,} groups"
        reasons.append(f"{groups} without signal (all rewards of a group equal{mean})")
    if stale:
        reasons.append(f"{stale:,} groups too old (training.max_staleness)")
    return ", ".join(reasons) or "no group has two trajectories to compare (sampling.n, dropped)"


def show_result(
    console: Console,
    exactness: str,
    folder: Path,
    picture: Path | None,
    steps: Sequence[JsonObject],
) -> None:
    """Print the result of a run: its audit and its folder. If the run sampled, also print the path
    of its picture, and the reason if nothing was trained."""

    def line(text: str, style: str | None = None) -> None:
        console.print(visible(text), style=style, highlight=False, markup=False, soft_wrap=True)

    if picture is not None and (why := why_untrained(steps)):
        no_signal = any(row.get("groups_without_signal") for row in steps)
        line(f"nothing was trained: {why}{_NO_SIGNAL if no_signal else ''}", "yellow")
    line(exactness)
    line(f"run folder {folder}")
    if picture is not None:
        line(f"picture    {picture}")


async def show_part(display: Display, name: str, work: Callable[[], Awaitable[_Result]]) -> _Result:
    """Run a startup task and show it while it runs."""
    with display.part(name):
        return await work()


SILENT = Display("", 0, Console(quiet=True), 0.0)  # shows nothing
