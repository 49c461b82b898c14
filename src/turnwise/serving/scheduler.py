"""Picks a worker for each turn, and carries a turn over when its worker fails.

The scheduler is a `Generator` like a single engine. A session stays on the worker that holds its
cache unless that is overloaded; a group's first turns go together; all else goes to the least
loaded. A turn whose worker died or hung goes on at another from the tokens that it already has.

A request that ends its worker must not end the next ones too. After its second death it is failed,
and refused for a while, if nobody else can have been the cause; where others died with it twice,
each of them is tried by itself.
"""

import array
import asyncio
import copy
import hashlib
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from turnwise.config import SamplingConfig, ServingConfig
from turnwise.deadlines import StallClock
from turnwise.engine.protocol import Chunk, Completion, Engine, Route, collect
from turnwise.errors import DeadlineError, EngineError

logger = logging.getLogger(__name__)

_TOKENS_PER_REQUEST = 2048
"""A request weighs 1, and 1 more for each so many tokens of its prompt."""
_SLACK = 4.0
"""Requests above the overload bound that move nobody yet."""
# What follows was found by simulation: 8 workers, sessions of 1 to 12 turns, one worker 4 x slower.
_SMOOTHING = 128
"""Turns of each worker over which its load is averaged."""
_LASTING = 1.05
"""Of the mean average load: a session leaves a worker above it."""
_AVERAGE_WEIGHT = 32
"""How much the average load counts beside the present one where a session finds its worker."""
_TIE = 1e-9
"""What a turn served counts for: it decides only between workers that are loaded alike."""
_OWN_FAILURES = 2
"""A request that failed so often on workers that are well is failed."""
_QUARANTINED = 1024
_QUARANTINE_SECONDS = 600.0
"""How many requests that ended workers are remembered, and for how long."""


@dataclass(slots=True, eq=False)
class _Turn:
    """One turn and what befell it."""

    request_id: str
    deaths: list[str] = field(default_factory=list)
    """Workers that died while they had it."""
    failures: int = 0
    """Its own: on workers that are well."""
    sampled: list[int] = field(default_factory=list)
    """Its tokens so far."""

    @property
    def is_on_trial(self) -> bool:
        """Others died with it twice: it runs while no other such turn does."""
        return len(self.deaths) > 1


@dataclass(slots=True, eq=False)
class Worker:
    """One engine as the scheduler sees it."""

    name: str
    engine: Engine
    usable: bool = True
    """False from its first failure until its manager has found it well."""
    load: float = 0.0
    """Requests in flight, weighted by their tokens."""
    place: int = -1
    """In the scheduler's arrays, while it is usable."""
    turns: int = 0
    """Served so far."""
    tokens: int = 0
    """Sampled so far."""
    load_seconds: float = 0.0
    """The integral of `load` over time."""
    lost: Counter[str] = field(default_factory=Counter)
    """What became of the turns that failed here."""
    in_flight: set[_Turn] = field(default_factory=set)
    suspects: list[_Turn] = field(default_factory=list)
    """When it was lost: its turns with which another worker had died before."""
    verdict: "asyncio.Future[bool] | None" = None
    """Whether it is lost, from its first failure until its manager has found out."""
    _changed: float = field(default_factory=time.monotonic)

    def add(self, weight: float, now: float) -> None:
        self.load_seconds += self.load * (now - self._changed)
        self._changed = now
        self.load += weight


class Scheduler:
    """Routes turns to workers.

    Args:
        serving: Bounds of stickiness and of continuations.
        turn_timeout: Seconds that a turn waits while no worker is usable.
        on_failure: Called with the name of a worker on which a request failed, once until it is
            restored or removed; without it, each failure is the worker's death.
        on_culprit: Called with the names of the workers that one request has ended.
    """

    def __init__(
        self,
        serving: ServingConfig,
        turn_timeout: float,
        on_failure: Callable[[str, str], None] | None = None,
        on_culprit: Callable[[Sequence[str]], None] | None = None,
    ) -> None:
        self.events: Counter[str] = Counter()
        """How often what happened: turns, sticky, moved_overload, moved_gone, aborted_by_update,
    continued, began_anew, moved (these three after a failure), quarantined."""
        self.workers: dict[str, Worker] = {}
        self._serving = serving
        self._turn_timeout = turn_timeout
        self._on_failure = on_failure
        self._on_culprit = on_culprit
        self._trial = asyncio.Lock()
        self._trials = StallClock(turn_timeout)
        self._quarantine: OrderedDict[bytes, float] = OrderedDict()
        """Digests of requests that ended workers, and until when they are refused."""
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._groups: OrderedDict[str, str] = OrderedDict()
        self._usable: list[Worker] = []
        # Of each usable worker: a choice among a thousand costs little more than among eight.
        self._loads = self._averages = self._turns = _zeros(0)
        self._joined = asyncio.Event()
        self._closed = ""

    def add(self, name: str, engine: Engine) -> None:
        """Let a worker take turns; one of the same name is replaced."""
        if name in self.workers:
            self.remove(name)
        self.workers[name] = Worker(name, engine, _changed=asyncio.get_running_loop().time())
        self._take_stock()
        self._closed = ""
        self._joined.set()

    def restore(self, name: str) -> None:
        """Trust a worker again: the request that failed on it failed by itself."""
        if (worker := self.workers.get(name)) is not None and not worker.usable:
            worker.usable = True
            _settle(worker, lost=False)
            self._take_stock()
            self._joined.set()

    def remove(self, name: str) -> Worker:
        """Give a worker no more turns; those that it has go on until they fail."""
        worker = self.workers.pop(name)
        if worker.verdict is None:
            worker.suspects = _suspects(worker)
        _settle(worker, lost=True)
        self._take_stock()
        worker.place = -1
        return worker

    def _take_stock(self) -> None:
        """The arrays anew, after a worker has come or gone."""
        averages = {worker.name: self._averages[worker.place] for worker in self._usable}
        self._usable = [worker for worker in self.workers.values() if worker.usable]
        self._loads, self._averages, self._turns = (_zeros(len(self._usable)) for _ in range(3))
        for worker in self.workers.values():
            worker.place = -1
        for place, worker in enumerate(self._usable):
            worker.place = place
            self._loads[place] = worker.load
            self._averages[place] = averages.get(worker.name, worker.load)
            self._turns[place] = worker.turns

    def close(self, why: str) -> None:
        """No worker is there and none is near: fail turns that wait for one until one is added."""
        self._closed = why
        self._joined.set()

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingConfig,
        request_id: str,
        seed: int | None = None,
        route: Route | None = None,
    ) -> Completion:
        chunks: list[Chunk] = []
        turn = self._turn(prompt_token_ids, sampling, request_id, seed, route or Route())
        async with aclosing(turn) as pieces:
            async for piece in pieces:
                if piece is None:
                    chunks.clear()
                else:
                    chunks.append(piece)
        return await collect(_each(chunks), request_id)

    async def stream(
        self,
        prompt_token_ids: Sequence[int],
        sampling: Any,
        request_id: str,
        seed: int | None = None,
        route: Route | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        turn = self._turn(prompt_token_ids, sampling, request_id, seed, route or Route())
        async with aclosing(turn) as pieces:
            async for piece in pieces:
                if piece is None:
                    raise EngineError(
                        f"the worker of {request_id} failed, and a streamed answer with a seed, "
                        "stop strings, penalties or a grammar cannot be continued elsewhere"
                    )
                yield piece

    async def _turn(
        self,
        prompt_token_ids: Sequence[int],
        sampling: Any,
        request_id: str,
        seed: int | None,
        route: Route,
    ) -> AsyncGenerator[Chunk | None, None]:
        """The turn's chunks, on as many workers as it takes; None: all before it is void."""
        prompt = list(prompt_token_ids)
        turn = _Turn(request_id)
        sampled, rest, aborts = turn.sampled, sampling, 0
        self.events["turns"] += 1
        if self._quarantine:
            self._refuse(request_id, _digest(prompt, sampling, seed))
        while True:
            attempts = len(turn.deaths) + turn.failures + aborts
            attempt = f"{request_id}~{attempts}" if attempts else request_id
            async with self._attempt(turn, route, 1 + len(prompt) / _TOKENS_PER_REQUEST) as worker:
                try:
                    stream = worker.engine.stream(
                        prompt + sampled if sampled else prompt, rest, attempt, seed, route
                    )
                    async with aclosing(stream) as chunks:
                        async for chunk in chunks:
                            sampled += chunk.token_ids
                            if turn.is_on_trial:
                                self._trials.moved()
                            worker.tokens += len(chunk.token_ids)
                            if chunk.finish_reason != "abort":
                                yield chunk
                                if chunk.finish_reason is not None:
                                    return
                            elif chunk.token_ids:
                                yield _unfinished(chunk)
                    aborts += 1  # by a weight update: what was sampled is kept
                    self.events["aborted_by_update"] += 1
                except (EngineError, DeadlineError) as error:
                    if await self._is_lost(worker, str(error)):
                        is_cause = turn.is_on_trial or worker.suspects == [turn]
                        turn.deaths.append(worker.name)
                        if is_cause:
                            self._convict(turn, _digest(prompt, sampling, seed))
                    else:
                        turn.failures += 1
                    self._give_up(turn, error)
                    lost = "continued" if remaining(sampling, len(sampled), seed) else "began_anew"
                    lost = lost if sampled else "moved"
                    worker.lost[lost] += 1
                    self.events[lost] += 1
            following = remaining(sampling, len(sampled), seed)
            if following is None:
                sampled.clear()
                rest = sampling
                yield None
            elif following.max_tokens == 0:
                yield Chunk([], [], [], "length")
                return
            else:
                rest = following

    async def _pick(self, route: Route, request_id: str) -> Worker:
        """The worker for a turn.

        Raises:
            DeadlineError: when none was usable in time.
        """
        if not self._usable:
            await self._wait_for_worker(request_id)
        worker = self._choose(route)
        worker.turns += 1
        self._turns[worker.place] += 1
        if route.session:
            self._remember(self._sessions, route.session, worker.name)
        if route.group:
            self._remember(self._groups, route.group, worker.name)
        return worker

    def _remember(self, known: "OrderedDict[str, str]", key: str, worker: str) -> None:
        known[key] = worker
        known.move_to_end(key)
        if len(known) > self._serving.known_sessions:
            known.popitem(last=False)

    async def _wait_for_worker(self, request_id: str) -> None:
        try:
            async with asyncio.timeout(self._turn_timeout):
                while not self._usable:
                    if self._closed:
                        raise EngineError(f"{request_id} has no worker left: {self._closed}")
                    self._joined.clear()
                    await self._joined.wait()
        except TimeoutError:
            raise DeadlineError(
                f"{request_id} found no worker alive within {self._turn_timeout:g} s"
            ) from None

    def _choose(self, route: Route) -> Worker:
        """The session's worker, the group's, or the least loaded.

        A session's worker is chosen by its average load above all, since it will have the
        session's later turns too; so a slow worker gets fewer sessions, not just fewer turns.
        """
        loads, averages, count = self._loads, self._averages, len(self._usable)
        averages += (loads - averages) / (_SMOOTHING * count)
        mean = float(np.add.reduce(loads)) / count
        bound = self._serving.overload * mean + _SLACK
        known = self._sessions.get(route.session)
        if known is not None:
            home = self.workers.get(known)
            if home is None or not home.usable:
                self.events["moved_gone"] += 1
            elif home.load > bound or self._is_lasting(home, mean):
                self.events["moved_overload"] += 1
            else:
                self.events["sticky"] += 1
                return home
        else:
            together = self.workers.get(self._groups.get(route.group, ""))
            if together is not None and together.usable and together.load <= bound:
                return together
        cost = loads + _TIE * self._turns
        if route.session:
            cost += _AVERAGE_WEIGHT * averages
        return self._usable[int(cost.argmin())]

    def _is_lasting(self, home: Worker, mean: float) -> bool:
        """Whether a worker has long been more loaded than the others, and still is."""
        if home.load <= _LASTING * mean:
            return False
        mean_average = float(np.add.reduce(self._averages)) / len(self._usable)
        return bool(self._averages[home.place] > _LASTING * mean_average)

    @asynccontextmanager
    async def _attempt(self, turn: _Turn, route: Route, weight: float) -> AsyncIterator[Worker]:
        """A turn's time on the worker that is picked for it."""
        on_trial = turn.is_on_trial
        if on_trial:
            await self._wait_for_trial(turn.request_id)
        try:
            worker = await self._pick(route, turn.request_id)
            while turn.deaths and not await self._is_well(worker):
                worker = await self._pick(route, turn.request_id)
            with self._in_flight(worker, turn, weight):
                yield worker
        finally:
            if on_trial:
                self._trial.release()

    async def _wait_for_trial(self, request_id: str) -> None:
        try:
            async with self._trials.watching():
                await self._trial.acquire()
        except TimeoutError:
            raise DeadlineError(
                f"{request_id}, with which workers died, could not be tried by itself: the trial "
                f"before it has not moved for {self._turn_timeout:g} s"
            ) from None
        self._trials.moved()

    @contextmanager
    def _in_flight(self, worker: Worker, turn: _Turn, weight: float) -> Iterator[None]:
        worker.in_flight.add(turn)
        self._add(worker, weight)
        try:
            yield
        finally:
            self._add(worker, -weight)
            worker.in_flight.discard(turn)

    def _add(self, worker: Worker, weight: float) -> None:
        worker.add(weight, asyncio.get_running_loop().time())
        if worker.place >= 0:
            self._loads[worker.place] = worker.load

    async def _is_well(self, worker: Worker) -> bool:
        """Whether a worker lives: one that had died before a turn came did not die of it."""
        try:
            async with asyncio.timeout(self._serving.health_timeout):
                await worker.engine.check_health()
        except (EngineError, DeadlineError, TimeoutError) as error:
            return not await self._is_lost(worker, str(error) or "no answer to a health check")
        return True

    async def _is_lost(self, worker: Worker, why: str) -> bool:
        """Whether the worker of a failed request is lost: its manager asks it.

        Meanwhile it gets no turns, which takes milliseconds where it is well.
        """
        if self.workers.get(worker.name) is not worker:
            return True
        if worker.usable:
            worker.usable = False
            worker.suspects = _suspects(worker)
            self._take_stock()
            logger.debug("%s: %s", worker.name, why)
            if self._on_failure is not None:
                worker.verdict = asyncio.get_running_loop().create_future()
                self._on_failure(worker.name, why)
        if worker.verdict is None:
            return True
        try:
            async with asyncio.timeout(self._turn_timeout):
                return await asyncio.shield(worker.verdict)
        except TimeoutError:
            return True

    def _give_up(self, turn: _Turn, error: EngineError | DeadlineError) -> None:
        """Raise where a turn has failed too often."""
        if len(turn.deaths) > self._serving.max_continuations:
            raise EngineError(
                f"{turn.request_id} failed on {len(turn.deaths)} workers; the last: {error}"
            ) from error
        if turn.failures >= _OWN_FAILURES:
            raise type(error)(
                f"{turn.request_id} failed {turn.failures} times on workers that are well; "
                f"the last: {error}"
            ) from error

    def _convict(self, turn: _Turn, digest: bytes) -> None:
        until = asyncio.get_running_loop().time() + _QUARANTINE_SECONDS
        self._quarantine[digest] = until
        if len(self._quarantine) > _QUARANTINED:
            self._quarantine.popitem(last=False)
        self.events["quarantined"] += 1
        if self._on_culprit is not None:
            self._on_culprit(turn.deaths)
        why = f"{turn.request_id} ended {len(turn.deaths)} workers ({', '.join(turn.deaths)})"
        logger.warning("%s and is refused for %g s", why, _QUARANTINE_SECONDS)
        raise EngineError(f"{why} and is not tried again")

    def _refuse(self, request_id: str, digest: bytes) -> None:
        until = self._quarantine.get(digest)
        if until is None:
            return
        if (left := until - asyncio.get_running_loop().time()) > 0:
            raise EngineError(
                f"{request_id} is refused for another {left:.0f} s: the same prompt and sampling "
                "ended two workers"
            )
        del self._quarantine[digest]


def _suspects(worker: Worker) -> list[_Turn]:
    return [turn for turn in worker.in_flight if turn.deaths]


def _settle(worker: Worker, *, lost: bool) -> None:
    """Tell the turns that wait for the verdict on a worker."""
    verdict, worker.verdict = worker.verdict, None
    if verdict is not None and not verdict.done():
        verdict.set_result(lost)


def _digest(prompt: Sequence[int], sampling: Any, seed: int | None) -> bytes:
    """What two requests have in common that would end a worker alike."""
    text = repr((sampling, seed)).encode()
    return hashlib.blake2b(array.array("q", prompt).tobytes() + text, digest_size=16).digest()


def remaining(sampling: Any, sampled: int, seed: int | None = None) -> Any:
    """The sampling parameters of the rest of a turn; None if its tokens depend on those before
    in a way that a new request cannot know (seed, stop strings, penalties, grammar)."""
    if sampled == 0:
        return sampling
    per_request = (
        "stop",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "structured_outputs",
        "bad_words",
        "logits_processors",
        "logits_processor_args",
        "extra_args",
        "prompt_logprobs",
    )
    if seed is not None or any(getattr(sampling, name, None) for name in per_request):
        return None
    changes = {
        "max_tokens": sampling.max_tokens - sampled,
        "min_tokens": max(0, sampling.min_tokens - sampled),
    }
    if isinstance(sampling, SamplingConfig):
        return sampling.model_copy(update=changes)
    rest = copy.copy(sampling)
    for name, value in changes.items():
        setattr(rest, name, value)
    return rest


def _zeros(count: int) -> npt.NDArray[np.float64]:
    return np.zeros(count)


def _unfinished(chunk: Chunk) -> Chunk:
    return Chunk(
        chunk.token_ids,
        chunk.logprobs,
        chunk.weight_versions,
        cached_tokens=chunk.cached_tokens,
        alternatives=chunk.alternatives,
    )


async def _each(chunks: Sequence[Chunk]) -> AsyncIterator[Chunk]:
    for chunk in chunks:
        yield chunk
