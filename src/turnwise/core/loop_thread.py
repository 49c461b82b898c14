"""An event loop in its own thread, for synchronous callers.

One async context manager is open in it from `start` to `stop`; if the context manager fails early,
all current and later callers get its error. The thread is a daemon, and every wait has a deadline
even when the event loop is stuck, so that no user code can block the program's exit. (anyio's
blocking portal waits for a stuck loop without a deadline, and keeps calls running after its context
manager has failed.)
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, Generic, Self, TypeVar

from turnwise.core.deadlines import deadline, deadline_error
from turnwise.core.interrupt import SAVE_SECONDS, Ending
from turnwise.core.user_code import unreturned_calls, use_daemon_threads
from turnwise.errors import DeadlineError, InputError, TurnwiseError

logger = logging.getLogger(__name__)

_Opened = TypeVar("_Opened")
_Result = TypeVar("_Result")
Work = Callable[[], Coroutine[Any, Any, _Result]]
_GRACE_SECONDS = 10.0
"""Time after a coroutine's own deadline until the event loop counts as stuck."""
_STOP_SECONDS = 60.0  # for the context manager to close at the end of a program's `with` block
_LEFT_SECONDS = 5.0
"""Time for the tasks that are left in the event loop to end once the context manager has closed."""
_LOOK_SECONDS = 0.05  # longest pause between two looks at whether the context manager has closed


class EventLoopThread(Generic[_Opened]):
    """An async context manager that is open in an event loop on a separate thread. Messages of
    errors refer to the manager by its `name`, such as "the pipeline"."""

    def __init__(
        self, context: Callable[[], AbstractAsyncContextManager[_Opened]], name: str
    ) -> None:
        self._context = context
        self._name = name
        self._began = threading.Event()
        self._opened: Future[_Opened] = Future()
        self._ended: Future[None] = Future()
        self._calls: set[asyncio.Task[object]] = set()
        self._leaving = False
        self.is_open = False
        """Whether the thread has been started, and has not been left."""
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._held()), daemon=True, name="turnwise-loop"
        )

    def start(self, seconds: float) -> _Opened:
        """Open the context manager within `seconds`, and return its value, or raise its error."""
        self._thread.start()
        self._began.wait()
        opened = self._result(self._opened, seconds, f"{self._name} to start")
        self.is_open = True
        return opened

    def __enter__(self) -> Self:
        """Begin a `with` block, in which `start` is called; its end calls `leave`."""
        if self._thread.ident is not None:
            raise InputError(f"{self._name} can run only once: create another")
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.leave(_STOP_SECONDS, error)

    @property
    def opened(self) -> _Opened:
        """The context manager's value, until the thread is left; InputError before and after."""
        if not self.is_open:
            raise InputError(f"{self._name} does not run: use it inside its with block")
        return self._opened.result()

    def submit(self, work: Work[_Result]) -> "Future[_Result]":
        """Start the coroutine that `work` makes, and return its future."""
        _ = self.opened
        self._raise_if_ended()

        async def tracked() -> _Result:
            task = asyncio.current_task()
            assert task is not None
            if self._leaving:
                raise asyncio.CancelledError
            self._calls.add(task)
            try:
                return await work()
            finally:
                self._calls.discard(task)

        coroutine = tracked()
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:  # the loop has closed since
            coroutine.close()
            self._ended.result()
            raise

    def call(self, work: Work[_Result], seconds: float, who: str) -> _Result:
        """Run the coroutine that `work` makes within `seconds`, and return its result; errors call
        it `who`. The coroutine is cancelled if the wait ends early. If a signal ends the wait, a
        run may first save its work (`Ending`)."""
        future: Future[_Result] | None = None

        async def within() -> _Result:
            async with deadline(seconds, f"waited for {who}: no answer"):
                return await work()

        try:  # a signal may come at any time
            future = self.submit(within)
            return self._result(future, seconds + _GRACE_SECONDS, f"the event loop of {self._name}")
        except BaseException as error:
            # A signal's handler raised; a second signal raises again.
            over = isinstance(error, Exception) if future is None else future.done()
            if not over and (ending := Ending.begin()) is not None:
                ending.wait(SAVE_SECONDS)
            raise
        finally:
            if future is not None:
                future.cancel()

    def stop(self, seconds: float) -> None:
        """Close the context manager within `seconds`. Raise the error that ended it earlier, or an
        error of closing it; raise Ctrl-C only after it has closed."""
        if self._thread.ident is None or not self._began.wait(_LEFT_SECONDS):
            return  # no thread, or no event loop, could be started
        with suppress(RuntimeError):  # the loop has closed already
            self._loop.call_soon_threadsafe(lambda: self._task.cancelling() or self._task.cancel())
        interrupted: KeyboardInterrupt | None = None
        for over, limit in (
            (self._ended.done, seconds),
            (lambda: not self._thread.is_alive(), _LEFT_SECONDS),
        ):
            end = time.monotonic() + limit
            while not over() and (left := end - time.monotonic()) > 0:
                try:
                    self._thread.join(min(left, _LOOK_SECONDS))
                except KeyboardInterrupt as error:
                    interrupted = error
        if interrupted is not None:
            raise interrupted
        if not self._ended.done():
            raise deadline_error(seconds, f"{self._name} did not end")
        if self._thread.is_alive():
            why = unreturned_calls() or "its event loop still runs"
            logger.warning("%s has ended, but %s", self._name, why)
        self._ended.result()

    def leave(self, seconds: float, error: BaseException | None) -> None:
        """Stop at the end of a `with` block. A failure to stop does not hide the block's `error`.
        If the end is late, only log that, because the block's results are there."""
        self.is_open = False
        try:
            self.stop(seconds)
        except TurnwiseError as failure:
            if error is None and not isinstance(failure, DeadlineError):
                raise
            if failure is not error:
                logger.warning("while %s ended: %s", self._name, failure)

    async def _held(self) -> None:
        """Hold the context manager open, and record its end in `_ended`: the thread may outlive it,
        because tasks that user code has left in the loop may never end."""
        task = asyncio.current_task()
        assert task is not None
        self._task, self._loop = task, asyncio.get_running_loop()
        use_daemon_threads(self._loop)
        self._began.set()
        try:
            async with self._context() as opened:
                self._opened.set_result(opened)
                try:
                    await asyncio.Event().wait()  # until it is cancelled, by stop or from inside
                finally:
                    self._leaving = True
                    for call in self._calls:  # callers get the cause, not its consequences
                        call.cancel()
        except asyncio.CancelledError:
            self._ended.set_result(None)
        except BaseException as error:
            self._ended.set_exception(error)

    def _result(self, future: "Future[_Result]", seconds: float, who: str) -> _Result:
        end = time.monotonic() + seconds
        either: list[Future[Any]] = [future, self._ended]
        wait(either, seconds, FIRST_COMPLETED)
        if future.done() and not future.cancelled():
            return future.result()
        if future.cancelled():
            wait([self._ended], max(0.0, end - time.monotonic()))
        self._raise_if_ended()
        if future.cancelled():
            raise TurnwiseError(f"{who} was cancelled")
        raise deadline_error(seconds, f"waited for {who}: no answer")

    def _raise_if_ended(self) -> None:
        if self._ended.done():
            self._ended.result()
            raise TurnwiseError(f"{self._name} has ended")
