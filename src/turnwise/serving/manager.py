"""Keeps a fleet of workers alive: start, health, restart, weights, sleep and wake.

A worker that dies or hangs is ended and started again, and gets the current weights before it
serves; its turns continue elsewhere meanwhile. Each loss is one line in the log when the worker is
back. A worker that does not come back is tried again later, ever less often.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from turnwise.config import ServingConfig, WeightsConfig
from turnwise.engine.protocol import Engine
from turnwise.errors import (
    DeadlineError,
    EngineError,
    InputError,
    TurnwiseError,
    WeightUpdateError,
)
from turnwise.serving.scheduler import Scheduler, Worker
from turnwise.tasks import task_group
from turnwise.weights.delivery import WeightSource

if TYPE_CHECKING:
    from turnwise.serving.chat_scheduler import Callback, ChatBackend, ChatCompletionScheduler
    from turnwise.serving.data_proto import DataProto
    from turnwise.trajectory import Message

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0
_GIVEN_UP_SECONDS, _GIVEN_UP_MOST_SECONDS = 60.0, 600.0
"""Between attempts to start a worker that was given up: the first wait, doubled up to the last."""
_JUDGE_SECONDS = 1.0
"""How long a restart waits for the scheduler to find out which request ended the worker."""
_SETTLED_CHECKS = 10


class ManagedEngine(Engine, Protocol):
    """An engine whose process can be ended."""

    def fail(self, why: str) -> None:
        """End every request with `EngineError`."""
        ...

    def kill(self) -> None: ...


Verify = Callable[[Engine], Awaitable[Any]]
"""Asks an engine whether it has the weights that it was given, and raises if not."""


@dataclass(slots=True)
class _Slot:
    """The place of one worker, whoever fills it."""

    name: str
    engine: ManagedEngine | None = None
    restarting: asyncio.Task[None] | None = None
    checking: asyncio.Task[None] | None = None
    failure: str = ""
    restarts: int = 0
    """In a row: since it last served for `_SETTLED_CHECKS` health checks. Less those after deaths
    that were a request's doing, which is known before or after the restart."""
    checks: int = 0


@dataclass(slots=True)
class Loss:
    """What happened to one worker, and what became of its turns."""

    worker: str
    why: str
    seconds: float
    turns: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        said = {
            "continued": "continued elsewhere from their tokens",
            "moved": "begun elsewhere",
            "began_anew": "begun anew",
        }
        turns = ", ".join(f"{self.turns[k]} turns {v}" for k, v in said.items() if self.turns[k])
        return (
            f"{self.worker} failed ({self.why}) and is back after {self.seconds:.1f} s; "
            f"{turns or 'it had no turns under way'}"
        )


class AsyncLLMServerManager:
    """Owns the workers behind one scheduler.

    Args:
        start: Starts the worker of a name, and raises `InputError` or `DeadlineError`.
        serving: How many workers, and how they are watched.
        weights: How updates treat turns under way.
        turn_timeout: Seconds that a turn waits while no worker is usable.

    Raises from updates, sleep and wake: `DeadlineError` or `EngineError`, naming the worker.
    """

    def __init__(
        self,
        start: Callable[[str], Awaitable[ManagedEngine]],
        serving: ServingConfig,
        weights: WeightsConfig,
        turn_timeout: float,
    ) -> None:
        self.scheduler = Scheduler(serving, turn_timeout, self._on_failure, self._on_culprit)
        self.losses: list[Loss] = []
        self.given_up: dict[str, str] = {}
        """Workers that did not come back yet, and why; they are tried again later."""
        self._start = start
        self._serving = serving
        self._weights = weights
        self._slots = [_Slot(f"worker-{index}") for index in range(serving.workers)]
        self._source: WeightSource | None = None
        self._verify: Verify | None = None
        self._version: int | None = None
        """Of the last update, which `_verify` is about."""
        self._asleep = False
        self._control = asyncio.Lock()
        self._occupied = False
        """Updates, sleep and wake have deadlines of their own, and an engine answers nobody
        meanwhile."""
        self._watching: list[asyncio.Task[None]] = []
        self.chats: ChatBackend | None = None
        """Answers chats on the workers; set by whoever starts it (`machinery.open_manager`)."""

    @property
    def chat_scheduler(self) -> "ChatCompletionScheduler":
        """An instance of the class that `rollout.chat_scheduler` names, or of its base.

        Raises:
            InputError: when nothing answers chats.
        """
        chats = self._opened_chats()
        return chats.scheduler(chats)

    async def submit_chat_completions(
        self,
        callback: "Callback",
        callback_additional_info: dict[str, Any],
        **chat_complete_request: Any,
    ) -> None:
        """See `ChatCompletionScheduler.submit_chat_completions`."""
        await self.chat_scheduler.submit_chat_completions(
            callback, callback_additional_info, **chat_complete_request
        )

    async def generate_sequences(
        self, prompts: "DataProto | Sequence[Sequence[Message]]", **sampling_params: Any
    ) -> "DataProto":
        """See `ChatBackend.generate_sequences`."""
        return await self._opened_chats().generate_sequences(prompts, **sampling_params)

    def _opened_chats(self) -> "ChatBackend":
        if self.chats is None:
            raise InputError("this manager answers no chats: open it with open_manager")
        return self.chats

    @property
    def engines(self) -> list[ManagedEngine]:
        """The workers that are up."""
        return [slot.engine for slot in self._slots if slot.engine is not None]

    @property
    def base_urls(self) -> dict[str, str]:
        """Where workers that are up serve HTTP themselves (serving.worker_servers), by name."""
        known = {engine.name: getattr(engine, "base_url", None) for engine in self.engines}
        return {name: url for name, url in known.items() if url}

    async def start(self) -> None:
        """Start all workers side by side; none is left running if one fails."""
        try:
            async with task_group() as starting:
                for slot in self._slots:
                    starting.create_task(self._fill(slot))
        except BaseException:
            await self.shutdown()
            raise
        self._watching = [asyncio.create_task(self._watch(slot)) for slot in self._slots]

    async def _fill(self, slot: _Slot) -> None:
        """Start the slot's worker; it takes turns once it is as all others are."""
        engine = await self._start(slot.name)
        try:
            async with self._control:
                if self._source is not None:
                    version = await self._source.catch_up(engine, self._weights.in_flight)
                    # A trainer that had to send anew may be ahead: the next update, which is
                    # near then, verifies this engine with all others.
                    if self._verify is not None and version == self._version:
                        await self._verify(engine)
                if self._asleep:
                    await engine.sleep()
                slot.engine = engine
                self.scheduler.add(slot.name, engine)
        except BaseException:
            engine.fail(f"{slot.name} did not come up")
            engine.kill()
            raise

    async def update_weights(self, source: WeightSource, verify: Verify | None = None) -> list[Any]:
        """Bring every worker to the weights that the source offers; all of them move, or none.

        First all are asked whether the update fits. A worker that dies or fails after that is
        replaced, and like one that is down already gets the weights before it serves.

        Returns:
            What `verify` returned for each worker that is up.

        Raises:
            WeightUpdateError: when a worker refuses the update, and all go on with the weights
                that they have; or when one does not stand the verification.
            TurnwiseError: when no worker took it up.
        """
        async with self._control:
            with self._occupying():
                engines = self.engines
                errors = await source.check(engines)
                for error in errors:
                    if isinstance(error, WeightUpdateError):
                        raise error
                engines = self._without_failed(engines, errors)
                self._source, self._verify = source, verify
                outcomes = await source.deliver(engines, self._weights.in_flight)
                self._version = max((o for o in outcomes if isinstance(o, int)), default=None)
                engines = self._without_failed(engines, outcomes)
                if verify is None:
                    return []
                results = await asyncio.gather(*map(verify, engines), return_exceptions=True)
                for result in results:
                    if isinstance(result, WeightUpdateError):
                        raise result
                self._without_failed(engines, results)
        return [result for result in results if not isinstance(result, BaseException)]

    def _without_failed(
        self, engines: list[ManagedEngine], outcomes: Sequence[Any]
    ) -> list[ManagedEngine]:
        """The engines whose outcome is no error; the others are lost, unless all failed to load
        what may be mended by the next update."""
        failed = {id(e): o for e, o in zip(engines, outcomes, strict=True) if _is_error(o)}
        all_failed = len(failed) == len(engines)
        for slot in self._slots:
            if (error := failed.get(id(slot.engine))) is None:
                continue
            if not isinstance(error, TurnwiseError):
                raise error
            if not (all_failed and isinstance(error, WeightUpdateError)):
                self._lose(slot, f"in a weight update: {error}", slot.engine)
        if failed and all_failed:
            raise next(iter(failed.values()))
        return [engine for engine in engines if id(engine) not in failed]

    @contextmanager
    def _occupying(self) -> Iterator[None]:
        self._occupied = True
        try:
            yield
        finally:
            self._occupied = False

    async def sleep(self) -> None:
        """Give every worker's memory back; turns under way go on from their tokens afterwards."""
        await self._all("sleep", asleep=True)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Serve again; `tags` (weights, kv_cache) wake a part."""
        asleep = bool(tags) and "kv_cache" not in (tags or ())
        await self._all("wake_up", *([tags] if tags else []), asleep=asleep)

    async def _all(self, method: str, *args: Any, asleep: bool) -> None:
        async def one(slot: _Slot) -> None:
            if (engine := slot.engine) is None:
                return
            try:
                await getattr(engine, method)(*args)
            except TurnwiseError as error:
                self._lose(slot, f"in {method}: {error}", engine)

        async with self._control:
            with self._occupying():
                self._asleep = asleep
                await asyncio.gather(*(one(slot) for slot in self._slots))

    @asynccontextmanager
    async def running(self) -> AsyncIterator["AsyncLLMServerManager"]:
        """Start, and shut down whatever happens in between."""
        await self.start()
        try:
            yield self
        finally:
            await self.shutdown()

    async def shutdown(self) -> None:
        """End every worker."""
        tasks = [t for s in self._slots for t in (s.restarting, s.checking) if t is not None]
        tasks += self._watching
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.scheduler.close("the fleet was shut down")
        for name in list(self.scheduler.workers):
            self.scheduler.remove(name)
        await asyncio.gather(*(e.shutdown() for e in self.engines), return_exceptions=True)
        for slot in self._slots:
            slot.engine = None

    async def _watch(self, slot: _Slot) -> None:
        while True:
            await asyncio.sleep(self._serving.health_every)
            if slot.engine is not None and not self._occupied:
                await self._check(slot)

    def _on_failure(self, name: str, why: str) -> None:
        """A request failed on a worker: find out at once whether the worker lives."""
        slot = self._slot(name)
        slot.failure = why
        if slot.checking is None or slot.checking.done():
            slot.checking = asyncio.create_task(self._check(slot))

    def _on_culprit(self, names: Sequence[str]) -> None:
        """One request ended these workers: that says nothing about them."""
        for name in names:
            self._slot(name).restarts -= 1

    def _slot(self, name: str) -> _Slot:
        return next(slot for slot in self._slots if slot.name == name)

    async def _check(self, slot: _Slot) -> None:
        engine = slot.engine
        if engine is None:
            return
        try:
            await self._ask(engine)
        except TimeoutError:
            if self._occupied:
                return
            seconds = self._serving.health_timeout
            self._lose(slot, f"no answer to health checks in {seconds:g} s", engine)
        except (EngineError, DeadlineError) as error:
            self._lose(slot, slot.failure or str(error), engine)
        except Exception as error:
            # Nothing may end the watch: a worker that cannot be asked is lost, whatever the reason.
            logger.exception("%s: its health check failed unexpectedly", slot.name)
            self._lose(slot, f"its health check failed: {error!r}", engine)
        else:
            if slot.engine is engine:
                slot.failure = ""
                slot.checks += 1
                if slot.checks >= _SETTLED_CHECKS:
                    slot.restarts = 0
                self.scheduler.restore(slot.name)

    async def _ask(self, engine: ManagedEngine) -> None:
        """Ask twice: where it was this process that stood still, the first deadline passes while
        the answer is already here."""
        seconds = self._serving.health_timeout / 2
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await engine.check_health()
                return
        async with asyncio.timeout(seconds):
            await engine.check_health()

    def _lose(self, slot: _Slot, why: str, engine: ManagedEngine | None = None) -> None:
        if slot.engine is None or (engine is not None and slot.engine is not engine):
            return  # somebody else has noticed
        logger.info("%s is lost: %s", slot.name, why)
        dead, slot.engine = slot.engine, None
        worker = self.scheduler.remove(slot.name)
        slot.restarting = asyncio.create_task(self._restart(slot, why, worker))
        try:
            dead.fail(f"{slot.name} failed: {why}")
            dead.kill()
        except Exception:
            logger.exception("%s could not be ended", slot.name)

    async def _restart(self, slot: _Slot, why: str, dead: Worker) -> None:
        clock = asyncio.get_running_loop().time
        started = clock()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_JUDGE_SECONDS):
                while dead.in_flight:  # noqa: ASYNC110 (one of them may be the cause)
                    await asyncio.sleep(_JUDGE_SECONDS / 100)
        last = ""
        for pause in self._pauses(slot):
            if slot.restarts >= self._serving.max_restarts:
                self._give_up(slot, why, last, pause)
            await asyncio.sleep(pause)
            slot.restarts = min(slot.restarts + 1, self._serving.max_restarts)
            try:
                await self._fill(slot)
                break
            except Exception as error:  # it is in the log when the worker is given up
                last = str(error) or type(error).__name__
        self.given_up.pop(slot.name, None)
        slot.failure, slot.checks = "", 0
        loss = Loss(slot.name, why, clock() - started, Counter(dead.lost))
        self.losses.append(loss)
        logger.warning("%s", loss)

    def _pauses(self, slot: _Slot) -> Iterator[float]:
        """Seconds before each attempt to start a worker."""
        while slot.restarts < self._serving.max_restarts:
            yield _RETRY_SECONDS * max(0, slot.restarts)
        pause = _GIVEN_UP_SECONDS
        while True:
            yield pause
            pause = min(2 * pause, _GIVEN_UP_MOST_SECONDS)

    def _give_up(self, slot: _Slot, why: str, last: str, pause: float) -> None:
        logger.error(
            "%s failed (%s) and is not back: %s; it is tried again in %g s",
            *(slot.name, why, last or "it has no restarts left", pause),
        )
        self.given_up[slot.name] = last or why
        if len(self.given_up) == len(self._slots):
            self.scheduler.close(f"{slot.name} failed: {why}")


def _is_error(outcome: Any) -> bool:
    return isinstance(outcome, BaseException)
