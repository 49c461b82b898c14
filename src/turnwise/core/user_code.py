"""Calls of user code (tools, environments, rewards, agents) outside the main event loop.

User code is code that a configuration or a program names. Each call has a name and a deadline. It
never runs on the event loop that calls it: plain functions run in daemon threads, and coroutines on
an event loop in one more daemon thread, so that clients can be shared between them. A call that
ignores its deadline is abandoned: nothing waits for it any more, it counts as stuck until it
returns, and no call begins while `MAX_STUCK` are stuck (`core.calls`).
"""

import asyncio
import contextlib
import functools
import inspect
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Generic, NoReturn, TypeVar

from turnwise.config import Config
from turnwise.core.aio import ThreadSafeFuture, run_in_thread, start_daemon, start_in_thread
from turnwise.core.calls import CALLER, Call, check_stuck, describe_calls, running_calls
from turnwise.core.deadlines import deadline, deadline_error
from turnwise.core.executor import use_daemon_threads
from turnwise.errors import TurnwiseError, describe_error, ordinary_error

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

GRACE_SECONDS = 2.0
"""Time that a cancelled coroutine of user code has for its clean-up."""
BLOCKED_SECONDS = 10.0
"""Time without beginning a call after which a loop of user code is blocked, and is replaced."""
STR_SECONDS = 10.0
"""Deadline of an error's own `__str__`, which is user code."""


async def call_user_code(
    function: Callable[..., object],
    /,
    *arguments: object,
    name: str,
    seconds: float,
    key: str = "",
) -> Any:
    """Call a user's function, plain or async, outside this event loop.

    Args:
        name: The call in messages: "the tool search". Calls are counted by it.
        seconds: Deadline. Cancelling this call ends the wait too.
        key: Configuration key of the deadline, which the error then names.

    Raises:
        DeadlineError: when it does not answer in time.
        TurnwiseError: when too many calls are stuck for another to begin.
        OSError: when no thread can be started for it.
        Exception: whatever the function raised. SystemExit, KeyboardInterrupt, StopIteration and
            a CancelledError that it raised itself become a RuntimeError.
    """
    check_stuck(name)
    async with deadline(seconds, f"{name} did not answer", key):
        if inspect.iscoroutinefunction(function):
            return await _on_user_loop(name, functools.partial(function, *arguments))
        value = await _in_user_thread(name, functools.partial(function, *arguments))
        if inspect.isawaitable(value):
            return await _on_user_loop(name, lambda: value)
        return value


async def run_abandonable(
    make: Callable[[], Awaitable[_T]], *, name: str, seconds: float, key: str = ""
) -> _T:
    """Run a user's coroutine that needs this event loop, in a separate task.

    When cancelled or late, this call waits at most `GRACE_SECONDS` for that task. The event loop's
    default executor becomes one of daemon threads, because the coroutine may use it.

    Raises:
        Exception: as `call_user_code` does.
    """
    check_stuck(name)
    loop = asyncio.get_running_loop()
    use_daemon_threads(loop)
    coroutine = _Coroutine(name, make, loop)
    coroutine.begin()
    async with deadline(seconds, f"{name} did not end", key):
        return await coroutine.outcome()


def call_and_wait(function: Callable[[], _T], *, name: str, seconds: float) -> _T:
    """Call a user's plain function from a thread that may block.

    Raises:
        Exception: as `call_user_code` does.
    """
    check_stuck(name)
    answer: queue.SimpleQueue[Callable[[], _T]] = queue.SimpleQueue()
    call = Call(name)

    def work() -> None:
        try:
            value = call.run(function)
        except BaseException as error:
            failure = ordinary_error(error)
            answer.put(lambda: _raise(failure))
        else:
            answer.put(lambda: value)

    start_in_thread(work)
    try:
        take = answer.get(timeout=seconds)
    except queue.Empty:
        call.abandon()
        raise deadline_error(seconds, f"{name} did not answer") from None
    return take()


async def import_user_code(
    load: Callable[..., _T], *arguments: object, config: Config, what: str
) -> _T:
    """Call a function that imports the user's modules, within `engine.start_timeout`.

    Args:
        what: What is imported, for the error: "the environment".

    Raises:
        DeadlineError: when the imports take longer.
        Exception: whatever `load` raises.
    """
    seconds, key = config.engine.start_timeout, "engine.start_timeout"
    loaded: _T = await call_user_code(
        load, *arguments, name=f"the import of {what}", seconds=seconds, key=key
    )
    return loaded


def _raise(error: Exception) -> NoReturn:
    raise error


async def describe_user_error(error: Exception) -> str:
    """Describe an error as `errors.describe_error` does, outside this event loop.

    The error's `__str__` is user code; if it does not answer, only the type's name is returned.
    """
    if isinstance(error, TurnwiseError):
        return str(error)
    kind = type(error).__name__
    try:
        return str(
            await call_user_code(
                describe_error, error, name=f"the __str__ of {kind}", seconds=STR_SECONDS
            )
        )
    except (TurnwiseError, OSError):
        return kind


async def _in_user_thread(name: str, function: Callable[[], _T]) -> _T:
    call = Call(name)
    try:
        return await run_in_thread(call.run, function)
    except BaseException as error:  # also where it never began, for lack of a thread
        (call.abandon if isinstance(error, asyncio.CancelledError) else call.returned)()
        raise


class _Coroutine(Call, Generic[_T]):
    """A call that is a task on an event loop.

    Args:
        home: Event loop of the task; another loop may wait for its outcome.
    """

    def __init__(
        self, name: str, make: Callable[[], Awaitable[_T]], home: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(name)
        self._make = make
        self._home = home
        self._reply = ThreadSafeFuture[_T]()
        self._task: asyncio.Task[_T] | None = None
        self._cancelled = False
        self._permit = [None]
        """Empty once the call has begun or was withdrawn: a list's `pop` is atomic."""
        self.register()

    def begin(self) -> None:
        """Start the task; called on the home loop."""
        if self._take_permit():
            self._task = self._home.create_task(self._run(), name=self.name)
            self._task.add_done_callback(self._done)

    async def outcome(self) -> _T:
        """Wait for its result.

        Raises:
            _LoopBlockedError: when it has not begun within `BLOCKED_SECONDS`; it is withdrawn.
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
                future.exception()  # or asyncio warns that it was not retrieved

    def where(self) -> str:
        """Return the line of user code while the loop runs this call; "" while it is suspended."""
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

    async def _run(self) -> _T:
        self.thread = threading.get_ident()
        CALLER.set(self.name)
        try:
            return await self._make()
        except (KeyboardInterrupt, SystemExit) as error:  # would end the loop too
            raise ordinary_error(error) from None
        except asyncio.CancelledError as error:
            if self._cancelled:
                raise
            raise ordinary_error(error) from None

    def _done(self, task: "asyncio.Task[_T]") -> None:
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
        use_daemon_threads(self.loop)
        self._asked: deque[float] = deque()
        """Times, on `time.monotonic`, at which calls that have not begun were submitted."""
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
                logger.warning("user code raised %s in a background task", type(error).__name__)
            else:
                self.loop.close()
                return


_user_loop: _UserLoop | None = None
_choosing = threading.Lock()


async def _on_user_loop(name: str, make: Callable[[], Awaitable[_T]]) -> _T:
    while True:
        user_loop = _sound_loop()
        coroutine = _Coroutine(name, make, user_loop.loop)
        user_loop.begin(coroutine)
        try:
            return await coroutine.outcome()
        except _LoopBlockedError:
            continue


def _sound_loop() -> _UserLoop:
    """Return the loop of user code, replaced if it is blocked."""
    global _user_loop
    with _choosing:
        if _user_loop is not None and _user_loop.blocked:
            blocking = [call for call in running_calls() if call.where()]
            logger.warning(
                "the event loop of user code is blocked and was replaced (%s); an async function "
                "should make blocking calls with asyncio.to_thread",
                describe_calls([call for call in blocking if isinstance(call, _Coroutine)]),
            )
            _user_loop.retire()
            _user_loop = None
        if _user_loop is None:
            _user_loop = _UserLoop()
        return _user_loop
