"""An event loop in a thread of its own, for synchronous callers.

One async context manager is open in it from `start` to `stop`, entered and left by one task.
Callers hand in coroutine functions and wait for them with a deadline. Where the context manager
ends by itself, because something in it failed, that error is what callers get, then and later.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, Generic, TypeVar

from turnwise.errors import DeadlineError, TurnwiseError

logger = logging.getLogger(__name__)

_Opened = TypeVar("_Opened")
_Result = TypeVar("_Result")
Work = Callable[[], Coroutine[Any, Any, _Result]]
_GRACE_SECONDS = 10.0
"""How much later than a coroutine's own deadline the loop itself counts as stuck."""


class LoopThread(Generic[_Opened]):
    """See the module's docstring.

    Args:
        context: Makes the context manager.
        name: What it is, for errors: "the pipeline".
    """

    def __init__(
        self, context: Callable[[], AbstractAsyncContextManager[_Opened]], name: str
    ) -> None:
        self._context = context
        self._name = name
        self._began = threading.Event()
        self._opened: Future[_Opened] = Future()
        self._ended: Future[None] = Future()
        self._calls: set[asyncio.Task[Any]] = set()
        self._leaving = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="turnwise-loop")

    def start(self, seconds: float) -> _Opened:
        """Open the context manager; returns what it gives.

        Raises:
            DeadlineError: when that takes longer.
            BaseException: what it raised; nothing is left open.
        """
        self._thread.start()
        self._began.wait()
        return self._result(self._opened, seconds, f"{self._name} to start")

    def submit(self, work: Work[_Result]) -> "Future[_Result]":
        """Begin what `work` makes, in the loop."""
        self._raise_if_ended()
        coroutine = self._tracked(work)
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:  # the loop has closed since
            coroutine.close()
            self._ended.result()
            raise

    def call(self, work: Work[_Result], seconds: float, who: str) -> _Result:
        """Run what `work` makes in the loop and wait for it; whatever ends the wait cancels it.

        Raises:
            DeadlineError: naming `who` was waited for, and to do what.
        """
        future = self.submit(lambda: _within(work, seconds, who))
        try:
            return self._result(future, seconds + _GRACE_SECONDS, f"the event loop of {self._name}")
        finally:
            future.cancel()

    def stop(self, seconds: float) -> None:
        """Close the context manager. Ctrl-C meanwhile ends nothing sooner.

        Raises:
            DeadlineError: when that takes longer.
            BaseException: what ended it earlier, or what closing it raised.
        """
        with suppress(RuntimeError):  # the loop has closed already
            self._loop.call_soon_threadsafe(self._cancel)
        interrupted: KeyboardInterrupt | None = None
        end = time.monotonic() + seconds
        while self._thread.is_alive() and (left := end - time.monotonic()) > 0:
            try:
                self._thread.join(left)
            except KeyboardInterrupt as error:
                interrupted = error
        if interrupted is not None:
            raise interrupted
        if self._thread.is_alive():
            raise DeadlineError(f"{self._name} did not end within {seconds:g} s")
        self._ended.result()

    def leave(self, seconds: float, error: BaseException | None) -> None:
        """Stop at the end of a `with` block, which `error` ended; a failure to stop never hides it.

        Raises:
            TurnwiseError: as `stop` does, where there is no `error`.
        """
        try:
            self.stop(seconds)
        except TurnwiseError as failure:
            if error is None:
                raise
            if failure is not error:
                logger.warning("while %s ended: %s", self._name, failure)

    def _run(self) -> None:
        try:
            asyncio.run(self._hold())
        except asyncio.CancelledError:
            self._ended.set_result(None)
        except BaseException as error:
            self._ended.set_exception(error)

    async def _hold(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._loop = task, asyncio.get_running_loop()
        self._began.set()
        async with self._context() as opened:
            self._opened.set_result(opened)
            try:
                await asyncio.Event().wait()  # until it is cancelled, by stop or from inside
            finally:
                self._leaving = True
                for call in self._calls:  # the cause is told, not what follows from it
                    call.cancel()

    def _cancel(self) -> None:
        if not self._task.cancelling():
            self._task.cancel()

    async def _tracked(self, work: Work[_Result]) -> _Result:
        task = asyncio.current_task()
        assert task is not None
        if self._leaving:
            raise asyncio.CancelledError
        self._calls.add(task)
        try:
            return await work()
        finally:
            self._calls.discard(task)

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
        raise DeadlineError(f"waited {seconds:g} s in vain for {who}")

    def _raise_if_ended(self) -> None:
        if self._ended.done():
            self._ended.result()
            raise TurnwiseError(f"{self._name} has ended")


async def _within(work: Work[_Result], seconds: float, who: str) -> _Result:
    deadline = asyncio.timeout(seconds)
    try:
        async with deadline:
            return await work()
    except TimeoutError:
        if not deadline.expired():
            raise
        raise DeadlineError(f"waited {seconds:g} s in vain for {who}") from None
