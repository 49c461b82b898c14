"""vLLM's engine client on top of a `Generator`, which samples the tokens of requests.

vLLM's frontend renders, checks and detokenises. `EngineCoreAdapter` replaces its engine process: it
gets tokens from the generator, and records each completion in its session.
"""

import asyncio
import contextlib
import copy
import itertools
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from http import HTTPStatus

import numpy as np
import torch

from turnwise.config import Config
from turnwise.core.spans import chat_span, record_answer
from turnwise.engine.adapters import POLICY, EngineAdapters
from turnwise.engine.protocol import (
    STREAM_INTERVAL,
    Alternatives,
    Chunk,
    Generator,
    Request,
    Route,
)
from turnwise.engine.vllm_start import engine_arguments
from turnwise.errors import DeadlineError, EngineError, InputError, TrajectoryError
from turnwise.serving.openai.request_context import CURRENT, ChoiceKey, RequestContext
from turnwise.serving.openai.vllm_api import (
    AsyncEngineArgs,
    AsyncLLM,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDeadError,
    FinishReason,
    GracefulHTTPError,
    InputProcessor,
    LogprobsLists,
    LogprobsTensors,
    OutputProcessor,
    PrefillStats,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    VLLMValidationError,
    renderer_from_config,
)

_FINISH = {str(reason): reason for reason in FinishReason}

Recorder = Callable[[RequestContext, ChoiceKey, list[int], Sequence[Chunk]], None]
"""Receives a finished completion: the request, which of its completions, the prompt's ids and all
chunks."""


class EngineClient(AsyncLLM):  # type: ignore[misc]
    """vLLM's engine client without its own engine.

    Args:
        config: Model, engine and sampling defaults.
        generator: Samples the tokens.
        record: Called with each finished completion.
        healthy: Returns whether anything can be served now.

    Example:
        >>> client = EngineClient(config, generator, hooks.record, lambda: True)
        >>> await init_app_state(client, app.state, args, EngineClient.tasks)
    """

    tasks = ("generate",)

    def __init__(
        self,
        config: Config,
        generator: Generator,
        record: Recorder,
        healthy: Callable[[], bool],
    ) -> None:
        adapters = EngineAdapters.of(config)
        arguments = engine_arguments(config.model, config.engine, config.deterministic, adapters)
        arguments["generation_config"] = "vllm"  # only our defaults
        self.vllm_config = AsyncEngineArgs(**arguments).create_engine_config()
        self.model_config = self.vllm_config.model_config
        self.scheduler_config = self.vllm_config.scheduler_config
        self.observability_config = self.vllm_config.observability_config
        self.log_requests = self.log_stats = False
        self.admission_stats = self.logger_manager = self.output_handler = None
        self.renderer = renderer_from_config(self.vllm_config)
        self.input_processor = InputProcessor(self.vllm_config, self.renderer)
        self.output_processor = OutputProcessor(self.renderer.tokenizer, log_stats=False)
        self.engine_core = EngineCoreAdapter(generator, self.output_processor, record)
        self._supported_tasks = self.tasks
        self._sampling = config.sampling
        self._healthy = healthy
        self._run_output_handler()

    async def add_request(
        self, request_id: str, prompt: object, params: SamplingParams, **options: object
    ) -> object:
        if (context := CURRENT.get()) is not None:
            sampling = context.session.sampling or self._sampling
            written = () if context.request is None else context.request.model_fields_set
            if "min_tokens" not in written:
                params.min_tokens = min(sampling.min_tokens, params.max_tokens)
            if "ignore_eos" not in written:
                params.ignore_eos = sampling.ignore_eos
        return await super().add_request(request_id, prompt, params, **options)

    async def generate(
        self, *args: object, **options: object
    ) -> AsyncGenerator[RequestOutput, None]:
        context = CURRENT.get()
        texts: dict[int, list[str]] = defaultdict(list)
        async with contextlib.aclosing(super().generate(*args, **options)) as outputs:
            async for output in outputs:
                for piece in output.outputs:
                    texts[piece.index].append(piece.text)
                if output.finished and context is not None:
                    context.texts |= {(output.request_id, i): "".join(texts[i]) for i in texts}
                yield output

    @property
    def errored(self) -> bool:
        return not self.is_running

    async def check_health(self) -> None:
        if not self._healthy():
            raise EngineDeadError

    async def is_tracing_enabled(self) -> bool:
        return False

    def shutdown(self, timeout: float | None = None) -> None:
        """Cancel the client's tasks; the generator's owner shuts it down."""
        if hasattr(self, "engine_core"):
            self.engine_core.shutdown()
        if (handler := getattr(self, "output_handler", None)) is not None:
            handler.cancel()


class EngineCoreAdapter:
    """The interface of vLLM's engine process, on top of a `Generator`.

    Args:
        generator: Samples the tokens.
        outputs: vLLM's detokenizer, which also passes errors to requests.
        record: Called with each finished completion.
    """

    def __init__(self, generator: Generator, outputs: OutputProcessor, record: Recorder) -> None:
        self._generator = generator
        self._outputs = outputs
        self._record = record
        self._queue: asyncio.Queue[tuple[int, EngineCoreOutput]] = asyncio.Queue()
        """Outputs, each with the weight version of its tokens."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._held: tuple[int, EngineCoreOutput] | None = None
        """Output of another weight version, for the next call."""

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        state = self._outputs.request_states[request.request_id]
        key = state.external_req_id, state.request_index
        work = self._run(request, CURRENT.get(), key)
        self._tasks[request.request_id] = asyncio.create_task(work)

    async def abort_requests_async(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if (task := self._tasks.get(request_id)) is not None:
                task.cancel()

    async def get_output_async(self) -> EngineCoreOutputs:
        """Return the outputs since the last call, up to a change of the weight version."""
        version, first = self._held or await self._queue.get()
        outputs, self._held = [first], None
        while not self._queue.empty():
            item = self._queue.get_nowait()
            if item[0] != version:
                self._held = item
                break
            outputs.append(item[1])
        return EngineCoreOutputs(outputs=outputs, weight_version=str(version))

    def shutdown(self, timeout: float | None = None) -> None:
        for task in self._tasks.values():
            task.cancel()

    async def _run(
        self, request: EngineCoreRequest, context: RequestContext | None, key: ChoiceKey
    ) -> None:
        params, request_id = request.sampling_params, request.request_id
        prompt = list(request.prompt_token_ids)
        lora = request.lora_request
        adapter = lora.lora_name if lora is not None else POLICY
        if context is not None and context.scores:
            context = None
        try:
            asked = Request(
                prompt,
                _sampling_of(params, prompt, context),
                request_id,
                params.seed,
                Route(adapter=adapter),
                whole=params.output_kind != RequestOutputKind.DELTA,
            )
            stream = sample(self._generator, self._record, context, key, asked)
            async with contextlib.aclosing(stream) as chunks:
                async for chunk in chunks:
                    self._pass_on(request_id, params, chunk)
        except Exception as error:  # raised to this request's client; other requests continue
            self._fail(request_id, client_error(error))
        finally:
            self._tasks.pop(request_id, None)

    def _pass_on(self, request_id: str, params: SamplingParams, chunk: Chunk) -> None:
        """Pass a chunk to vLLM's frontend, one part for each weight version in it."""
        count, versions = len(chunk.token_ids), chunk.weight_versions
        edges = [0, *(i for i in range(1, count) if versions[i] != versions[i - 1]), count]
        wanted = params.num_logprobs is not None
        # vLLM's frontend finds the stop string again, and cuts the text before it.
        by_string = isinstance(chunk.stop_reason, str)
        finish = None if chunk.finish_reason is None else _FINISH[chunk.finish_reason]
        for start, end in itertools.pairwise(edges):
            last = end == count
            output = EngineCoreOutput(
                request_id=request_id,
                new_token_ids=chunk.token_ids[start:end],
                new_logprobs=_logprobs(chunk, start, end) if wanted else None,
                new_prompt_logprobs_tensors=None if start else _prompt_logprobs(chunk),
                finish_reason=finish if last and not by_string else None,
                stop_reason=chunk.stop_reason if last and not by_string else None,
                prefill_stats=PrefillStats(
                    num_cached_tokens=chunk.cached_tokens,
                    num_cache_creation_tokens=chunk.stored_tokens,
                ),
            )
            self._queue.put_nowait((versions[start] if start < end else 0, output))
        if by_string:
            output = EngineCoreOutput(
                request_id, [], finish_reason=finish, stop_reason=chunk.stop_reason
            )
            self._queue.put_nowait((0, output))

    def _fail(self, request_id: str, error: Exception) -> None:
        """Raise the error to the client, and abort the request and its siblings (n > 1)."""
        if (state := self._outputs.request_states.get(request_id)) is None:
            return
        state.queue.put(error)
        name = state.parent_req.request_id if state.parent_req is not None else request_id
        for ended in self._outputs.abort_requests([name], internal=True):
            if ended != request_id and (task := self._tasks.get(ended)) is not None:
                task.cancel()


async def sample(
    generator: Generator,
    record: Recorder,
    context: RequestContext | None,
    key: ChoiceKey,
    request: Request,
) -> AsyncGenerator[Chunk, None]:
    """Sample a request's tokens for its session, and record the finished completion.

    Args:
        record: Called before the last chunk is returned.
        context: The client's request; None for one that belongs to no session.
        key: Which of its completions this is.
        request: Its route names only the adapter.

    Raises:
        InputError: when the session may have no more turns.
    """
    session = context.session if context is not None else None
    if session is not None:
        route = Route(session.id, session.group, request.route.adapter)
        request = request._replace(route=route)
    turn = len(session.trajectory.turns) if session else 0
    prompt, sampling = list(request.prompt), request.sampling
    chunks: list[Chunk] = []
    finished = False
    stream = generator.stream(request)
    if session is not None:
        session.begin_turn()
    try:
        with chat_span(turn, sampling.temperature, sampling.max_tokens) as span:
            async with contextlib.aclosing(stream) as pieces:
                async for chunk in pieces:
                    chunks.append(chunk)
                    if chunk.finish_reason is not None and context is not None:
                        record(context, key, prompt, chunks)
                        finished = True
                    yield chunk
            sampled = sum(len(chunk.token_ids) for chunk in chunks)
            version = max((max(c.weight_versions, default=-1) for c in chunks), default=-1)
            reason = str(chunks[-1].finish_reason) if chunks else "none"
            record_answer(span, len(prompt), sampled, reason, version)
    except asyncio.CancelledError:
        if session is not None and (not chunks or chunks[-1].finish_reason is None):
            session.lost_turns += 1
        raise
    finally:
        if session is not None and not finished:
            session.lose_turn()


def client_error(error: Exception) -> Exception:
    """Return an error in the form that vLLM sends to a client."""
    shown = error
    if isinstance(error, EngineError | DeadlineError):
        shown = GracefulHTTPError(str(error), HTTPStatus.SERVICE_UNAVAILABLE)
    elif isinstance(error, InputError):
        shown = VLLMValidationError(str(error))
    elif isinstance(error, TrajectoryError):  # its own logits processor failed, and would again
        shown = GracefulHTTPError(str(error), HTTPStatus.UNPROCESSABLE_ENTITY)
    return shown


def _sampling_of(
    params: SamplingParams, prompt: list[int], context: RequestContext | None
) -> SamplingParams:
    """Return a request's sampling for the generator, within the tokens that its session has left.

    Raises:
        InputError: when the request would make tokens off-policy, or has no tokens left.
    """
    sampling = copy.copy(params)
    streamed = params.output_kind == RequestOutputKind.DELTA
    sampling.stream_interval = 1 if streamed else STREAM_INTERVAL
    if context is None:
        return sampling
    session = context.session
    if session.sampling is not None and params.structured_outputs:
        raise InputError(
            "a grammar (a strict tool, or parallel_tool_calls=false) would make the tokens of "
            "this training session off-policy: leave it out"
        )
    room = session.room(prompt, context.prompt.fork_reason)
    if room is not None and room <= 0:
        raise InputError(
            f"the conversation has used up its {session.max_response_tokens} tokens "
            "(rollout.max_response_tokens)"
        )
    if room is not None and sampling.max_tokens > room:
        sampling.max_tokens = room
        sampling.min_tokens = min(sampling.min_tokens, room)
    return sampling


def _logprobs(chunk: Chunk, start: int, end: int) -> LogprobsLists | None:
    """Return the log-probs of a chunk's tokens from `start` to `end` in vLLM's form."""
    if start == end:
        return None
    rows = chunk.alternatives[start:end] or [
        [(token, logprob, 1)]
        for token, logprob in zip(
            chunk.token_ids[start:end], chunk.logprobs[start:end], strict=True
        )
    ]
    return LogprobsLists(*_columns(rows))


def _prompt_logprobs(chunk: Chunk) -> LogprobsTensors | None:
    """Return the log-probs of the prompt, which come with its first chunk, in vLLM's form."""
    if not chunk.prompt_alternatives:
        return None
    return LogprobsTensors(*map(torch.from_numpy, _columns(chunk.prompt_alternatives)))


def _columns(rows: Alternatives) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return ids and log-probs, both [T, N], and the ranks [T] of the first of each row."""
    # A sampled token among the likeliest may have one entry less: it gets a second one.
    widest = max(map(len, rows))
    rows = [[*row, *row[:1] * (widest - len(row))] for row in rows]
    return (
        np.array([[token for token, _, _ in row] for row in rows]),
        np.array([[logprob for _, logprob, _ in row] for row in rows]),
        np.array([row[0][2] for row in rows]),
    )
