"""The actor around one engine, and the mailbox through which the fleet uses it.

Other processes use it through `WorkerHandle`: one call submits many requests, and another, which
is always in flight, returns the chunks of all of them. Each of these processes has a mailbox.
"""

import asyncio
import os
from collections import defaultdict
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from turnwise.config import Config, EngineConfig
from turnwise.core import logs
from turnwise.core.aio import freeze_gc
from turnwise.engine.protocol import Chunk, Route, Sampling
from turnwise.errors import EngineError, TurnwiseError
from turnwise.weights import BACKEND, WORKER_EXTENSION

if TYPE_CHECKING:
    from turnwise.engine.vllm_engine import VllmEngine
    from turnwise.serving.openai.server import OpenAIServer

HEARTBEAT_SECONDS = 10.0
"""Time after which `collect` returns without a chunk, to show that the worker is alive."""
GPU_MEMORY = 0.9
"""Share of a GPU's memory that engines on it take together; vLLM's own default for one is 0.92."""

Submission = tuple[str, list[int], Sampling, int | None, str]
"""A request's id, its prompt's token ids, its sampling parameters, its seed and its adapter."""
Event = tuple[str, Chunk | Exception]
"""A request's id, and its next chunk or the error that ended it."""


@dataclass(slots=True)
class _Mailbox:
    """Requests of one process that uses the engine, and their events since it last asked."""

    events: list[Event] = field(default_factory=list)
    happened: asyncio.Event = field(default_factory=asyncio.Event)
    requests: dict[str, "asyncio.Task[None]"] = field(default_factory=dict)

    def add(self, request_id: str, event: Chunk | Exception) -> None:
        self.events.append((request_id, event))
        self.happened.set()


class EngineWorker:
    """An actor's class: one `VllmEngine`, with its own OpenAI server if the configuration says so.

    Args:
        config: Model, engine, sampling and seeds.
        bundle_indices: Bundles of this actor's placement group, one for each device of the
            engine, each of which runs in its own actor; None runs them in child processes.
        fraction_of_gpus: Share of each GPU's memory that the engine may take.
        seed: Seed of the engine's random numbers; None takes the configuration's.
        name: The worker's name in errors.
    """

    def __init__(
        self,
        config: Config,
        bundle_indices: Sequence[int] | None = None,
        fraction_of_gpus: float = 1.0,
        seed: int | None = None,
        name: str = "worker-0",
    ) -> None:
        self._config = config
        self._seed = config.seed if seed is None else seed
        self._name = name
        self._share = fraction_of_gpus
        self._mailboxes: dict[str, _Mailbox] = defaultdict(_Mailbox)
        self._server: OpenAIServer | None = None
        self._bundle_indices = bundle_indices

    async def post_init_async(self) -> int:
        """Build the engine, which takes seconds; returns this process's id.

        Raises:
            InputError: when vLLM refuses the model or an argument.
        """
        logs.follow()
        engine = self._config.engine
        if self._bundle_indices is not None:
            from turnwise.serving.colocated.engine import on_bundles  # needs Ray

            engine = on_bundles(engine, self._bundle_indices, self._name)
        if self._share < 1.0:
            utilization = engine.vllm_args.get("gpu_memory_utilization", GPU_MEMORY) * self._share
            vllm_args = {**engine.vllm_args, "gpu_memory_utilization": utilization}
            engine = engine.model_copy(update={"vllm_args": vllm_args})
        config = self._config
        served = config.serving.worker_servers or config.metrics.port is not None
        if engine.metrics is None and served:
            engine = engine.model_copy(update={"metrics": True})
        self._engine = self._create_engine(engine)
        await self._engine.load_adapters()
        if self._config.serving.worker_servers:
            from turnwise.serving.openai.server import OpenAIServer

            self._server = OpenAIServer(self._config, self._engine, port=0)
            await self._server.start()
        freeze_gc()
        return os.getpid()

    def _create_engine(self, engine: EngineConfig) -> "VllmEngine":
        """Make the engine; a hook for subclasses that change its arguments."""
        from turnwise.engine.adapters import EngineAdapters
        from turnwise.engine.vllm_engine import VllmEngine

        return VllmEngine(
            self._config.model,
            engine,
            seed=self._seed,
            deterministic=self._config.deterministic,
            adapters=EngineAdapters.of(self._config),
            worker_extension=WORKER_EXTENSION,
            weight_backend=BACKEND,
            name=self._name,
        )

    async def report_dp_openai_server_base_url(self) -> str | None:
        """Return the base URL of this worker's own OpenAI server; None without one."""
        return None if self._server is None else str(self._server.base_url)

    async def shutdown(self) -> bool:
        """End the server and the engine, and return True; the owner kills the actor."""
        if self._server is not None:
            await self._server.stop()
        await self._engine.shutdown()
        return True

    async def call(self, method: str, *args: object) -> Any:
        """Call any method of the engine."""
        return await getattr(self._engine, method)(*args)

    async def submit(self, batch: Sequence[Submission], client: str = "") -> None:
        """Begin requests, whose chunks `collect` returns to the same client."""
        mailbox = self._mailboxes[client]
        for submission in batch:
            task = asyncio.create_task(self._run(mailbox, *submission))
            mailbox.requests[submission[0]] = task

    async def collect(self, client: str = "") -> list[Event]:
        """Return a client's events since the last call, as soon as there is one.

        Returns an empty list after `HEARTBEAT_SECONDS` without any.
        """
        mailbox = self._mailboxes[client]
        if not mailbox.events:
            mailbox.happened.clear()
            try:
                async with asyncio.timeout(HEARTBEAT_SECONDS):
                    await mailbox.happened.wait()
            except TimeoutError:
                return []
        events, mailbox.events = mailbox.events, []
        return events

    async def cancel(self, request_ids: Sequence[str], client: str = "") -> None:
        """End requests whose results are no longer needed."""
        requests = self._mailboxes[client].requests
        for request_id in request_ids:
            if (task := requests.get(request_id)) is not None:
                task.cancel()

    async def forget(self, client: str) -> None:
        """End all requests of a client that is gone."""
        if (mailbox := self._mailboxes.pop(client, None)) is not None:
            for task in mailbox.requests.values():
                task.cancel()

    async def _run(
        self,
        mailbox: _Mailbox,
        request_id: str,
        prompt: list[int],
        sampling: Sampling,
        seed: int | None,
        adapter: str,
    ) -> None:
        ended = False
        try:
            route = Route(adapter=adapter)
            stream = self._engine.stream(prompt, sampling, request_id, seed, route)
            async with aclosing(stream) as chunks:
                async for chunk in chunks:
                    mailbox.add(request_id, chunk)
                    ended = chunk.finish_reason is not None
            if not ended:  # the caller waits without a deadline
                raise EngineError(f"{self._name} ended request {request_id} without a reason")
        except Exception as error:
            # An error of another type may not be readable in another process.
            known = isinstance(error, TurnwiseError)
            mailbox.add(request_id, error if known else EngineError(f"{self._name}: {error!r}"))
        finally:
            mailbox.requests.pop(request_id, None)
