"""A registry of a run's waits, and a watchdog that lists them when there is no progress.

Every wait is registered for as long as it lasts: `with waiting(who): await ...`. This costs a
microsecond and sets no timeout; deadlines do that. There is one registry per process, because a
wait in one part of a run may hold up another.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path

_NAMED = 8  # maximum number of kinds of waits that one line lists
_ASKED_SECONDS = 1.0  # time after which it is noticed that a report is asked for


class _Progress:
    """Time of the last progress, on `time.monotonic`'s clock."""

    moved = 0.0


_waits: "dict[waiting, None]" = {}


class waiting:
    """Registers a wait for the length of a `with` block; entering and leaving count as progress.

    Args:
        who: Object of "waiting for": "the trainer to train".
        kind: Singular noun under which similar waits are listed together: "tool".
    """

    __slots__ = ("kind", "since", "who")

    def __init__(self, who: str, kind: str = "") -> None:
        self.who = who
        self.kind = kind

    def __enter__(self) -> None:
        made_progress()
        self.since = _Progress.moved
        _waits[self] = None

    def __exit__(self, *exception: object) -> None:
        del _waits[self]
        made_progress()


def made_progress() -> None:
    """Record progress: a wait ended, tokens arrived, a part was saved."""
    _Progress.moved = time.monotonic()


def last_progress() -> float:
    """Return when this process last made progress, on `time.monotonic`'s clock."""
    return _Progress.moved


class Watchdog:
    """Reports when there is no progress for `seconds` during its `async with` block.

    It runs in a thread, so it also notices when the event loop itself is stuck.

    Args:
        seconds: Time without any progress.
        report: Called with one line once per stall, in the watchdog's thread.
        run: The run folder; when another process asks there for the report of `turnwise stuck`, it
            is written.
    """

    def __init__(
        self, seconds: float, report: Callable[[str], None], run: Path | None = None
    ) -> None:
        self._seconds = seconds
        self._report = report
        self._run = run
        self._ended = threading.Event()

    async def __aenter__(self) -> "Watchdog":
        made_progress()
        threading.Thread(target=self._watch, daemon=True, name="turnwise-watchdog").start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._ended.set()

    def _watch(self) -> None:
        reported = None
        longest = self._seconds if self._run is None else _ASKED_SECONDS
        pause = min(self._seconds, longest)
        while not self._ended.wait(pause):
            if self._run is not None:
                from turnwise.core import stacks  # for Linux; other systems read runs

                if (request := stacks.report_request(self._run)).exists():
                    stacks.write_report(self._run, _line(time.monotonic()))
                    request.unlink(missing_ok=True)
            moved, now = _Progress.moved, time.monotonic()
            left = moved + self._seconds - now
            if left <= 0 and moved != reported:
                reported = moved
                self._report(_line(now))
            pause = min(left if left > 0 else self._seconds, longest)


def _line(now: float) -> str:
    """Return a sentence about this moment: the waits, the longest first, those of a kind as one."""
    kinds: dict[tuple[str, str], list[waiting]] = {}
    for wait in sorted(list(_waits), key=lambda wait: wait.since):
        kinds.setdefault((wait.kind, "" if wait.kind else wait.who), []).append(wait)
    parts = []
    for (kind, _), alike in kinds.items():
        who, seconds = alike[0].who, f"{now - alike[0].since:.3g} s"
        several = f"{len(alike)} {kind}{'' if len(alike) == 1 else 's'}"
        parts.append(f"{several} ({who} for {seconds})" if kind else f"{who} ({seconds})")
    if len(parts) > _NAMED:
        parts[_NAMED:] = [f"{len(parts) - _NAMED} more"]
    said = f"waiting for: {', '.join(parts)}" if parts else "no wait is registered"
    return f"no progress for {now - _Progress.moved:.3g} s; {said}"
