"""vLLM's asynchronous engine behind the `Engine` protocol: the same class on a CPU and on GPUs.

The engine computes in a child process that a fork server starts; the `VllmEngine` object belongs to
the event loop of its caller. Log-probs come from the processed distribution (after temperature,
top-p and top-k), from which the tokens were drawn. Weights are loaded while requests are paused. A
new version of an adapter is loaded next to its earlier versions, without a pause.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import psutil

from turnwise.config import EngineConfig, ModelConfig
from turnwise.core.aio import run_in_thread
from turnwise.core.deadlines import StallClock, deadline
from turnwise.core.json_types import Args, JsonObject, Kwargs, dtype_name
from turnwise.core.optional import Foreign, load_object
from turnwise.engine.adapters import (
    NO_ADAPTERS,
    POLICY,
    AdapterTable,
    EngineAdapters,
    key_of,
)
from turnwise.engine.grammar_replay import GrammarReplay
from turnwise.engine.logits_processors import (
    ADAPTER,
    EXTRA_ARG,
    SETTINGS,
    Call,
    name_of,
    with_request,
)
from turnwise.engine.protocol import (
    PAUSE_MODES,
    VLLM_METRICS,
    WEIGHT_BACKEND,
    Chunk,
    InFlight,
    Occupancy,
    PauseMode,
    Rendezvous,
    Request,
    Route,
    WeightUpdate,
)
from turnwise.engine.vllm_images import ImageInputs
from turnwise.engine.vllm_requests import TokenStreams, sampling_params
from turnwise.engine.vllm_start import engine_arguments, import_vllm, start_llm
from turnwise.engine.worker_extensions import combined
from turnwise.errors import (
    DeadlineError,
    EngineError,
    InputError,
    TrajectoryError,
    TurnwiseError,
    WeightUpdateError,
    text_of,
)
from turnwise.trajectory import FORCED

if TYPE_CHECKING:
    from prometheus_client import Metric

    from turnwise.internals.vllm import AsyncLLM, MultiModalInput, SamplingParams

_T = TypeVar("_T")
_POLL_SECONDS = 0.01
_DEATH_CHECK_SECONDS = 0.5
_GRACE_SECONDS = 5.0  # added to the workers' own deadlines, whose errors are more specific
_STEP_SECONDS = 5.0  # time after which a health check measures whether the engine still computes
_LOOK_SECONDS = 2.0  # duration of this measurement; computing takes at least a tenth of a core
_CERTAIN = -1e-4  # log-prob above which a token may have been forced
_SLEEP_TAGS = {"weights", "kv_cache"}  # vLLM's tags for the memory that `sleep` frees
_ERRORS = {kind.__name__: kind for kind in (DeadlineError, InputError, WeightUpdateError)}
"""Classes of the errors in workers' replies, by name."""


class VllmEngine:
    """One vLLM engine.

    Args:
        model: The model to load.
        engine: Settings of the engine.
        seed: Seed of the engine's own random numbers.
        deterministic: Compute one request at a time without a prefix cache, so that a request's
            tokens and log-probs depend only on the request's prompt and seed.
        adapters: Adapters that the engine holds; they need a worker extension.
        worker_extension: `package.module.Class` that vLLM mixes into its worker to add the weight
            transports, in addition to the class of `engine.vllm_args.worker_extension_cls`. Without
            a worker extension, weights cannot be updated, and tokens that a logits processor forces
            count as sampled.
        name: Name of this engine in errors.
        start: Function that starts vLLM; it gets the arguments of `start_llm`.

    Raises:
        InputError: when vLLM refuses the model or an argument.

    Example:
        engine = VllmEngine(config.model, config.engine)
        completion = await generate(engine, Request([5, 6, 7], config.sampling, "request-1"))
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
        name: str = "engine",
        start: "Callable[[str, JsonObject, bool], AsyncLLM]" = start_llm,
    ) -> None:
        vllm = import_vllm()
        self.name = name
        self._vllm = vllm
        self._allowed = engine.logits_processors_allowed
        self._loaded: set[str] = set()  # names of requests' logits processors that were imported
        self._unforced: set[str] = set()  # names of logits processors that cannot force tokens
        self._timeout = engine.request_timeout
        self._clock = StallClock(engine.request_timeout)
        self._pending: set[str] = set()
        self._cache_salt: str | None = None
        """Salt of the prefix cache, so that requests do not use prefixes of older weights; None
        while all cached prefixes may be used."""
        self._adapters = AdapterTable(adapters)
        self._unloaded = dict(adapters.paths)  # paths of adapters that are not loaded yet, by name
        self._loading = asyncio.Lock()
        self._has_adapters = bool(adapters.rank)
        self._slots = 0  # number of adapters that the engine can hold
        self._captures = engine.routing_replay and vllm.current_platform.is_cpu()
        """Whether the workers need a call of `capture_experts` to record the routed experts."""
        self._ready = False  # whether adapters are loaded, and routed experts are captured
        if self._captures and not worker_extension:
            raise InputError("engine.routing_replay: on a CPU an engine needs a worker extension")
        if model.adapter is not None and POLICY not in adapters.paths:
            raise InputError("model.adapter: an engine needs adapters=EngineAdapters.of(config)")
        arguments = engine_arguments(model, engine, deterministic, adapters) | {"seed": seed}
        if self._has_adapters:
            self._slots = arguments["max_loras"]
        if extension := combined(worker_extension, arguments.get("worker_extension_cls", "")):
            arguments["worker_extension_cls"] = extension
        if worker_extension:
            config = vllm.WeightTransferConfig(backend=WEIGHT_BACKEND)
            arguments["weight_transfer_config"] = config
        self._extended = bool(worker_extension)
        self._adapted = ADAPTER in (arguments["logits_processors"] or [])
        settings: JsonObject = arguments["additional_config"][SETTINGS] if self._adapted else {}
        self._always: list[str] = settings.get("always", [])
        """Names of the callables that process the logits of every request."""
        self._llm = start(model.path, arguments, bool(engine.metrics))
        self._streams = TokenStreams(self._llm, self._clock)
        self._images = ImageInputs(self._llm, engine.images_per_prompt)
        self._grammars = GrammarReplay(self._llm)

    async def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        params, calls = sampling_params(request.sampling, request.seed), list[Call]()
        if self._adapted or EXTRA_ARG in (params.extra_args or {}):
            params.extra_args, calls = with_request(params.extra_args, request.id, self._allowed)
            for name in {*map(name_of, calls)} - self._loaded:
                async with self._deadline(f"loading the logits processor {name}", self._timeout):
                    await run_in_thread(load_object, name, "logits_processors")
                self._loaded.add(name)
        seen: dict[str, MultiModalInput] = {}
        if request.prompt.images:
            async with self._deadline(f"processing the images of {request.id}", self._timeout):
                seen = await self._images.prepare(request.prompt)
        await self.load_adapters()
        if request.route.folder:
            await self._bring(request.route)
        await self._llm.get_supported_tasks()  # nothing may wait from here to vLLM's queue
        vllm = self._vllm
        with self._adapters.using(request.route.adapter, request.id) as adapter:
            self._pending.add(request.id)
            try:
                inputs = vllm.tokens_input(request.prompt.tolist(), cache_salt=self._cache_salt)
                if seen:
                    inputs = self._images.put_in(inputs, request.prompt.images, seen)
                watching = partial(self._moving, f"with request {request.id} waiting")
                made = self._streams.chunks(inputs, params, request, adapter, watching)
                names = {*self._always, *map(name_of, calls)}
                if self._extended and not names <= self._unforced:
                    made = self._marked(made, request.id, names)
                if request.record_allowed and params.structured_outputs:
                    made = self._with_allowed(made, request, params)
                async with aclosing(made) as chunks:
                    async for chunk in chunks:
                        if any(logprob != logprob for logprob in chunk.logprobs):  # not a number
                            raise await self._unsampled(request.id)
                        yield chunk
            except vllm.EngineDeadError as error:
                raise EngineError(f"{self.name} died during request {request.id}") from error
            except vllm.EngineGenerateError as error:
                why = error.__cause__ or error
                raise EngineError(f"{self.name} failed in request {request.id}: {why}") from error
            except (ValueError, vllm.VLLMValidationError) as error:
                raise InputError(f"{self.name} refused {request.id}: {error}") from error
            finally:
                self._pending.discard(request.id)

    async def load_adapters(self) -> None:
        """Load the adapters, unless they are loaded already. The first request calls this too.

        Raises:
            InputError: when an adapter cannot be read or does not fit the model; it names the
                adapter's key.
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
                self._adapters.add(adapter)
                del self._unloaded[name]
            self._ready = True

    async def _bring(self, route: Route) -> None:
        """Load the adapter that a route names, unless the engine holds it. If all slots are taken,
        first remove another adapter."""
        if self._adapters.touch(route.adapter):
            return
        what = f"a wait for one of {self._slots} slots of adapters (engine.vllm_args.max_loras)"
        async with self._moving(f"with {what}"), self._loading:
            if self._adapters.touch(route.adapter):
                return
            while len(self._adapters) >= self._slots:
                await self._make_room()
            adapter, key = self._adapters.new(route.adapter), f"the adapter {route.adapter}"
            adapter.brought = True
            try:
                await self._ask("put_adapter", adapter.number, route.folder, key)
            except BaseException:  # a worker may hold the adapter, and would never free its slot
                with suppress(Exception):
                    await self._ask("remove_adapter", adapter.number)
                raise
            self._adapters.add(adapter)

    async def _make_room(self) -> None:
        """Remove an adapter. If requests use all adapters, choose one that gets no new requests and
        is removed when its last request ends. Without this, a client that always has a request in
        flight would keep its adapter's slot for ever."""
        if (leaving := self._adapters.evict()) is None:
            raise InputError(f"engine.vllm_args.max_loras: no slot of {self._slots} is left")
        try:
            while leaving.users:  # noqa: ASYNC110 (no event says that a request has ended)
                await asyncio.sleep(_POLL_SECONDS)
        except BaseException:
            self._adapters.add(leaving)
            raise
        await self._ask("remove_adapter", leaving.number)

    def _moving(self, waiting: str) -> AbstractAsyncContextManager[object]:
        """Limit a wait: raise `DeadlineError` if the engine samples no token of any request for
        `engine.request_timeout` seconds."""
        stalled = f"{self.name}, {waiting}, sampled no token"
        return self._clock.watching(stalled, "engine.request_timeout")

    async def _unsampled(self, request_id: str) -> TrajectoryError:
        """Return the error of a request whose log-probs are NaN: the model's logits are NaN, or a
        logits processor failed or excluded every token."""
        who, why = f"request {request_id} on {self.name}", ""
        if self._adapted and self._extended:
            async with self._deadline(f"explaining the failure of {request_id}", self._timeout):
                replies = await self._ask("take_processor_failure", request_id)
            why = next((reply["why"] for reply in replies if reply["why"]), "")
        if why:
            return TrajectoryError("logits_processor_error", f"{who}: {why}")
        return TrajectoryError(
            "no_token",
            f"{who}: no token has a probability: the model's logits are not numbers, or a logits "
            "processor left none",
        )

    async def _with_allowed(
        self, made: AsyncGenerator[Chunk, None], request: Request, params: "SamplingParams"
    ) -> AsyncGenerator[Chunk, None]:
        """Add to the last chunk of a completion the ids that its grammar allowed at each token."""
        sampled = list[int]()
        async with aclosing(made) as chunks:
            async for chunk in chunks:
                sampled += chunk.token_ids
                if chunk.finish_reason not in (None, "abort"):
                    tasks = await self._llm.get_supported_tasks()
                    async with self._deadline(f"replaying {request.id}'s grammar", self._timeout):
                        allowed = await run_in_thread(
                            self._grammars.allowed, request, params, sampled, tasks
                        )
                    chunk = replace(chunk, allowed=allowed)
                yield chunk

    async def _marked(
        self, made: AsyncGenerator[Chunk, None], request_id: str, names: set[str]
    ) -> AsyncGenerator[Chunk, None]:
        """Set the version `FORCED` for the tokens that logits processors forced. A forced token has
        a log-prob of about 0, but so can a sampled token; only the engine's process knows which
        tokens were forced."""
        places, start = set[int](), 0
        async with aclosing(made) as chunks:
            async for chunk in chunks:
                values = enumerate(chunk.logprobs, start)
                certain = {place for place, logprob in values if logprob > _CERTAIN}
                if certain - places and not names <= self._unforced:
                    what = f"listing what was not sampled in {request_id}"
                    async with self._deadline(what, self._timeout):
                        replies = await self._ask("take_forced_tokens", request_id)
                    known = [reply["places"] for reply in replies if reply["places"] is not None]
                    if not known:
                        self._unforced |= names
                    places.update(*known)
                forced, versions = certain & places, enumerate(chunk.weight_versions, start)
                marked = [FORCED if place in forced else version for place, version in versions]
                start += len(marked)
                yield replace(chunk, weight_versions=marked) if forced else chunk

    async def pause(self, mode: PauseMode = "keep") -> None:
        if mode == "wait":  # there is no fixed deadline while requests in flight make progress
            async with self._moving("finishing its requests"):
                await self._answered(self._vllm.pause(self._llm, mode), "pausing")
        else:
            await self._in_time("pausing", self._vllm.pause(self._llm, mode))
        self._clock.stopped = True

    async def resume(self) -> None:
        await self._in_time("resuming", self._llm.resume_generation())
        self._clock.moved()  # a failed update pauses the engine without stopping the clock
        self._clock.stopped = False

    async def sleep(self) -> None:
        await self._in_time("going to sleep", self._llm.sleep())
        self._clock.stopped = True

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        if unknown := set(tags or ()) - _SLEEP_TAGS:
            raise InputError(f"wake_up takes the tags weights and kv_cache, not {min(unknown)}")
        await self._in_time("waking up", self._llm.wake_up(list(tags) if tags else None))
        if not await self._in_time("waking up", self._llm.is_sleeping()):
            self._clock.moved()
            self._clock.stopped = False

    async def check_update(self, manifest: WeightUpdate) -> list[str]:
        async with self._deadline(f"checking weight update {manifest.version}", self._timeout):
            replies = await self._ask("check_update", manifest.to_dict())
        return [reply["device"] for reply in replies]

    async def update_weights(
        self, manifest: WeightUpdate, in_flight: InFlight = "keep", timeout: float | None = None
    ) -> int:
        seconds = timeout or self._timeout
        what = f"weight update {manifest.version}"
        return await self._load(what, manifest.to_dict(), seconds, in_flight)

    async def prepare_refit_info(
        self, state_dict_info: Mapping[str, tuple[Sequence[int], object]]
    ) -> None:
        """Set the tensors that every update has: by name, the shape and the torch type (or the
        type's name)."""
        given = state_dict_info.items()
        plain = {name: (tuple(shape), dtype_name(dtype)) for name, (shape, dtype) in given}
        async with self._deadline("preparing for weight updates", self._timeout):
            await self._ask("expect_tensors", plain)

    async def init_collective(self, group: Rendezvous, timeout: float | None = None) -> None:
        seconds = timeout or self._timeout
        async with self._deadline("joining a process group", seconds + _GRACE_SECONDS):
            await self._ask("join_collective", *group, seconds)

    async def receive_weights(
        self,
        transport: Literal["ipc", "collective"],
        address: str = "",
        timeout: float | None = None,
        in_flight: InFlight = "keep",
    ) -> None:
        """Load the weights that an `IpcSender` sends, or that the trainer broadcasts.

        Args:
            address: The sender's address; "" takes the device's default. Only for `ipc`.
        """
        seconds = timeout or self._timeout
        unknown = {"version": 0, "path": address, "nbytes": 0, "tensors": ()}
        opening = {"transport": transport, **unknown}
        await self._load(f"an update by {transport}", opening, seconds, in_flight)

    async def _load(
        self, what: str, manifest: JsonObject, seconds: float, in_flight: InFlight
    ) -> int:
        """Begin an update in all workers, and load it once its first chunk arrives."""
        async with self._deadline(what, seconds + _GRACE_SECONDS):
            try:
                offers = await self._ask("open_update", manifest, seconds)
                while not all(offers):
                    await asyncio.sleep(_POLL_SECONDS)
                    offers = await self._ask("poll_update")
                versions = {offer["version"] for offer in offers}
                if len(versions) > 1:
                    raise WeightUpdateError(f"{self.name} was offered versions {versions} at once")
                version = int(versions.pop())
                if self._adapters.trained is not None:
                    loaded = await self._load_adapter(version, in_flight)
                else:  # after a failure it stays paused, because it must not serve half an update
                    keep_cache = in_flight == "keep_cache"
                    mode = PAUSE_MODES[in_flight]
                    pausing = self._vllm.pause(self._llm, mode, clear_cache=not keep_cache)
                    await self._answered(pausing)
                    if keep_cache:
                        self._cache_salt = f"weights {version}"
                    with self._clock.held():
                        loaded = await self._ask("load_update")
                        await self._answered(self._llm.update_weight_version(str(version)))
                        await self._answered(self._llm.resume_generation())
                    self._clock.stopped = False
                if not all(reply["ended"] for reply in loaded):
                    # A call can wait for a step of the engine, because workers answer between two
                    # steps. So this call is made only if it is needed.
                    await self._ask("end_update", "")
                return version
            except BaseException as error:
                with suppress(Exception):  # the first error is the one to report
                    async with asyncio.timeout(_GRACE_SECONDS):
                        await self._ask("end_update", text_of(error))
                raise

    async def _load_adapter(self, version: int, in_flight: InFlight) -> list[JsonObject]:
        """Load the update in progress as the adapters for new requests; requests in flight keep
        their adapters.

        Requests on an older adapter end early only if `in_flight` is `abort`, or if the engine
        would hold more than `VERSIONS` versions of the adapter. Their finish reason is `abort`.
        """
        made = [self._adapters.new(name, version) for name in self._adapters.policies]
        numbers = {adapter.name: adapter.number for adapter in made}
        try:
            loaded = await self._ask("load_update", numbers, self._adapters.trained)
        except BaseException:
            for adapter in made:
                with suppress(Exception):  # the first error is the one to report
                    await self._ask("remove_adapter", adapter.number)
            raise
        for adapter in made:  # add before aborting, because aborted requests continue with these
            self._adapters.add(adapter)
        for old in self._adapters.excess():
            # Abort first: vLLM cannot compute a request whose adapter is missing.
            await self._streams.abort(old.users)
            await self._ask("remove_adapter", old.number)
        if in_flight == "abort":
            for old in self._adapters.older:
                await self._streams.abort(old.users)
        return loaded

    async def _ask(self, method: str, *args: object) -> list[JsonObject]:
        """Call a method of `WorkerExtension` in all workers; raise the first error of a worker."""
        call = self._llm.collective_rpc(method, args=args)
        replies: list[JsonObject] = await self._answered(call, f"a call of {method}")
        for reply in replies:
            if "error" in reply:
                raise _ERRORS[reply["error"]](f"{self.name}: {reply['message']}")
        return replies

    async def _answered(self, call: Coroutine[Any, Any, _T], what: str = "a weight update") -> _T:
        """Wait for an answer from the engine's process. Raise EngineError if the process dies,
        because vLLM's own call would wait for ever in that case."""
        answer = asyncio.ensure_future(call)
        try:
            while not answer.done():
                await asyncio.wait([answer], timeout=_DEATH_CHECK_SECONDS)
                if self._llm.errored and not answer.done():
                    raise EngineError(f"{self.name} died during {what}")
            return answer.result()
        except self._vllm.EngineDeadError as error:
            raise EngineError(f"{self.name} died during {what}") from error
        finally:
            answer.cancel()

    async def _in_time(self, what: str, call: Coroutine[Any, Any, _T]) -> _T:
        async with self._deadline(what, self._timeout):
            return await self._answered(call, what)

    def _deadline(self, what: str, seconds: float) -> AbstractAsyncContextManager[None]:
        return deadline(seconds, f"{self.name} did not finish {what}")

    async def device_ids(self) -> list[str]:
        """List each shard's device: a GPU's UUID; on a CPU, `HOST-PROCESS_ID`."""
        async with self._deadline("reporting its devices", self._timeout):
            return [reply["device"] for reply in await self._ask("report_device_id")]

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: Args = (), kwargs: Kwargs = None
    ) -> list[Foreign]:
        """Call a method of the engine's workers, for example of the class in
        `engine.vllm_args.worker_extension_cls`.

        Args:
            timeout: Seconds; None takes `engine.request_timeout`.

        Returns:
            The answer of each worker, as plain values.

        Raises:
            TurnwiseError: when the method is missing, or raises.
        """
        call = self._llm.collective_rpc(method, args=tuple(args), kwargs=dict(kwargs or {}))
        async with self._deadline(f"a call of {method}", timeout or self._timeout):
            try:
                return list(await self._answered(call, f"a call of {method}"))
            except TurnwiseError:
                raise
            except Exception as error:
                raise TurnwiseError(f"{self.name}: {method} failed: {error}") from error

    async def reset_prefix_cache(self) -> None:
        await self._in_time("resetting the prefix cache", self._llm.reset_prefix_cache())

    async def check_health(self) -> Occupancy | None:
        if self._llm.errored:
            raise EngineError(f"{self.name} is dead")
        # A round trip to the process that computes. It answers between two steps.
        asked = self._vllm.occupancy(self._llm)
        answer = asyncio.ensure_future(self._in_time("a health check", asked))
        try:
            await asyncio.wait([answer], timeout=_STEP_SECONDS)
            if not answer.done() and self._pending:
                before = self._processor_seconds()
                await asyncio.wait([answer], timeout=_LOOK_SECONDS)
                # A step of a large model on a CPU takes long. If a step never ends, the requests'
                # own deadline, `engine.request_timeout`, ends them.
                if not answer.done() and self._processor_seconds() > before + _LOOK_SECONDS / 10:
                    return None
            return Occupancy(*await answer)
        finally:
            answer.cancel()

    def _processor_seconds(self) -> float:
        """Return the processor time, in seconds, of the processes that compute."""
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
        self._grammars.close()
        self._llm.shutdown()
        # vLLM calls `shutdown` again from `__del__`. At the interpreter's end, the modules that
        # `shutdown` needs are gone.
        self._llm.shutdown = lambda timeout=None: None
