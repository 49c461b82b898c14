"""An event loop whose time is a number: sleeping takes none, and a test moves it as it likes."""

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")
_REAL_SECONDS = 30.0
"""Time for threads to finish, when no timer is left."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Its time stands still while code runs, and jumps to the next timer when nothing else is left.

    A machine that is slow, or stands still, changes nothing that a test sees.
    """

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.now


class _Selector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(_REAL_SECONDS if timeout is None else 0.0)
        if not ready:
            if timeout is None:
                raise TimeoutError("every task waits, and no timer is set")
            self._loop.now += max(0.0, timeout)
        return ready


def run_virtually(work: Coroutine[object, object, _T]) -> _T:
    """Run a coroutine in virtual time.

    Raises:
        TimeoutError: when the work waits for an event that can never happen.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)


def virtual_time(
    test: Callable[_P, Coroutine[Any, Any, None]],
) -> Callable[_P, None]:
    """Decorate an async test, which then runs in virtual time."""

    @functools.wraps(test)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> None:
        run_virtually(test(*args, **kwargs))

    return run


def stand_still(seconds: float) -> None:
    """Let time pass in the middle of running code, as when the whole process is stopped."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    loop.now += seconds
