"""Small asyncio pieces that the standard library lacks: loops, task groups, threads, garbage."""

import asyncio
import contextlib
import contextvars
import errno
import functools
import gc
import os
import queue
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import ParamSpec, TypeVar

from turnwise.core.optional import Foreign
from turnwise.errors import ordinary_error

_T = TypeVar("_T")
_P = ParamSpec("_P")
_Item = TypeVar("_Item")

_THREAD_SECONDS = 10.0  # maximum wait of a call until a thread can be started for it
_RETRY_SECONDS = 0.1


def run(main: Coroutine[object, object, _T]) -> _T:
    """Run a coroutine as `asyncio.run` does, on uvloop if that is installed (it comes with vLLM),
    because uvloop takes less processor time per turn."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)


class _Group(asyncio.TaskGroup):
    def __init__(self) -> None:
        super().__init__()
        self.running = set[asyncio.Task[Foreign]]()

    def create_task(self, *given: Foreign, **options: Foreign) -> asyncio.Task[Foreign]:
        task = super().create_task(*given, **options)
        self.running.add(task)
        task.add_done_callback(self.running.discard)
        return task


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """Open a `TaskGroup` that raises the first error itself instead of an exception group."""
    try:
        async with _Group() as group:
            yield group
            # Wait here, during the block. Before Python 3.13, if a child fails later, while the
            # group waits in its exit, the task stays marked as cancelled (`is_cancelled`).
            while left := [task for task in group.running if not task.done()]:
                await asyncio.wait(left)
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
        raise first from first.__cause__


async def together(works: Iterable[Coroutine[object, object, _T]]) -> list[_T]:
    """Run coroutines concurrently, and return their results in order.

    Unlike `asyncio.gather`, the first error cancels the other coroutines, and is raised once all of
    them have ended.
    """
    async with task_group() as tasks:
        running = [tasks.create_task(work) for work in works]
    return [task.result() for task in running]


async def for_each(
    items: Iterable[_Item], work: Callable[[_Item], Awaitable[object]], at_once: int
) -> None:
    """Work on all items, on at most `at_once` at a time; take each item from `items` only when its
    work begins. The first error cancels the work on other items."""
    left = iter(items)

    async def one_after_another() -> None:
        for item in left:
            try:
                await work(item)
            except asyncio.CancelledError as error:
                if is_cancelled():
                    raise
                raise ordinary_error(error) from None  # a task group would treat it as success

    async with task_group() as tasks:
        for _ in range(at_once):
            tasks.create_task(one_after_another())


def is_cancelled() -> bool:
    """Return whether the running task was cancelled; if not, a CancelledError came from something
    that it awaited."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def freeze_gc() -> None:
    """Exempt all present objects (modules, models) from garbage collection, because each full
    collection of them would stop the event loop for tenths of a second."""
    gc.collect()
    gc.freeze()


async def run_in_thread(
    function: Callable[_P, _T], /, *arguments: _P.args, **keywords: _P.kwargs
) -> _T:
    """Run a blocking function of our own in an idle daemon thread; raise OSError if no thread can
    be started.

    A function that never returns blocks neither other calls (as it would in asyncio's default
    executor, which user code could exhaust) nor the exit of the program. For user code, which may
    not return, see `core.user_code`.
    """
    return await in_thread(Future(), functools.partial(function, *arguments, **keywords))


async def in_thread(
    future: Future[_T],
    function: Callable[[], _T],
    start: Callable[[Callable[[], None]], None] | None = None,
) -> _T:
    """Run a function as `run_in_thread` does, or in the thread in which `start` starts it, and give
    its outcome to a future. If the wait is cancelled, the future is cancelled, too. A function
    whose future is cancelled before the function begins is not run."""
    start = start or start_in_thread
    done = done_event(future)
    ends = time.monotonic() + _THREAD_SECONDS
    try:
        while True:
            try:
                start(functools.partial(fulfil, future, function))
                break
            except OSError:
                if time.monotonic() >= ends:
                    raise
            await asyncio.sleep(_RETRY_SECONDS)
        await done.wait()
    finally:
        future.cancel()  # unless it is done
    return future.result()


def done_event(future: Future[_T]) -> asyncio.Event:
    """Return an event of this event loop that is set once a future of another thread is done.

    `asyncio.wrap_future` would replace a TimeoutError by a new one without the traceback, and a
    CancelledError of `concurrent.futures` by an error that looks like a cancellation of our own
    task.
    """
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def wake(_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing waits
            loop.call_soon_threadsafe(done.set)

    future.add_done_callback(wake)
    return done


async def set_within(event: asyncio.Event, seconds: float | None) -> bool:
    """Wait at most `seconds` for an event, and return whether it is set."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


def fulfil(future: Future[_T], function: Callable[[], _T], *, ordinary: bool = True) -> None:
    """Call a function, and give a future its result or error (if `ordinary`, as `ordinary_error`
    makes it); do nothing if the future is cancelled."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except BaseException as error:
        future.set_exception(ordinary_error(error) if ordinary else error)
    else:
        future.set_result(result)


Inbox = queue.SimpleQueue[Callable[[], bool]]
"""Functions for a thread to call; after a function that returns True, other callers may take the
thread."""
_idle_threads: list[Inbox] = []
"""Inboxes of idle threads, reused because starting a thread blocks the event loop for a moment."""
os.register_at_fork(after_in_child=_idle_threads.clear)  # the threads are the parent's


def start_in_thread(work: Callable[[], None]) -> None:
    """Start a function, which must not raise an error, in an idle daemon thread and a copy of the
    caller's context; raise OSError if no thread can be started."""
    context = contextvars.copy_context()

    def once() -> bool:
        context.run(work)
        return True

    take_thread().put(once)


def take_thread() -> Inbox:
    """Return the inbox of an idle daemon thread, or start one if none is idle; raise OSError if no
    thread can be started."""
    try:
        return _idle_threads.pop()
    except IndexError:
        inbox = Inbox()

    def serve() -> None:
        while True:
            if inbox.get()():
                _idle_threads.append(inbox)

    start_daemon(serve, "turnwise-call")
    return inbox


def call_within(function: Callable[[], _T], seconds: float) -> _T:
    """Call a blocking function of our own outside an event loop; raise TimeoutError when it does
    not return within `seconds`."""
    return begun(function).result(seconds)


def begun(function: Callable[[], _T]) -> Future[_T]:
    """Begin a blocking function of our own in a thread; return its future."""
    answer: Future[_T] = Future()
    start_in_thread(functools.partial(fulfil, answer, function))
    return answer


def start_daemon(target: Callable[[], None], name: str) -> None:
    """Start a daemon thread; raise OSError if the system allows no more threads at the moment."""
    try:
        threading.Thread(target=target, daemon=True, name=name).start()
    except RuntimeError as error:
        raise OSError(
            errno.EAGAIN, "no thread can be started (ulimit -u, or pids.max of a container)"
        ) from error
