"""Runs each turn on one worker of a fleet, and continues it on another worker if the first one
fails.

A turn whose worker died or hung continues on another worker from the tokens sampled so far. If its
sampling parameters do not allow this (`remaining`), it restarts. A request that crashes its worker
must not crash other workers, too. If two workers die while they run a request, and no other request
can be the cause, the request is quarantined: it fails, and equal requests are refused for a while.
If several requests were running at both deaths, each of them is retried alone.
"""

import asyncio
import copy
import hashlib
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

from turnwise.config import SamplingConfig, ServingConfig
from turnwise.core.aio import together
from turnwise.core.deadlines import StallClock, deadline
from turnwise.core.json_types import Args, Kwargs
from turnwise.core.optional import Foreign
from turnwise.engine.protocol import Chunk, Engine, Occupancy, Request, Sampling
from turnwise.errors import DeadlineError, EngineError
from turnwise.serving.channel import ChannelError
from turnwise.serving.routing import TOKENS_PER_REQUEST, Router, ScheduledTurn, Supervisor, Worker

logger = logging.getLogger(__name__)

_MAX_FAILURES = 2
"""Failures on live workers after which a turn fails, because the request must be the cause."""
_MAX_QUARANTINED = 1024
_QUARANTINE_SECONDS = 600.0  # time for which a request is refused; by then its cause may be fixed
_PER_REQUEST = (
    "stop",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "structured_outputs",
    "bad_words",
    "logits_processors",
    "logits_processor_args",
    "extra_args",
)
"""Sampling parameters that make a token depend on the request's earlier tokens."""

Listener = Callable[..., None]
"""Function that is called with each change of the workers, for example to update the scheduler of
another process:

- `("add", name, engine)`: use a new worker, which has the fleet's weights; it replaces a worker of
  the same name;
- `("restore", name)`: use a worker again: a request failed on it, but it is alive. A listener that
  cannot reach the worker does not use it until it can;
- `("remove", name, lost)`: give a worker no further turns, because it is lost or leaves. Turns on a
  worker that leaves end, or are aborted and continue on other workers;
- `("occupancy", name, occupancy)`: a health check returned the occupancy of a worker's engine;
- `("close", why)`: no worker will come until the next "add".
"""


class Scheduler:
    """Routes turns to workers.

    Args:
        serving: Limits of the stickiness of sessions to workers, and of continuations.
        turn_timeout: Seconds that a turn waits while no worker is usable.
    """

    def __init__(self, serving: ServingConfig, turn_timeout: float) -> None:
        self.events: Counter[str] = Counter()
        """Counts of routing decisions and failures.

        Choices for sessions that have a worker: sticky (unchanged), moved_overload, moved_slow,
        moved_gone.
        Interruptions: aborted_by_update, and handed_over by a worker that leaves. After a failure:
        continued (from the sampled tokens), restarted (from the prompt, discarding tokens), moved
        (no token was sampled yet), quarantined.
        """
        self._serving = serving
        self._turn_timeout = turn_timeout
        self._router = Router(serving, self.events)
        self._quarantined: OrderedDict[bytes, float] = OrderedDict()
        """Time until which each request is refused, by the request's digest."""
        self._alone = asyncio.Lock()  # held by a suspect turn while it is retried
        self._suspects_clock = StallClock(turn_timeout)
        self._changed = asyncio.Event()
        """Set when a worker is usable again, or the scheduler is closed."""
        self._closed = ""  # reason why no worker will become usable; "" while one may
        self._listeners: list[Listener] = []

    @property
    def min_workers(self) -> int:
        """Number of workers that the run begins with."""
        return self._serving.min_workers

    @property
    def workers(self) -> dict[str, Worker]:
        """All workers by name, including failed ones that are not removed yet."""
        return self._router.workers

    def add(self, name: str, engine: Engine, supervisor: Supervisor | None = None) -> Worker:
        """Add a worker; it replaces a worker of the same name."""
        if name in self.workers:
            self.remove(name)
        now = asyncio.get_running_loop().time()
        worker = self.workers[name] = Worker(name, engine, supervisor, changed=now)
        self._router.rebuild()
        self._closed = ""
        self._changed.set()
        self._tell("add", name, engine)
        return worker

    def subscribe(self, listener: Listener) -> None:
        """Report all workers to a listener, and every change from now on."""
        for worker in self.workers.values():
            listener("add", worker.name, worker.engine)
        self._listeners.append(listener)

    def _tell(self, *change: object) -> None:
        for listener in self._listeners:
            listener(*change)

    def unsubscribe(self, listener: Listener) -> None:
        """Report nothing more to a listener."""
        self._listeners.remove(listener)

    def prefer(self, names: Iterable[str]) -> None:
        """Give new sessions to these workers only, while one of them is usable."""
        self._router.preferred = frozenset(names)
        self._router.rebuild()

    def add_remote_load(self, changes: Mapping[str, float]) -> None:
        """Add changes, by worker, to the loads that other processes cause."""
        now = asyncio.get_running_loop().time()
        for name, change in changes.items():
            if (worker := self.workers.get(name)) is not None:
                worker.elsewhere += change
                self._router.add_load(worker, change, now)

    def note_occupancy(self, name: str, occupancy: Occupancy) -> None:
        """Report the occupancy of a worker's engine to the listeners."""
        self._tell("occupancy", name, occupancy)

    def restore(self, name: str) -> None:
        """Use a worker again, because it is alive and only the request failed."""
        self._tell("restore", name)
        if (worker := self.workers.get(name)) is not None and not worker.usable:
            worker.usable = True
            worker.report(lost=False)
            self._router.rebuild()
            self._changed.set()

    def suspend(self, name: str) -> None:
        """Give a worker no turns until `restore`, because it is alive but cannot be reached from
        here.

        Turns that failed on it continue on other workers.
        """
        # Listeners that reported a failure wait for an answer. They may be able to reach the
        # worker, so each listener tries this itself.
        self._tell("restore", name)
        if (worker := self.workers.get(name)) is not None:
            if worker.usable:
                worker.usable = False
                self._router.rebuild()
            worker.report(lost=False)

    def remove(self, name: str, *, lost: bool = True) -> Worker:
        """Remove and return a worker.

        Its running turns go on until they fail. If the worker is not `lost` but leaves, they go on
        until they end, or are aborted and continue on other workers.
        """
        worker = self.workers.pop(name)
        if lost and worker.verdict is None:
            worker.note_suspects()
        worker.report(lost=lost)
        self._router.rebuild()
        self._tell("remove", name, lost)
        return worker

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: Args = (), kwargs: Kwargs = None
    ) -> list[Foreign]:
        """Call a method of the vLLM workers of all usable engines; see `VllmEngine.collective_rpc`.
        The answers are in the order of the engines."""
        engines: list[Foreign] = [one.engine for one in self.workers.values() if one.usable]
        answers = await together(e.collective_rpc(method, timeout, args, kwargs) for e in engines)
        return [answer for each in answers for answer in each]

    def close(self, why: str) -> None:
        """Fail turns that wait for a worker, until a worker is added."""
        self._closed = why
        self._changed.set()
        self._tell("close", why)

    async def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """Sample one completion; see `Generator.stream`.

        If a request wants its answer as a whole, and may have to restart, its chunks are held back
        until its end.
        """
        turn = ScheduledTurn(request, 1 + len(request.prompt) / TOKENS_PER_REQUEST)
        self.events["turns"] += 1
        if self._quarantined:
            digest, now = _digest(request), asyncio.get_running_loop().time()
            if (seconds := self._quarantined.get(digest, 0.0) - now) > 0:
                raise EngineError(
                    f"{request.id} is refused for another {seconds:.0f} s: the same prompt and "
                    "sampling crashed two workers"
                )
            self._quarantined.pop(digest, None)
        holds, held = request.whole and not continues(request), list[Chunk]()
        rest, ended = request.sampling, False
        while True:
            async with self._placed(turn) as worker:
                try:
                    async with aclosing(worker.engine.stream(_attempt(turn, rest))) as chunks:
                        async for chunk in chunks:
                            self._note(turn, worker, chunk)
                            if chunk.finish_reason == "abort":  # the turn continues elsewhere
                                if not chunk.token_ids:
                                    continue
                                chunk = replace(
                                    chunk, finish_reason=None, stop_reason=None, experts=b""
                                )
                            elif chunk.finish_reason is not None:
                                chunk, ended = _with_times(chunk, turn, worker), True
                            if holds:
                                held.append(chunk)
                            else:
                                yield chunk
                            if ended:
                                break
                    if not ended:
                        turn.aborts += 1  # aborted without a failure: the tokens are kept
                        stays = self.workers.get(worker.name) is worker
                        self.events["aborted_by_update" if stays else "handed_over"] += 1
                except (EngineError, DeadlineError) as error:
                    await self._handle_failure(turn, worker, error)
            if ended:
                break
            left = remaining(request, len(turn.sampled))
            if left is None:
                if not holds:
                    raise EngineError(
                        f"the worker of {request.id} failed, and a streamed answer with a seed, "
                        "stop strings, penalties or a grammar cannot be continued elsewhere"
                    )
                turn.sampled.clear()
                held.clear()
                turn.first_token_at, left = None, request.sampling
            elif left.max_tokens == 0:
                held.append(_with_times(Chunk([], [], [], "length"), turn, worker))
                break
            rest = left
        for chunk in held:
            yield chunk

    def _note(self, turn: ScheduledTurn, worker: Worker, chunk: Chunk) -> None:
        turn.sampled += chunk.token_ids
        if turn.first_token_at is None and chunk.token_ids:
            if chunk.first_token_age is not None:
                turn.first_token_at = time.time() - chunk.first_token_age
            elif chunk.finish_reason is None:
                turn.first_token_at = time.time()
            turn.queued = chunk.queued
        worker.tokens += len(chunk.token_ids)
        if turn.is_suspect:
            self._suspects_clock.moved()

    @asynccontextmanager
    async def _placed(self, turn: ScheduledTurn) -> AsyncIterator[Worker]:
        """Wait until a turn may run, choose its worker, and add the turn to the worker's load."""
        alone, clock = turn.is_suspect, asyncio.get_running_loop().time
        if alone:
            async with self._suspects_clock.watching(
                f"{turn.request.id}, during which workers died, could not be retried alone: the "
                "retry of another request made no progress"
            ):
                await self._alone.acquire()
            self._suspects_clock.moved()
        try:
            worker = await self._schedule(turn.request)
            while turn.deaths:  # this turn did not cause a worker's earlier death
                try:
                    async with asyncio.timeout(self._serving.health_timeout):
                        await worker.engine.check_health()
                    break
                except (EngineError, DeadlineError, TimeoutError) as error:
                    why = str(error) or "no answer to a health check"
                    if not await self._ask_whether_lost(worker, why):
                        break
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
                self._alone.release()

    async def _schedule(self, request: Request) -> Worker:
        if not self._router.usable:
            async with deadline(self._turn_timeout, f"{request.id} found no live worker"):
                while not self._router.usable:
                    if self._closed:
                        raise EngineError(f"{request.id} has no worker left: {self._closed}")
                    self._changed.clear()
                    await self._changed.wait()
        return self._router.schedule(request.route)

    async def _handle_failure(
        self, turn: ScheduledTurn, worker: Worker, error: EngineError | DeadlineError
    ) -> None:
        """Find out whether the turn or the worker caused a failure; raise the error if the turn
        caused it, or has failed too often."""
        name = turn.request.id
        if await self._ask_whether_lost(worker, str(error)):
            is_cause = turn.is_suspect or worker.suspects == [turn]
            turn.deaths.append(worker)
            if is_cause:
                names = ", ".join(each.name for each in turn.deaths)
                ended = f"{name} crashed {len(turn.deaths)} workers ({names})"
                logger.warning("%s and is refused for %g s", ended, _QUARANTINE_SECONDS)
                until = asyncio.get_running_loop().time() + _QUARANTINE_SECONDS
                self._quarantined[_digest(turn.request)] = until
                if len(self._quarantined) > _MAX_QUARANTINED:
                    self._quarantined.popitem(last=False)
                self.events["quarantined"] += 1
                for each in turn.deaths:
                    if each.supervisor is not None:
                        each.supervisor.excuse_death()
                raise EngineError(f"{ended} and is not retried")
        elif isinstance(error, ChannelError):
            turn.cuts += 1  # no request can be the cause of a lost channel
        else:
            turn.failures += 1
        if (losses := len(turn.deaths) + turn.cuts) > self._serving.max_continuations:
            raise EngineError(f"{name} failed on {losses} workers; the last: {error}") from error
        if turn.failures >= _MAX_FAILURES:
            raise type(error)(
                f"{name} failed {turn.failures} times on healthy workers; the last: {error}"
            ) from error
        outcome = "moved"
        if turn.sampled:
            rest = remaining(turn.request, len(turn.sampled))
            outcome = "restarted" if rest is None else "continued"
        worker.failed_turns[outcome] += 1
        self.events[outcome] += 1

    async def _ask_whether_lost(self, worker: Worker, why: str) -> bool:
        """Ask the supervisor whether a worker is lost; the worker gets no turns until the
        answer."""
        if self.workers.get(worker.name) is not worker:
            return True
        if worker.usable:
            worker.usable = False
            worker.note_suspects()
            self._router.rebuild()
            logger.debug("%s: %s", worker.name, why)
            if worker.supervisor is not None:
                worker.verdict = asyncio.get_running_loop().create_future()
                worker.supervisor.report_failure(why)
        if worker.supervisor is None:
            return True  # nobody to ask: each failure counts as death
        if worker.verdict is None:
            return False  # the supervisor has answered or suspended the worker, so it is alive
        try:
            async with asyncio.timeout(self._turn_timeout):
                return await asyncio.shield(worker.verdict)
        except TimeoutError:
            return True


def _attempt(turn: ScheduledTurn, rest: Sampling) -> Request:
    """Return the request of a turn's next attempt, which samples the rest."""
    attempts = len(turn.deaths) + turn.failures + turn.cuts + turn.aborts
    if not attempts:
        return turn.request
    return replace(
        turn.request,
        prompt=turn.request.prompt + turn.sampled,
        sampling=rest,
        id=f"{turn.request.id}~{attempts}",  # an engine may still use an earlier id
    )


def continues(request: Request) -> bool:
    """Return whether a new request can sample the rest of an interrupted one. It cannot if the
    remaining tokens depend on the earlier tokens (seed, stop strings, penalties, grammar); in that
    case, the turn has to restart."""
    sampling = request.sampling
    if request.seed is not None:
        return False
    if isinstance(sampling, SamplingConfig):  # pydantic is slow to look up a missing name
        return not any(map(vars(sampling).get, _PER_REQUEST))
    return not any(getattr(sampling, name, None) for name in _PER_REQUEST)


def remaining(request: Request, sampled: int) -> "Sampling | None":
    """Return the sampling parameters for the rest of a request, after `sampled` of its tokens.

    None if no new request can sample the rest; see `continues`.
    """
    sampling = request.sampling
    if sampled == 0:
        return sampling
    if not continues(request):
        return None
    changes: dict[str, object] = {
        "max_tokens": sampling.max_tokens - sampled,
        "min_tokens": max(0, sampling.min_tokens - sampled),
    }
    if isinstance(sampling, SamplingConfig):
        return sampling.model_copy(update={**changes, "prompt_logprobs": False})
    changes["prompt_logprobs"] = None  # they came with the first tokens
    rest = copy.copy(sampling)
    for name, value in changes.items():
        setattr(rest, name, value)
    return rest


def _with_times(last: Chunk, turn: ScheduledTurn, worker: Worker) -> Chunk:
    """Return the last chunk of a turn with the times of the whole turn."""
    first = turn.first_token_at
    age = None if first is None else max(0.0, time.time() - first)
    return replace(last, first_token_age=age, queued=turn.queued, worker=worker.name)


def _digest(request: Request) -> bytes:
    """Return a digest of everything in a request that may crash a worker."""
    whole = request.prompt.ids.tobytes()
    whole += repr((request.sampling, request.seed)).encode()
    whole += repr([(str(one.image), one.start) for one in request.prompt.images]).encode()
    return hashlib.blake2b(whole, digest_size=16).digest()
