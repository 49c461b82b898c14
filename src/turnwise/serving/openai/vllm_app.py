"""vLLM's OpenAI application, and the `ChatService` in it.

Completions and tokenisation are handled by vLLM's own code. The service replaces the methods of
vLLM that answer chats, Responses and Anthropic's Messages, turn conversations into ids, and choose
adapters. `EngineClient` samples the completions. The server's tests fail if vLLM moves these parts.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from fastapi import FastAPI
from starlette.datastructures import State

from turnwise.chat.session_store import SessionStore
from turnwise.chat.tool_parser import silence
from turnwise.config import Config
from turnwise.core.gguf import resolve_model, resolve_tokenizer
from turnwise.core.json_types import JsonObject
from turnwise.core.optional import Foreign
from turnwise.engine.adapters import EngineAdapters
from turnwise.engine.protocol import Generator
from turnwise.engine.vllm_start import engine_arguments
from turnwise.errors import InputError
from turnwise.internals import vllm_server as vllm
from turnwise.serving.openai.chat_service import ChatService
from turnwise.serving.openai.engine_client import EngineClient
from turnwise.serving.openai.request_context import CURRENT
from turnwise.serving.openai.responses import ResponseService
from turnwise.serving.openai.vllm_errors import refusing

Create = Callable[..., Awaitable[object]]  # a method of vLLM that answers or renders a request
VLLM_ROUTES = {
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
"""Paths of vLLM's application that are served; its control routes are not among them."""


async def build(
    config: Config, generator: Generator, store: SessionStore, names: Sequence[str]
) -> FastAPI:
    """Build vLLM's application around `generator`, with only the routes in `VLLM_ROUTES`.

    Its `state.chats` is the chat service. Answers name the model by the first of `names`; requests
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
    args.chat_template = config.model.template_text  # not an argument, as it may begin with a dash
    # vLLM reads the option only here, but copies it here only when it configures an engine.
    args.structured_outputs_config.reasoning_parser = config.serving.reasoning_parser or ""
    silence(config.rollout.tool_parser)
    # vLLM writes its default, 16, into requests, where it looks like a client's choice.
    vllm.CompletionRequest.model_fields["max_tokens"].default = None
    try:
        adapters = EngineAdapters.of(config)
        engine = engine_arguments(config.model, config.engine, config.deterministic, adapters)
        client = EngineClient(engine, config.sampling, generator)
        root = logging.getLogger()
        level, handlers = root.level, [(handler, handler.level) for handler in root.handlers]
        try:
            app: FastAPI = vllm.build_app(args, EngineClient.tasks, client.model_config)
        finally:  # vLLM imports a package for SageMaker that hides records below ERROR
            root.setLevel(level)
            for handler, own in handlers:
                handler.setLevel(own)
        await vllm.init_app_state(client, app.state, args, EngineClient.tasks)
        vllm.keep_requests_out_of_the_log()
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise InputError(f"vLLM cannot serve {config.model.path}: {error}") from error
    app.router.routes[:] = [r for r in app.router.routes if getattr(r, "path", "") in VLLM_ROUTES]
    service = ChatService(config, generator, app.state, store)
    _serve_adapters(service, app.state, config.serving.adapters, names)
    app.state.chats = client.service = service
    renderer, chat = app.state.online_renderer, app.state.openai_serving_chat
    preprocess = partial(_preprocess, renderer.preprocess_chat, service)
    renderer.preprocess_chat = partial(_after_others, preprocess)
    render = renderer.render_completion
    renderer.render_completion = partial(_render_completion, render, service)
    chat.create_chat_completion = partial(service.answer_for_vllm, False)
    app.state.openai_serving_responses.create_responses = ResponseService(
        service, app.state, store
    ).create
    messages = app.state.anthropic_serving_messages  # streamed from the chunks of a chat
    messages.create_chat_completion = partial(service.answer_for_vllm, True)
    messages.create_messages = partial(_after_others, messages.create_messages)
    return app


async def _after_others(work: Create, *arguments: object, **options: object) -> object:
    """Let other requests run before a step of a request that may take long."""
    await asyncio.sleep(0)
    return await work(*arguments, **options)


async def _preprocess(
    preprocess_chat: Create,
    service: ChatService,
    request: Foreign,
    messages: list[JsonObject],
    *args: object,
    tool_dicts: list[JsonObject] | None = None,
    **options: object,
) -> object:
    """Give vLLM's method the ids of a conversation whose tokens are counted or shown. With ids,
    vLLM renders nothing, and fetches no images from URLs."""
    asked = await service.prompts.read(request, messages, tool_dicts)
    found = await service.prompts.find(None, asked, request)
    assert found.token_ids is not None
    kept = getattr(request, "kv_transfer_params", None) or {}
    request.kv_transfer_params = {**kept, "prompt_token_ids": found.token_ids.tolist()}
    return await _after_others(
        preprocess_chat, request, [], *args, tool_dicts=tool_dicts, **options
    )


async def _render_completion(
    render: Create,
    service: ChatService,
    request: vllm.CompletionRequest,
    **options: object,
) -> object:
    context = CURRENT.get()
    if context is not None:
        context.request = request
        with refusing():
            context.sampling = service.sampling.complete(request, context.session)
    return await render(request, **options)


def _serve_adapters(
    service: ChatService, state: State, adapters: Mapping[str, str], names: Sequence[str]
) -> None:
    """List adapters next to the model; requests choose an adapter by their `model`. Without
    adapters a request may name any model."""
    models = state.openai_serving_models
    if not adapters:
        models.is_base_model = lambda name: True
        return
    if same := [name for name in adapters if name in names or not name]:
        raise InputError(f"serving.adapters: {same[0]!r} is the model's own name")
    models.is_base_model = lambda name: name in names
    for number, (name, path) in enumerate(adapters.items(), start=1):
        models.lora_requests[name] = vllm.LoRARequest(name, number, path, names[0])
    vllm.choose_adapters(state.openai_serving_completion, service.choose_adapter)
