"""The part of vLLM's engine client that its application uses, around a generator."""

import asyncio
import copy
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial

from turnwise.config import SamplingConfig
from turnwise.core.json_types import JsonObject
from turnwise.engine.adapters import POLICY
from turnwise.engine.protocol import STREAM_INTERVAL, Chunk, Generator, Request, Route, unbroken
from turnwise.internals import vllm_server as vllm
from turnwise.serving.openai.chat_service import ChatService
from turnwise.serving.openai.choices import engine_outputs
from turnwise.serving.openai.request_context import CURRENT, ChoiceKey, RequestContext
from turnwise.serving.openai.vllm_errors import client_error
from turnwise.serving.scheduler import Scheduler
from turnwise.trajectory.prompt import Prompt


class EngineClient:
    """The part of vLLM's engine client that its application uses; vLLM's own classes check and
    detokenise, and split requests for several completions."""

    tasks = ("generate",)
    service: ChatService

    def __init__(
        self, arguments: JsonObject, sampling: SamplingConfig, generator: Generator
    ) -> None:
        only_ours = arguments | {"generation_config": "vllm"}  # no defaults of the model's files
        self.vllm_config = vllm.AsyncEngineArgs(**only_ours).create_engine_config()
        self.model_config = self.vllm_config.model_config
        self.renderer = vllm.renderer_from_config(self.vllm_config)
        self.input_processor = vllm.InputProcessor(self.vllm_config, self.renderer)
        self.errored, self.is_running, self.dead_error = False, True, vllm.EngineDeadError()
        self._outputs = vllm.OutputProcessor(self.renderer.tokenizer, log_stats=False)
        self._tasks: set[asyncio.Task[None]] = set()
        self._sampling = sampling
        self._generator = generator

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Admit every request, because requests wait in the engines."""

    async def check_health(self) -> None:
        fleet = self._generator
        if isinstance(fleet, Scheduler) and not any(w.usable for w in fleet.workers.values()):
            raise vllm.EngineDeadError

    def shutdown(self, timeout: float | None = None) -> None:
        """Refuse new requests, and cancel the requests in flight; the engines keep running."""
        self.errored, self.is_running = True, False
        for task in self._tasks:
            task.cancel()

    async def generate(
        self,
        prompt: object,
        sampling_params: vllm.SamplingParams,
        request_id: str,
        *,
        prompt_text: str | None = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: object = None,
        **options: object,
    ) -> AsyncGenerator[vllm.RequestOutput, None]:
        """Sample `sampling_params.n` completions of a prompt that vLLM has rendered."""
        context = CURRENT.get()
        params = sampling_params
        if context is not None:
            # Not all kinds of requests have these parameters.
            sampling = context.session.sampling or self._sampling
            written = () if context.request is None else context.request.model_fields_set
            if "min_tokens" not in written:
                params.min_tokens = min(sampling.min_tokens, params.max_tokens)
            if "ignore_eos" not in written:
                params.ignore_eos = sampling.ignore_eos
            if "min_p" not in written and params.temperature:
                params.min_p = sampling.min_p
            asked = context.request
            scoring = getattr(asked, "echo", False) and getattr(asked, "max_tokens", None) == 0
            if scoring or getattr(asked, "use_beam_search", False):
                context = None  # no turn: the token is thrown away, or beams are searched
        request = self.input_processor.process_inputs(
            request_id, prompt, params, supported_tasks=self.tasks, **options
        )
        assert not request.mm_features  # `_preprocess` lets vLLM see no image
        self.input_processor.assign_request_id(request)
        text = vllm.extract_prompt_components(self.model_config, prompt).text
        queue = vllm.RequestOutputCollector(params.output_kind, request.request_id)
        parent = vllm.ParentRequest(request) if params.n > 1 else None
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
        request: vllm.EngineCoreRequest,
        context: RequestContext | None,
        key: ChoiceKey,
        queue: vllm.RequestOutputCollector,
    ) -> None:
        params, lora = request.sampling_params, request.lora_request
        detokenizer = self._outputs.request_states[request.request_id].detokenizer
        try:
            streamed = params.output_kind == vllm.RequestOutputKind.DELTA
            asking = CURRENT.get()  # also for a beam search, which has no `context`
            images = () if asking is None else asking.images
            prompt, sampling = Prompt(request.prompt_token_ids, images), copy.copy(params)
            sampling.stream_interval = 1 if streamed else STREAM_INTERVAL
            trained = False
            stream: Callable[[Request], AsyncGenerator[Chunk, None]]
            stream = partial(unbroken, self._generator)
            if context is not None:
                stream = partial(self.service.sample, context, key)
                trained = context.trained
                sampling.max_tokens = context.max_tokens_for(prompt, params.max_tokens)
                sampling.min_tokens = min(params.min_tokens, sampling.max_tokens)
                context.score_prompt(sampling)
            asked = Request(
                prompt,
                sampling,
                request.request_id,
                params.seed,
                Route(adapter=lora.lora_name if lora is not None else POLICY),
                whole=not streamed,
                record_allowed=trained,
            )
            with_logprobs = params.num_logprobs is not None
            scored = params.prompt_logprobs is not None  # a session may record them unasked
            async with aclosing(stream(asked)) as chunks:
                async for chunk in chunks:
                    for output in engine_outputs(request.request_id, chunk, with_logprobs, scored):
                        self._outputs.process_outputs([output])
                    if chunk.finish_reason is not None and context is not None:
                        context.texts[key] = getattr(detokenizer, "output_text", "")
        except Exception as error:  # raised to this request's client; other requests continue
            queue.put(client_error(error))
