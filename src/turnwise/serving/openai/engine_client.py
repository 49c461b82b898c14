"""vLLM's engine client on top of the chat service, which samples the tokens of requests.

vLLM's application asks its engine client for completions by `generate`, and reads the attributes of
`EngineClient`. vLLM's own classes check and detokenise, and split requests for several completions.
"""

import asyncio
import copy
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing

import numpy as np
import torch

from turnwise.config import Config
from turnwise.engine.adapters import POLICY, EngineAdapters
from turnwise.engine.protocol import STREAM_INTERVAL, Alternatives, Chunk, Request, Route
from turnwise.engine.vllm_start import engine_arguments
from turnwise.errors import InputError
from turnwise.serving.openai.chat_service import ChatService, client_error
from turnwise.serving.openai.requests import CURRENT, ChoiceKey, RequestContext
from turnwise.serving.openai.vllm_api import (
    AsyncEngineArgs,
    EngineCoreOutput,
    EngineCoreRequest,
    EngineDeadError,
    FinishReason,
    InputProcessor,
    LogprobsLists,
    LogprobsTensors,
    OutputProcessor,
    ParentRequest,
    PrefillStats,
    RequestOutput,
    RequestOutputCollector,
    RequestOutputKind,
    SamplingParams,
    extract_prompt_components,
    renderer_from_config,
)

_FINISH = {str(reason): reason for reason in FinishReason}


class EngineClient:
    """The part of vLLM's engine client that its application uses.

    Args:
        healthy: Returns whether anything can be served now.
    """

    tasks = ("generate",)
    service: ChatService
    """Samples the tokens; set once the application is built."""

    def __init__(self, config: Config, healthy: Callable[[], bool]) -> None:
        adapters = EngineAdapters.of(config)
        arguments = engine_arguments(config.model, config.engine, config.deterministic, adapters)
        arguments["generation_config"] = "vllm"  # only our defaults
        self.vllm_config = AsyncEngineArgs(**arguments).create_engine_config()
        self.model_config = self.vllm_config.model_config
        self.renderer = renderer_from_config(self.vllm_config)
        self.input_processor = InputProcessor(self.vllm_config, self.renderer)
        self.errored, self.is_running, self.dead_error = False, True, EngineDeadError()
        self._outputs = OutputProcessor(self.renderer.tokenizer, log_stats=False)
        self._tasks: set[asyncio.Task[None]] = set()
        self._sampling = config.sampling
        self._healthy = healthy

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Admit every request: they wait in the engines."""

    async def check_health(self) -> None:
        if not self._healthy():
            raise EngineDeadError

    def shutdown(self, timeout: float | None = None) -> None:
        """Refuse new requests, and cancel those in flight; the engines belong to others."""
        self.errored, self.is_running = True, False
        for task in self._tasks:
            task.cancel()

    async def generate(
        self,
        prompt: object,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        prompt_text: str | None = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: object = None,
        **options: object,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Sample `sampling_params.n` completions of a prompt that vLLM has rendered."""
        context, params = CURRENT.get(), sampling_params
        if context is not None:
            # Not all kinds of requests have these parameters.
            sampling = context.session.sampling or self._sampling
            written = () if context.request is None else context.request.model_fields_set
            if "min_tokens" not in written:
                params.min_tokens = min(sampling.min_tokens, params.max_tokens)
            if "ignore_eos" not in written:
                params.ignore_eos = sampling.ignore_eos
            if context.scores:
                context = None
        request = self.input_processor.process_inputs(
            request_id, prompt, params, supported_tasks=self.tasks, **options
        )
        self.input_processor.assign_request_id(request)
        text = extract_prompt_components(self.model_config, prompt).text
        queue = RequestOutputCollector(params.output_kind, request.request_id)
        parent = ParentRequest(request) if params.n > 1 else None
        tasks = set()
        for index in range(params.n):
            part = copy.copy(request)
            if parent is not None:
                part.request_id, part.sampling_params = parent.get_child_info(index)
            self._outputs.add_request(part, text, parent, index, queue)
            task = asyncio.create_task(self._run(part, context, (request_id, index), queue))
            task.add_done_callback(self._tasks.discard)
            tasks.add(task)
        self._tasks |= tasks
        finished = False
        try:
            while not finished:
                output = queue.get_nowait() or await queue.get()
                finished = output.finished
                yield output
        finally:
            if not finished:
                self._outputs.abort_requests([request.request_id], internal=True)
                for task in tasks:
                    task.cancel()

    async def _run(
        self,
        request: EngineCoreRequest,
        context: RequestContext | None,
        key: ChoiceKey,
        queue: RequestOutputCollector,
    ) -> None:
        """Sample one completion, and put vLLM's outputs of it into `queue`."""
        params, lora = request.sampling_params, request.lora_request
        detokenizer = self._outputs.request_states[request.request_id].detokenizer
        try:
            asked = Request(
                list(request.prompt_token_ids),
                _sampling_of(params, request.prompt_token_ids, context),
                request.request_id,
                params.seed,
                Route(adapter=lora.lora_name if lora is not None else POLICY),
                whole=params.output_kind != RequestOutputKind.DELTA,
            )
            with_logprobs = params.num_logprobs is not None
            async with aclosing(self.service.sample(context, key, asked)) as chunks:
                async for chunk in chunks:
                    for output in _outputs(request.request_id, chunk, with_logprobs):
                        self._outputs.process_outputs([output])
                    if chunk.finish_reason is not None and context is not None:
                        context.texts[key] = getattr(detokenizer, "output_text", "")
        except Exception as error:  # raised to this request's client; other requests continue
            queue.put(client_error(error))


def _outputs(request_id: str, chunk: Chunk, with_logprobs: bool) -> Iterator[EngineCoreOutput]:
    """Yield a chunk in vLLM's form, for its detokenizer."""
    finish = None if chunk.finish_reason is None else _FINISH[chunk.finish_reason]
    # vLLM finds a stop string again, cuts the text before it, and ends the request.
    by_string = isinstance(chunk.stop_reason, str)
    prompt = chunk.prompt_alternatives  # they come with the first chunk
    yield EngineCoreOutput(
        request_id=request_id,
        new_token_ids=list(chunk.token_ids),
        new_logprobs=_logprobs(chunk) if with_logprobs else None,
        new_prompt_logprobs_tensors=(
            LogprobsTensors(*map(torch.from_numpy, _columns(prompt))) if prompt else None
        ),
        finish_reason=None if by_string else finish,
        stop_reason=None if by_string else chunk.stop_reason,
        prefill_stats=PrefillStats(
            num_cached_tokens=chunk.cached_tokens,
            num_cache_creation_tokens=chunk.stored_tokens,
        ),
    )
    if by_string:
        yield EngineCoreOutput(request_id, [], finish_reason=finish, stop_reason=chunk.stop_reason)


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
    sampling.max_tokens = context.within(prompt, params.max_tokens)
    if sampling.max_tokens <= 0:
        raise InputError(
            f"the conversation has used up its {session.max_response_tokens} tokens "
            "(rollout.max_response_tokens)"
        )
    sampling.min_tokens = min(params.min_tokens, sampling.max_tokens)
    return sampling


def _logprobs(chunk: Chunk) -> LogprobsLists | None:
    """Return the log-probs of a chunk's tokens in vLLM's form."""
    pairs = zip(chunk.token_ids, chunk.logprobs, strict=True)
    rows = chunk.alternatives or [[(token, logprob, 1)] for token, logprob in pairs]
    return LogprobsLists(*_columns(rows)) if rows else None


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
