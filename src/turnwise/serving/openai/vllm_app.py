"""vLLM's OpenAI application around a `ChatService`, for what the service does not answer itself.

Completions, Responses, Anthropic Messages, tokenisation, and chats with streaming, several choices,
log-probs, grammars or reasoning are vLLM's code. Some parts are ours, put in the place of vLLM's
methods: turning a conversation into ids, which sessions make exact, choosing an adapter, sampling
ids (`engine_client`), and keeping responses. The server's tests fail if vLLM moves these parts.

A session keeps the input and the output of each of its responses, as long as it lives. A request
that continues one by `previous_response_id` is sent to vLLM with the whole conversation as its
input, so that it takes the same path as one that sends all items itself. vLLM's own store is off:
it is never emptied, and it loses calls of functions.
"""

import json
import logging
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from fastapi import FastAPI
from pydantic import BaseModel, ValidationError
from starlette.datastructures import State
from starlette.requests import Request

from turnwise.chat.messages import Answer, Conversation, answer
from turnwise.chat.prompts import RefusedParameter
from turnwise.chat.session import StoredResponse
from turnwise.chat.session_store import SessionStore
from turnwise.chat.tool_parser import silence
from turnwise.config import Config
from turnwise.core.gguf import resolve_model, resolve_tokenizer
from turnwise.core.json_types import JsonObject
from turnwise.core.optional import Foreign
from turnwise.engine.adapters import POLICY
from turnwise.engine.protocol import Generator
from turnwise.errors import InputError, TrajectoryError
from turnwise.serving.openai.chat_service import ChatService, echo_of
from turnwise.serving.openai.engine_client import EngineClient
from turnwise.serving.openai.errors import UNKNOWN, explain
from turnwise.serving.openai.requests import CURRENT, settle
from turnwise.serving.openai.vllm_api import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    CompletionRequest,
    FlexibleArgumentParser,
    LoRARequest,
    ResponsesRequest,
    ResponsesResponse,
    SamplingRequest,
    VLLMError,
    VLLMValidationError,
    build_app,
    init_app_state,
    make_arg_parser,
)

Create = Callable[..., Awaitable[object]]
"""A method of vLLM's that answers or renders a request."""
ROUTES = {
    "/health",
    "/ping",
    "/invocations",
    "/metrics",
    "/version",
    "/openapi.json",
    "/docs",
    "/static",
    "/tokenize",
    "/detokenize",
    "/v1/models",
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
}
"""Paths that are served; vLLM's control routes are not among them."""
_ITEM_BYTES = 1_000
"""Estimated memory of an item of a response without its text."""


async def build(
    config: Config,
    generator: Generator,
    healthy: Callable[[], bool],
    store: SessionStore,
    names: Sequence[str],
) -> FastAPI:
    """Build vLLM's application around `generator`, with only the routes in `ROUTES`.

    Its `state.chats` is the chat service.

    Args:
        healthy: Returns whether anything can be served now.
        store: The sessions of the requests.
        names: The model's names for clients; responses have the first. Requests may use any name
            unless there are adapters.

    Raises:
        InputError: when vLLM refuses the model, or has no parser of the configured name.
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
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    args.chat_template = config.model.template_text  # as an argument it could begin with a dash
    # vLLM copies the option here where it makes an engine's configuration, and reads it here only.
    args.structured_outputs_config.reasoning_parser = config.serving.reasoning_parser or ""
    silence(config.rollout.tool_parser)
    # vLLM writes its default, 16, into requests, where it looks like a client's choice.
    CompletionRequest.model_fields["max_tokens"].default = None
    try:
        client = EngineClient(config, healthy)
        root = logging.getLogger()
        level, handlers = root.level, [(handler, handler.level) for handler in root.handlers]
        try:
            app: FastAPI = build_app(args, EngineClient.tasks, client.model_config)
        finally:  # it imports a package for SageMaker that hides everything below ERROR
            root.setLevel(level)
            for handler, own in handlers:
                handler.setLevel(own)
        await init_app_state(client, app.state, args, EngineClient.tasks)
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise InputError(f"vLLM cannot serve {config.model.path}: {error}") from error
    app.router.routes[:] = [r for r in app.router.routes if getattr(r, "path", "") in ROUTES]
    _serve_adapters(app.state, config.serving.adapters, names)
    service = ChatService(config, generator, app.state, store.remember_completion)
    app.state.chats = client.service = service
    renderer, chat = app.state.online_renderer, app.state.openai_serving_chat
    responses = app.state.openai_serving_responses
    renderer.preprocess_chat = _around_rendering(renderer.preprocess_chat, service, config)
    renderer.render_completion = _around_completion(renderer.render_completion, config)
    chat.create_chat_completion = _around_answer(chat.create_chat_completion, service)
    responses.create_responses = _storing(responses.create_responses, store)
    messages = app.state.anthropic_serving_messages
    if messages is not None:  # Anthropic's messages are streamed from chunks of a chat
        messages.create_chat_completion = _around_answer(
            messages.create_chat_completion, service, objects=True
        )
    return app


def _around_rendering(preprocess_chat: Create, service: ChatService, config: Config) -> Create:
    """Wrap the method that renders conversations: its ids are exact if the session knows them."""

    async def preprocess(
        request: SamplingRequest,
        messages: list[JsonObject],
        *args: object,
        tool_dicts: list[JsonObject] | None = None,
        **options: object,
    ) -> object:
        context = CURRENT.get()
        if context is not None:
            messages = [dict(message) for message in messages]
            context.request, context.asked = request, Conversation(messages, tool_dicts)
            with _refusing():
                settle(request, context.session.sampling, config)
                if not getattr(request, "tools", None) and request.tool_choice is None:
                    request.tool_choice = "none"  # or vLLM removes calls from the text
                ids = await service.exact_prompt(context, request)
            if ids is not None:
                kept = getattr(request, "kv_transfer_params", None) or {}
                request.kv_transfer_params = {**kept, "prompt_token_ids": ids}
        return await preprocess_chat(request, messages, *args, tool_dicts=tool_dicts, **options)

    return preprocess


def _around_completion(render_completion: Create, config: Config) -> Create:
    """Wrap the method that renders the prompts of Completions."""

    async def render(request: CompletionRequest, **options: object) -> object:
        context = CURRENT.get()
        if context is not None:
            context.request = request
            with _refusing():
                settle(request, context.session.sampling, config)
        return await render_completion(request, **options)

    return render


@contextmanager
def _refusing() -> Iterator[None]:
    """Raise errors of a request in the form that vLLM sends to the client."""
    try:
        yield
    except VLLMError:
        raise
    except RefusedParameter as error:
        raise VLLMValidationError(str(error), parameter=error.parameter) from error
    except TrajectoryError as error:
        raise VLLMValidationError(str(error), parameter="messages") from error
    except Exception as error:  # a client's messages may be anything
        why = f"{type(error).__name__}: {error}"
        if isinstance(error, ValidationError):
            why, _ = explain(list(map(dict, error.errors())), UNKNOWN)
        message = f"messages cannot be read: {why}"
        raise VLLMValidationError(message, parameter="messages") from error


def _around_answer(create: Create, service: ChatService, *, objects: bool = False) -> Create:
    """Wrap a method that answers chats, to note answers and add the ids that clients ask for.

    With `objects`, clients hold arguments as objects, as those of Anthropic's Messages do, so that
    arguments which are not JSON are none; other answers of theirs need no notes.
    """

    async def noting(request: ChatCompletionRequest, raw_request: Request | None = None) -> object:
        response, context = await create(request, raw_request), CURRENT.get()
        if context is None:
            return response
        if isinstance(response, AsyncGenerator):
            if not objects:
                service.remember(f"chatcmpl-{request.request_id}", context.session)
            return _watched(response, context.answers, objects) if request.tools else response
        if objects or not isinstance(response, ChatCompletionResponse):
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

    return noting


async def _watched(
    events: AsyncGenerator[str, None], answers: dict[int, Answer], objects: bool
) -> AsyncGenerator[str, None]:
    """Pass on the events of a stream, and note each answer once it is finished.

    vLLM parses a stream piece by piece. Where a call is malformed, the client can get another
    answer than the whole text parsed at once would give; the client sends back what it got.
    """
    choices: dict[int, _Parts] = defaultdict(_Parts)
    async for event in events:
        if event.startswith("data: {"):
            for choice in json.loads(event[6:]).get("choices") or []:
                parts = choices[choice["index"]]
                parts.add(choice.get("delta") or {})
                if choice.get("finish_reason"):
                    answers[choice["index"]] = parts.whole(objects)
        yield event


@dataclass(slots=True)
class _Parts:
    """The pieces of one choice so far."""

    text: list[str] = field(default_factory=list)
    calls: dict[int, list[str]] = field(default_factory=dict)
    """Name, then pieces of the arguments, by the index of the call."""

    def add(self, delta: JsonObject) -> None:
        self.text.append(delta.get("content") or "")
        for piece in delta.get("tool_calls") or []:
            function = piece.get("function") or {}
            call = self.calls.setdefault(piece["index"], [""])
            call[0] += function.get("name") or ""
            call.append(function.get("arguments") or "")

    def whole(self, objects: bool) -> Answer:
        calls = [(call[0], "".join(call[1:])) for call in self.calls.values()]
        if objects:
            calls = [(name, said if _is_json(said) else "{}") for name, said in calls]
        return answer("".join(self.text), calls)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _serve_adapters(state: State, adapters: Mapping[str, str], names: Sequence[str]) -> None:
    """List adapters next to the model, and let requests choose one by their `model`.

    A request of a session that names no model keeps the adapter of the session's last turn. A
    training session is sampled by the policy alone. Without adapters a request may name any model.
    """
    models = state.openai_serving_models
    if not adapters:
        models.is_base_model = lambda name: True
        return
    if same := [name for name in adapters if name in names or not name]:
        raise InputError(f"serving.adapters: {same[0]!r} is the model's own name")
    models.is_base_model = lambda name: name in names
    for number, (name, path) in enumerate(adapters.items(), start=1):
        models.lora_requests[name] = LoRARequest(name, number, path, names[0])

    def choose(request: SamplingRequest, **options: object) -> LoRARequest | None:
        context = CURRENT.get()
        if context is not None and not request.model:
            request.model = context.session.adapter or None
        chosen = models.lora_requests.get(request.model)
        if context is not None:
            if chosen is not None and context.session.sampling is not None:
                raise VLLMValidationError(
                    f"model={request.model!r} would make the tokens of this training session "
                    "off-policy: leave it out, or name the model itself",
                    parameter="model",
                )
            context.adapter = chosen.lora_name if chosen is not None else POLICY
        return chosen

    # Each looks up its request's adapter.
    for kind in ("openai_serving_chat", "openai_serving_completion", "openai_serving_responses"):
        getattr(state, kind)._maybe_get_adapters = choose
    if state.anthropic_serving_messages is not None:
        state.anthropic_serving_messages._maybe_get_adapters = choose


def _storing(create_responses: Create, store: SessionStore) -> Create:
    """Wrap vLLM's method that answers Responses, so that they are kept and continued.

    A request whose `store` is false is not kept. An unknown id is answered by vLLM, with 404.
    """

    async def create(request: ResponsesRequest, raw_request: Request | None = None) -> object:
        if request.background:
            raise VLLMValidationError(
                "background responses are not served: leave `background` out, and read the answer "
                "from this request or, with `store`, later by its id",
                parameter="background",
            )
        context = CURRENT.get()
        if context is None:
            return await create_responses(request, raw_request)
        previous, kept, asked = request.previous_response_id, request.store, request.input
        new: list[object] = (
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

        def finished(response: ResponsesResponse) -> None:
            response.previous_response_id = previous
            if kept and not session.closed:
                output, body = list(response.output), response.model_dump_json(by_alias=True)
                stored = StoredResponse(before, new, output, json.loads(body))
                session.responses[response.id] = stored
                session.size += sum(map(_bytes_of, [*new, *output])) + 2 * len(body)
                store.remember_completion(response.id, session)

        async def watched(events: AsyncGenerator[Foreign, None]) -> AsyncGenerator[object, None]:
            async for event in events:
                response = getattr(event, "response", None)
                if event.type == "response.completed" and isinstance(response, ResponsesResponse):
                    finished(response)
                yield event

        made = await create_responses(request, raw_request)
        if isinstance(made, ResponsesResponse):
            finished(made)
        elif isinstance(made, AsyncGenerator):
            request.previous_response_id = previous  # for the events
            return watched(made)
        return made

    return create


def _bytes_of(item: object) -> int:
    text = item.model_dump_json() if isinstance(item, BaseModel) else json.dumps(item, default=str)
    return _ITEM_BYTES + len(text)
