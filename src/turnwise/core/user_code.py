"""Calls of user code (tools, environments, rewards, agents) outside the main event loop.

Each call has a name and a deadline. Plain functions run in daemon threads; each environment has a
thread of its own for its plain functions (`UserThread`). All coroutines run on one event loop in
another daemon thread, so that they can share clients. A call that ignores its deadline is
abandoned: nothing waits for it any more, and it counts as stuck until it returns. No call begins
while `MAX_STUCK` calls are stuck.
"""

import asyncio
import contextlib
import contextvars
import functools
import inspect
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar
from weakref import WeakSet

from turnwise.core.aio import (
    Inbox,
    done_event,
    fulfil,
    in_thread,
    set_within,
    start_daemon,
    start_in_thread,
    take_thread,
)
from turnwise.core.deadlines import deadline, deadline_error
from turnwise.core.optional import Foreign
from turnwise.core.user_imports import thread as importing
from turnwise.errors import (
    InputError,
    TrajectoryError,
    TurnwiseError,
    describe_error,
    in_user_code,
    ordinary_error,
    short_path,
)

logger = logging.getLogger(__name__)
_T = TypeVar("_T")
_P = ParamSpec("_P")

MAX_STUCK = 256  # maximum number of stuck calls; at this number, no call of user code begins
GRACE_SECONDS = 2.0  # time that a cancelled coroutine of user code has for its clean-up
BLOCKED_SECONDS = 10.0
"""If a call waits this long to begin, the loop of user code counts as blocked and is replaced."""
STR_SECONDS = 10.0  # deadline of an error's own `__str__`, which is user code
_NAMED = 4  # maximum number of calls that one line names
_caller: ContextVar[str] = ContextVar("caller", default="")
"""Name of the coroutine of user code that runs in this context; "" outside of user code."""


async def call_user_code(
    function: Callable[..., object],
    /,
    *arguments: object,
    name: str,
    seconds: float,
    key: str = "",
    thread: "UserThread | None" = None,
) -> Any:
    """Call a user's function, plain or async, outside this event loop and within `seconds`.

    A plain function runs in `thread`, or in any thread if `thread` is None. The error of a late
    call has the call's `name` ("the tool search") and the configuration key of its deadline
    (`key`).

    Raises:
        DeadlineError: when the call does not answer in time.
        TurnwiseError: when too many calls are stuck for another to begin.
        OSError: when no thread can be started for the call.
        Exception: whatever the function raised. SystemExit, KeyboardInterrupt, StopIteration and
            a CancelledError that it raised itself become a RuntimeError.
    """
    _check_stuck(name)
    async with deadline(seconds, f"{name} did not answer", key):
        if inspect.iscoroutinefunction(function):
            return await _on_user_loop(name, functools.partial(function, *arguments))
        call = Call[Foreign](name)
        start = None if thread is None else functools.partial(thread.start, call)
        try:
            value = await in_thread(call, lambda: call.run(function, *arguments), start)
            if inspect.isawaitable(value):
                return await _on_user_loop(name, lambda: value)
            return value
        finally:
            call.add_done_callback(_close_unbegun)  # also if it returns later


def _close_unbegun(call: Future[Foreign]) -> None:
    """Close a coroutine that a call returned too late to be run; Python would warn about it."""
    if not call.cancelled() and call.exception() is None:
        value = call.result()
        if inspect.iscoroutine(value) and inspect.getcoroutinestate(value) == inspect.CORO_CREATED:
            value.close()


async def run_abandonable(
    make: Callable[[], Awaitable[_T]], *, name: str, seconds: float, key: str = ""
) -> _T:
    """Run a user's coroutine that needs this event loop in a separate task. When cancelled or late,
    wait at most `GRACE_SECONDS` for that task."""
    _check_stuck(name)
    loop = asyncio.get_running_loop()
    use_daemon_threads(loop)
    coroutine = _Coroutine(name, make, loop)
    coroutine.begin()
    async with deadline(seconds, f"{name} did not end", key):
        await coroutine.ended()
        return coroutine.result()


def call_and_wait(function: Callable[[], _T], *, name: str, seconds: float) -> _T:
    """Call a user's plain function from a thread that may block; raises as `call_user_code`
    does."""
    _check_stuck(name)
    call = Call[_T](name)
    try:
        start_in_thread(lambda: fulfil(call, lambda: call.run(function)))
        if not wait([call], seconds).done:
            raise deadline_error(seconds, f"{name} did not answer")
        return call.result()
    finally:
        call.cancel()


async def import_user_code(
    load: Callable[..., _T], *arguments: object, seconds: float, what: str
) -> _T:
    """Call a function that imports the user's modules (`what`) within `seconds`, the value of
    `engine.start_timeout`."""
    loaded: _T = await call_user_code(
        load,
        *arguments,
        name=f"the import of {what}",
        seconds=seconds,
        key="engine.start_timeout",
    )
    return loaded


async def describe_user_error(error: Exception) -> str:
    """Describe an error as `errors.describe_error` does, but outside this event loop, because its
    `__str__` is user code. If `__str__` does not answer, return only the type's name."""
    if isinstance(error, TurnwiseError):
        return str(error)
    kind = type(error).__name__
    name = f"the __str__ of {kind}"
    try:
        return str(await call_user_code(describe_error, error, name=name, seconds=STR_SECONDS))
    except (TurnwiseError, OSError):
        return kind


@asynccontextmanager
async def user_errors(
    reason: str | None, said: str, passing: tuple[type[Exception], ...] = (TurnwiseError,)
) -> AsyncIterator[None]:
    """Turn an error of user code in an `async with` block into a `TrajectoryError` with `reason`,
    or without a reason into an `InputError`. The message begins with `said`; errors of the types
    `passing` are raised unchanged."""
    try:
        yield
    except passing:
        raise
    except Exception as error:
        why = said + await describe_user_error(error)
        raise (TrajectoryError(reason, why) if reason else InputError(why)) from error


# The register of calls


class Call(Future[_T]):
    """One call of user code, registered as running until it returns.

    A call cancelled before it begins never runs; a call cancelled later counts as stuck.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.began = time.monotonic()
        self.thread: int | None = None
        """Identifier of the thread that runs the call; None before the call begins."""
        _running[self] = None
        self.add_done_callback(_unregister)

    def run(self, function: Callable[..., _T], *arguments: object) -> _T:
        """Call the function in this thread."""
        self.thread = threading.get_ident()
        before, importing.runs_user_code = importing.runs_user_code, True
        try:
            return function(*arguments)
        finally:
            importing.runs_user_code = before

    def cancel(self) -> bool:
        """Withdraw the call if it has not begun, else count it as stuck until it returns; return
        whether it was withdrawn."""
        withdrawn = super().cancel()
        if not withdrawn and not self.done():
            _stuck[self] = None
            if self.done():  # in the meantime
                _unregister(self)
        return withdrawn

    def where(self) -> str:
        """Return the line of user code that runs now, as `at file:line`; "" if unknown."""
        frame = None if self.thread is None else sys._current_frames().get(self.thread)
        while frame is not None and not in_user_code(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None:
            return ""
        return f"at {short_path(frame.f_code.co_filename)}:{frame.f_lineno}"


_running: dict[Call[Foreign], None] = {}  # calls that have not returned
_stuck: dict[Call[Foreign], None] = {}  # calls that have not returned and were cancelled


def _unregister(call: Foreign) -> None:
    _running.pop(call, None)
    _stuck.pop(call, None)


def _check_stuck(name: str) -> None:
    if len(_stuck) >= MAX_STUCK:
        raise TurnwiseError(f"{name} is not called, because {stuck_calls()}")


def stuck_calls(since: float = 0.0) -> str:
    """Describe in one clause the abandoned calls that have not returned and that began at `since`
    (a time of `time.monotonic`) or later; "" without such calls."""
    return _described([call for call in list(_stuck) if call.began >= since])


def unreturned_calls() -> str:
    """Describe in one clause all calls of user code that have not returned; "" if none."""
    return _described(list(_running))


def _described(calls: list[Call[Foreign]]) -> str:
    if not calls:
        return ""
    names: dict[str, list[Call[Foreign]]] = {}
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


class UserThread:
    """The thread in which the plain calls of one environment run, one after another, so that they
    can share an object that is bound to a thread, such as an sqlite3 connection.

    The thread is taken at the first call, and other users can take it after `release`. A stuck call
    keeps its thread, and the next call gets another thread. For use on one event loop.
    """

    def __init__(self) -> None:
        self._inbox: Inbox | None = None
        self._last: Call[Foreign] | None = None

    def start(self, call: Call[Foreign], work: Callable[[], None]) -> None:
        """Start the work of a call once the calls before it have returned; raise OSError if no
        thread can be started."""
        if self._last in _stuck:
            self.release()
        if self._inbox is None:
            self._inbox = take_thread()
        self._last, context = call, contextvars.copy_context()

        def run() -> bool:
            context.run(work)
            return False

        self._inbox.put(run)

    def release(self) -> None:
        """Free the thread for others once its calls have returned."""
        if self._inbox is not None:
            self._inbox.put(lambda: True)
        self._inbox = self._last = None


# Threads that user code itself begins

_prepared: "WeakSet[asyncio.AbstractEventLoop]" = WeakSet()


def use_daemon_threads(loop: asyncio.AbstractEventLoop) -> None:
    """Give an event loop an unlimited number of daemon threads as its default executor; idempotent.
    User code that never returns from `asyncio.to_thread` would otherwise occupy asyncio's few
    threads, and the program would wait for them at its end."""
    if loop not in _prepared:
        _prepared.add(loop)
        loop.set_default_executor(_DaemonThreads())


class _DaemonThreads(ThreadPoolExecutor):
    """An executor that starts a daemon thread for each call that finds no idle thread. It is a
    `ThreadPoolExecutor`, because event loops accept no other executor."""

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> "Future[_T]":
        name = f"a thread of {_caller.get()}"
        if not _caller.get():
            # asyncio.to_thread submits the function as an argument of its context's `run`
            called = fn.args[0] if isinstance(fn, functools.partial) and fn.args else fn
            name = f"a thread for {getattr(called, '__qualname__', type(called).__name__)}"
        call = Call[_T](name)
        work = functools.partial(call.run, functools.partial(fn, *args, **kwargs))
        try:
            start_in_thread(lambda: fulfil(call, work, ordinary=False))
        except OSError:
            call.cancel()
            raise
        return call

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Do nothing: threads are daemons, and nothing waits for their calls."""


# Coroutines, and the event loop on which they run


class _Coroutine(Call[_T]):
    """A call that runs as a task on the event loop `home`; other loops may wait until it ends."""

    def __init__(
        self, name: str, make: Callable[[], Awaitable[_T]], home: asyncio.AbstractEventLoop
    ) -> None:
        self._make = make
        self._home = home
        self._task: asyncio.Task[_T] | None = None
        self._ending = False
        super().__init__(name)  # last: once registered, other threads may call its `where`
        self._replied = done_event(self)

    def begin(self) -> None:
        """Start the task; called on the home loop."""
        if self.set_running_or_notify_cancel():
            self._task = self._home.create_task(self._run(), name=self.name)
            self._task.add_done_callback(self._done)

    async def ended(self) -> bool:
        """Wait for the end of the call, and return True; if it has not begun within
        `BLOCKED_SECONDS`, withdraw it and return False."""
        try:
            while not await set_within(self._replied, BLOCKED_SECONDS):
                if Future.cancel(self):
                    return False
        except asyncio.CancelledError:
            if not Future.cancel(self):
                with contextlib.suppress(RuntimeError):  # its loop has closed
                    self._home.call_soon_threadsafe(self._end)
                try:
                    await set_within(self._replied, GRACE_SECONDS)
                finally:
                    self.cancel()
            raise
        return True

    def where(self) -> str:
        """Return the line of user code while the loop runs this call; "" while it is suspended."""
        return super().where() if asyncio.current_task(self._home) is self._task else ""

    def _end(self) -> None:
        self._ending = True
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> _T:
        self.thread = threading.get_ident()
        _caller.set(self.name)
        try:
            return await self._make()
        except (KeyboardInterrupt, SystemExit) as error:  # would end the loop too
            raise ordinary_error(error) from None
        except asyncio.CancelledError as error:
            if self._ending:
                raise
            raise ordinary_error(error) from None

    def _done(self, task: "asyncio.Task[_T]") -> None:
        try:
            self.set_result(task.result())
        except BaseException as error:
            self.set_exception(ordinary_error(error))


class _UserLoop:
    """An event loop for user code, in a daemon thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        use_daemon_threads(self.loop)
        self._asked: deque[float] = deque()
        """Times (`time.monotonic`) at which the calls that have not begun were submitted."""
        start_daemon(self._serve, "turnwise-user-code")

    @property
    def blocked(self) -> bool:
        """Whether a call has been waiting to begin for `BLOCKED_SECONDS`."""
        try:
            return time.monotonic() - self._asked[0] >= BLOCKED_SECONDS
        except IndexError:
            return False

    def begin(self, coroutine: "_Coroutine[_T]") -> None:
        """Begin a call in the loop; thread-safe."""

        def begin() -> None:
            self._asked.popleft()
            coroutine.begin()

        self._asked.append(time.monotonic())
        self.loop.call_soon_threadsafe(begin)

    def stop_when_idle(self) -> None:
        """End the loop once it has nothing left to do; call this on the loop."""
        if asyncio.all_tasks(self.loop):
            self.loop.call_later(1.0, self.stop_when_idle)
        else:
            self.loop.stop()

    def _serve(self) -> None:
        importing.runs_user_code = True
        asyncio.set_event_loop(self.loop)
        while True:
            try:
                self.loop.run_forever()
            except BaseException as error:  # SystemExit in a task that user code started
                logger.warning("user code raised %s in a background task", type(error).__name__)
            else:
                self.loop.close()
                return


_user_loop: _UserLoop | None = None
_choosing = threading.Lock()


async def _on_user_loop(name: str, make: Callable[[], Awaitable[_T]]) -> _T:
    """Run a coroutine on the event loop of user code; replace that loop if it is blocked."""
    global _user_loop
    while True:
        with _choosing:
            if _user_loop is not None and _user_loop.blocked:
                coroutines = [call for call in list(_running) if isinstance(call, _Coroutine)]
                logger.warning(
                    "the event loop of user code is blocked and was replaced (%s); an async "
                    "function should make blocking calls with asyncio.to_thread",
                    _described([call for call in coroutines if call.where()]),
                )
                _user_loop.loop.call_soon_threadsafe(_user_loop.stop_when_idle)
                _user_loop = None
            user_loop = _user_loop = _user_loop or _UserLoop()
        coroutine = _Coroutine(name, make, user_loop.loop)
        user_loop.begin(coroutine)
        if await coroutine.ended():
            return coroutine.result()
