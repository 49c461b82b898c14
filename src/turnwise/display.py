"""A run as a person sees it: a live table on a terminal, plain lines everywhere else."""

import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

_REFRESH_PER_SECOND = 4


class Display:
    """Shows phases and steps; a context manager. Without a terminal it prints a line a step."""

    def __init__(self, name: str, steps: int, console: Console) -> None:
        self._name = name
        self._steps = steps
        self._console = console
        self._phase, self._done, self._total = "start", 0, 0
        self._last: dict[str, Any] = {}
        self._accuracy: float | None = None
        self._started = time.perf_counter()
        self._first_step: float | None = None
        self._live = Live(
            console=console,
            refresh_per_second=_REFRESH_PER_SECOND,
            get_renderable=self._table,
            transient=True,
        )

    def __enter__(self) -> "Display":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def phase(self, name: str, total: int = 0) -> None:
        self._phase, self._done, self._total = name, 0, total
        if name == "rollout" and self._first_step is None:
            self._first_step = time.perf_counter()

    def advance(self) -> None:
        self._done += 1

    def step(self, metrics: dict[str, Any]) -> None:
        self._last = metrics
        if metrics["accuracy_heldout"] is not None:
            self._accuracy = metrics["accuracy_heldout"]
        self._console.print(self._line(metrics), highlight=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        """Something that a person should know at once."""
        self._console.print(text, style="yellow", highlight=False, soft_wrap=True, markup=False)

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
            parts.append(f"held-out accuracy {metrics['accuracy_heldout']:.3f}")
        if metrics["dropped"]:
            reasons = ", ".join(f"{k} {v}" for k, v in metrics["dropped"].items())
            parts.append(f"dropped: {reasons}")
        return "  ".join(parts)

    def _time_left(self) -> str:
        step = self._last.get("step", 0)
        if self._first_step is None or step < 1:
            return ""
        seconds = (time.perf_counter() - self._first_step) / step * (self._steps - step)
        return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"

    def _table(self) -> Table:
        elapsed = int(time.perf_counter() - self._started)
        progress = f" {self._done}/{self._total}" if self._total else ""
        table = Table(title=f"turnwise · {self._name}", title_justify="left")
        last = self._last
        columns = {
            "step": f"{last.get('step', 0)}/{self._steps}",
            "now": f"{self._phase}{progress}",
            "reward": f"{last['reward_mean']:.3f}" if last else "–",
            "held-out": f"{self._accuracy:.3f}" if self._accuracy is not None else "–",
            "rollout tok/s": f"{last['rollout_tokens_per_s']:,.0f}" if last else "–",
            "train tok/s": f"{last['train_tokens_per_s']:,.0f}" if last else "–",
            "staleness": str(last.get("staleness_max", "–")),
            "elapsed": f"{elapsed // 60}:{elapsed % 60:02d}",
            "left": self._time_left() or "–",
        }
        for name in columns:
            table.add_column(name, justify="right")
        table.add_row(*columns.values())
        return table
