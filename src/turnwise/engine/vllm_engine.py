"""vLLM's asynchronous engine behind the `Engine` protocol: the same class on a CPU and on GPUs.

The engine computes in a child process that a fork server starts; this object belongs to the event
loop of its caller. Log-probs are those of the processed distribution (after temperature, top-p
and top-k), the one that the tokens were drawn from.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from turnwise.config import EngineConfig, ModelConfig, SamplingConfig
from turnwise.core.aio import run_in_thread
from turnwise.core.deadlines import StallClock
from turnwise.engine.adapter_table import AdapterTable, LoadedAdapter
from turnwise.engine.adapters import NO_ADAPTERS, POLICY, EngineAdapters, key_of
from turnwise.engine.logits_processors import (
    ADAPTER,
    EXTRA_ARG,
    failed,
    is_unsampled,
    load_processor,
    with_request,
)
from turnwise.engine.protocol import (
    VLLM_METRICS,
    Chunk,
    Completion,
    PauseMode,
    Route,
    Sampling,
    collect,
)
from turnwise.engine.token_streams import TokenStreams
from turnwise.engine.vllm_requests import make_chunk, sampling_params
from turnwise.engine.vllm_start import engine_arguments, import_vllm, start_llm
from turnwise.engine.vllm_updates import UpdatableEngine
from turnwise.errors import EngineError, InputError

if TYPE_CHECKING:
    from prometheus_client import Metric

    from turnwise.engine.vllm_api import SamplingParams

_T = TypeVar("_T")
_STEP_SECONDS = 5.0
"""Time after which a health check looks at whether the engine still computes."""
_LOOK_SECONDS = 2.0
"""Time in which an engine that computes uses a tenth of a core at the least."""
_SLEEP_TAGS = {"weights", "kv_cache"}
"""vLLM's tags of the parts whose memory sleep frees."""


class VllmEngine(UpdatableEngine):
    """One vLLM engine.

    Args:
        model: The model to load.
        engine: Settings of the engine.
        seed: Seed of the engine's own random numbers.
        deterministic: Compute one request at a time without a prefix cache, so that a request's
            tokens and log-probs depend on nothing but its prompt and seed.
        adapters: Adapters that the engine holds; needs a worker extension.
        worker_extension: `package.module.Class` that vLLM mixes into its worker to add the weight
            transports. Without one, weights cannot be updated.
        weight_backend: Name under which the extension registers its transports.
        name: Name of this engine in errors.

    Raises:
        InputError: when vLLM refuses the model or an argument.

    Example:
        engine = VllmEngine(config.model, config.engine)
        completion = await engine.generate([5, 6, 7], config.sampling, "request-1")
        await engine.shutdown()
    """

    def __init__(
        self,
        model: ModelConfig,
        engine: EngineConfig,
        *,
        seed: int = 0,
        deterministic: bool = False,
        adapters: EngineAdapters = NO_ADAPTERS,
        worker_extension: str = "",
        weight_backend: str = "turnwise",
        name: str = "engine",
    ) -> None:
        vllm = import_vllm()
        self.name = name
        self._vllm = vllm
        self._allowed = engine.logits_processors_allowed
        self._loaded: set[str] = set()
        """Names of requests' logits processors that were imported."""
        self._timeout = engine.request_timeout
        self._clock = StallClock(engine.request_timeout)
        self._pending: set[str] = set()
        self._cache_salt: str | None = None
        """Salt that keeps requests from using cached prefixes of older weights; None allows all."""
        self._adapters = AdapterTable(adapters.trained)
        self._unloaded = dict(adapters.paths)
        """Paths of adapters that are not loaded yet, by name."""
        self._loading = asyncio.Lock()
        self._has_adapters = bool(adapters.rank)
        self._captures = engine.routing_replay and vllm.current_platform.is_cpu()
        """Whether the workers must be asked to capture the choice of experts."""
        self._ready = False
        """Whether all adapters are loaded, and choices are captured."""
        if self._captures and not worker_extension:
            raise InputError("engine.routing_replay: on a CPU an engine needs a worker extension")
        if model.adapter is not None and POLICY not in adapters.paths:
            raise InputError("model.adapter: an engine needs adapters=EngineAdapters.of(config)")
        arguments = engine_arguments(model, engine, deterministic, adapters) | {"seed": seed}
        if worker_extension:
            arguments |= {
                "worker_extension_cls": worker_extension,
                "weight_transfer_config": vllm.WeightTransferConfig(backend=weight_backend),
            }
        self._extended = bool(worker_extension)
        self._adapted = ADAPTER in (arguments["logits_processors"] or [])
        self._llm = start_llm(model.path, arguments, bool(engine.metrics))
        self._streams = TokenStreams(self._llm, self._clock)

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingConfig,
        request_id: str,
        seed: int | None = None,
        route: Route | None = None,
    ) -> Completion:
        stream = self.stream(prompt_token_ids, sampling, request_id, seed, route)
        async with aclosing(stream) as chunks:
            return await collect(chunks, self.name)

    async def stream(
        self,
        prompt_token_ids: Sequence[int],
        sampling: Sampling,
        request_id: str,
        seed: int | None = None,
        route: Route | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        params = sampling_params(sampling, seed)
        await self._settle_processors(params, request_id)
        await self.load_adapters()
        await self._llm.get_supported_tasks()  # from here to vLLM's queue nothing may wait
        name = route.adapter if route is not None else POLICY
        run = self._token_chunks if self._streams.take(params) else self._frontend_chunks
        with self._adapters.using(name, request_id) as adapter, self._running(request_id):
            pieces = run(list(prompt_token_ids), params, request_id, adapter)
            async with aclosing(pieces) as chunks:
                async for chunk in chunks:
                    if is_unsampled(chunk.logprobs):
                        who = f"request {request_id} on {self.name}"
                        raise failed(who, await self._processor_failure(request_id))
                    yield chunk

    async def load_adapters(self) -> None:
        """Load the adapters, before the first request unless they are loaded already.

        Raises:
            InputError: naming the key of one that cannot be read or does not fit the model.
        """
        if self._ready:
            return
        async with self._loading, self._deadline("loading its adapters", self._timeout):
            await self._answered(self._llm.get_supported_tasks(), "its first call")  # vLLM keeps it
            if self._captures:
                await self._ask("capture_experts")
            if self._has_adapters:
                await self._ask("prepare_adapters")
            for name, path in list(self._unloaded.items()):
                adapter = self._adapters.new(name)
                await self._ask("put_adapter", adapter.number, path, key_of(name))
                self._adapters.add(name, adapter)
                del self._unloaded[name]
            self._ready = True

    @contextmanager
    def _running(self, request_id: str) -> Iterator[None]:
        """Count a request, and raise vLLM's errors as ours."""
        vllm = self._vllm
        self._pending.add(request_id)
        try:
            yield
        except vllm.EngineDeadError as error:
            raise EngineError(f"{self.name} died during request {request_id}") from error
        except vllm.EngineGenerateError as error:
            why = error.__cause__ or error
            raise EngineError(f"{self.name} failed in request {request_id}: {why}") from error
        except (ValueError, vllm.VLLMValidationError) as error:
            raise InputError(f"{self.name} refused {request_id}: {error}") from error
        finally:
            self._pending.discard(request_id)

    def _moving(self, request_id: str) -> AbstractAsyncContextManager[object]:
        """Raise `DeadlineError` from a request's wait when the engine samples no token of any."""
        stalled = f"{self.name}, with request {request_id} waiting, sampled no token"
        return self._clock.watching(stalled, "engine.request_timeout")

    async def _token_chunks(
        self,
        prompt: list[int],
        params: "SamplingParams",
        request_id: str,
        adapter: LoadedAdapter | None,
    ) -> AsyncGenerator[Chunk, None]:
        """Yield the chunks of a request of nothing but tokens."""
        inputs = self._vllm.tokens_input(prompt, cache_salt=self._cache_salt)
        stream = await self._streams.open(inputs, params, request_id, adapter)
        try:
            finished = False
            while not finished:
                async with self._moving(request_id):
                    chunk = await stream.next()
                finished = chunk.finish_reason is not None
                yield chunk
        finally:
            await self._streams.close(stream)

    async def _frontend_chunks(
        self,
        prompt: list[int],
        params: "SamplingParams",
        request_id: str,
        adapter: LoadedAdapter | None,
    ) -> AsyncGenerator[Chunk, None]:
        """Yield the chunks of a request that needs vLLM's frontend, which gets every token."""
        vllm = self._vllm
        interval, params.stream_interval = params.stream_interval or 1, 1
        inputs = vllm.tokens_input(prompt, cache_salt=self._cache_salt)
        sampled, few = 0, None
        first: float | None = None
        lora, versions = (adapter.request, adapter.spans()) if adapter is not None else (None, None)
        stream = self._llm.generate(inputs, params, request_id, lora_request=lora)
        async with aclosing(stream) as outputs:
            while True:
                async with self._moving(request_id):
                    output = await anext(outputs, None)
                if output is None:
                    return
                piece = output.outputs[0]
                finished = piece.finish_reason is not None
                labels = versions or (
                    piece.weight_versions
                    if finished
                    else vllm.weight_versions_so_far(self._llm, request_id)
                )
                now = time.monotonic()
                if first is None and piece.token_ids:
                    first = now
                age = None if first is None else now - first
                chunk = make_chunk(output, labels or (), sampled, age)
                sampled += len(piece.token_ids)
                few = chunk if few is None else few + chunk
                if finished or len(few.token_ids) >= interval:
                    yield few
                    few = None
                if finished:
                    return

    async def _settle_processors(self, params: "SamplingParams", request_id: str) -> None:
        """Check the logits processors that a request names, before it reaches the engine.

        Raises:
            InputError: when one is not allowed, or cannot be loaded.
        """
        if not self._adapted and EXTRA_ARG not in (params.extra_args or {}):
            return
        params.extra_args, names = with_request(params.extra_args, request_id, self._allowed)
        for name in set(names) - self._loaded:
            async with self._deadline(f"loading the logits processor {name}", self._timeout):
                await run_in_thread(load_processor, name)
            self._loaded.add(name)

    async def _processor_failure(self, request_id: str) -> str:
        """Return the reason why a request's logits processor failed; "" when none did."""
        if not (self._adapted and self._extended):
            return ""
        async with self._deadline(f"explaining the failure of {request_id}", self._timeout):
            replies = await self._ask("take_processor_failure", request_id)
        return next((reply["why"] for reply in replies if reply["why"]), "")

    async def pause(self, mode: PauseMode = "keep") -> None:
        if mode == "wait":  # as long as requests in flight make progress
            await self._drain()
        else:
            await self._in_time("pausing", self._vllm.pause(self._llm, mode))
        self._clock.stopped = True

    async def _drain(self) -> None:
        stalled = f"{self.name}, finishing its requests, sampled no token"
        async with self._clock.watching(stalled, "engine.request_timeout"):
            await self._answered(self._vllm.pause(self._llm, "wait"), "pausing")

    async def resume(self) -> None:
        await self._in_time("resuming", self._llm.resume_generation())
        self._restart_clock()

    async def sleep(self) -> None:
        await self._in_time("going to sleep", self._llm.sleep())
        self._clock.stopped = True

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        if unknown := set(tags or ()) - _SLEEP_TAGS:
            raise InputError(f"wake_up takes the tags weights and kv_cache, not {min(unknown)}")
        await self._in_time("waking up", self._llm.wake_up(list(tags) if tags else None))
        if not await self._in_time("waking up", self._llm.is_sleeping()):
            self._restart_clock()

    async def _in_time(self, what: str, call: Coroutine[Any, Any, _T]) -> _T:
        async with self._deadline(what, self._timeout):
            return await self._answered(call, what)

    async def device_ids(self) -> list[str]:
        """List each shard's device: a GPU's UUID; on a CPU, `HOST-PROCESS_ID`."""
        async with self._deadline("reporting its devices", self._timeout):
            return [reply["device"] for reply in await self._ask("report_device_id")]

    async def reset_prefix_cache(self) -> None:
        await self._in_time("resetting the prefix cache", self._llm.reset_prefix_cache())

    async def check_health(self) -> None:
        if self._llm.errored:
            raise EngineError(f"{self.name} is dead")
        # A round trip to the process that computes, which answers between two steps.
        answer = asyncio.ensure_future(self._in_time("a health check", self._llm.is_paused()))
        try:
            await asyncio.wait([answer], timeout=_STEP_SECONDS)
            if not answer.done() and self._pending:
                before = self._processor_seconds()
                await asyncio.wait([answer], timeout=_LOOK_SECONDS)
                # A step of a large model on a CPU takes long. Whether it ever ends is a question
                # of the requests' own deadline, `engine.request_timeout`.
                if not answer.done() and self._processor_seconds() > before + _LOOK_SECONDS / 10:
                    return
            await answer
        finally:
            answer.cancel()

    def _processor_seconds(self) -> float:
        """Return the processor time of the processes that compute."""
        total = 0.0
        for pid in self._vllm.engine_processes(self._llm):
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                for each in (process, *process.children(recursive=True)):
                    times = each.cpu_times()
                    total += times.user + times.system
        return total

    async def num_in_flight(self) -> int:
        return len(self._pending)

    async def metrics(self) -> "list[Metric]":
        from prometheus_client import REGISTRY

        return [m for m in REGISTRY.collect() if m.name.startswith(VLLM_METRICS)]

    async def shutdown(self) -> None:
        self._llm.shutdown()
        # vLLM calls it again from `__del__`, at the interpreter's end without the modules it needs.
        self._llm.shutdown = lambda timeout=None: None
