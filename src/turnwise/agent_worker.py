"""Serve an agent over standard input and output, for `rollout.agent: "worker: COMMAND"`.

This file needs only Python 3.9 or later. Import it as `turnwise.agent_worker`; if the agent's
environment does not have turnwise, copy this file next to your agent.

    # my_agent.py
    from agent_worker import serve

    async def run(task, base_url):
        ...
        return {"metrics": {"searches": 3}}

    if __name__ == "__main__":
        serve(run)

In the protocol, each line is one JSON object. Any number of requests can run at once. Examples:

    to the worker                                                   from the worker
    {"id": 1, "method": "run", "task": {...}, "base_url": "..."}    {"id": 1, "result": {...}}
    {"id": 2, "method": "tasks"}                                    {"id": 2, "result": [...]}
    {"id": 1, "method": "cancel"}                                   {"id": 1, "error": "..."}

A `run` request also has the keys `model` and `name`. Its result is null or an object with any of
`reward`, `metrics`, `sessions` and `error`. A `cancel` has no answer. The worker ends when its
input ends. If the trainer sends spans to a collector, a `run` request has the headers of the
trajectory's span (`traceparent`) in the key `trace`. If OpenTelemetry is installed, that span is
the current context during the call.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import json
import os
import sys
import threading
import traceback
from concurrent.futures import Future
from typing import Any, BinaryIO, Callable, Optional  # noqa: UP035  # of Python 3.9

Function = Callable[..., Any]


def serve(run: Function, tasks: Optional[Function] = None) -> None:  # noqa: UP045
    """Answer requests until standard input ends. The agent's prints go to standard error.

    Args:
        run: Function `run(task, base_url)`, async or plain; plain functions run in threads. It
            works on one task and returns a report, or None. An exception is reported as the task's
            error.
        tasks: Function that returns the rows of data, for `data.path`; None if the worker has no
            data.

    Example:
        serve(run, lambda: [{"question": "2 + 2?", "answer": "4"}])
    """
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    # Otherwise prints, and child processes that read standard input, would break the protocol.
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin = open(os.devnull)  # noqa: SIM115  # for the rest of the process
    worker = _Worker(run, tasks, answers)
    for line in requests:
        worker.handle(json.loads(line))
    for listing in worker.listing:  # unfinished runs are abandoned
        listing.result()


class _Worker:
    def __init__(self, run: Function, tasks: Function | None, answers: BinaryIO) -> None:
        self._run = run
        self._tasks = tasks
        self._answers = answers
        self._running: dict[int, Future[None]] = {}
        self.listing: list[Future[None]] = []  # requests for the list of tasks
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def handle(self, request: dict[str, Any]) -> None:
        """Begin a request, or cancel one."""
        number, method = request["id"], request["method"]
        if method == "cancel":
            running = self._running.get(number)
            if running is not None:
                running.cancel()
            return
        self._running[number] = future = asyncio.run_coroutine_threadsafe(
            self._answer(number, method, request), self._loop
        )
        if method == "tasks":
            self.listing.append(future)

    async def _answer(self, number: int, method: str, request: dict[str, Any]) -> None:
        try:
            if method == "run":
                _join(request.get("trace"))
                value = await _call(self._run, request["task"], request["base_url"])
            elif method == "tasks" and self._tasks is not None:
                value = list(await _call(self._tasks))
            else:
                raise ValueError(f"this worker has no {method}")
            self._write({"id": number, "result": value})
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # report it, and continue with other requests
            traceback.print_exc()
            self._write({"id": number, "error": f"{type(error).__name__}: {error}"})
        finally:
            self._running.pop(number, None)

    def _write(self, answer: dict[str, Any]) -> None:
        self._answers.write(json.dumps(answer).encode() + b"\n")
        self._answers.flush()


def _join(trace: Optional[dict[str, str]]) -> None:  # noqa: UP045
    """Make the trajectory's span the current context of this asyncio task."""
    if trace:
        try:
            from opentelemetry import context, propagate
        except ImportError:
            return
        context.attach(propagate.extract(trace))


async def _call(function: Function, *arguments: Any) -> Any:
    if inspect.iscoroutinefunction(function):
        return await function(*arguments)
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    future: Future[Any] = Future()

    def work() -> None:
        try:
            future.set_result(function(*arguments))
        except BaseException as error:
            future.set_exception(error)
        loop.call_soon_threadsafe(done.set)

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=[work], daemon=True).start()
    await done.wait()
    value = future.result()
    return await value if inspect.isawaitable(value) else value
