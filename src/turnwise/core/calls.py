"""The register of calls of user code: those that run, and those that were abandoned.

A call that ignores its deadline is abandoned: nothing waits for it any more, and it counts as stuck
until it returns. `core.user_code` makes the calls; `core.executor` registers those that user code
itself makes with `asyncio.to_thread`.
"""

import sys
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import TypeVar

from turnwise.errors import TurnwiseError, in_user_code, short_path

_T = TypeVar("_T")

MAX_STUCK = 256
"""Maximum number of stuck calls; at this number, no call of user code begins."""
_NAMED = 4
"""Maximum number of calls that one line names."""
CALLER: ContextVar[str] = ContextVar("caller", default="")
"""Name of the coroutine of user code that runs in this context; "" outside of user code."""


class Call:
    """One call of user code, registered from its beginning until it returns."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.began = time.monotonic()
        self.thread: int | None = None
        """Identifier of the thread that runs it; None before it begins."""
        self._abandoned = False

    def run(self, function: Callable[[], _T]) -> _T:
        """Call the function in this thread."""
        self.thread = threading.get_ident()
        self.register()
        try:
            return function()
        finally:
            self.returned()

    def register(self) -> None:
        """Register the call as running."""
        _running[self] = None
        if self._abandoned:  # before it began
            _stuck[self] = None

    def returned(self) -> None:
        """Unregister the call."""
        _running.pop(self, None)
        _stuck.pop(self, None)

    def abandon(self) -> None:
        """Count the call as stuck from its beginning until it returns."""
        self._abandoned = True
        if self in _running:
            _stuck[self] = None
        if self not in _running:  # it has returned in the meantime
            _stuck.pop(self, None)

    def where(self) -> str:
        """Return the line of user code that runs now, as `at file:line`; "" if unknown."""
        frame = None if self.thread is None else sys._current_frames().get(self.thread)
        while frame is not None and not in_user_code(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None:
            return ""
        return f"at {short_path(frame.f_code.co_filename)}:{frame.f_lineno}"


_running: dict[Call, None] = {}
"""Calls that have not returned."""
_stuck: dict[Call, None] = {}
"""Calls that have not returned and were abandoned."""


def check_stuck(name: str) -> None:
    """Refuse another call while too many are stuck.

    Raises:
        TurnwiseError: naming the call, and those that are stuck.
    """
    if len(_stuck) >= MAX_STUCK:
        raise TurnwiseError(f"{name} is not called, because {stuck_calls()}")


def stuck_calls(since: float = 0.0) -> str:
    """Describe the abandoned calls that have not returned in one clause; "" without any.

    Args:
        since: Time, as of `time.monotonic`, from which calls count by their beginning.
    """
    return describe_calls([call for call in list(_stuck) if call.began >= since])


def unreturned_calls() -> str:
    """Describe all calls of user code that have not returned in one clause; "" without any."""
    return describe_calls(list(_running))


def running_calls() -> list[Call]:
    """Return all calls of user code that have not returned."""
    return list(_running)


def describe_calls(calls: list[Call]) -> str:
    """Describe calls by their names and lines in one clause; "" without any."""
    if not calls:
        return ""
    names: dict[str, list[Call]] = {}
    for call in calls:
        names.setdefault(call.name, []).append(call)
    parts = []
    for name, alike in list(names.items())[:_NAMED]:
        times = f"{len(alike)} times" if len(alike) > 1 else ""
        about = ", ".join(filter(None, [times, alike[0].where()]))
        parts.append(f"{name} ({about})" if about else name)
    if len(names) > _NAMED:
        parts.append(f"{len(names) - _NAMED} more")
    verb = "s have" if len(calls) > 1 else " has"
    return f"{len(calls)} call{verb} not returned: {', '.join(parts)}"
