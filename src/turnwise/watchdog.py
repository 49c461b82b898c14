"""Who is waited for, and a watchdog that says so when nothing moves any more.

Every wait of a run registers itself here for as long as it lasts: `with waiting(who): await ...`.
It costs a microsecond and decides nothing: deadlines do that. The registry is the process's, since
what holds up one part of a run may be waited for in another.
"""

import threading
import time
from collections.abc import Callable, Iterable
from types import TracebackType

_NAMED = 8
"""As many kinds of waits, at most, are told in one line."""


class _Progress:
    """When something last moved, on `time.monotonic`'s clock."""

    moved = 0.0


_waits: "dict[waiting, None]" = {}


class waiting:
    """Registers a wait for the length of a `with` block; its beginning and end are progress.

    Args:
        who: For whom, and for what: "the trainer to train".
        kind: Of waits that come in numbers, the singular: "tool". They are told together.
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
    """Something moved: a wait ended, tokens came, a part was saved."""
    _Progress.moved = time.monotonic()


class Watchdog:
    """While its `async with` block runs: tells when nothing has moved for `seconds`.

    It watches from a thread of its own, so it also sees that the event loop itself is stuck.

    Args:
        seconds: Without any progress.
        tell: Gets one line once per stall, in the watchdog's thread.
    """

    def __init__(self, seconds: float, tell: Callable[[str], None]) -> None:
        self._seconds = seconds
        self._tell = tell
        self._ended = threading.Event()

    async def __aenter__(self) -> "Watchdog":
        made_progress()
        threading.Thread(target=self._watch, daemon=True, name="turnwise-watchdog").start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._ended.set()

    def _watch(self) -> None:
        told = None
        pause = self._seconds
        while not self._ended.wait(pause):
            moved, now = _Progress.moved, time.monotonic()
            pause = moved + self._seconds - now
            if pause > 0:
                continue
            pause = self._seconds
            if moved != told:
                told = moved
                self._tell(
                    f"nothing has moved for {now - moved:.3g} s; {_describe(list(_waits), now)}"
                )


def _describe(waits: Iterable[waiting], now: float) -> str:
    """Who is waited for, the longest first; waits of one kind together."""
    kinds: dict[tuple[str, str], list[waiting]] = {}
    for wait in sorted(waits, key=lambda wait: wait.since):
        kinds.setdefault((wait.kind, "" if wait.kind else wait.who), []).append(wait)
    parts = [_describe_kind(alike, now) for alike in kinds.values()]
    if len(parts) > _NAMED:
        parts[_NAMED:] = [f"{len(parts) - _NAMED} more"]
    return f"waiting for: {', '.join(parts)}" if parts else "nobody is known to be waited for"


def _describe_kind(alike: list[waiting], now: float) -> str:
    longest = alike[0]
    seconds = f"{now - longest.since:.3g} s"
    if not longest.kind:
        return f"{longest.who} ({seconds})"
    plural = "" if len(alike) == 1 else "s"
    return f"{len(alike)} {longest.kind}{plural} ({longest.who} for {seconds})"
