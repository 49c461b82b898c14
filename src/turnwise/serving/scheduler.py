"""Runs each turn on one worker of a fleet, and continues it on another if that worker fails.

The scheduler is a `Generator` like a single engine. `routing` chooses the worker of a turn, and
`quarantine` handles turns that crash their workers. A turn whose worker died or hung continues on
another from the tokens sampled so far, or restarts if its sampling parameters do not allow that
(`continuation`).
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

from turnwise.config import ServingConfig
from turnwise.core.deadlines import deadline
from turnwise.engine.protocol import Chunk, Engine, Request
from turnwise.errors import DeadlineError, EngineError
from turnwise.serving.channel import ChannelError
from turnwise.serving.continuation import remaining, unfinished
from turnwise.serving.quarantine import Quarantine
from turnwise.serving.routing import TOKENS_PER_REQUEST, Router
from turnwise.serving.worker_state import Follower, Supervisor, Turn, Worker

logger = logging.getLogger(__name__)

_MAX_FAILURES = 2
"""Failures on live workers after which a turn fails, because the request must be the cause."""


class _MustRestart(Exception):
    """A turn cannot be continued: the chunks yielded so far are invalid."""


class Scheduler:
    """Routes turns to workers.

    Args:
        serving: Limits of stickiness and continuations.
        turn_timeout: Seconds that a turn waits while no worker is usable.

    Example:
        scheduler = Scheduler(ServingConfig(), turn_timeout=60.0)
        scheduler.add("worker-0", engine)
        completion = await generate(scheduler, Request([1, 2, 3], config.sampling, "request-0"))
    """

    def __init__(self, serving: ServingConfig, turn_timeout: float) -> None:
        self.events: Counter[str] = Counter()
        """Counts of routing decisions and failures.

        Choices for sessions that have a worker: sticky (unchanged), moved_overload, moved_slow,
        moved_gone.
        Interruptions: aborted_by_update. After a failure: continued (from the sampled tokens),
        restarted (from the prompt, discarding tokens), moved (no token was sampled yet),
        quarantined.
        """
        self._serving = serving
        self._turn_timeout = turn_timeout
        self._router = Router(serving, self.events)
        self._quarantine = Quarantine(turn_timeout)
        self._changed = asyncio.Event()
        """Set when a worker is usable again, or the scheduler is closed."""
        self._closed = ""
        """Reason why no worker will become usable; "" while one may."""
        self._followers: list[Follower] = []

    @property
    def workers(self) -> dict[str, Worker]:
        """All workers by name, including failed ones that are not removed yet."""
        return self._router.workers

    def add(self, name: str, engine: Engine, supervisor: Supervisor | None = None) -> Worker:
        """Add a worker; one of the same name is replaced.

        Args:
            supervisor: Checks after a failed request whether the worker is alive; None means that
                each failure counts as its death.
        """
        if name in self.workers:
            self.remove(name)
        now = asyncio.get_running_loop().time()
        worker = self.workers[name] = Worker(name, engine, supervisor, _changed=now)
        self._router.rebuild()
        self._closed = ""
        self._changed.set()
        for follower in self._followers:
            follower.add(name, engine)
        return worker

    def lead(self, follower: Follower) -> None:
        """Report all workers to a follower, and every change from now on."""
        for worker in self.workers.values():
            follower.add(worker.name, worker.engine)
        self._followers.append(follower)

    def leave(self, follower: Follower) -> None:
        """Report nothing more to a follower."""
        self._followers.remove(follower)

    def prefer(self, names: Iterable[str]) -> None:
        """Give new sessions to these workers only, while one of them is usable."""
        self._router.preferred = frozenset(names)
        self._router.rebuild()

    def note_elsewhere(self, loads: Mapping[str, float]) -> None:
        """Add the loads of workers by other processes, by name, in place of the last ones."""
        now = asyncio.get_running_loop().time()
        for worker in self.workers.values():
            change = loads.get(worker.name, 0.0) - worker.elsewhere
            if change:
                worker.elsewhere += change
                self._router.add_load(worker, change, now)

    def restore(self, name: str) -> None:
        """Use a worker again: it is alive, so only the request failed."""
        for follower in self._followers:
            follower.restore(name)
        if (worker := self.workers.get(name)) is not None and not worker.usable:
            worker.usable = True
            worker.settle(lost=False)
            self._router.rebuild()
            self._changed.set()

    def suspend(self, name: str) -> None:
        """Give a worker no turns until `restore`: it is alive, but cannot be reached from here.

        Turns that failed on it continue on others.
        """
        for follower in self._followers:  # which may reach it, and wait for an answer
            follower.restore(name)
        if (worker := self.workers.get(name)) is not None:
            if worker.usable:
                worker.usable = False
                self._router.rebuild()
            worker.settle(lost=False)

    def remove(self, name: str) -> Worker:
        """Remove a worker; turns that are running on it continue until they fail."""
        worker = self.workers.pop(name)
        if worker.lost is None:
            worker.note_suspects()
        worker.settle(lost=True)
        self._router.rebuild()
        for follower in self._followers:
            follower.remove(name)
        return worker

    def close(self, why: str) -> None:
        """Fail turns that wait for a worker, until a worker is added."""
        self._closed = why
        self._changed.set()
        for follower in self._followers:
            follower.close(why)

    async def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """Sample one completion; see `Generator.stream`.

        No chunk of a whole request that may have to restart is returned before its end.
        """
        turn = Turn(request, 1 + len(request.prompt) / TOKENS_PER_REQUEST)
        self.events["turns"] += 1
        self._quarantine.check(turn)
        held = request.whole and remaining(request, 1) is None
        while True:
            chunks: list[Chunk] = []
            try:
                async with aclosing(self._run(turn)) as pieces:
                    async for chunk in pieces:
                        if held:
                            chunks.append(chunk)
                        else:
                            yield chunk
            except _MustRestart:
                if held:
                    continue
                raise EngineError(
                    f"the worker of {request.id} failed, and a streamed answer with a seed, "
                    "stop strings, penalties or a grammar cannot be continued elsewhere"
                ) from None
            for chunk in chunks:
                yield chunk
            return

    async def _run(self, turn: Turn) -> AsyncGenerator[Chunk, None]:
        """Yield the chunks of a turn, from one worker or several.

        Raises:
            _MustRestart: when the turn has to restart, at the next call.
            EngineError, DeadlineError: when it failed too often, or no worker was usable in time.
        """
        while True:
            async with self._on_worker(turn) as worker:
                try:
                    async with aclosing(worker.engine.stream(turn.attempt())) as chunks:
                        async for chunk in chunks:
                            self._note(turn, worker, chunk)
                            if chunk.finish_reason is None:
                                yield chunk
                            elif chunk.finish_reason != "abort":
                                yield _with_times(chunk, turn, worker)
                                return
                            elif chunk.token_ids:
                                yield unfinished(chunk)
                    turn.aborts += 1  # aborted by a weight update: the tokens are kept
                    self.events["aborted_by_update"] += 1
                except (EngineError, DeadlineError) as error:
                    await self._handle_failure(turn, worker, error)
            rest = remaining(turn.request, len(turn.sampled))
            if rest is None:
                turn.restart()
                raise _MustRestart
            if rest.max_tokens == 0:
                yield _with_times(Chunk([], [], [], "length"), turn, worker)
                return
            turn.rest = rest

    def _note(self, turn: Turn, worker: Worker, chunk: Chunk) -> None:
        turn.sampled += chunk.token_ids
        if turn.first_token_at is None and chunk.token_ids:
            if chunk.first_token_age is not None:
                turn.first_token_at = time.time() - chunk.first_token_age
            elif chunk.finish_reason is None:
                turn.first_token_at = time.time()
            turn.queued = chunk.queued
        worker.tokens += len(chunk.token_ids)
        if turn.is_suspect:
            self._quarantine.moved()

    @asynccontextmanager
    async def _on_worker(self, turn: Turn) -> AsyncIterator[Worker]:
        """Count a turn on the worker that is chosen for it."""
        alone, clock = turn.is_suspect, asyncio.get_running_loop().time
        if alone:
            await self._quarantine.begin_alone(turn)
        try:
            worker = await self._schedule(turn.request)
            # A worker that was dead before this turn arrived did not die of it.
            while turn.deaths and not await self._is_alive(worker):
                worker = await self._schedule(turn.request)
            worker.running.add(turn)
            self._router.add_load(worker, turn.weight, clock())
            try:
                yield worker
            finally:
                self._router.add_load(worker, -turn.weight, clock())
                worker.running.discard(turn)
        finally:
            if alone:
                self._quarantine.end_alone()

    async def _schedule(self, request: Request) -> Worker:
        """Choose a worker.

        Raises:
            DeadlineError: when none was usable in time.
        """
        if not self._router.usable:
            async with deadline(self._turn_timeout, f"{request.id} found no live worker"):
                while not self._router.usable:
                    if self._closed:
                        raise EngineError(f"{request.id} has no worker left: {self._closed}")
                    self._changed.clear()
                    await self._changed.wait()
        return self._router.schedule(request.route)

    async def _handle_failure(
        self, turn: Turn, worker: Worker, error: EngineError | DeadlineError
    ) -> None:
        """Find out whether the turn or the worker caused a failure, and record it.

        Raises:
            EngineError, DeadlineError: when the turn has failed too often, or crashed the worker.
        """
        if await self._is_lost(worker, str(error)):
            is_cause = turn.is_suspect or worker.suspects == [turn]
            turn.deaths.append(worker)
            if is_cause:
                self._convict(turn)
        elif isinstance(error, ChannelError):
            turn.cuts += 1  # of which no request is the cause
        else:
            turn.failures += 1
        if (losses := len(turn.deaths) + turn.cuts) > self._serving.max_continuations:
            raise EngineError(
                f"{turn.request.id} failed on {losses} workers; the last: {error}"
            ) from error
        if turn.failures >= _MAX_FAILURES:
            raise type(error)(
                f"{turn.request.id} failed {turn.failures} times on healthy workers; "
                f"the last: {error}"
            ) from error
        outcome = "moved"
        if turn.sampled:
            rest = remaining(turn.request, len(turn.sampled))
            outcome = "restarted" if rest is None else "continued"
        worker.failed_turns[outcome] += 1
        self.events[outcome] += 1

    def _convict(self, turn: Turn) -> None:
        """Quarantine and fail a turn that crashed its workers."""
        error = self._quarantine.add(turn)
        self.events["quarantined"] += 1
        for worker in turn.deaths:
            if worker.supervisor is not None:
                worker.supervisor.excuse_death()
        raise error

    async def _is_alive(self, worker: Worker) -> bool:
        try:
            async with asyncio.timeout(self._serving.health_timeout):
                await worker.engine.check_health()
        except (EngineError, DeadlineError, TimeoutError) as error:
            return not await self._is_lost(worker, str(error) or "no answer to a health check")
        return True

    async def _is_lost(self, worker: Worker, why: str) -> bool:
        """Ask the supervisor whether a worker on which a request failed is lost.

        Until the answer, which takes milliseconds if the worker is alive, it gets no turns.
        """
        if self.workers.get(worker.name) is not worker:
            return True
        if worker.usable:
            worker.usable = False
            worker.note_suspects()
            self._router.rebuild()
            logger.debug("%s: %s", worker.name, why)
            if worker.supervisor is not None:
                worker.lost = asyncio.get_running_loop().create_future()
                worker.supervisor.report_failure(why)
        if worker.lost is None:  # nobody to ask; or suspended
            return worker.supervisor is None
        try:
            async with asyncio.timeout(self._turn_timeout):
                return await asyncio.shield(worker.lost)
        except TimeoutError:
            return True


def _with_times(last: Chunk, turn: Turn, worker: Worker) -> Chunk:
    """Return the last chunk of a turn with the times of the whole turn."""
    first = turn.first_token_at
    age = None if first is None else max(0.0, time.time() - first)
    return replace(last, first_token_age=age, queued=turn.queued, worker=worker.name)
