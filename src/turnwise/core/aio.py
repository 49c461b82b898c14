"""Small asyncio pieces that the standard library lacks: loops, task groups, threads, garbage.

Deadlines are in `core.deadlines`, calls of user code in `core.user_code`.
"""

import asyncio
import contextlib
import contextvars
import errno
import functools
import gc
import queue
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import ParamSpec, TypeVar

from turnwise.errors import ordinary_error

_T = TypeVar("_T")
_P = ParamSpec("_P")
_Item = TypeVar("_Item")

_THREAD_SECONDS = 10.0  # time for which a call waits until a thread can be started for it
_RETRY_SECONDS = 0.1


def run(main: Coroutine[object, object, _T]) -> _T:
    """Run a coroutine as `asyncio.run` does, on uvloop if it is installed (vLLM brings it).

    Its event loop takes less processor time for a turn.
    """
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """Open a `TaskGroup` that raises the first error itself, not a group around it."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
        raise first from first.__cause__


async def together(works: Iterable[Coroutine[object, object, _T]]) -> list[_T]:
    """Run coroutines concurrently, and return their results in order.

    Unlike `asyncio.gather`, the first error cancels the others, and is raised when all have ended.
    """
    async with task_group() as tasks:
        running = [tasks.create_task(work) for work in works]
    return [task.result() for task in running]


async def for_each(
    items: Iterable[_Item], work: Callable[[_Item], Awaitable[object]], at_once: int
) -> None:
    """Work on all items, on at most `at_once` at a time; each is asked for when its turn comes. The
    first error cancels the work on others."""
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
    """Return whether the running task was cancelled.

    If not, a CancelledError came from something that the task awaited.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def freeze_gc() -> None:
    """Exempt all present objects (modules, models) from garbage collection.

    Otherwise each full collection would stop the event loop for tenths of a second.
    """
    gc.collect()
    gc.freeze()


def settle(future: "asyncio.Future[_T]", outcome: Callable[[], _T]) -> None:
    """Give a future the result of `outcome`, or its error as `ordinary_error`, in any thread; does
    nothing once the future is done, or its event loop closed."""
    try:
        finish = functools.partial(future.set_result, outcome())
    except BaseException as error:
        finish = functools.partial(future.set_exception, ordinary_error(error))

    def finish_once() -> None:
        if not future.done():
            finish()

    with contextlib.suppress(RuntimeError):  # the loop is closed: nothing waits
        future.get_loop().call_soon_threadsafe(finish_once)


async def run_in_thread(
    function: Callable[_P, _T], /, *arguments: _P.args, **keywords: _P.kwargs
) -> _T:
    """Run a blocking function of our own in an idle daemon thread; OSError if none can be started.

    A function that never returns blocks neither other calls (as it would in asyncio's default
    executor, which user code may use up) nor the exit of the program. For user code, which may not
    return, see `core.user_code`.
    """
    reply: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
    work = functools.partial(settle, reply, functools.partial(function, *arguments, **keywords))
    ends = time.monotonic() + _THREAD_SECONDS
    while True:
        try:
            start_in_thread(work)
            break
        except OSError:
            if time.monotonic() >= ends:
                raise
        await asyncio.sleep(_RETRY_SECONDS)
    return await reply


_idle_threads: list[queue.SimpleQueue[Callable[[], None]]] = []
"""Inboxes of idle threads, reused because starting a thread blocks the event loop for a moment."""


def start_in_thread(work: Callable[[], None]) -> None:
    """Start a function that raises nothing in an idle daemon thread, and return at once.

    It runs in a copy of the caller's context. Raises OSError when no thread can be started.
    """
    context = contextvars.copy_context()
    try:
        inbox = _idle_threads.pop()
    except IndexError:
        inbox = queue.SimpleQueue()

        def serve() -> None:
            while True:
                inbox.get()()
                _idle_threads.append(inbox)

        start_daemon(serve, "turnwise-call")
    inbox.put(lambda: context.run(work))


def call_within(function: Callable[[], _T], seconds: float) -> _T:
    """Call a blocking function of our own outside an event loop; TimeoutError when it does not
    return within `seconds`."""
    answer: Future[_T] = Future()

    def work() -> None:
        try:
            answer.set_result(function())
        except BaseException as error:
            answer.set_exception(error)

    start_in_thread(work)
    return answer.result(seconds)


def start_daemon(target: Callable[[], None], name: str) -> None:
    """Start a daemon thread; OSError when the system allows no more, which may be so for a
    moment."""
    try:
        threading.Thread(target=target, daemon=True, name=name).start()
    except RuntimeError as error:
        raise OSError(
            errno.EAGAIN, "no thread can be started (ulimit -u, or pids.max of a container)"
        ) from error
