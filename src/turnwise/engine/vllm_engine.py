"""vLLM's asynchronous engine behind the `Engine` protocol: the same class on a CPU and on GPUs.

The engine computes in a child process that a fork server starts; this object lives in the event
loop that calls it. Log-probs are those of the processed distribution (after temperature, top-p
and top-k), the one that the tokens were drawn from.
"""

import asyncio
import gc
import importlib
import multiprocessing
import multiprocessing.forkserver
import os
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from turnwise import fork_server
from turnwise.config import EngineConfig, ModelConfig, SamplingConfig
from turnwise.deadlines import StallClock
from turnwise.engine.logits_processors import (
    ADAPTER,
    EXTRA_ARG,
    SETTINGS,
    extra_args,
    failed,
    is_unsampled,
    load_processor,
    with_request,
)
from turnwise.engine.protocol import (
    PAUSE_MODES,
    STREAM_INTERVAL,
    VLLM_METRICS,
    Chunk,
    Completion,
    FinishReason,
    InFlight,
    PauseMode,
    Route,
    collect,
)
from turnwise.errors import (
    DeadlineError,
    EngineError,
    InputError,
    WeightUpdateError,
)

if TYPE_CHECKING:
    from prometheus_client import Metric

_ERROR_LINE = re.compile(r"\b(?:\w+Error|\w+Exception): (.+)")
_UNIPROC_EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""As a dotted string: the plain "uni" is rewritten to "mp" on CPUs."""
_FORKED_EXECUTOR = "turnwise.engine.forked_executor.ForkedExecutor"
_CPU_KV_CACHE_GIB = 0.5
_CPU_BLOCK_SIZE = 32
_STREAMED = ("ipc", "collective")
_LOOK_SECONDS = 0.5
_POLL_SECONDS = 0.01
_GRACE_SECONDS = 5.0
"""The workers' own waits end first: they know which of the trainer's messages did not come."""
_ERRORS = {kind.__name__: kind for kind in (DeadlineError, InputError, WeightUpdateError)}


_SLEEPING = {"weights", "kv_cache"}
"""vLLM's tags of the parts that sleep."""


class VllmEngine:
    """One vLLM engine.

    Args:
        model: What to load.
        engine: How to run it.
        seed: Seed of the engine's own random numbers.
        deterministic: Compute one request at a time without a prefix cache, so that a request's
            tokens and log-probs depend on nothing but its prompt and seed.
        worker_extension: `package.module.Class` that vLLM mixes into its worker; it brings the
            weight transports. Without one the engine keeps its weights.
        weight_backend: Name under which the extension registers its transports.
        name: What errors call this engine.

    Raises:
        InputError: when vLLM refuses the model or an argument.
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
        context = multiprocessing.get_context("forkserver")
        if not fork_server.share_with_engines():
            context.set_forkserver_preload(["turnwise.engine.preload"])
            multiprocessing.forkserver.ensure_running()  # imports there while we import here
        gc.disable()
        vllm = importlib.import_module("turnwise.engine.vllm_names")
        gc.enable()
        vllm.use_process_context(context)
        self.name = name
        self._vllm = vllm
        self._allowed = engine.logits_processors_allowed
        self._loaded: set[str] = set()
        """Names of requests' logits processors that can be imported."""
        self._timeout = engine.request_timeout
        self._clock = StallClock(engine.request_timeout)
        self._pending: set[str] = set()
        self._cache_salt: str | None = None
        """Keeps requests from cached prefixes that older weights computed."""
        arguments = engine_arguments(model, engine, deterministic) | {"seed": seed}
        if worker_extension:
            arguments |= {
                "worker_extension_cls": worker_extension,
                "weight_transfer_config": vllm.WeightTransferConfig(backend=weight_backend),
            }
        self._extended = bool(worker_extension)
        self._adapted = ADAPTER in (arguments["logits_processors"] or [])
        try:
            args = vllm.AsyncEngineArgs(**arguments)
            # Named, because vLLM's default adds a logger that nobody reads.
            loggers = [vllm.PrometheusStatLogger] if engine.metrics else []
            self._llm = vllm.AsyncLLM.from_engine_args(args, stat_loggers=loggers)
        except (ValueError, TypeError, OSError) as error:
            raise InputError(f"vLLM cannot serve {model.path}: {_first_sentence(error)}") from error
        except RuntimeError as error:  # the engine's process failed: its log tells why
            cause = _last_logged_error() or error
            raise InputError(f"vLLM cannot serve {model.path}: {cause}") from error

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
        sampling: Any,
        request_id: str,
        seed: int | None = None,
        route: Route | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        if isinstance(sampling, SamplingConfig):
            params = self._parameters(sampling, seed)
            params.stream_interval = STREAM_INTERVAL
        else:
            params = sampling
            params.logprobs = params.logprobs or 0
            params.flat_logprobs = True
            params.detokenize = bool(params.stop)
        params.output_kind = self._vllm.RequestOutputKind.DELTA
        interval, few = params.stream_interval or 1, None
        async with aclosing(self._chunks(prompt_token_ids, params, request_id)) as chunks:
            async for chunk in chunks:
                whole = chunk if few is None else few + chunk
                # vLLM tells the first token at once, whatever the interval is.
                if whole.finish_reason is None and len(whole.token_ids) < interval:
                    few = whole
                else:
                    few = None
                    yield whole

    def _parameters(self, sampling: SamplingConfig, seed: int | None) -> Any:
        return self._vllm.SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            stop=sampling.stop or None,
            stop_token_ids=sampling.stop_token_ids or None,
            ignore_eos=sampling.ignore_eos,
            prompt_logprobs=0 if sampling.prompt_logprobs else None,
            extra_args=extra_args(sampling) or None,
            seed=seed,
            logprobs=0,
            flat_logprobs=True,
            detokenize=bool(sampling.stop),
            skip_special_tokens=False,
        )

    async def _chunks(
        self, prompt_token_ids: Sequence[int], params: Any, request_id: str
    ) -> AsyncGenerator[Chunk, None]:
        """Yield vLLM's chunks of a request, as long as the engine samples tokens of any."""
        vllm = self._vllm
        await self._settle_processors(params, request_id)
        prompt = vllm.tokens_input(list(prompt_token_ids), cache_salt=self._cache_salt)
        sampled = 0
        prompt_logprobs: list[float | None] | None = None
        self._pending.add(request_id)
        try:
            async with aclosing(self._llm.generate(prompt, params, request_id)) as outputs:
                while True:
                    async with self._clock.watching():
                        output = await anext(outputs, None)
                    self._clock.moved()
                    if output is None:
                        return
                    if output.prompt_logprobs:
                        prompt_logprobs = _prompt_logprobs(output.prompt_logprobs)
                    piece = output.outputs[0]
                    finished = piece.finish_reason is not None
                    labels = (
                        piece.weight_versions
                        if finished
                        else vllm.weight_versions_so_far(self._llm, request_id)
                    )
                    chunk = _chunk(output, labels or (), sampled, prompt_logprobs)
                    if is_unsampled(chunk.logprobs):
                        name = f"request {request_id} on {self.name}"
                        raise failed(name, await self._processor_failure(request_id))
                    yield chunk
                    sampled += len(piece.token_ids)
                    if finished:
                        return
        except TimeoutError:
            raise DeadlineError(
                f"{self.name} sampled no token in {self._timeout:g} s, while request {request_id} "
                "waited for some (engine.request_timeout)"
            ) from None
        except vllm.EngineDeadError as error:
            raise EngineError(f"{self.name} died during request {request_id}") from error
        except vllm.EngineGenerateError as error:
            why = error.__cause__ or error
            raise EngineError(f"{self.name} failed in request {request_id}: {why}") from error
        except (ValueError, vllm.VLLMValidationError) as error:
            raise InputError(f"{self.name} refused {request_id}: {error}") from error
        finally:
            self._pending.discard(request_id)

    async def _settle_processors(self, params: Any, request_id: str) -> None:
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
        """Ask the shards why a request's logits processor failed; "" when none did."""
        if not (self._adapted and self._extended):
            return ""
        async with self._deadline(f"explaining the failure of {request_id}", self._timeout):
            replies = await self._ask("take_processor_failure", request_id)
        return next((reply["why"] for reply in replies if reply["why"]), "")

    async def abort(self, request_id: str) -> None:
        await self._llm.abort(request_id)

    async def pause(self, mode: PauseMode = "keep") -> None:
        if mode == "wait":  # for as long as the requests in flight move
            await self._drain()
        else:
            async with self._deadline("pausing", self._timeout):
                await self._vllm.pause(self._llm, mode)
        self._clock.stopped = True

    async def _drain(self) -> None:
        try:
            async with self._clock.watching():
                await self._vllm.pause(self._llm, "wait")
        except TimeoutError:
            raise DeadlineError(
                f"{self.name} sampled no token in {self._timeout:g} s, while it was to finish its "
                "requests (engine.request_timeout)"
            ) from None

    async def resume(self) -> None:
        async with self._deadline("resuming", self._timeout):
            await self._llm.resume_generation()
        self._go_on()

    async def sleep(self) -> None:
        async with self._deadline("going to sleep", self._timeout):
            await self._llm.sleep()
        self._clock.stopped = True

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        if unknown := set(tags or ()) - _SLEEPING:
            raise InputError(f"wake_up knows the tags weights and kv_cache, and not {min(unknown)}")
        async with self._deadline("waking up", self._timeout):
            await self._llm.wake_up(list(tags) if tags else None)
            if await self._llm.is_sleeping():
                return
        self._go_on()

    def _go_on(self) -> None:
        self._clock.moved()
        self._clock.stopped = False

    async def device_ids(self) -> list[str]:
        """List each shard's device: a GPU's UUID; on a CPU, `HOST-PROCESS_ID`."""
        async with self._deadline("telling its devices", self._timeout):
            return [reply["device"] for reply in await self._ask("report_device_id")]

    async def check_update(self, manifest: dict[str, Any]) -> list[str]:
        async with self._deadline(f"checking weight update {manifest['version']}", self._timeout):
            return [reply["device"] for reply in await self._ask("check_update", manifest)]

    async def update_weights(
        self, manifest: dict[str, Any], in_flight: InFlight = "keep", timeout: float | None = None
    ) -> int:
        seconds, version = timeout or self._timeout, int(manifest["version"])
        if manifest["transport"] in _STREAMED:
            address = manifest["path"]
            return await self._update_from(manifest["transport"], address, seconds, in_flight)
        async with self._deadline(f"weight update {version}", seconds):
            await self._ask("check_update", manifest)
            async with self._swapping(version, in_flight):
                await self._ask("load_update", manifest)
        return version

    async def prepare_refit_info(
        self, state_dict_info: Mapping[str, tuple[Sequence[int], Any]]
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
        """Load what an `IpcSender` at `address` sends, by default at that of the device; raises
        as `update_weights` does."""
        await self._update_from("ipc", address, timeout or self._timeout, in_flight)

    async def update_weights_from_collective(
        self, timeout: float | None = None, in_flight: InFlight = "keep"
    ) -> None:
        """Load what the trainer broadcasts; raises as `update_weights` does."""
        await self._update_from("collective", "", timeout or self._timeout, in_flight)

    async def _update_from(
        self, transport: str, address: str, seconds: float, in_flight: InFlight
    ) -> int:
        """Requests go on until the trainer's first chunk is here; returns its version."""
        async with self._deadline(f"an update by {transport}", seconds + _GRACE_SECONDS):
            try:
                await self._ask("open_stream", transport, address, seconds)
                while not all(offers := await self._ask("poll_stream")):  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_SECONDS)
                versions = {offer["version"] for offer in offers}
                if len(versions) > 1:
                    raise WeightUpdateError(f"{self.name} was offered versions {versions} at once")
                version = int(versions.pop())
                async with self._swapping(version, in_flight):
                    await self._ask("load_update")
                await self._ask("end_stream", "")
                return version
            except BaseException as error:
                with suppress(Exception):  # the error that brought us here is the one to tell
                    async with asyncio.timeout(_GRACE_SECONDS):
                        await self._ask("end_stream", str(error) or type(error).__name__)
                raise

    async def _ask(self, method: str, *args: Any) -> list[dict[str, Any]]:
        """Call a method of all workers; raises the first error among their replies."""
        call = asyncio.ensure_future(self._llm.collective_rpc(method, args=args))
        try:
            while not call.done():
                await asyncio.wait([call], timeout=_LOOK_SECONDS)
                # A call that was under way when the engine died is never answered.
                if self._llm.errored and not call.done():
                    raise EngineError(f"{self.name} died during a call of {method}")
            replies: list[dict[str, Any]] = call.result()
        except self._vllm.EngineDeadError as error:
            raise EngineError(f"{self.name} died during a call of {method}") from error
        finally:
            call.cancel()
        for reply in replies:
            if "error" in reply:
                raise _ERRORS[reply["error"]](f"{self.name}: {reply['message']}")
        return replies

    @asynccontextmanager
    async def _swapping(self, version: int, in_flight: InFlight = "keep") -> AsyncIterator[None]:
        """Around the loading of weights: what is done to requests in flight, and what follows.

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
        self._go_on()

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

    async def load(self) -> int:
        return len(self._pending)

    async def metrics(self) -> "list[Metric]":
        from prometheus_client import REGISTRY

        return [m for m in REGISTRY.collect() if m.name.startswith(VLLM_METRICS)]

    async def shutdown(self) -> None:
        self._llm.shutdown()

    @asynccontextmanager
    async def _deadline(self, what: str, seconds: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError:
            raise DeadlineError(f"{self.name} did not finish {what} in {seconds:g} s") from None


def engine_arguments(
    model: ModelConfig, engine: EngineConfig, deterministic: bool
) -> dict[str, Any]:
    """The arguments of vLLM's AsyncEngineArgs that a configuration asks for.

    Raises:
        InputError: when vLLM has no such engine on this machine.
    """
    vllm = importlib.import_module("turnwise.engine.vllm_names")
    classes, callables = _processors(engine.logits_processors)
    adapted = bool(callables or engine.logits_processors_allowed is not None)
    arguments: dict[str, Any] = {
        "model": model.path,
        "tokenizer": model.tokenizer,
        "dtype": model.dtype,
        "trust_remote_code": model.trust_remote_code,
        "tensor_parallel_size": engine.tensor_parallel_size,
        "pipeline_parallel_size": engine.pipeline_parallel_size,
        "max_model_len": model.max_length,
        "max_num_seqs": 1 if deterministic else engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "enable_prefix_caching": engine.prefix_caching and not deterministic,
        "logits_processors": [*classes, *([ADAPTER] if adapted else [])] or None,
        "logprobs_mode": "processed_logprobs",
        "enable_log_requests": False,
        "disable_log_stats": True,
    }
    if engine.kv_cache_gib:
        arguments["kv_cache_memory_bytes"] = int(engine.kv_cache_gib * 2**30)
    if vllm.current_platform.is_cpu():
        if engine.pipeline_parallel_size > 1:
            raise InputError(
                "engine.pipeline_parallel_size: vLLM shares an engine's layers among GPUs only; "
                "on a CPU set it to 1 and raise engine.tensor_parallel_size"
            )
        arguments.setdefault("kv_cache_memory_bytes", int(_CPU_KV_CACHE_GIB * 2**30))
        arguments |= {
            "block_size": _CPU_BLOCK_SIZE,
            "enforce_eager": True,
            "distributed_executor_backend": (
                _UNIPROC_EXECUTOR if engine.devices == 1 else _FORKED_EXECUTOR
            ),
        }
    elif vllm.current_platform.is_cuda():
        arguments["enable_sleep_mode"] = True
    arguments |= engine.extra
    if adapted:
        settings = {"always": callables, "allowed": engine.logits_processors_allowed}
        own = arguments.get("additional_config", {})
        arguments["additional_config"] = {**own, SETTINGS: settings}
    return arguments


def _chunk(
    output: Any, labels: Sequence[Any], start: int, prompt_logprobs: list[float | None] | None
) -> Chunk:
    """One output of vLLM; `labels` are the spans of versions from the completion's start."""
    piece = output.outputs[0]
    if piece.finish_reason == "error":
        raise EngineError(f"vLLM failed in request {output.request_id}")
    token_ids = list(piece.token_ids)
    flat = piece.logprobs
    logprobs: list[float] = []
    alternatives: list[list[tuple[int, float, int]]] = []
    if token_ids and flat is not None:
        logprobs = [flat.logprobs[index] for index in flat.start_indices]
        if len(flat.logprobs) > len(logprobs):
            ranked = list(zip(flat.token_ids, flat.logprobs, flat.ranks, strict=True))
            bounds = zip(flat.start_indices, flat.end_indices, strict=True)
            alternatives = [ranked[first:last] for first, last in bounds]
    if len(logprobs) != len(token_ids):
        raise EngineError(f"vLLM gave {len(logprobs)} log-probs for {len(token_ids)} tokens")
    end = start + len(token_ids)
    versions = [
        _version(span.version)
        for span in labels
        for _ in range(max(span.start, start), min(span.end, end))
    ]
    if len(versions) != len(token_ids):
        raise EngineError(f"vLLM told the weights of {len(versions)} of {len(token_ids)} tokens")
    return Chunk(
        token_ids,
        logprobs,
        versions,
        cast(FinishReason | None, piece.finish_reason),
        piece.stop_reason,
        output.num_cached_tokens or 0,
        prompt_logprobs,
        alternatives,
    )


def _prompt_logprobs(positions: Any) -> list[float | None]:
    return [next(iter(p.values())).logprob if p else None for p in positions]


def _last_logged_error() -> str:
    """The last error line in this process's log, which the engine's process writes to as well."""
    path = Path(os.readlink("/proc/self/fd/2"))
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    errors = (match[1] for line in reversed(lines) if (match := _ERROR_LINE.search(line)))
    return next((text for text in errors if "root cause" not in text), "")


def _version(label: str) -> int:
    """vLLM calls the weights that it loaded itself "default"; to us they are version 0."""
    return 0 if label == "default" else int(label)


def _processors(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """The names of vLLM's batch classes, and those of callables.

    Raises:
        InputError: when one cannot be loaded, or is neither.
    """
    vllm = importlib.import_module("turnwise.engine.vllm_names")
    kinds: tuple[list[str], list[str]] = [], []
    for name in names:
        loaded = load_processor(name, "engine.logits_processors")
        if not callable(loaded):
            raise InputError(f"engine.logits_processors: {name} is not callable")
        is_class = isinstance(loaded, type) and issubclass(loaded, vllm.LogitsProcessor)
        kinds[0 if is_class else 1].append(name)
    return kinds


def _first_sentence(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3]) or type(error).__name__
