"""A registry of a run's waits, and a watchdog that lists them when there is no progress.

Every wait is registered for as long as it lasts: `with waiting(who): await ...`. This costs a
microsecond and sets no timeout; deadlines do that. There is one registry per process, because a
wait in one part of a run may hold up another.
"""

import threading
import time
from collections.abc import Callable, Iterable
from types import TracebackType

_NAMED = 8
"""Maximum number of kinds of waits that one line lists."""


_WANTED_SECONDS = 1.0
"""Time after which a report that is wanted is noticed."""


class _Progress:
    """Time of the last progress, on `time.monotonic`'s clock."""

    moved = 0.0


_waits: "dict[waiting, None]" = {}


class waiting:
    """Registers a wait for the length of a `with` block; entering and leaving count as progress.

    Args:
        who: Object of "waiting for": "the trainer to train".
        kind: Singular noun under which similar waits are listed together: "tool".

    Example:
        with waiting("the trainer to train"):
            await trainer.train(samples)
    """

    __slots__ = ("kind", "since", "who")

    def __init__(self, who: str, kind: str = "") -> None:
        self.who = who
        self.kind = kind

    def __enter__(self) -> None:
        made_progress()
        self.since = _Progress.moved
        _waits[self] = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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
        wanted: Called every second; while it is true, `answer` is called.
        answer: Called with the line of the present moment, in the watchdog's thread.

    Example:
        async with Watchdog(300.0, logger.warning):
            await train()
    """

    def __init__(
        self,
        seconds: float,
        report: Callable[[str], None],
        wanted: Callable[[], bool] | None = None,
        answer: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._seconds = seconds
        self._report = report
        self._wanted = wanted
        self._answer = answer
        self._ended = threading.Event()

    async def __aenter__(self) -> "Watchdog":
        made_progress()
        threading.Thread(target=self._watch, daemon=True, name="turnwise-watchdog").start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._ended.set()

    def _watch(self) -> None:
        reported = None
        longest = self._seconds if self._wanted is None else _WANTED_SECONDS
        pause = min(self._seconds, longest)
        while not self._ended.wait(pause):
            if self._wanted is not None and self._wanted():
                self._answer(_line(time.monotonic()))
            moved, now = _Progress.moved, time.monotonic()
            left = moved + self._seconds - now
            if left <= 0 and moved != reported:
                reported = moved
                self._report(_line(now))
            pause = min(left if left > 0 else self._seconds, longest)


def _line(now: float) -> str:
    """Return a sentence about the present moment."""
    return f"no progress for {now - _Progress.moved:.3g} s; {_describe(list(_waits), now)}"


def _describe(waits: Iterable[waiting], now: float) -> str:
    """List the waits in one clause, the longest first; those of one kind together."""
    kinds: dict[tuple[str, str], list[waiting]] = {}
    for wait in sorted(waits, key=lambda wait: wait.since):
        kinds.setdefault((wait.kind, "" if wait.kind else wait.who), []).append(wait)
    parts = [_describe_kind(alike, now) for alike in kinds.values()]
    if len(parts) > _NAMED:
        parts[_NAMED:] = [f"{len(parts) - _NAMED} more"]
    return f"waiting for: {', '.join(parts)}" if parts else "no wait is registered"


def _describe_kind(alike: list[waiting], now: float) -> str:
    longest = alike[0]
    seconds = f"{now - longest.since:.3g} s"
    if not longest.kind:
        return f"{longest.who} ({seconds})"
    plural = "" if len(alike) == 1 else "s"
    return f"{len(alike)} {longest.kind}{plural} ({longest.who} for {seconds})"
