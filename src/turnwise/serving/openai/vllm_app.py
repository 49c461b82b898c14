"""vLLM's OpenAI application around a `Generator`: one worker's engine, or the fleet.

Chat Completions, Completions, Responses and Anthropic Messages, streaming, tools, reasoning and
structured outputs are vLLM's code. Two parts are ours: turning a conversation into ids
(`session_hooks`), which sessions make exact, and sampling ids (`engine_client`). The server's tests
fail if vLLM moves these parts. Plain chat completions do not come here (`direct_chat`).
"""

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence

from fastapi import FastAPI

from turnwise.chat.session import Session
from turnwise.chat.tool_parser import silence
from turnwise.config import Config
from turnwise.core.gguf import resolve_model, resolve_tokenizer
from turnwise.engine.protocol import Generator
from turnwise.errors import InputError
from turnwise.serving.openai.adapters import serve_adapters
from turnwise.serving.openai.engine_client import EngineClient
from turnwise.serving.openai.session_hooks import SessionHooks
from turnwise.serving.openai.vllm_api import (
    CompletionRequest,
    FlexibleArgumentParser,
    build_app,
    init_app_state,
    make_arg_parser,
)

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


async def build(
    config: Config,
    generator: Generator,
    healthy: Callable[[], bool],
    remember: Callable[[str, Session], None],
    names: Sequence[str],
) -> FastAPI:
    """Build vLLM's application around `generator`, with only the routes in `ROUTES`.

    Args:
        healthy: Returns whether anything can be served now.
        remember: Called with each chat completion's id and session.
        names: The model's names for clients; responses have the first. Requests may use any name
            unless there are adapters.

    Raises:
        InputError: when vLLM refuses the model, or has no parser of the configured name.

    Example:
        >>> app = await build(config, engine, lambda: True, store.remember_completion, ["policy"])
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
    hooks = SessionHooks(config, remember)
    try:
        client = EngineClient(config, generator, hooks.record, healthy)
        with _root_logger_kept():
            app: FastAPI = build_app(args, EngineClient.tasks, client.model_config)
        await init_app_state(client, app.state, args, EngineClient.tasks)
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise InputError(f"vLLM cannot serve {config.model.path}: {error}") from error
    app.router.routes[:] = [r for r in app.router.routes if getattr(r, "path", "") in ROUTES]
    serve_adapters(app.state, config.serving.adapters, names)
    hooks.attach(app.state, client.renderer.tokenizer)
    app.state.session_hooks = hooks
    return app


@contextlib.contextmanager
def _root_logger_kept() -> Iterator[None]:
    """Restore the root logger after a block.

    vLLM's application imports a package for SageMaker that hides everything below ERROR.
    """
    root = logging.getLogger()
    level, handlers = root.level, [(handler, handler.level) for handler in root.handlers]
    try:
        yield
    finally:
        root.setLevel(level)
        for handler, own in handlers:
            handler.setLevel(own)
