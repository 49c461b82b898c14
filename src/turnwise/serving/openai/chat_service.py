"""Chat completions of sessions, over HTTP and in this process: one path for every chat.

`ChatReader` reads a request, `ChatPrompts` finds its exact prompt, and `sample` samples it for its
session, within the session's token budget. A `ChoiceReader` and vLLM's parser read each choice, and
`ChatWriter` writes the answer, whole or as events. Responses (`responses`) and Anthropic's
Messages, which vLLM translates, are chats, too. vLLM's application (`vllm_app`) answers all other
requests.
"""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import replace
from functools import partial
from http import HTTPStatus

from pydantic import ValidationError
from starlette.datastructures import State
from starlette.responses import Response

from turnwise.chat.messages import Answer
from turnwise.chat.messages import answer as canonical_answer
from turnwise.chat.session_store import SessionStore
from turnwise.chat.template import load_template
from turnwise.chat.tool_parser import format_of, is_object
from turnwise.config import Config
from turnwise.core.json_types import JsonObject
from turnwise.core.spans import chat_span, record_answer
from turnwise.engine.adapters import POLICY
from turnwise.engine.protocol import (
    Chunk,
    Completion,
    Generator,
    Request,
    Route,
    TurnTimes,
    completion_of,
    unbroken,
)
from turnwise.errors import EngineError, InputError
from turnwise.internals import vllm_server as vllm
from turnwise.serving.openai.bounded_parser import BoundedParsing
from turnwise.serving.openai.chat_prompts import ChatPrompts
from turnwise.serving.openai.chat_request import ChatReader, ParsedRequest
from turnwise.serving.openai.chat_sampler import Chat, ChatSampler
from turnwise.serving.openai.chat_writer import ChatWriter, Events
from turnwise.serving.openai.errors import errors_of, explain, refusal
from turnwise.serving.openai.request_context import CURRENT, ChoiceKey, RequestContext
from turnwise.serving.openai.request_sampling import RequestSampling
from turnwise.serving.openai.vllm_errors import client_error, for_clients, refusing

logger = logging.getLogger(__name__)


class ChatService:
    """Answers the chats of sessions; `state` is the state of vLLM's application."""

    def __init__(
        self, config: Config, generator: Generator, state: State, store: SessionStore
    ) -> None:
        self.remember = store.remember_completion
        self._store = store
        self._generator = generator
        self._chat = state.openai_serving_chat
        self._models = state.openai_serving_models
        self._adapters = bool(config.serving.adapters)
        self.tokenizer = self._chat.renderer.tokenizer
        self._format = format_of(config.rollout.tool_parser)
        reasons = bool(config.serving.reasoning_parser)
        parser = config.rollout.tool_parser, config.model, self.tokenizer, _count_late
        self.parsing = BoundedParsing(*parser, reasons=reasons)
        self._chat.parser_cls = self.parsing.bounded(self._chat.parser_cls)
        template = load_template(config.model, config.sampling, config.engine, self.tokenizer)
        self.prompts = ChatPrompts(
            template,
            self._chat,
            max_images=config.engine.images_per_prompt,
            shows_tools=config.rollout.tools_in_prompt,
        )
        self._reader = ChatReader(self._chat)
        self.sampling = RequestSampling(
            config.sampling,
            max_length=config.model.max_length,
            processors=config.engine.logits_processors_allowed,
            # Teachers in engines or servers give log-probs under one distribution only.
            exact=all(teacher.in_ranks for teacher in config.teachers().values()),
        )
        self.sampler = ChatSampler(config.sampling, self._chat, self.sample)
        self.writer = ChatWriter(
            self._chat, self.sampler, self.prompts, self.parsing, reasons=reasons
        )

    @contextmanager
    def serving(
        self, name: str | None, previous: str | None, child: str | None = None
    ) -> Iterator[RequestContext]:
        """Hold the session of a request, and make the request `CURRENT`, until it is answered;
        completions that are not delivered by then are lost. Raises the errors of
        `SessionStore.request`."""
        with ExitStack() as held:
            session = held.enter_context(self._store.request(name, previous, child))
            context = RequestContext(session, held)
            token = CURRENT.set(context)
            try:
                yield context
            finally:
                for _ in context.undelivered:
                    context.session.lose_turn()
                context.session.lost_turns += len(context.undelivered)
                context.undelivered.clear()
                CURRENT.reset(token)

    async def answer_here(self, tree: JsonObject, context: RequestContext) -> JsonObject | Events:
        """Return the answer to a request, or its events if it is streamed."""
        if unknown := tree.keys() - vllm.ChatCompletionRequest.model_fields:
            raise InputError(f"a chat completion's request has no key {min(unknown)}")
        return await self._answer(await self._prepare(tree, context))

    async def answer_http(self, tree: JsonObject, context: RequestContext) -> Response | Events:
        """Answer an HTTP client's request; return the answer's events if it is streamed."""
        try:
            answered = await self._answer(await self._prepare(tree, context))
        except ValidationError as error:
            return refusal(400, *explain(errors_of(error), tree))
        except Exception as error:  # raised to this request's client; other requests continue
            wrong = vllm.create_error_response(client_error(error))
            if wrong.error.code == HTTPStatus.INTERNAL_SERVER_ERROR:
                logger.exception("a chat could not be answered")
            return _json(wrong.model_dump(), wrong.error.code)
        return answered if isinstance(answered, AsyncGenerator) else _json(answered)

    async def answer_for_vllm(
        self, object_arguments: bool, request: vllm.ChatCompletionRequest, _: object = None
    ) -> vllm.ChatCompletionResponse | Events:
        """Answer a request of vLLM's application, in place of vLLM's own method; for
        `object_arguments` see `RequestContext`."""
        context = CURRENT.get()
        assert context is not None  # the routes that sample are served in sessions
        context.object_arguments = object_arguments
        await asyncio.sleep(0)  # let other requests run between the steps of this one
        with for_clients():
            answered = await self._answer(await self.prepare_chat(request, context))
        if isinstance(answered, AsyncGenerator):
            return answered
        return vllm.ChatCompletionResponse.model_validate(answered)

    async def _prepare(self, tree: JsonObject, context: RequestContext) -> Chat:
        read = self._reader.read(tree)
        if not isinstance(read, ParsedRequest):
            return await self.prepare_chat(read, context)
        adapter = self.choose_adapter(read.request)
        context.request, context.conversation = read.request, read.conversation
        self._complete_sampling(context)
        return await self._ready(read, adapter, context, _new_name())

    async def prepare_chat(
        self, request: vllm.ChatCompletionRequest, context: RequestContext
    ) -> Chat:
        """Return the chat of a request that vLLM has read, ready to be sampled."""
        wrong = self._chat.online_renderer.validate_chat_template(
            request_chat_template=request.chat_template,
            chat_template_kwargs=request.chat_template_kwargs,
            trust_request_chat_template=False,
        )
        if wrong is not None:
            raise vllm.VLLMValidationError(wrong.error.message, parameter="chat_template")
        tools = [tool.model_dump() for tool in request.tools or ()] or None
        return await self.prepare(request, request.messages, tools, context, _new_name())

    async def prepare(
        self,
        request: vllm.SamplingRequest,
        messages: Sequence[JsonObject],
        tools: list[JsonObject] | None,
        context: RequestContext,
        name: str,
    ) -> Chat:
        """Return the chat of vLLM's request with these messages and tools, ready to be sampled."""
        vllm.validate_request_mm_kwargs(
            mm_processor_kwargs=request.mm_processor_kwargs,
            media_io_kwargs=request.media_io_kwargs,
            trust_request_mm_kwargs=False,
        )
        adapter = self.choose_adapter(request)
        if not tools and request.tool_choice is None:
            request.tool_choice = "none"  # otherwise vLLM removes calls from the text
        context.request = request
        context.conversation = await self.prompts.read(request, messages, tools)
        self._complete_sampling(context)
        parsed = self._reader.complete(request, context.conversation)
        return await self._ready(parsed, adapter, context, name)

    def _complete_sampling(self, context: RequestContext) -> None:
        with refusing():
            context.sampling = self.sampling.complete(context.request, context.session)

    async def _ready(
        self,
        parsed: ParsedRequest,
        adapter: vllm.LoRARequest | None,
        context: RequestContext,
        name: str,
    ) -> Chat:
        context.request = parsed.request
        found = await self.prompts.find(context.session, context.conversation, parsed.request)
        prompt = found.token_ids
        assert prompt is not None
        context.next_prompt = found
        return self.sampler.ready(Chat(name, context, parsed, prompt, adapter))

    async def _answer(self, chat: Chat) -> JsonObject | Events:
        # Clients of Anthropic's Messages get an id different from the chat's name.
        session = None if chat.context.object_arguments else chat.context.session
        if chat.request.stream:
            if session is not None:
                self.remember(chat.name, session)
            return self.writer.events(chat)
        answered = await self.writer.whole(chat)
        if session is not None:
            self.remember(chat.name, session)
        return answered

    def choose_adapter(
        self, request: vllm.SamplingRequest, **options: object
    ) -> vllm.LoRARequest | None:
        """Return the adapter that a request names by its `model`; without a name, the adapter of
        its session's last turn. None means the model itself, which is the only choice for training
        sessions."""
        if not self._adapters:
            return None
        context = CURRENT.get()
        if context is not None and not request.model:
            request.model = context.session.adapter or None
        chosen: vllm.LoRARequest | None = self._models.lora_requests.get(request.model)
        if chosen is None and request.model and not self._models.is_base_model(request.model):
            names = ", ".join(model.name for model in self._models.base_model_paths)
            raise vllm.VLLMNotFoundError(
                f"The model `{request.model}` does not exist. Valid aliases: {names}."
            )
        if context is not None:
            if chosen is not None and context.session.sampling is not None:
                raise vllm.VLLMValidationError(
                    f"model={request.model!r} would make the tokens of this training session "
                    "off-policy: leave it out, or name the model itself",
                    parameter="model",
                )
            context.adapter = chosen.lora_name if chosen is not None else POLICY
        return chosen

    async def sample(
        self, context: RequestContext, key: ChoiceKey, request: Request
    ) -> AsyncGenerator[Chunk, None]:
        """Sample a request's tokens for its session; the finished completion becomes a turn. The
        `route` of the given request names only the adapter; this method adds the session and its
        group."""
        session, sampling = context.session, request.sampling
        route = Route(session.id, session.group, request.route.adapter)
        request, turn = replace(request, route=route), len(session.trajectory.turns)
        chunks, finished = list[Chunk](), False
        session.begin_turn()
        try:
            with chat_span(turn, sampling.temperature, sampling.max_tokens) as span:
                async with aclosing(unbroken(self._generator, request)) as pieces:
                    async for chunk in pieces:
                        chunks.append(chunk)
                        if chunk.finish_reason is not None:
                            completion = completion_of(chunks, request.id)
                            version = max(completion.weight_versions, default=-1)
                            prompt, sampled = len(request.prompt), len(completion.token_ids)
                            record_answer(span, prompt, sampled, chunk.finish_reason, version)
                            self._record(context, key, request, completion)
                            finished = True
                        yield chunk
            if not finished:
                raise EngineError(f"{request.id} ended without an answer")
        except (asyncio.CancelledError, GeneratorExit):
            session.lost_turns += not finished
            raise
        finally:
            if not finished:
                session.lose_turn()

    def _record(
        self, context: RequestContext, key: ChoiceKey, request: Request, completion: Completion
    ) -> None:
        """Keep a finished completion, to be recorded as a turn once the client gets it."""

        def answer() -> Answer:
            """Return the answer as the client got it, or the whole text if the request is not a
            chat. Count tool calls as an agent loop does, because the client may not notice a broken
            call."""
            said = context.answers.get(key[1])
            if said is None:
                text = context.texts.get(key)
                if text is None:  # the client disconnected before the end
                    text = self.prompts.template_of(context.request).decode(completion.token_ids)
                said = canonical_answer(text, [])
            if tools := context.conversation.tools:
                text, calls = said
                names = [str((tool.get("function") or tool).get("name")) for tool in tools]
                readable = sum(is_object(arguments) for _, arguments in calls)
                broken = len(calls) - readable
                broken += not calls and self._format.unreadable(text, names, [])
                events = context.session.trajectory.events
                events.update({"tool_call": readable} if readable else {})
                events.update({"tool_malformed": broken} if broken else {})
            return said

        context.finished[key] = completion
        first, now = completion.first_token_at, time.time()
        times = TurnTimes(0, context.began, first, now, completion.worker, completion.queued)
        record = partial(
            context.session.record,
            request.prompt,
            completion,
            asked=context.conversation,
            answer=answer,
            prompt=context.next_prompt,
            adapter=context.adapter,
            times=times,
            sampling=context.sampling,
        )
        context.undelivered.append(record)


def _count_late() -> None:
    """Count, for the current session, an answer that would take too long to parse."""
    if (context := CURRENT.get()) is not None:
        context.session.trajectory.events["parse_timeout"] += 1


def _new_name() -> str:
    return f"chatcmpl-{secrets.token_hex(8)}"


def _json(tree: JsonObject, status: int = HTTPStatus.OK.value) -> Response:
    text = json.dumps(tree, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Response(text, status, media_type="application/json")
