"""vLLM's OpenAI application around a `ChatService`, for what the service does not answer itself.

Completions, Responses, Anthropic Messages, tokenisation, and chats with streaming, several choices,
log-probs, grammars or reasoning are vLLM's code. Some parts are ours, put in the place of vLLM's
methods: turning a conversation into ids, which sessions make exact, choosing an adapter, sampling
ids (`EngineClient`), and keeping responses. The server's tests fail if vLLM moves these parts.
"""

import asyncio
import copy
import json
import logging
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from functools import partial

import numpy as np
import torch
from fastapi import FastAPI
from pydantic import BaseModel, ValidationError
from starlette.datastructures import State

from turnwise.chat.messages import Answer, Conversation, answer
from turnwise.chat.session import StoredResponse
from turnwise.chat.session_store import SessionStore
from turnwise.chat.tool_parser import is_object, silence
from turnwise.config import Config
from turnwise.core.gguf import resolve_model, resolve_tokenizer
from turnwise.core.json_types import JsonObject
from turnwise.core.optional import Foreign
from turnwise.engine.adapters import POLICY, EngineAdapters
from turnwise.engine.protocol import (
    STREAM_INTERVAL,
    Alternatives,
    Chunk,
    Generator,
    Request,
    Route,
    unbroken,
)
from turnwise.engine.vllm_start import engine_arguments
from turnwise.errors import InputError, TrajectoryError
from turnwise.internals import vllm_server as vllm
from turnwise.serving.openai.chat_service import (
    CURRENT,
    ChatService,
    ChoiceKey,
    RequestContext,
    client_error,
    echo_of,
)
from turnwise.serving.openai.errors import UNKNOWN, errors_of, explain
from turnwise.serving.openai.requests import settle
from turnwise.serving.scheduler import Scheduler
from turnwise.trajectory.images import PromptIds, placed

Create = Callable[..., Awaitable[object]]  # a method of vLLM's that answers or renders a request
ROUTES = {
    "/health",
    "/ping",
    "/version",
    "/docs",
    "/static",
    "/invocations",
    "/tokenize",
    "/detokenize",
    "/v1/models",
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
}
"""Paths that are served; vLLM's control routes are not among them."""
_FINISH = {str(reason): reason for reason in vllm.FinishReason}
_ITEM_BYTES = 1_000  # estimated memory of an item of a response without its text


async def build(
    config: Config, generator: Generator, store: SessionStore, names: Sequence[str]
) -> FastAPI:
    """Build vLLM's application around `generator`, with only the routes in `ROUTES`.

    Its `state.chats` is the chat service. Responses have the first of the model's `names`; requests
    may use any name unless there are adapters. Raises `InputError` when vLLM refuses the model, or
    has no parser of the configured name.
    """
    arguments = [
        *("--model", resolve_model(config.model.path)),
        *("--tokenizer", resolve_tokenizer(config.model)),
        *("--served-model-name", *names),
        *("--tool-call-parser", config.rollout.tool_parser, "--enable-auto-tool-choice"),
        "--enable-offline-docs",  # /docs with the scripts that it needs, from vLLM's own files
    ]
    if config.model.template_args:
        arguments += ["--default-chat-template-kwargs", json.dumps(config.model.template_args)]
    if config.serving.reasoning_parser:
        arguments += ["--reasoning-parser", config.serving.reasoning_parser]
    args = vllm.make_arg_parser(vllm.FlexibleArgumentParser()).parse_args(arguments)
    args.chat_template = config.model.template_text  # as an argument it could begin with a dash
    # vLLM copies the option here where it makes an engine's configuration, and reads it here only.
    args.structured_outputs_config.reasoning_parser = config.serving.reasoning_parser or ""
    silence(config.rollout.tool_parser)
    # vLLM writes its default, 16, into requests, where it looks like a client's choice.
    vllm.CompletionRequest.model_fields["max_tokens"].default = None
    try:
        client = EngineClient(config, generator)
        root = logging.getLogger()
        level, handlers = root.level, [(handler, handler.level) for handler in root.handlers]
        try:
            app: FastAPI = vllm.build_app(args, EngineClient.tasks, client.model_config)
        finally:  # it imports a package for SageMaker that hides everything below ERROR
            root.setLevel(level)
            for handler, own in handlers:
                handler.setLevel(own)
        await vllm.init_app_state(client, app.state, args, EngineClient.tasks)
        vllm.keep_clients_mistakes_out_of_the_log()
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise InputError(f"vLLM cannot serve {config.model.path}: {error}") from error
    app.router.routes[:] = [r for r in app.router.routes if getattr(r, "path", "") in ROUTES]
    _serve_adapters(app.state, config.serving.adapters, names)
    service = ChatService(config, generator, app.state, store)
    app.state.chats = client.service = service
    vllm.replace_parsers(app.state, service.parsing.bounded)
    renderer, chat = app.state.online_renderer, app.state.openai_serving_chat
    responses = app.state.openai_serving_responses
    preprocess = partial(_preprocess, renderer.preprocess_chat, service, config)
    renderer.preprocess_chat = partial(_after_others, preprocess)
    render = renderer.render_completion
    renderer.render_completion = partial(_render_completion, render, service, config)
    chat.create_chat_completion = partial(_answer_chat, chat.create_chat_completion, service, False)
    respond = partial(_store_response, responses.create_responses, store)
    responses.create_responses = partial(_after_others, respond)
    messages = app.state.anthropic_serving_messages  # which are streamed from chunks of a chat
    create = messages.create_chat_completion
    messages.create_chat_completion = partial(_answer_chat, create, service, True)
    messages.create_messages = partial(_after_others, messages.create_messages)
    return app


def _listed(message: JsonObject) -> JsonObject:
    """Return a copy of a message whose parts can be read again: vLLM's may be an iterator that is
    read once, or its own objects."""
    if (content := message.get("content")) is None or isinstance(content, str):
        return dict(message)
    parts = [
        part.model_dump(exclude_none=True) if isinstance(part, BaseModel) else part
        for part in content
    ]
    return {**message, "content": parts}


async def _after_others(work: Create, *arguments: object, **options: object) -> object:
    """Let other requests come before one of the steps of a request, which may be long."""
    await asyncio.sleep(0)
    return await work(*arguments, **options)


async def _preprocess(
    preprocess_chat: Create,
    service: ChatService,
    config: Config,
    request: vllm.SamplingRequest,
    messages: list[JsonObject],
    *args: object,
    tool_dicts: list[JsonObject] | None = None,
    **options: object,
) -> object:
    """Render a conversation by vLLM's method; its ids are exact if the session knows them. Those of
    one with images are always ours: vLLM would also fetch the images of URLs."""
    context, ids = CURRENT.get(), None
    with _refusing():
        messages = [_listed(message) for message in messages]
        if seen := vllm.has_non_text_content(messages):
            messages = await service.read_images(request, messages)
        asked = Conversation(messages, tool_dicts)
        if context is not None:
            context.request, context.asked = request, asked
            context.sampling = settle(request, context.session, config, service.agent_sampling)
            if not getattr(request, "tools", None) and request.tool_choice is None:
                request.tool_choice = "none"  # or vLLM removes calls from the text
            ids = await service.exact_prompt(context, request)
            context.images = placed(ids or ())
        elif seen:
            ids = await service.own_ids(asked, request)
    if ids is not None:
        kept = getattr(request, "kv_transfer_params", None) or {}
        request.kv_transfer_params = {**kept, "prompt_token_ids": ids}
        messages = [] if seen else messages  # vLLM takes no ids for messages with images
    if context is not None:
        context.session.context_full = len(ids or ()) >= config.model.max_length
    try:
        return await _after_others(
            preprocess_chat, request, messages, *args, tool_dicts=tool_dicts, **options
        )
    except vllm.VLLMValidationError as error:
        if context is not None and error.parameter in ("input_tokens", "input_text"):
            context.session.context_full = True
        raise
    except ValidationError:  # parts of messages may be read for the first time here
        with _refusing():
            raise


async def _render_completion(
    render: Create,
    service: ChatService,
    config: Config,
    request: vllm.CompletionRequest,
    **options: object,
) -> object:
    context = CURRENT.get()
    if context is not None:
        context.request = request
        with _refusing():
            context.sampling = settle(request, context.session, config, service.agent_sampling)
    return await render(request, **options)


@contextmanager
def _refusing() -> Iterator[None]:
    """Raise errors of a request in the form that vLLM sends to the client."""
    try:
        yield
    except vllm.VLLMError:
        raise
    except (InputError, TrajectoryError) as error:
        parameter = getattr(error, "parameter", "messages")
        raise vllm.VLLMValidationError(str(error), parameter=parameter) from error
    except Exception as error:  # a client's messages may be anything
        why = f"{type(error).__name__}: {error}"
        if isinstance(error, ValidationError):
            why, _ = explain(errors_of(error), UNKNOWN)
        message = f"messages cannot be read: {why}"
        raise vllm.VLLMValidationError(message, parameter="messages") from error


async def _answer_chat(
    create: Create,
    service: ChatService,
    objects: bool,
    request: vllm.ChatCompletionRequest,
    raw_request: object = None,
) -> object:
    """Answer a chat by vLLM's method; note the answer, and add the ids that clients ask for. With
    `objects`, clients hold arguments as objects, as those of Anthropic's Messages do, so that
    arguments which are not JSON are none; other answers need no notes."""
    response, context = await _after_others(create, request, raw_request), CURRENT.get()
    if context is None:
        return response
    if isinstance(response, AsyncGenerator):
        if not objects:
            service.remember(f"chatcmpl-{request.request_id}", context.session)
        return _watched(response, context.answers, objects) if request.tools else response
    if objects or not isinstance(response, vllm.ChatCompletionResponse):
        return response
    service.remember(response.id, context.session)
    for choice in response.choices:
        message = choice.message
        calls = [(call.function.name, call.function.arguments) for call in message.tool_calls]
        context.answers[choice.index] = answer(message.content, calls)
        if request.return_token_ids:
            completion = context.finished[response.id, choice.index]
            for key, value in echo_of(response.prompt_token_ids, completion).items():
                setattr(message, key, value)
    return response


async def _watched(
    events: AsyncGenerator[str, None], answers: dict[int, Answer], objects: bool
) -> AsyncGenerator[str, None]:
    """Pass on the events of a stream, and note each finished answer as the client will send it
    back: where a call is malformed, that may differ from the whole text parsed at once."""
    texts: dict[int, list[str]] = defaultdict(list)
    calls: dict[int, dict[int, list[str]]] = defaultdict(dict)
    async for event in events:
        if event.startswith("data: {"):
            for choice in json.loads(event[6:]).get("choices") or []:
                index, delta = choice["index"], choice.get("delta") or {}
                texts[index].append(delta.get("content") or "")
                for piece in delta.get("tool_calls") or []:
                    function = piece.get("function") or {}
                    call = calls[index].setdefault(piece["index"], ["", ""])
                    call[0] += function.get("name") or ""
                    call[1] += function.get("arguments") or ""
                if choice.get("finish_reason"):
                    said = [
                        (name, given if not objects or is_object(given) else "{}")
                        for name, given in calls[index].values()
                    ]
                    answers[index] = answer("".join(texts[index]), said)
        yield event


def _serve_adapters(state: State, adapters: Mapping[str, str], names: Sequence[str]) -> None:
    """List adapters next to the model, and let requests choose one by their `model`, or by that of
    their session's last turn. A training session is sampled by the policy alone. Without adapters
    a request may name any model."""
    models = state.openai_serving_models
    if not adapters:
        models.is_base_model = lambda name: True
        return
    if same := [name for name in adapters if name in names or not name]:
        raise InputError(f"serving.adapters: {same[0]!r} is the model's own name")
    models.is_base_model = lambda name: name in names
    for number, (name, path) in enumerate(adapters.items(), start=1):
        models.lora_requests[name] = vllm.LoRARequest(name, number, path, names[0])

    def choose(request: vllm.SamplingRequest, **options: object) -> vllm.LoRARequest | None:
        context = CURRENT.get()
        if context is not None and not request.model:
            request.model = context.session.adapter or None
        chosen = models.lora_requests.get(request.model)
        if context is not None:
            if chosen is not None and context.session.sampling is not None:
                raise vllm.VLLMValidationError(
                    f"model={request.model!r} would make the tokens of this training session "
                    "off-policy: leave it out, or name the model itself",
                    parameter="model",
                )
            context.adapter = chosen.lora_name if chosen is not None else POLICY
        return chosen

    # Each looks up its request's adapter.
    for kind in ("openai_serving_chat", "openai_serving_completion", "openai_serving_responses"):
        vllm.choose_adapters(getattr(state, kind), choose)
    vllm.choose_adapters(state.anthropic_serving_messages, choose)


async def _store_response(
    create: Create,
    store: SessionStore,
    request: vllm.ResponsesRequest,
    raw_request: object = None,
) -> object:
    """Answer one of Responses' requests by vLLM's method; keep the response, unless `store` is
    false. A request that continues one is sent with the whole conversation; vLLM's own store is
    off, because it is never emptied, and loses calls. vLLM answers an unknown id, with 404."""
    if request.background:
        raise vllm.VLLMValidationError(
            "background responses are not served: leave `background` out, and read the answer "
            "from this request or, with `store`, later by its id",
            parameter="background",
        )
    context = CURRENT.get()
    if context is None:
        return await create(request, raw_request)
    previous, kept, asked = request.previous_response_id, request.store, request.input
    new: list[Foreign] = (
        [{"role": "user", "content": asked}] if isinstance(asked, str) else list(asked)
    )
    before: StoredResponse | None = None
    if previous is not None and (found := store.of_response(context.session, previous)):
        if found is not context.session:
            context.session = context.held.enter_context(store.holding(found))
        before = found.responses[previous]
        request.input = [*before.given, *before.output, *new]
        request.previous_response_id = None
    session = context.session

    def finished(response: vllm.ResponsesResponse) -> None:
        response.previous_response_id = previous
        if kept and not session.closed:
            output, body = list(response.output), response.model_dump_json(by_alias=True)
            stored = StoredResponse(before, new, output, json.loads(body))
            session.responses[response.id] = stored
            session.size += 2 * len(body)
            for item in [*new, *output]:
                is_model = isinstance(item, BaseModel)
                text = item.model_dump_json() if is_model else json.dumps(item, default=str)
                session.size += _ITEM_BYTES + len(text)
            store.remember_completion(response.id, session)

    async def watched(events: AsyncGenerator[Foreign, None]) -> AsyncGenerator[object, None]:
        async for event in events:
            response = getattr(event, "response", None)
            if event.type == "response.completed" and isinstance(response, vllm.ResponsesResponse):
                finished(response)
            yield event

    made = await create(request, raw_request)
    if isinstance(made, vllm.ResponsesResponse):
        finished(made)
    elif isinstance(made, AsyncGenerator):
        request.previous_response_id = previous  # for the events
        return watched(made)
    return made


class EngineClient:
    """The part of vLLM's engine client that its application uses; vLLM's own classes check and
    detokenise, and split requests for several completions."""

    tasks = ("generate",)
    service: ChatService

    def __init__(self, config: Config, generator: Generator) -> None:
        adapters = EngineAdapters.of(config)
        arguments = engine_arguments(config.model, config.engine, config.deterministic, adapters)
        arguments["generation_config"] = "vllm"  # only our defaults
        self.vllm_config = vllm.AsyncEngineArgs(**arguments).create_engine_config()
        self.model_config = self.vllm_config.model_config
        self.renderer = vllm.renderer_from_config(self.vllm_config)
        self.input_processor = vllm.InputProcessor(self.vllm_config, self.renderer)
        self.errored, self.is_running, self.dead_error = False, True, vllm.EngineDeadError()
        self._outputs = vllm.OutputProcessor(self.renderer.tokenizer, log_stats=False)
        self._tasks: set[asyncio.Task[None]] = set()
        self._sampling = config.sampling
        self._generator = generator

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Admit every request: they wait in the engines."""

    async def check_health(self) -> None:
        fleet = self._generator
        if isinstance(fleet, Scheduler) and not any(w.usable for w in fleet.workers.values()):
            raise vllm.EngineDeadError

    def shutdown(self, timeout: float | None = None) -> None:
        """Refuse new requests, and cancel those in flight; the engines belong to others."""
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
        context = asking = CURRENT.get()
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
                context = None  # it throws its token away, or chooses among the likeliest
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
                if finished and params.output_kind == vllm.RequestOutputKind.FINAL_ONLY:
                    tools = None if asking is None else asking.asked.tools
                    for answered in output.outputs:  # before vLLM parses them
                        await self.service.parsing.prepare(answered.text, tools)
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
            asking = CURRENT.get()  # of a search of beams, too
            images, ids = () if asking is None else asking.images, list(request.prompt_token_ids)
            prompt, sampling = PromptIds(ids, images) if images else ids, copy.copy(params)
            sampling.stream_interval = 1 if streamed else STREAM_INTERVAL
            trained = False
            stream: Callable[[Request], AsyncGenerator[Chunk, None]]
            stream = partial(unbroken, self._generator)
            if context is not None:
                session = context.session
                stream = partial(self.service.sample, context, key)
                trained = session.sampling is not None and not context.sampling.untrained
                sampling.max_tokens = context.within(prompt, params.max_tokens)
                if sampling.max_tokens <= 0:
                    session.context_full = True
                    raise InputError(
                        f"the conversation has used up its {session.max_response_tokens} tokens "
                        "(rollout.max_response_tokens)"
                    )
                sampling.min_tokens = min(params.min_tokens, sampling.max_tokens)
                if session.sampling is not None and session.sampling.prompt_logprobs:
                    sampling.prompt_logprobs = params.prompt_logprobs or 0
                    sampling.skip_reading_prefix_cache = True  # which leaves prompts unscored
            asked = Request(
                prompt,
                sampling,
                request.request_id,
                params.seed,
                Route(adapter=lora.lora_name if lora is not None else POLICY),
                whole=not streamed,
                images=images,
                record_allowed=trained,
            )
            with_logprobs = params.num_logprobs is not None
            scored = params.prompt_logprobs is not None  # a session may record them unasked
            async with aclosing(stream(asked)) as chunks:
                async for chunk in chunks:
                    for output in _outputs(request.request_id, chunk, with_logprobs, scored):
                        self._outputs.process_outputs([output])
                    if chunk.finish_reason is not None and context is not None:
                        context.texts[key] = getattr(detokenizer, "output_text", "")
        except Exception as error:  # raised to this request's client; other requests continue
            queue.put(client_error(error))


def _outputs(
    request_id: str, chunk: Chunk, with_logprobs: bool, scored: bool
) -> Iterator[vllm.EngineCoreOutput]:
    """Yield a chunk in vLLM's form, for its detokenizer."""
    finish = None if chunk.finish_reason is None else _FINISH[chunk.finish_reason]
    # vLLM finds a stop string again, cuts the text before it, and ends the request.
    by_string = isinstance(chunk.stop_reason, str)
    prompt = chunk.prompt_alternatives if scored else []  # they come with the first chunk
    rows: Alternatives = []
    if with_logprobs:
        pairs = zip(chunk.token_ids, chunk.logprobs, strict=True)
        rows = chunk.alternatives or [[(token, logprob, 1)] for token, logprob in pairs]
    yield vllm.EngineCoreOutput(
        request_id=request_id,
        new_token_ids=list(chunk.token_ids),
        new_logprobs=vllm.LogprobsLists(*_columns(rows)) if rows else None,
        new_prompt_logprobs_tensors=(
            vllm.LogprobsTensors(*map(torch.from_numpy, _columns(prompt))) if prompt else None
        ),
        finish_reason=None if by_string else finish,
        stop_reason=None if by_string else chunk.stop_reason,
        prefill_stats=vllm.PrefillStats(
            num_cached_tokens=chunk.cached_tokens,
            num_cache_creation_tokens=chunk.stored_tokens,
        ),
    )
    if by_string:
        yield vllm.EngineCoreOutput(
            request_id, [], finish_reason=finish, stop_reason=chunk.stop_reason
        )


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
