"""A registry of a run's waits, and a watchdog that lists them when there is no progress.

Every wait is registered for as long as it lasts: `with waiting(who): await ...`, in one registry
per process, because a wait in one part of a run may hold up another.
"""

import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

_NAMED = 8  # maximum number of kinds of waits that one line lists
_ASKED_SECONDS = 1.0  # longest pause between two looks for a request for a report
_moved = 0.0  # time of the last progress, on `time.monotonic`'s clock
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
        self.since = _moved
        _waits[self] = None

    def __exit__(self, *exception: object) -> None:
        del _waits[self]
        made_progress()


def made_progress() -> None:
    """Record progress: a wait ended, tokens arrived, a part was saved."""
    global _moved
    _moved = time.monotonic()


def last_progress() -> float:
    """Return when this process last made progress, on `time.monotonic`'s clock."""
    return _moved


@asynccontextmanager
async def watching_progress(
    seconds: float, report: Callable[[str], None], run: Path | None = None
) -> AsyncIterator[None]:
    """Call `report` with one line, once per stall, when there is no progress for `seconds` during
    an `async with` block. Also write the report of `turnwise stuck` when another process asks for
    it in the folder `run`. A thread does this, so that a stuck event loop does not prevent it."""
    ended = threading.Event()
    longest = seconds if run is None else _ASKED_SECONDS

    def watch() -> None:
        reported = None
        pause = min(seconds, longest)
        while not ended.wait(pause):
            if run is not None:
                from turnwise.core import stacks  # imported here because it works only on Linux

                if (request := stacks.report_request(run)).exists():
                    stacks.write_report(run, _line(time.monotonic()))
                    request.unlink(missing_ok=True)
            moved, now = _moved, time.monotonic()
            left = moved + seconds - now
            if left <= 0 and moved != reported:
                reported = moved
                report(_line(now))
            pause = min(left if left > 0 else seconds, longest)

    made_progress()
    threading.Thread(target=watch, daemon=True, name="turnwise-watchdog").start()
    try:
        yield
    finally:
        ended.set()


def _line(now: float) -> str:
    """Return a sentence that names the present waits, longest first, with one entry per kind."""
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
    return f"no progress for {now - _moved:.3g} s; {said}"
