"""Small asyncio pieces that the standard library lacks."""

import asyncio
import contextlib
import gc
import queue
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

_T = TypeVar("_T")


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """A `TaskGroup` that raises the first error itself, not a group around it."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


def settle_heap() -> None:
    """Spare the garbage collector what is here to stay (modules, models): each of its full
    collections would stop the event loop for tenths of a second."""
    gc.collect()
    gc.freeze()


_idle_threads: list[queue.SimpleQueue[Callable[[], None]]] = []


async def run_in_thread(function: Callable[[], _T]) -> _T:
    """Run a blocking function in a daemon thread that has nothing else to do.

    One that never returns holds up neither other calls (as a pool's worker would) nor the exit
    of the program. Threads are used again: starting one stops the event loop until it runs.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()

    def settle(setter: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            setter(value)

    def work() -> None:
        setter: Callable[[Any], None]
        try:
            setter, value = future.set_result, function()
        except BaseException as error:
            # A future takes no StopIteration, and SystemExit would end the event loop.
            fine = isinstance(error, Exception) and not isinstance(error, StopIteration)
            setter = future.set_exception
            value = error if fine else RuntimeError(f"raised {error!r}")  # type: ignore[assignment]
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
            loop.call_soon_threadsafe(settle, setter, value)

    try:
        inbox = _idle_threads.pop()
    except IndexError:
        inbox = queue.SimpleQueue()
        threading.Thread(target=_serve, args=[inbox], daemon=True, name="turnwise-call").start()
    inbox.put(work)
    return await future


def _serve(inbox: "queue.SimpleQueue[Callable[[], None]]") -> None:
    while True:
        inbox.get()()
        _idle_threads.append(inbox)
