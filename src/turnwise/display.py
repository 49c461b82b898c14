"""A run as a person sees it: a live table on a terminal, plain lines everywhere else."""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

_REFRESH_PER_SECOND = 4
_QUIET_SECONDS = 10.0
"""Without a terminal, a start that prints nothing for this long prints what it is at."""
_QUIET_STEP_SECONDS = 60.0
"""The same once a step is done."""


class Display:
    """Shows the start, phases and steps; a context manager.

    Args:
        name: The run's.
        steps: That it will train; 0 for what does not train.
        success_reward: The reward from which a trajectory counts as right.
    """

    def __init__(self, name: str, steps: int, console: Console, success_reward: float) -> None:
        self._name = name
        self._steps = steps
        self._console = console
        self._success = f"reward ≥ {success_reward:g}"
        self._parts: dict[str, float] = {}
        """Start time of each part that is being started, by its name."""
        self._phase, self._done, self._total = "start", 0, 0
        self._last: dict[str, Any] = {}
        self._accuracy: float | None = None
        self._started = self._phase_began = self._printed = time.perf_counter()
        self._first_step: float | None = None
        self._steps_here = 0
        """Done by this process: a resumed run begins at a later one."""
        self._ended = threading.Event()
        self._live = Live(
            console=console,
            refresh_per_second=_REFRESH_PER_SECOND,
            get_renderable=self._table,
            transient=True,
        )

    def __enter__(self) -> "Display":
        if self._console.is_terminal:
            self._live.start()
        else:
            threading.Thread(target=self._beat, daemon=True, name="turnwise-display").start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._live.stop()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Show a part of the start for the length of a `with` block; others may run beside it.

        Args:
            name: Such as "starting Ray".
        """
        began = self._parts[name] = time.perf_counter()
        self._print(f"{name} ...")
        try:
            yield
            self._print(f"{name}: {time.perf_counter() - began:.1f} s")
        finally:
            self._parts.pop(name, None)

    def phase(self, name: str, total: int = 0) -> None:
        self._phase, self._done, self._total = name, 0, total
        self._phase_began = time.perf_counter()
        if name == "rollout" and self._first_step is None:
            self._first_step = self._phase_began

    def advance(self) -> None:
        self._done += 1

    def step(self, metrics: dict[str, Any]) -> None:
        self._last = metrics
        self._steps_here += metrics["step"] > 0
        if metrics["accuracy_heldout"] is not None:
            self._accuracy = metrics["accuracy_heldout"]
        self._print(self._line(metrics))

    def warn(self, text: str) -> None:
        """Something that a person should know at once."""
        self._print(text, style="yellow")

    def _print(self, text: str, style: str | None = None) -> None:
        self._printed = time.perf_counter()
        self._console.print(text, style=style, highlight=False, soft_wrap=True, markup=False)

    def _beat(self) -> None:
        """Without a terminal: print what the run is at whenever it was quiet for long."""
        while True:
            quiet = _QUIET_STEP_SECONDS if self._last else _QUIET_SECONDS
            if self._ended.wait(max(0.0, self._printed + quiet - time.perf_counter())):
                return
            now = time.perf_counter()
            if now - self._printed >= quiet:
                self._print(f"{now - self._started:.0f} s: {self._now(now)}")

    def _now(self, now: float) -> str:
        """The current activity and its duration, as text."""
        parts = sorted(list(self._parts.items()), key=lambda part: part[1])
        if parts:
            return ", ".join(f"{name} ({now - began:.0f} s)" for name, began in parts)
        return f"{self._phase}{self._progress} ({now - self._phase_began:.0f} s)"

    @property
    def _progress(self) -> str:
        return f" {self._done}/{self._total}" if self._total else ""

    def _line(self, metrics: dict[str, Any]) -> str:
        parts = [
            f"step {metrics['step']:>4}/{self._steps}",
            f"reward {metrics['reward_mean']:.3f}",
            f"rollout {metrics['rollout_tokens_per_s']:6,.0f} tok/s",
            f"train {metrics['train_tokens_per_s']:6,.0f} tok/s",
            f"stale {metrics['staleness_max']}",
            f"{metrics['step_seconds']:.1f} s",
        ]
        if left := self._time_left():
            parts.append(f"left {left}")
        if metrics["accuracy_heldout"] is not None:
            accuracy = metrics["accuracy_heldout"]
            parts.append(f"held-out accuracy ({self._success}) {accuracy:.3f}")
        if why := why_untrained([metrics]):
            parts.append(f"nothing trained: {why}")
        if metrics["dropped"]:
            reasons = ", ".join(f"{k} {v}" for k, v in metrics["dropped"].items())
            parts.append(f"dropped: {reasons}")
        return "  ".join(parts)

    def _time_left(self) -> str:
        step = self._last.get("step", 0)
        if self._first_step is None or not self._steps_here:
            return ""
        each = (time.perf_counter() - self._first_step) / self._steps_here
        seconds = each * (self._steps - step)
        return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"

    def _table(self) -> Table:
        elapsed = int(time.perf_counter() - self._started)
        table = Table(title=f"turnwise · {self._name}", title_justify="left")
        last = self._last
        columns = {
            "now": "\n".join(list(self._parts)) or f"{self._phase}{self._progress}",
            "elapsed": f"{elapsed // 60}:{elapsed % 60:02d}",
        }
        if self._steps:
            columns |= {
                "step": f"{last.get('step', 0)}/{self._steps}",
                "reward": f"{last['reward_mean']:.3f}" if last else "–",
                "held-out": f"{self._accuracy:.3f}" if self._accuracy is not None else "–",
                "rollout tok/s": f"{last['rollout_tokens_per_s']:,.0f}" if last else "–",
                "train tok/s": f"{last['train_tokens_per_s']:,.0f}" if last else "–",
                "staleness": str(last.get("staleness_max", "–")),
                "left": self._time_left() or "–",
            }
        for name in columns:
            table.add_column(name, justify="right")
        table.add_row(*columns.values())
        return table


def why_untrained(steps: Sequence[Mapping[str, Any]]) -> str:
    """Why none of these steps' metrics trained a token; "" where one did, or there is no step."""
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
