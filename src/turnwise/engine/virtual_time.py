"""Virtual time: an event loop whose clock jumps to the next timer, so that waits take no time."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import TypeVar

_T = TypeVar("_T")
_REAL_SECONDS = 30.0
"""Time for threads to finish, when no timer is left."""


def run_virtually(work: Coroutine[object, object, _T]) -> _T:
    """Run a coroutine on a clock that jumps over every wait.

    Raises:
        TimeoutError: when the work waits for an event that can never happen.

    Example:
        run_virtually(asyncio.sleep(3600))  # returns at once
    """
    with asyncio.Runner(loop_factory=_VirtualTimeLoop) as runner:
        return runner.run(work)


class _VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self._now

    def jump(self, seconds: float) -> None:
        self._now += seconds


class _JumpingSelector(selectors.DefaultSelector):
    """A selector that moves the clock, instead of waiting, when nothing is ready."""

    def __init__(self, loop: _VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0 if timeout is not None else _REAL_SECONDS)
        if not ready:
            if timeout is None:
                raise TimeoutError("every task waits, and no timer is set")
            self._loop.jump(timeout)
        return ready
