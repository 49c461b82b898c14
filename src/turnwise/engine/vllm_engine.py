"""vLLM's asynchronous engine behind the `Engine` protocol: the same class on a CPU and on GPUs.

The engine computes in a child process that a fork server starts; this object belongs to the event
loop of its caller. Log-probs are those of the processed distribution (after temperature, top-p
and top-k), the one that the tokens were drawn from.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from typing import TYPE_CHECKING

from turnwise.config import EngineConfig, ModelConfig, SamplingConfig
from turnwise.core.deadlines import StallClock, deadline
from turnwise.core.json_types import JsonObject
from turnwise.engine.logits_processors import (
    ADAPTER,
    EXTRA_ARG,
    failed,
    is_unsampled,
    load_processor,
    with_request,
)
from turnwise.engine.protocol import (
    PAUSE_MODES,
    VLLM_METRICS,
    Chunk,
    Completion,
    InFlight,
    PauseMode,
    Route,
    Sampling,
    WeightUpdate,
    collect,
)
from turnwise.engine.vllm_requests import make_chunk, read_prompt_logprobs, sampling_params
from turnwise.engine.vllm_start import engine_arguments, import_vllm, start_llm
from turnwise.engine.worker_calls import call_workers
from turnwise.errors import EngineError, InputError, WeightUpdateError, text_of

if TYPE_CHECKING:
    from prometheus_client import Metric

    from turnwise.engine.vllm_api import SamplingParams

_POLL_SECONDS = 0.01
_GRACE_SECONDS = 5.0
"""Time after the workers' own deadlines, whose errors are more specific."""
_SLEEP_TAGS = {"weights", "kv_cache"}
"""vLLM's tags of the parts whose memory sleep frees."""


class VllmEngine:
    """One vLLM engine.

    Args:
        model: The model to load.
        engine: Settings of the engine.
        seed: Seed of the engine's own random numbers.
        deterministic: Compute one request at a time without a prefix cache, so that a request's
            tokens and log-probs depend on nothing but its prompt and seed.
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
        arguments = engine_arguments(model, engine, deterministic) | {"seed": seed}
        if worker_extension:
            arguments |= {
                "worker_extension_cls": worker_extension,
                "weight_transfer_config": vllm.WeightTransferConfig(backend=weight_backend),
            }
        self._extended = bool(worker_extension)
        self._adapted = ADAPTER in (arguments["logits_processors"] or [])
        self._llm = start_llm(model.path, arguments, bool(engine.metrics))

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingConfig,
        request_id: str,
        seed: int | None = None,
        route: Route | None = None,
    ) -> Completion:
        async with aclosing(self.stream(prompt_token_ids, sampling, request_id, seed)) as chunks:
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
        interval, few = params.stream_interval or 1, None
        async with aclosing(self._chunks(prompt_token_ids, params, request_id)) as chunks:
            async for chunk in chunks:
                whole = chunk if few is None else few + chunk
                # vLLM returns the first token at once, whatever the interval is.
                if whole.finish_reason is None and len(whole.token_ids) < interval:
                    few = whole
                else:
                    few = None
                    yield whole

    async def _chunks(
        self, prompt_token_ids: Sequence[int], params: "SamplingParams", request_id: str
    ) -> AsyncGenerator[Chunk, None]:
        """Yield vLLM's chunks of a request; fails when the engine samples no token of any."""
        vllm = self._vllm
        await self._settle_processors(params, request_id)
        prompt = vllm.tokens_input(list(prompt_token_ids), cache_salt=self._cache_salt)
        sampled = 0
        prompt_logprobs: list[float | None] | None = None
        self._pending.add(request_id)
        stalled = f"{self.name}, with request {request_id} waiting, sampled no token"
        try:
            async with aclosing(self._llm.generate(prompt, params, request_id)) as outputs:
                while True:
                    async with self._clock.watching(stalled, "engine.request_timeout"):
                        output = await anext(outputs, None)
                    self._clock.moved()
                    if output is None:
                        return
                    if output.prompt_logprobs:
                        prompt_logprobs = read_prompt_logprobs(output.prompt_logprobs)
                    piece = output.outputs[0]
                    finished = piece.finish_reason is not None
                    labels = (
                        piece.weight_versions
                        if finished
                        else vllm.weight_versions_so_far(self._llm, request_id)
                    )
                    chunk = make_chunk(output, labels or (), sampled, prompt_logprobs)
                    if is_unsampled(chunk.logprobs):
                        name = f"request {request_id} on {self.name}"
                        raise failed(name, await self._processor_failure(request_id))
                    yield chunk
                    sampled += len(piece.token_ids)
                    if finished:
                        return
        except vllm.EngineDeadError as error:
            raise EngineError(f"{self.name} died during request {request_id}") from error
        except vllm.EngineGenerateError as error:
            why = error.__cause__ or error
            raise EngineError(f"{self.name} failed in request {request_id}: {why}") from error
        except (ValueError, vllm.VLLMValidationError) as error:
            raise InputError(f"{self.name} refused {request_id}: {error}") from error
        finally:
            self._pending.discard(request_id)

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
                await asyncio.to_thread(load_processor, name)
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
            async with self._deadline("pausing", self._timeout):
                await self._vllm.pause(self._llm, mode)
        self._clock.stopped = True

    async def _drain(self) -> None:
        stalled = f"{self.name}, finishing its requests, sampled no token"
        async with self._clock.watching(stalled, "engine.request_timeout"):
            await self._vllm.pause(self._llm, "wait")

    async def resume(self) -> None:
        async with self._deadline("resuming", self._timeout):
            await self._llm.resume_generation()
        self._restart_clock()

    async def sleep(self) -> None:
        async with self._deadline("going to sleep", self._timeout):
            await self._llm.sleep()
        self._clock.stopped = True

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        if unknown := set(tags or ()) - _SLEEP_TAGS:
            raise InputError(f"wake_up takes the tags weights and kv_cache, not {min(unknown)}")
        async with self._deadline("waking up", self._timeout):
            await self._llm.wake_up(list(tags) if tags else None)
            if await self._llm.is_sleeping():
                return
        self._restart_clock()

    def _restart_clock(self) -> None:
        self._clock.moved()
        self._clock.stopped = False

    async def device_ids(self) -> list[str]:
        """List each shard's device: a GPU's UUID; on a CPU, `HOST-PROCESS_ID`."""
        async with self._deadline("reporting its devices", self._timeout):
            return [reply["device"] for reply in await self._ask("report_device_id")]

    async def check_update(self, manifest: WeightUpdate) -> list[str]:
        async with self._deadline(f"checking weight update {manifest.version}", self._timeout):
            replies = await self._ask("check_update", manifest.to_dict())
        return [reply["device"] for reply in replies]

    async def update_weights(
        self, manifest: WeightUpdate, in_flight: InFlight = "keep", timeout: float | None = None
    ) -> int:
        seconds = timeout or self._timeout
        opening = ("open_update", manifest.to_dict(), seconds)
        return await self._load(f"weight update {manifest.version}", opening, seconds, in_flight)

    async def prepare_refit_info(
        self, state_dict_info: Mapping[str, tuple[Sequence[int], object]]
    ) -> None:
        plain = {
            name: (tuple(shape), str(dtype).removeprefix("torch."))
            for name, (shape, dtype) in state_dict_info.items()
        }
        async with self._deadline("preparing for weight updates", self._timeout):
            await self._ask("expect_tensors", plain)

    async def init_collective(
        self,
        rank_prefix: int,
        ip: str,
        port: int,
        world_size: int,
        train_world_size: int,
        timeout: float | None = None,
    ) -> None:
        seconds = timeout or self._timeout
        async with self._deadline("joining a process group", seconds + _GRACE_SECONDS):
            await self._ask(
                "join_collective", rank_prefix, ip, port, world_size, train_world_size, seconds
            )

    async def update_weights_via_ipc_zmq(
        self, address: str = "", timeout: float | None = None, in_flight: InFlight = "keep"
    ) -> None:
        """Load the weights that an `IpcSender` sends; the default address is the device's.

        Raises:
            WeightUpdateError, DeadlineError: as `update_weights` does.
        """
        seconds = timeout or self._timeout
        opening = ("open_stream", "ipc", address, seconds)
        await self._load("an update by ipc", opening, seconds, in_flight)

    async def update_weights_from_collective(
        self, timeout: float | None = None, in_flight: InFlight = "keep"
    ) -> None:
        """Load the weights that the trainer broadcasts.

        Raises:
            WeightUpdateError, DeadlineError: as `update_weights` does.
        """
        seconds = timeout or self._timeout
        opening = ("open_stream", "collective", "", seconds)
        await self._load("an update by collective", opening, seconds, in_flight)

    async def _load(
        self, what: str, opening: tuple[object, ...], seconds: float, in_flight: InFlight
    ) -> int:
        """Open an update in all workers, and load it; requests run until its first chunk arrives.

        Args:
            opening: The worker's method that opens the update, and its arguments.

        Returns:
            The version that was loaded.
        """
        async with self._deadline(what, seconds + _GRACE_SECONDS):
            try:
                method, *args = opening
                offers = await self._ask(str(method), *args)
                while not all(offers):
                    await asyncio.sleep(_POLL_SECONDS)
                    offers = await self._ask("poll_update")
                versions = {offer["version"] for offer in offers}
                if len(versions) > 1:
                    raise WeightUpdateError(f"{self.name} was offered versions {versions} at once")
                version = int(versions.pop())
                async with self._swapping(version, in_flight):
                    loaded = await self._ask("load_update")
                if not all(reply["ended"] for reply in loaded):
                    # A step behind: workers answer between two steps of the engine.
                    await self._ask("end_update", "")
                return version
            except BaseException as error:
                with suppress(Exception):  # the first error is the one to report
                    async with asyncio.timeout(_GRACE_SECONDS):
                        await self._ask("end_update", text_of(error))
                raise

    async def _ask(self, method: str, *args: object) -> list[JsonObject]:
        return await call_workers(self._llm, self.name, method, *args)

    @asynccontextmanager
    async def _swapping(self, version: int, in_flight: InFlight = "keep") -> AsyncIterator[None]:
        """Pause requests in flight around the loading of weights, and resume them under `version`.

        A failure leaves the engine paused: it must not serve half an update.
        """
        keep_cache = in_flight == "keep_cache"
        await self._vllm.pause(self._llm, PAUSE_MODES[in_flight], clear_cache=not keep_cache)
        if keep_cache:
            self._cache_salt = f"weights {version}"
        with self._clock.held():
            yield
            try:
                await self._llm.update_weight_version(str(version))
            except self._vllm.EngineDeadError as error:
                raise EngineError(f"{self.name} died during a weight update") from error
            await self._llm.resume_generation()
        self._restart_clock()

    async def reset_prefix_cache(self) -> None:
        async with self._deadline("resetting the prefix cache", self._timeout):
            await self._llm.reset_prefix_cache()

    async def check_health(self) -> None:
        try:
            async with self._deadline("a health check", self._timeout):
                await self._llm.check_health()
                await self._llm.is_paused()  # a round trip to the process that computes
        except self._vllm.EngineDeadError as error:
            raise EngineError(f"{self.name} is dead") from error

    async def num_in_flight(self) -> int:
        return len(self._pending)

    async def metrics(self) -> "list[Metric]":
        from prometheus_client import REGISTRY

        return [m for m in REGISTRY.collect() if m.name.startswith(VLLM_METRICS)]

    async def shutdown(self) -> None:
        self._llm.shutdown()

    def _deadline(self, what: str, seconds: float) -> AbstractAsyncContextManager[None]:
        return deadline(seconds, f"{self.name} did not finish {what}")
