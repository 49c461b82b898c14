"""A fleet of workers behind one scheduler: start, weights, sleep, wake and shutdown.

Each worker has a supervisor that restarts it when it fails. A new worker gets the fleet's weights
and state before it gets turns; meanwhile its predecessor's turns continue on other workers.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

from turnwise.config import ServingConfig, WeightsConfig
from turnwise.core.aio import task_group, together
from turnwise.errors import InputError, TurnwiseError, WeightUpdateError
from turnwise.serving.scheduler import Scheduler
from turnwise.serving.supervisor import ManagedEngine, WorkerFailure, WorkerSupervisor
from turnwise.weights.sync import Updated, WeightSync

if TYPE_CHECKING:
    from turnwise.serving.chat_scheduler import Callback, ChatBackend, ChatCompletionScheduler
    from turnwise.serving.data_proto import DataProto
    from turnwise.trajectory import Message


class AsyncLLMServerManager:
    """The workers behind one scheduler.

    Args:
        start: Starts a worker, given its name and its index from 0; raises `InputError` or
            `DeadlineError`.
        serving: Number of workers, and settings of their supervision.
        weights: Treatment of running turns during updates.
        turn_timeout: Seconds that a turn waits while no worker is usable.

    Updates, sleep and wake raise `DeadlineError` or `EngineError`, naming the worker.

    Example:
        start = WorkerStarter(config, gpus=1.0)
        manager = AsyncLLMServerManager(start, config.serving, config.weights, turn_timeout=60.0)
        async with manager.running():
            request = Request([1, 2, 3], config.sampling, "request-0")
            completion = await generate(manager.scheduler, request)
    """

    def __init__(
        self,
        start: Callable[[str, int], Awaitable[ManagedEngine]],
        serving: ServingConfig,
        weights: WeightsConfig,
        turn_timeout: float,
    ) -> None:
        self.scheduler = Scheduler(serving, turn_timeout)
        self.failures: list[WorkerFailure] = []
        """Failures of workers that have been restarted since."""
        self.chats: ChatBackend | None = None
        """Answers chats on the workers; set by its owner, `runtime.open_manager`."""
        self._start = start
        self._weights = weights
        self._supervisors = [
            WorkerSupervisor(
                index,
                serving,
                self.scheduler,
                start=self._start_worker,
                is_busy=lambda: self._busy,
                on_failure=self.failures.append,
                on_give_up=self._close_if_empty,
            )
            for index in range(serving.workers)
        ]
        self._sync: WeightSync | None = None
        """Source of the last update; None before the first one."""
        self._asleep = False
        self._control = asyncio.Lock()
        """Lock of updates, sleep and wake-up, also held while a new worker joins."""
        self._busy = False
        """True during an update, sleep or wake-up; health checks are then skipped."""

    @property
    def chat_scheduler(self) -> "ChatCompletionScheduler":
        """An instance of the class in `rollout.chat_scheduler`, or of the base class.

        Raises:
            InputError: when the manager has no chat backend.
        """
        chats = self._opened_chats()
        return chats.scheduler(chats)

    async def submit_chat_completions(
        self,
        callback: "Callback",
        callback_additional_info: dict[str, object],
        **chat_complete_request: object,
    ) -> None:
        """Call `ChatCompletionScheduler.submit_chat_completions`."""
        await self.chat_scheduler.submit_chat_completions(
            callback, callback_additional_info, **chat_complete_request
        )

    async def generate_sequences(
        self, prompts: "DataProto | Sequence[Sequence[Message]]", **sampling_params: object
    ) -> "DataProto":
        """Call `ChatBackend.generate_sequences`."""
        return await self._opened_chats().generate_sequences(prompts, **sampling_params)

    def _opened_chats(self) -> "ChatBackend":
        if self.chats is None:
            raise InputError("this manager answers no chats: open it with open_manager")
        return self.chats

    @property
    def engines(self) -> list[ManagedEngine]:
        """Engines of the workers that are up."""
        return [engine for _, engine in self._up()]

    @property
    def base_urls(self) -> dict[str, str]:
        """URLs of running workers that serve HTTP themselves (serving.worker_servers)."""
        known = {engine.name: getattr(engine, "base_url", None) for engine in self.engines}
        return {name: url for name, url in known.items() if url}

    @property
    def given_up(self) -> dict[str, str]:
        """Reasons why workers could not be restarted, by name; further attempts follow."""
        return {one.name: one.given_up for one in self._supervisors if one.given_up}

    async def start(self) -> None:
        """Start all workers concurrently; if one fails, end them all."""
        try:
            async with task_group() as starting:
                for supervisor in self._supervisors:
                    starting.create_task(supervisor.start())
        except BaseException:
            await self.shutdown()
            raise
        for supervisor in self._supervisors:
            supervisor.watch()

    async def _start_worker(self, supervisor: WorkerSupervisor) -> None:
        """Start a worker, and give it the weights and state of all others."""
        engine = await self._start(supervisor.name, supervisor.index)
        try:
            async with self._control:
                if self._sync is not None:
                    await self._sync.update_one(engine, self._weights.in_flight)
                if self._asleep:
                    await engine.sleep()
                supervisor.admit(engine)
        except BaseException:
            engine.fail(f"{supervisor.name} did not come up")
            engine.kill()
            raise

    async def update_weights(self, sync: WeightSync) -> list[Updated]:
        """Update all workers to the weights that `sync` offers, or none.

        A worker that dies or fails once all have found that the update fits is restarted; like any
        restarted worker, it gets the weights before it serves. If all failed to load them, all are
        kept: the next update may succeed.

        Returns:
            The results of the workers that serve the weights.

        Raises:
            WeightUpdateError: when a worker refuses the update, in which case all keep their
                weights, or when one's canary differs from the trainer's.
            TurnwiseError: when no worker loaded it.
        """
        async with self._control:
            with self._occupied():
                try:
                    results = await sync.update(self.engines, self._weights.in_flight)
                finally:
                    if sync.current is not None:  # no worker has refused it
                        self._sync = sync
                failed = {e: r for e, r in results.items() if isinstance(r, TurnwiseError)}
                all_failed = len(failed) == len(results)
                for supervisor, engine in self._up():
                    error = failed.get(engine)
                    if error is None or (all_failed and isinstance(error, WeightUpdateError)):
                        continue
                    supervisor.lose(f"in a weight update: {error}", engine)
        if failed and all_failed:
            raise next(iter(failed.values()))
        return [result for result in results.values() if isinstance(result, Updated)]

    @contextmanager
    def _occupied(self) -> Iterator[None]:
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    async def sleep(self) -> None:
        """Free every worker's memory; running turns wait and continue after the wake-up."""
        await self._all("sleep", lambda engine: engine.sleep(), asleep=True)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Resume serving; `tags` (weights, kv_cache) wake a part, None wakes everything."""
        asleep = bool(tags) and "kv_cache" not in (tags or ())
        await self._all("wake_up", lambda engine: engine.wake_up(tags or None), asleep=asleep)

    async def _all(
        self, what: str, call: Callable[[ManagedEngine], Awaitable[None]], *, asleep: bool
    ) -> None:
        async def one(supervisor: WorkerSupervisor, engine: ManagedEngine) -> None:
            try:
                await call(engine)
            except TurnwiseError as error:
                supervisor.lose(f"in {what}: {error}", engine)

        async with self._control:
            with self._occupied():
                self._asleep = asleep
                await together(one(*pair) for pair in self._up())

    @asynccontextmanager
    async def running(self) -> AsyncIterator["AsyncLLMServerManager"]:
        """Start the workers, and shut them down at the end of the block in any case."""
        await self.start()
        try:
            yield self
        finally:
            await self.shutdown()

    async def shutdown(self) -> None:
        """Shut down all workers."""
        await asyncio.gather(*(supervisor.stop() for supervisor in self._supervisors))
        self.scheduler.close("the fleet was shut down")
        for name in list(self.scheduler.workers):
            self.scheduler.remove(name)
        await asyncio.gather(*(e.shutdown() for e in self.engines), return_exceptions=True)
        for supervisor in self._supervisors:
            supervisor.engine = None

    def _up(self) -> list[tuple[WorkerSupervisor, ManagedEngine]]:
        return [(one, one.engine) for one in self._supervisors if one.engine is not None]

    def _close_if_empty(self, why: str) -> None:
        if len(self.given_up) == len(self._supervisors):
            self.scheduler.close(why)
