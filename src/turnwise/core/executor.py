"""The default executor of event loops on which user code may run: daemon threads without a limit.

asyncio's own has a few threads. User code that never returns from `asyncio.to_thread` would keep
them, so that other calls wait for ever, and so does the end of the program, which joins them.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar
from weakref import WeakSet

from turnwise.core.aio import start_in_thread
from turnwise.core.calls import CALLER, Call

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Loop = asyncio.AbstractEventLoop
_prepared: "WeakSet[_Loop]" = WeakSet()


def use_daemon_threads(loop: _Loop) -> None:
    """Make daemon threads the default executor of an event loop, once."""
    if loop not in _prepared:
        _prepared.add(loop)
        loop.set_default_executor(_DaemonThreads())


class _DaemonThreads(ThreadPoolExecutor):
    """An executor that starts a daemon thread for each call that finds none idle.

    It is a `ThreadPoolExecutor` because event loops accept no other; it has no threads as such.
    """

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> "Future[_T]":
        """Start a call, and return its future.

        Raises:
            OSError: when no thread can be started.
        """
        call = Call(_name(fn, args))
        future = _Future[_T](call)

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                value = call.run(partial(fn, *args, **kwargs))
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(value)

        start_in_thread(work)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Do nothing: threads are daemons, and nothing waits for their calls."""


class _Future(Future[_T]):
    """The future of a call, which is abandoned when its running cannot be cancelled."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self._call = call

    def cancel(self) -> bool:
        """Cancel the call if it has not begun; otherwise count it as stuck until it returns."""
        cancelled = super().cancel()
        if not cancelled:
            self._call.abandon()
        return cancelled


def _name(function: Callable[..., object], arguments: tuple[object, ...]) -> str:
    """Return the name of a call: that of the user code that makes it, or else the function's."""
    if caller := CALLER.get():
        return f"a thread of {caller}"
    if isinstance(function, partial) and function.args:  # as asyncio.to_thread submits it
        function = function.args[0]
    return f"a thread for {getattr(function, '__qualname__', type(function).__name__)}"
