"""Plain chat completions, answered without vLLM's application.

vLLM's application checks and renders a request, and builds its answer, with every option in mind,
which takes more processor time than all other work of the server. Most requests of agents have no
such option (`plain_request`). They are answered here, with vLLM's detokenizer, parser and messages,
so that a client gets the same answer either way.

All other requests pass on to vLLM's application, and so does a request that has to be refused:
nothing is sampled before it is known to be plain.
"""

import json
import secrets
import time
from collections import OrderedDict
from contextlib import aclosing
from dataclasses import dataclass
from http import HTTPStatus

import msgspec
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from turnwise.chat.messages import Conversation, answer
from turnwise.chat.prompts import PromptCache
from turnwise.chat.template import in_thread_if_long
from turnwise.config import Config, SamplingConfig
from turnwise.core.json_types import JsonObject
from turnwise.engine.protocol import Chunk, Generator, Request
from turnwise.serving.openai.engine_client import client_error, sample
from turnwise.serving.openai.middleware import (
    read_body,
    replaying,
    send_json,
    unless_gone,
)
from turnwise.serving.openai.plain_request import PlainRequest, read, texts, without_empty_tools
from turnwise.serving.openai.request_context import CURRENT, RequestContext
from turnwise.serving.openai.session_hooks import SessionHooks
from turnwise.serving.openai.vllm_api import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    EngineCoreRequest,
    IncrementalDetokenizer,
    SamplingParams,
    ToolCall,
    UsageInfo,
    create_error_response,
    make_tool_call_id,
    resolve_chat_template_content_format,
)

PATH = "/v1/chat/completions"
_OWN_HEADERS = b"endpoint-load-metrics-format"
"""Header of a request whose answer needs headers of its own."""
_TOOLS = 256
"""Maximum number of cached sets of tools."""
_TOOLS_BYTES = 65_536
"""Maximum size of a cached set; vLLM's application answers requests with larger ones."""


class DirectChat:
    """Answers plain chat completions, and passes everything else to vLLM's application.

    Args:
        app: vLLM's application, which `vllm_app.build` made.
        config: Model and sampling defaults.
        generator: Samples the tokens.

    Example:
        >>> app = SessionMiddleware(DirectChat(app, config, scheduler), store, counts)
    """

    def __init__(self, app: FastAPI, config: Config, generator: Generator) -> None:
        self._app = app
        self._config = config
        self._generator = generator
        self._hooks: SessionHooks = app.state.session_hooks
        self._chat = app.state.openai_serving_chat
        self._tokenizer = self._chat.renderer.tokenizer
        self._prompts = PromptCache(self._hooks.template)
        self._tools: OrderedDict[bytes, _Offer | None] = OrderedDict()
        self._empty = self._empty_answer()
        self._possible = not (config.serving.adapters or config.serving.reasoning_parser)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = CURRENT.get()
        if context is None or not _sends_chat(scope):
            await self._app(scope, receive, send)
            return
        body = await read_body(receive)
        if body is None:
            return
        body = without_empty_tools(body)
        asked = await self._plan(body, context) if self._possible else None
        if asked is None:
            context.request, context.asked = None, Conversation()
            await self._app(scope, replaying(body, receive), send)
            return
        answered = await unless_gone(self._complete(asked, context), receive)
        if answered is not None:
            await send_json(send, *answered)

    async def _plan(self, body: bytes, context: RequestContext) -> "_Asked | None":
        """Return everything that sampling needs; None if vLLM's application has to answer."""
        own = context.session.sampling
        base = own or self._config.sampling
        parsed = read(body) if _is_plain(base) else None
        offer = self._offer(parsed[0].tools) if parsed is not None else None
        if parsed is None or offer is None:
            return None
        request, messages = parsed
        changes = request.sampling
        if own is not None and any(getattr(own, name) != changes[name] for name in changes):
            return None
        context.request = offer.request
        context.asked = Conversation(messages, offer.tools)
        context.asked.tools_digest = offer.digest
        try:
            prompt = await self._hooks.exact_prompt(context, offer.request)
            if prompt is None and (shown := texts(messages)) is not None:
                prompt = await in_thread_if_long(
                    shown, lambda: self._prompts.render(shown, offer.tools)
                )
        except Exception:  # a client's messages may be anything: vLLM's path reports the error
            return None
        if prompt is None:
            return None
        most = self._room(request, base, prompt, context)
        least = changes.get("min_tokens", min(base.min_tokens, most))
        if most < 1 or least > most:
            return None
        changes |= {"max_tokens": most, "min_tokens": least, "prompt_logprobs": False}
        return _Asked(request, messages, offer, prompt, base.model_copy(update=changes))

    def _room(
        self,
        request: PlainRequest,
        base: SamplingConfig,
        prompt: list[int],
        context: RequestContext,
    ) -> int:
        """Return the largest number of tokens that may follow the prompt."""
        most: int = self._chat.model_config.max_model_len - len(prompt)
        most = min(most, request.max_completion_tokens or request.max_tokens or base.max_tokens)
        room = context.session.room(prompt, context.prompt.fork_reason)
        return most if room is None else min(most, room)

    def _offer(self, tools: list[JsonObject] | None) -> "_Offer | None":
        """Return a set of tools as vLLM reads it; None if it needs vLLM's application."""
        key = msgspec.json.encode(tools or None)
        if len(key) > _TOOLS_BYTES:
            return None
        if key not in self._tools:
            try:
                self._tools[key] = self._read_tools(tools or None)
            except Exception:  # a client's tools may be anything: vLLM's path reports the error
                self._tools[key] = None
            if len(self._tools) > _TOOLS:
                self._tools.popitem(last=False)
        self._tools.move_to_end(key)
        return self._tools[key]

    def _read_tools(self, tools: list[JsonObject] | None) -> "_Offer | None":
        request = ChatCompletionRequest(messages=[], tools=tools)
        dumped = [tool.model_dump() for tool in request.tools or ()] or None
        request.tool_choice = "auto" if dumped else "none"  # or vLLM removes calls from the text
        variables = self._chat._effective_chat_template_kwargs(request)
        if dumped and self._chat.parser_cls is not None:
            parser = self._chat._make_parser(request, self._tokenizer, variables)
            request = parser.adjust_request(request=request)
        content = resolve_chat_template_content_format(
            self._chat.chat_template,
            dumped,
            self._chat.chat_template_content_format,
            self._tokenizer,
            model_config=self._chat.model_config,
        )
        if content != "string" or request.extract_structured_outputs() is not None:
            return None
        params = SamplingParams(skip_special_tokens=request.skip_special_tokens)
        digest = Conversation(tools=dumped).tools_digest
        return _Offer(dumped, digest, request, variables, params)

    async def _complete(self, asked: "_Asked", context: RequestContext) -> tuple[int, bytes]:
        """Sample, and return the status and the body of the answer."""
        name = f"chatcmpl-{secrets.token_hex(8)}"
        text = IncrementalDetokenizer.from_new_request(
            self._tokenizer, _detokenized(name, asked.prompt, asked.offer.params)
        )
        chunks: list[Chunk] = []
        request = Request(asked.prompt, asked.sampling, name, asked.request.seed, whole=True)
        stream = sample(self._generator, self._hooks.record, context, (name, 0), request)
        try:
            async with aclosing(stream) as pieces:
                async for chunk in pieces:
                    chunks.append(chunk)
                    text.update(list(chunk.token_ids), chunk.finish_reason == "stop")
            said = text.get_next_output_text(True, False)
            tree = self._answer(asked, name, said, chunks, context)
        except Exception as error:  # raised to this request's client; other requests continue
            refusal = create_error_response(client_error(error))
            return refusal.error.code, _json(refusal.model_dump())
        self._hooks.remember(name, context.session)
        return HTTPStatus.OK, _json(tree)

    def _answer(
        self,
        asked: "_Asked",
        name: str,
        text: str,
        chunks: list[Chunk],
        context: RequestContext,
    ) -> JsonObject:
        """Return the answer as vLLM writes it, and note it for the session."""
        token_ids = [token for chunk in chunks for token in chunk.token_ids]
        content: str | None = text
        calls: list[ToolCall] = []
        if self._chat.parser_cls is not None:
            request = asked.offer.request.model_copy()
            request.messages = asked.messages
            parser = self._chat._make_parser(request, self._tokenizer, asked.offer.variables)
            _, content, found = parser.parse(
                text, request, enable_auto_tools=True, model_output_token_ids=token_ids
            )
            calls = [ToolCall(id=c.id or make_tool_call_id(), function=c) for c in found or ()]
        context.answers[0] = answer(
            content, [(call.function.name, call.function.arguments) for call in calls]
        )
        message = ChatMessage(role="assistant", content=content, tool_calls=calls).model_dump()
        choice = {
            **self._empty["choices"][0],
            "message": message,
            "finish_reason": "tool_calls" if calls else chunks[-1].finish_reason,
            "stop_reason": chunks[-1].stop_reason,
        }
        usage = {
            **self._empty["usage"],
            "prompt_tokens": len(asked.prompt),
            "completion_tokens": len(token_ids),
            "total_tokens": len(asked.prompt) + len(token_ids),
        }
        tree = {**self._empty, "id": name, "created": int(time.time())}
        tree |= {"choices": [choice], "usage": usage}
        if asked.request.return_token_ids:
            logprobs, versions = context.finished[name, 0]
            choice["token_ids"] = token_ids
            tree["prompt_token_ids"] = message["prompt_token_ids"] = asked.prompt
            message["generation_token_ids"] = token_ids
            message["generation_log_probs"] = logprobs
            message["weight_versions"] = versions
        return tree

    def _empty_answer(self) -> JsonObject:
        """Return an answer with all of vLLM's keys."""
        choice = ChatCompletionResponseChoice(
            index=0, message=ChatMessage(role="assistant", content="")
        )
        response = ChatCompletionResponse(
            model=self._chat.models.model_name(None),
            choices=[choice],
            usage=UsageInfo(),
            system_fingerprint=self._chat.system_fingerprint,
        )
        tree: JsonObject = response.model_dump()
        return tree


@dataclass(slots=True)
class _Offer:
    """A set of tools."""

    tools: list[JsonObject] | None
    """The tools as the template gets them."""
    digest: bytes
    """Their digest in a conversation."""
    request: ChatCompletionRequest
    """vLLM's request with these tools and no messages."""
    variables: JsonObject
    """Variables of the chat template, for vLLM's parser."""
    params: SamplingParams
    """Parameters of the detokenizer."""


@dataclass(slots=True)
class _Asked:
    """A plain request, ready to be sampled."""

    request: PlainRequest
    messages: list[JsonObject]
    offer: _Offer
    prompt: list[int]
    sampling: SamplingConfig


def _sends_chat(scope: Scope) -> bool:
    if scope["path"] != PATH:
        return False
    headers = dict(scope["headers"])
    kind: bytes = headers.get(b"content-type", b"")
    return kind.startswith(b"application/json") and _OWN_HEADERS not in headers


def _is_plain(sampling: SamplingConfig) -> bool:
    """Return whether tokens are sampled and read without help of vLLM's frontend."""
    return not (sampling.stop or sampling.logits_processors)


def _detokenized(name: str, prompt: list[int], params: SamplingParams) -> EngineCoreRequest:
    """Return the request for vLLM's detokenizer."""
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=prompt,
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def _json(tree: JsonObject) -> bytes:
    return json.dumps(tree, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
