"""Small asyncio pieces that the standard library lacks, and the place where user code runs.

User code is what a configuration names: tools, environments, rewards, agents. It never runs on the
event loop that asks for it: plain functions run in daemon threads, coroutines on an event loop of
their own in one more daemon thread, so that clients which they share work. A call that ignores its
deadline is abandoned: nobody waits for it any more, it is counted until it returns, and while there
are `MAX_STUCK` of them no other begins.
"""

import asyncio
import contextlib
import gc
import inspect
import logging
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

from turnwise.errors import (
    DeadlineError,
    TurnwiseError,
    describe_error,
    in_user_code,
    ordinary_error,
    short_path,
)

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

MAX_STUCK = 256
"""Abandoned calls that have not returned; with as many, no call of user code begins."""
GRACE_SECONDS = 2.0
"""A cancelled coroutine of user code has this long for its own clean-up."""
BLOCKED_SECONDS = 10.0
"""A loop of user code that begins nothing for this long is blocked; another takes its place."""
STR_SECONDS = 1.0
"""Deadline of an error's own `__str__`, which is user code."""
_NAMED = 4
"""Names of calls, at most, in one line."""


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """A `TaskGroup` that raises the first error itself, not a group around it."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
        raise first from first.__cause__


def is_cancelled() -> bool:
    """Whether somebody cancelled the running task: a CancelledError without that is an error of
    what the task waited for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def settle_heap() -> None:
    """Spare the garbage collector what is here to stay (modules, models): each of its full
    collections would stop the event loop for tenths of a second."""
    gc.collect()
    gc.freeze()


class _Reply(Generic[_T]):
    """A future of the running event loop that any thread may settle, once."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[_T] = self._loop.create_future()

    def succeed(self, value: _T) -> None:
        self._settle(self.future.set_result, value)

    def fail(self, error: BaseException) -> None:
        self._settle(self.future.set_exception, ordinary_error(error))

    def _settle(self, setter: Callable[[Any], None], value: Any) -> None:
        def settle() -> None:
            if not self.future.done():
                setter(value)

        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
            self._loop.call_soon_threadsafe(settle)


_idle_threads: list[queue.SimpleQueue[Callable[[], None]]] = []


async def run_in_thread(function: Callable[[], _T]) -> _T:
    """Run a blocking function in a daemon thread that has nothing else to do.

    One that never returns holds up neither other calls (as a pool's worker would) nor the exit
    of the program. Threads are used again: starting one stops the event loop until it runs.
    """
    reply = _Reply[_T]()

    def work() -> None:
        try:
            value = function()
        except BaseException as error:
            reply.fail(error)
        else:
            reply.succeed(value)

    _start_in_thread(work)
    return await reply.future


def _start_in_thread(work: Callable[[], None]) -> None:
    try:
        inbox = _idle_threads.pop()
    except IndexError:
        inbox = queue.SimpleQueue()
        threading.Thread(target=_serve, args=[inbox], daemon=True, name="turnwise-call").start()
    inbox.put(work)


def _serve(inbox: "queue.SimpleQueue[Callable[[], None]]") -> None:
    while True:
        inbox.get()()
        _idle_threads.append(inbox)


async def call_user_code(
    function: Callable[..., Any], /, *arguments: Any, name: str, seconds: float | None = None
) -> Any:
    """Call a function of the user's, plain or async, away from this event loop.

    Args:
        name: Of what is called, for people: "the tool search". Calls are counted by it.
        seconds: Deadline; None leaves it to the caller, whose cancellation ends the wait too.

    Raises:
        DeadlineError: when it does not answer in time.
        TurnwiseError: when too many calls are stuck for another to begin.
        Exception: what the function raised. SystemExit, KeyboardInterrupt, StopIteration and a
            CancelledError of its own come as RuntimeError.
    """
    if len(_stuck) >= MAX_STUCK:
        raise TurnwiseError(f"{name} is not called, because {stuck_calls()}")
    try:
        async with asyncio.timeout(seconds) as deadline:
            if inspect.iscoroutinefunction(function):
                return await _on_user_loop(name, lambda: function(*arguments))
            value = await _in_user_thread(name, lambda: function(*arguments))
            if inspect.isawaitable(value):
                return await _on_user_loop(name, lambda: value)
            return value
    except TimeoutError:
        if not deadline.expired():
            raise
        raise DeadlineError(f"{name} did not answer within {seconds:g} s") from None


async def run_abandonable(make: Callable[[], Awaitable[_T]], name: str) -> _T:
    """Run a coroutine of the user's that needs this event loop, in a task of its own.

    Once this call is cancelled it waits `GRACE_SECONDS` for that task, whatever the task does.

    Raises:
        Exception: as `call_user_code` does.
    """
    coroutine = _Coroutine(name, make, asyncio.get_running_loop())
    coroutine.begin()
    value: _T = await coroutine.outcome()
    return value


def call_and_wait(function: Callable[[], _T], *, name: str, seconds: float) -> _T:
    """Call a plain function of the user's from a thread that may wait.

    Raises:
        Exception: as `call_user_code` does.
    """
    answer: queue.SimpleQueue[Callable[[], _T]] = queue.SimpleQueue()
    call = _Call(name)

    def work() -> None:
        try:
            value = call.run(function)
        except BaseException as error:
            failure = ordinary_error(error)
            answer.put(lambda: _raise(failure))
        else:
            answer.put(lambda: value)

    _start_in_thread(work)
    try:
        take = answer.get(timeout=seconds)
    except queue.Empty:
        call.abandon()
        raise DeadlineError(f"{name} did not answer within {seconds:g} s") from None
    return take()


def _raise(error: Exception) -> Any:
    raise error


async def describe_user_error(error: Exception) -> str:
    """`errors.describe_error`, away from this event loop: the error's `__str__` is user code."""
    if isinstance(error, TurnwiseError):
        return str(error)
    kind = type(error).__name__
    try:
        return str(
            await call_user_code(
                describe_error, error, name=f"the __str__ of {kind}", seconds=STR_SECONDS
            )
        )
    except TurnwiseError:
        return kind


def stuck_calls() -> str:
    """The abandoned calls that have not returned, in one clause; "" when there are none."""
    return _describe(list(_stuck))


def unreturned_calls() -> str:
    """All calls of user code that have not returned, in one clause; "" when there are none."""
    return _describe(list(_running))


def _describe(calls: "list[_Call]") -> str:
    if not calls:
        return ""
    names: dict[str, list[_Call]] = {}
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


class _Call:
    """One call of user code, registered until it returns."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.thread: int | None = None
        """Identifier of the thread that runs it, once it has begun."""
        _running[self] = None

    def run(self, function: Callable[[], _T]) -> _T:
        """Call the function in this thread."""
        self.thread = threading.get_ident()
        try:
            return function()
        finally:
            self.returned()

    def returned(self) -> None:
        _running.pop(self, None)
        _stuck.pop(self, None)

    def abandon(self) -> None:
        _stuck[self] = None
        if self not in _running:  # it has returned in this moment
            _stuck.pop(self, None)

    def where(self) -> str:
        """The line of the user's code that it stands at, as `at file:line`, where that shows."""
        frame = None if self.thread is None else sys._current_frames().get(self.thread)
        while frame is not None and not in_user_code(frame.f_code.co_filename):
            frame = frame.f_back
        return (
            "" if frame is None else f"at {short_path(frame.f_code.co_filename)}:{frame.f_lineno}"
        )


_running: dict[_Call, None] = {}
_stuck: dict[_Call, None] = {}


async def _in_user_thread(name: str, function: Callable[[], Any]) -> Any:
    call = _Call(name)
    try:
        return await run_in_thread(lambda: call.run(function))
    except asyncio.CancelledError:
        call.abandon()
        raise


class _Coroutine(_Call):
    """A call that is a task on an event loop.

    Args:
        home: The loop that it runs on; another loop may wait for its outcome.
    """

    def __init__(
        self, name: str, make: Callable[[], Awaitable[Any]], home: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(name)
        self._make = make
        self._home = home
        self._reply = _Reply[Any]()
        self._task: asyncio.Task[Any] | None = None
        self._cancelled = False
        self._permit = [None]
        """Empty once it has begun or was withdrawn: a list's `pop` is atomic."""

    def begin(self) -> None:
        """Start the task; called on the home loop."""
        if self._take_permit():
            self._task = self._home.create_task(self._run(), name=self.name)
            self._task.add_done_callback(self._done)

    async def outcome(self) -> Any:
        """Wait for its result.

        Raises:
            _LoopBlockedError: when it has not begun within `BLOCKED_SECONDS`; it never will.
        """
        future = self._reply.future
        try:
            while not (await asyncio.wait([future], timeout=BLOCKED_SECONDS))[0]:
                if self._take_permit():
                    self.returned()
                    raise _LoopBlockedError
        except asyncio.CancelledError:
            if self._take_permit():
                self.returned()
            else:
                await self._end()
            raise
        return future.result()

    async def _end(self) -> None:
        future = self._reply.future
        with contextlib.suppress(RuntimeError):  # its loop has closed
            self._home.call_soon_threadsafe(self._cancel)
        try:
            await asyncio.wait([future], timeout=GRACE_SECONDS)
        finally:
            if not future.done():
                self.abandon()
                future.cancel()
            elif not future.cancelled():
                future.exception()  # else asyncio says that nobody asked for it

    def where(self) -> str:
        """Only while its loop runs it: elsewhere it waits for something else to happen."""
        return super().where() if asyncio.current_task(self._home) is self._task else ""

    def _take_permit(self) -> bool:
        try:
            self._permit.pop()
        except IndexError:
            return False
        return True

    def _cancel(self) -> None:
        self._cancelled = True
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> Any:
        self.thread = threading.get_ident()
        try:
            return await self._make()
        except (KeyboardInterrupt, SystemExit) as error:  # would end the loop too
            raise ordinary_error(error) from None
        except asyncio.CancelledError as error:
            if self._cancelled:
                raise
            raise ordinary_error(error) from None

    def _done(self, task: asyncio.Task[Any]) -> None:
        self.returned()
        if task.cancelled():
            self._reply.fail(asyncio.CancelledError())
        elif error := task.exception():
            self._reply.fail(error)
        else:
            self._reply.succeed(task.result())


class _LoopBlockedError(Exception):
    """A call did not begin, because the loop of user code is blocked."""


class _UserLoop:
    """An event loop for user code, in a daemon thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._asked: deque[float] = deque()
        """When each call that has not begun was asked for, on `time.monotonic`'s clock."""
        threading.Thread(target=self._serve, daemon=True, name="turnwise-user-code").start()

    @property
    def blocked(self) -> bool:
        try:
            return time.monotonic() - self._asked[0] >= BLOCKED_SECONDS
        except IndexError:
            return False

    def begin(self, coroutine: _Coroutine) -> None:
        """Have a call begin; any thread may ask."""

        def begin() -> None:
            self._asked.popleft()
            coroutine.begin()

        self._asked.append(time.monotonic())
        self.loop.call_soon_threadsafe(begin)

    def retire(self) -> None:
        """End the loop once it is no longer blocked and has nothing left to do."""
        self.loop.call_soon_threadsafe(self._stop_when_idle)

    def _stop_when_idle(self) -> None:
        if asyncio.all_tasks(self.loop):
            self.loop.call_later(1.0, self._stop_when_idle)
        else:
            self.loop.stop()

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        while True:
            try:
                self.loop.run_forever()
            except BaseException as error:  # SystemExit in a task that user code started
                logger.warning("user code raised %s in a task of its own", type(error).__name__)
            else:
                self.loop.close()
                return


_user_loop: _UserLoop | None = None
_choosing = threading.Lock()


async def _on_user_loop(name: str, make: Callable[[], Awaitable[Any]]) -> Any:
    while True:
        user_loop = _sound_loop()
        coroutine = _Coroutine(name, make, user_loop.loop)
        user_loop.begin(coroutine)
        try:
            return await coroutine.outcome()
        except _LoopBlockedError:
            continue


def _sound_loop() -> _UserLoop:
    """The loop of user code; another one if it is blocked."""
    global _user_loop
    with _choosing:
        if _user_loop is not None and _user_loop.blocked:
            blocking = [call for call in list(_running) if call.where()]
            logger.warning(
                "the event loop of user code is blocked and another takes its place (%s); an async "
                "function should run what blocks with asyncio.to_thread",
                _describe([call for call in blocking if isinstance(call, _Coroutine)]),
            )
            _user_loop.retire()
            _user_loop = None
        if _user_loop is None:
            _user_loop = _UserLoop()
        return _user_loop
