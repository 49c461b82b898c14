"""Chat completions of sessions, over HTTP and in this process.

`ChatService` finds the exact prompt of a conversation, samples within the tokens that are left,
reads the answer with vLLM's detokenizer and parser, and records the turn. It takes less processor
time than vLLM's application (`vllm_app`), which checks, renders and answers requests that are no
`PlainRequest`, or have to be refused; it takes prompts and records turns here as well:

plain: SessionMiddleware -> plan_body -> plan -> exact_prompt -> _complete or _stream -> sample
other: SessionMiddleware -> vLLM -> _preprocess -> exact_prompt -> vLLM -> EngineClient -> sample
"""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache, partial
from http import HTTPStatus
from typing import NamedTuple

import msgspec
from starlette.datastructures import State
from starlette.responses import Response

from turnwise.chat import prompts
from turnwise.chat.images import read_parts
from turnwise.chat.messages import Answer, Conversation, in_thread_if_long, plain
from turnwise.chat.messages import answer as canonical_answer
from turnwise.chat.session import AS_CONFIGURED, Session, TurnSampling
from turnwise.chat.session_store import SessionStore
from turnwise.chat.template import load_template
from turnwise.chat.tool_parser import format_of, is_object
from turnwise.config import Config, SamplingConfig
from turnwise.core.aio import run_in_thread
from turnwise.core.json_types import JsonObject
from turnwise.core.spans import chat_span, record_answer
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
from turnwise.engine.vllm_requests import sampling_params
from turnwise.errors import DeadlineError, EngineError, InputError, TrajectoryError
from turnwise.internals import vllm_server as vllm
from turnwise.serving.openai.agent_sampling import AgentSampling
from turnwise.serving.openai.bounded_parser import BoundedParsing
from turnwise.serving.openai.event_stream import DONE, EventStream
from turnwise.serving.openai.plain_request import PlainRequest, read
from turnwise.trajectory import ChatTemplate
from turnwise.trajectory.images import PlacedImage, extended, image_parts, images_in, placed
from turnwise.trajectory.left_out import check_tools

logger = logging.getLogger(__name__)

ECHO = ("prompt_token_ids", "generation_token_ids", "generation_log_probs", "weight_versions")
"""Keys of an answer's message by which a client may send its ids back."""
_TEMPLATES = 16  # maximum number of cached templates, one for each set of template variables
_TOOLS = 256
_TOOLS_BYTES = 65_536
"""Maximum size of a cached set; vLLM's application answers requests with larger ones."""

Complete = Callable[[], Awaitable[JsonObject]]
"""Samples a request whose prompt is known, and returns the answer."""
Events = AsyncGenerator[str, None]
"""Server-sent events of such a request, if it is streamed."""
ChoiceKey = tuple[str, int]
"""Identity of one completion of a request: vLLM's id of its prompt, and the index of the choice."""


class _Offer(NamedTuple):
    """A set of tools, as each of its readers gets it."""

    conversation: Conversation
    """The tools as the template gets them, without messages."""
    request: vllm.ChatCompletionRequest
    """vLLM's request with them, without messages."""
    variables: JsonObject  # of the chat template, for vLLM's parser
    params: vllm.SamplingParams  # of the detokenizer


@dataclass(slots=True)
class RequestContext:
    """One request on its way to the engine and back."""

    session: Session
    held: ExitStack  # closed at the end of the request
    request: vllm.SamplingRequest | None = None
    """The request as parsed by vLLM; None before rendering."""
    asked: Conversation = field(default_factory=Conversation)
    """Messages and tools of a chat; empty for other requests."""
    prompt: prompts.NextPrompt = field(default_factory=lambda: prompts.NextPrompt(None))
    images: Sequence[PlacedImage] = ()
    """Images of the prompt, of which vLLM's application passes on the ids alone."""
    finished: dict[ChoiceKey, Completion] = field(default_factory=dict)
    texts: dict[ChoiceKey, str] = field(default_factory=dict)
    undelivered: list[Callable[[], None]] = field(default_factory=list)
    """For each completion that the client has not got, a function that records it as a turn."""
    answers: dict[int, Answer] = field(default_factory=dict)
    """Answers as the client got them, by the index; of streamed chats only those with tools."""
    adapter: str = ""
    sampling: TurnSampling = AS_CONFIGURED
    """The turn's own sampling parameters."""
    began: float = field(default_factory=time.time)
    """Time when the request came, in seconds since the epoch."""

    def within(self, prompt: Sequence[int], most: int) -> int:
        """Return how many of `most` tokens may follow a prompt; 0 or less if none may."""
        room = self.session.room(prompt, self.prompt.fork_reason)
        return most if room is None else min(most, room)

    async def deliver(self) -> None:
        """Record the finished completions, before the client gets the bytes that have their end: it
        can leave as soon as it has read these, or send the next request."""
        while self.undelivered:
            self.undelivered.pop(0)()
            if self.undelivered:  # of a thousand prompts, say: others' requests come between
                await asyncio.sleep(0)


CURRENT: ContextVar[RequestContext | None] = ContextVar("request", default=None)
"""The request that the current task serves; None outside requests that sample."""


class ChatService:
    """Answers the chats of sessions; `state` is that of vLLM's application."""

    def __init__(
        self, config: Config, generator: Generator, state: State, store: SessionStore
    ) -> None:
        self.remember = store.remember_completion
        self._store = store
        self._config = config
        self._generator = generator
        self._chat = state.openai_serving_chat
        self.tokenizer = self._chat.renderer.tokenizer
        self._format = format_of(config.rollout.tool_parser)
        self.parsing = BoundedParsing(config, self.tokenizer, _count_late)
        self._template = load_template(config, self.tokenizer)
        self._with_variables = lru_cache(_TEMPLATES)(
            lambda text: self._template.with_variables(**json.loads(text))
        )
        self._offer = lru_cache(_TOOLS)(self._read_offer)
        self._warned = False
        self.agent_sampling = AgentSampling(config)
        self._plans = not (config.serving.adapters or config.serving.reasoning_parser)
        choice = vllm.ChatCompletionResponseChoice(
            index=0, message=vllm.ChatMessage(role="assistant", content="")
        )
        empty = vllm.ChatCompletionResponse(
            model=self._chat.models.model_name(None),
            choices=[choice],
            usage=vllm.UsageInfo(),
            system_fingerprint=self._chat.system_fingerprint,
        )
        self._empty: JsonObject = empty.model_dump()  # an answer with all of vLLM's keys

    @contextmanager
    def serving(
        self, name: str | None, previous: str | None, child: str | None = None
    ) -> Iterator[RequestContext]:
        """Hold the session of a request, and make the request `CURRENT`, until it is answered;
        completions not delivered then are lost. Raises as `SessionStore.request` does."""
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

    async def answer(self, tree: JsonObject, context: RequestContext) -> JsonObject | Events:
        """Return vLLM's answer to a request, or the events of one that is streamed."""
        if (planned := await self.plan(tree, context)) is not None:
            return planned if isinstance(planned, AsyncGenerator) else await planned()
        if unknown := tree.keys() - vllm.ChatCompletionRequest.model_fields:
            raise InputError(f"a chat completion's request has no key {min(unknown)}")
        answered = await self._chat.create_chat_completion(vllm.ChatCompletionRequest(**tree))
        if isinstance(answered, AsyncGenerator):
            return answered
        dumped: JsonObject = answered.model_dump()
        return dumped

    async def plan_body(
        self, tree: object, context: RequestContext
    ) -> tuple[object, Complete | Events | None]:
        """Return the body for vLLM's application, as JSON was read, and the result of `plan`."""
        # Clients without tools send an empty list and a choice among them, which vLLM refuses.
        if (
            isinstance(tree, dict)
            and tree.keys() & {"tools", "tool_choice"}
            and tree.get("tools") in (None, [])
            and tree.get("tool_choice") in (None, "auto", "none")
        ):
            tree = {k: v for k, v in tree.items() if k not in ("tools", "tool_choice")}
        planned = await self.plan(tree, context)
        if planned is None:
            context.request, context.asked = None, Conversation()  # not all models' chats set them
        return tree, planned

    async def plan(self, tree: object, context: RequestContext) -> Complete | Events | None:
        """Return what completes a request; None if vLLM's application has to answer it.

        None never refuses: vLLM's path answers, and words the refusal.
        """
        own = context.session.sampling
        base = own or self._config.sampling
        # vLLM's frontend finds stop strings, and checks logits processors.
        if not self._plans or base.stop or base.logits_processors:
            return None
        if (parsed := read(tree)) is None:
            return None
        request, messages = parsed
        tools = msgspec.json.encode(request.tools or None)
        offer = self._offer(tools) if len(tools) <= _TOOLS_BYTES else None
        if offer is None:
            return None
        if (settled := self.agent_sampling.of_plain(request.sampling, context.session)) is None:
            return None
        context.sampling, changes = settled
        offered = offer.conversation
        context.request = offer.request
        context.asked = Conversation(messages, offered.tools)
        context.asked.tools_digest = offered.tools_digest
        try:
            prompt = await self.exact_prompt(context, offer.request)
            if prompt is None:  # every template renders messages of nothing but text
                shown = [
                    {k: v for k, v in message.items() if v is not None and k not in ECHO}
                    for message in messages
                ]
                if all(message.keys() == {"role", "content"} for message in shown):
                    prompt = await in_thread_if_long(
                        shown, lambda: self._template.render_first(shown, offered.tools)
                    )
        except Exception:  # a client's messages may be anything: vLLM's path reports the error
            return None
        if prompt is None:
            return None
        most: int = self._chat.model_config.max_model_len - len(prompt)
        most = min(most, request.max_completion_tokens or request.max_tokens or base.max_tokens)
        most = context.within(prompt, most)
        least = changes.get("min_tokens", min(base.min_tokens, most))
        if most < 1 or least > most:
            return None
        changes |= {"max_tokens": most, "min_tokens": least}
        changes["prompt_logprobs"] = own is not None and own.prompt_logprobs
        sampling = base.model_copy(update=changes)
        parsing = offer.request.model_copy(update={"messages": messages})
        plan = (context, request, parsing, offer, prompt, sampling)
        return self._stream(*plan) if request.stream else partial(self._complete, *plan)

    def _read_offer(self, encoded: bytes) -> _Offer | None:
        """Return a set of tools as vLLM reads it; None if it needs vLLM's application."""
        try:
            request = vllm.ChatCompletionRequest(messages=[], tools=msgspec.json.decode(encoded))
            dumped = [tool.model_dump() for tool in request.tools or ()] or None
            # Without tools vLLM would remove calls from the text.
            request.tool_choice = "auto" if dumped else "none"
            variables = vllm.template_variables(self._chat, request)
            if dumped:
                parser = vllm.make_parser(self._chat, request, self.tokenizer, variables)
                request = parser.adjust_request(request=request)
            content = vllm.resolve_chat_template_content_format(
                self._chat.chat_template,
                dumped,
                self._chat.chat_template_content_format,
                self.tokenizer,
                model_config=self._chat.model_config,
            )
            if content != "string" or request.extract_structured_outputs() is not None:
                return None
            params = vllm.SamplingParams(skip_special_tokens=request.skip_special_tokens)
        except Exception:  # a client's tools may be anything: vLLM's path reports the error
            return None
        return _Offer(Conversation(tools=dumped), request, variables, params)

    async def respond(self, complete: Complete) -> Response:
        """Complete a planned request, for an HTTP client."""
        try:
            status, tree = HTTPStatus.OK.value, await complete()
        except Exception as error:  # raised to this request's client; other requests continue
            refusal = vllm.create_error_response(client_error(error))
            status, tree = refusal.error.code, refusal.model_dump()
        text = json.dumps(tree, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return Response(text, status, media_type="application/json")

    async def _complete(
        self,
        context: RequestContext,
        request: PlainRequest,
        parsing: vllm.ChatCompletionRequest,
        offer: _Offer,
        prompt: list[int],
        sampling: SamplingConfig,
    ) -> JsonObject:
        """Sample, and return the answer as vLLM writes it."""
        name, detokenizer = self._detokenizer(offer, prompt)
        seen = placed(prompt)
        asked = Request(prompt, sampling, name, request.seed, whole=True, images=seen)
        stop_reason: int | str | None = None
        async with aclosing(self.sample(context, (name, 0), asked)) as chunks:
            async for chunk in chunks:
                detokenizer.update(list(chunk.token_ids), chunk.finish_reason == "stop")
                stop_reason = chunk.stop_reason
        completion = context.finished[name, 0]
        token_ids = completion.token_ids
        text = detokenizer.get_next_output_text(True, False)
        await self.parsing.prepare(text, context.asked.tools)
        content, found = self._parse(parsing, text, token_ids, offer.variables)
        calls = [
            vllm.ToolCall(id=call.id or vllm.make_tool_call_id(), function=call) for call in found
        ]
        answered = [(call.name, call.arguments) for call in found]
        context.answers[0] = canonical_answer(content, answered)
        message = vllm.ChatMessage(role="assistant", content=content, tool_calls=calls).model_dump()
        choice = {
            **self._empty["choices"][0],
            "message": message,
            "finish_reason": "tool_calls" if calls else completion.finish_reason,
            "stop_reason": stop_reason,
        }
        usage = {
            **self._empty["usage"],
            "prompt_tokens": len(prompt),
            "completion_tokens": len(token_ids),
            "total_tokens": len(prompt) + len(token_ids),
        }
        tree = {**self._empty, "id": name, "created": int(time.time())}
        tree |= {"choices": [choice], "usage": usage}
        if request.return_token_ids:
            choice["token_ids"], tree["prompt_token_ids"] = token_ids, prompt
            message |= echo_of(prompt, completion)
        self.remember(name, context.session)
        return tree

    async def _stream(
        self,
        context: RequestContext,
        request: PlainRequest,
        parsing: vllm.ChatCompletionRequest,
        offer: _Offer,
        prompt: list[int],
        sampling: SamplingConfig,
    ) -> Events:
        """Sample, and yield the events of the answer as vLLM writes them."""
        name, detokenizer = self._detokenizer(offer, prompt)
        self.remember(name, context.session)
        try:
            params = sampling_params(sampling, request.seed)
            params.stream_interval = 1
            asked = Request(prompt, params, name, request.seed, images=placed(prompt))
            parser = None
            if parsing.tools:
                parser = vllm.make_parser(self._chat, parsing, self.tokenizer, offer.variables)
            usage = bool(request.stream_options and request.stream_options.include_usage)
            events, begun = EventStream(name, self._chat, parser, parsing, prompt, usage), False
            async with aclosing(self.sample(context, (name, 0), asked)) as chunks:
                async for chunk in chunks:
                    finish, ids = chunk.finish_reason, list(chunk.token_ids)
                    detokenizer.update(ids, finish == "stop")
                    text = detokenizer.get_next_output_text(finish is not None, True)
                    event = "" if begun else events.first()
                    begun = True
                    event += events.following(text, ids, finish, chunk.stop_reason)
                    if finish is not None:
                        context.texts[name, 0] = detokenizer.output_text
                        if parser is not None:
                            context.answers[0] = events.answer
                    if event:
                        yield event
            yield events.last() + DONE
        except Exception as error:  # raised to this request's client; other requests continue
            why = self._chat.create_streaming_error_response(client_error(error))
            yield f"data: {why}\n\n{DONE}"

    def _detokenizer(
        self, offer: _Offer, prompt: list[int]
    ) -> tuple[str, vllm.IncrementalDetokenizer]:
        """Return a name for an answer, and vLLM's detokenizer of it."""
        name = f"chatcmpl-{secrets.token_hex(8)}"
        request = vllm.EngineCoreRequest(
            request_id=name,
            prompt_token_ids=prompt,
            mm_features=None,
            sampling_params=offer.params,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        return name, vllm.IncrementalDetokenizer.from_new_request(self.tokenizer, request)

    def _parse(
        self,
        request: vllm.SamplingRequest,
        text: str,
        token_ids: list[int],
        variables: JsonObject,
    ) -> tuple[str | None, list[vllm.FunctionCall]]:
        """Return the content and the calls that a client gets for a text."""
        if not hasattr(request, "tool_choice"):
            return text, []
        parser = vllm.make_parser(self._chat, request, self.tokenizer, variables)
        _, content, calls = parser.parse(
            text, request, enable_auto_tools=True, model_output_token_ids=token_ids
        )
        return content, list(calls or ())

    async def exact_prompt(
        self, context: RequestContext, request: vllm.SamplingRequest
    ) -> list[int] | None:
        """Return a prompt's ids, or None if vLLM has to render it; refuse a request without a chat
        template, and in a training session one whose tools or messages the template leaves out."""
        session, asked, template = context.session, context.asked, self._template_of(request)
        messages, training = asked.messages, session.sampling is not None
        if template.missing:
            raise prompts.RefusedParameter("messages", template.missing)
        if asked.tools and self._config.rollout.tools_in_prompt and not template.shows_tools:
            tools, shown = asked.tools, [plain(message) for message in messages]
            try:
                await in_thread_if_long(shown, lambda: check_tools(template, shown, tools))
            except InputError as error:
                if training:
                    raise prompts.RefusedParameter("tools", str(error)) from error
                if not self._warned:
                    logger.warning("a request has tools, and %s", error)
                self._warned = True
        if (required := getattr(request, "required_prefix_token_ids", None)) is not None:
            name = "required_prefix_token_ids"
            ids = prompts.token_ids_of({name: required}, name)
            return await run_in_thread(prompts.spliced_prompt, template, asked, ids)
        prompt = await in_thread_if_long(messages, lambda: session.next_prompt(asked, template))
        context.prompt = prompt
        if prompt.token_ids is not None:
            return prompt.token_ids
        if (echoed := prompts.echoed_prompt(template, asked, refuse_dropped=training)) is not None:
            if echoed.token_ids is not None:
                return echoed.token_ids
            context.prompt = echoed
        return await self.own_ids(asked, request)

    async def own_ids(self, asked: Conversation, request: vllm.SamplingRequest) -> list[int] | None:
        """Return the ids of a whole conversation, or None if vLLM has to render it."""
        if not self._config.model.escape_special_tokens and not images_in(asked.messages):
            return None
        template, shown = self._template_of(request), asked.messages
        generation = getattr(request, "add_generation_prompt", True)
        return await in_thread_if_long(
            shown, lambda: prompts.own_prompt(template, asked, generation=generation)
        )

    async def read_images(
        self, request: vllm.SamplingRequest, messages: Sequence[JsonObject]
    ) -> list[JsonObject]:
        """Return messages with the images of their parts, as we keep them; refuse a request whose
        images cannot be read, are too many, or are nothing that this server takes."""

        def read() -> list[JsonObject]:
            return [
                read_parts(message, f"messages[{index}]", files=False)
                if vllm.has_non_text_content([message])
                else message
                for index, message in enumerate(messages)
            ]

        for name in ("echo", "continue_final_message", "required_prefix_token_ids"):
            if getattr(request, name, False):
                why = f"{name} is not served where a message has an image"
                raise prompts.RefusedParameter(name, why)
        most = self._config.engine.images_per_prompt
        if not most or not self._chat.model_config.supports_multimodal_inputs:
            raise InputError("this server takes text alone: a request has an image or another file")
        if len([*image_parts(messages)]) > most:  # before any is decoded
            why = f"more than {most} images (engine.images_per_prompt)"
            raise InputError(f"the messages have {why}")
        return await run_in_thread(read)

    def _template_of(self, request: vllm.SamplingRequest) -> ChatTemplate:
        """Return the template with a request's variables; all share the tokenizer."""
        own = getattr(request, "chat_template_kwargs", None)
        if not own:
            return self._template
        return self._with_variables(json.dumps(own, sort_keys=True, default=str))

    async def sample(
        self, context: RequestContext, key: ChoiceKey, request: Request
    ) -> AsyncGenerator[Chunk, None]:
        """Sample a request's tokens for its session; the finished completion becomes a turn. The
        route of `request` names only the adapter."""
        session, sampling = context.session, request.sampling
        route = Route(session.id, session.group, request.route.adapter)
        request, turn = request._replace(route=route), len(session.trajectory.turns)
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
            """Return an answer as the client got it, or would have got it from the whole text;
            count its tool calls as a loop does: the client may not notice a broken one."""
            said, chat = context.answers.get(key[1]), context.request
            if said is None:
                text = context.texts.get(key)
                if text is None:  # the client disconnected before the end
                    text = self._template_of(chat).decode(completion.token_ids)
                try:
                    content, found = self._parse(chat, text, completion.token_ids, {})
                except Exception:  # the client gets the error; the session keeps the text
                    logger.debug("an answer cannot be parsed", exc_info=True)
                    content, found = text, []
                said = canonical_answer(content, [(call.name, call.arguments) for call in found])
            if tools := context.asked.tools:
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
            extended(request.prompt),
            completion,
            asked=context.asked,
            answer=answer,
            prompt=context.prompt,
            adapter=context.adapter,
            times=times,
            sampling=context.sampling,
        )
        context.undelivered.append(record)


def _count_late() -> None:
    """Count an answer whose parse would take too long, with the session that it is for."""
    if (context := CURRENT.get()) is not None:
        context.session.trajectory.events["parse_timeout"] += 1


def echo_of(prompt: list[int], completion: Completion) -> JsonObject:
    """Return the values of a message's `ECHO`."""
    values = prompt, completion.token_ids, completion.logprobs, completion.weight_versions
    return dict(zip(ECHO, values, strict=True))


def client_error(error: Exception) -> Exception:
    """Return an error in the form that vLLM sends to a client."""
    shown: Exception = error
    if isinstance(error, EngineError | DeadlineError):
        shown = vllm.GracefulHTTPError(str(error), HTTPStatus.SERVICE_UNAVAILABLE)
    elif isinstance(error, InputError):
        shown = vllm.VLLMValidationError(str(error))
    elif isinstance(error, TrajectoryError):  # its own logits processor failed, and would again
        shown = vllm.GracefulHTTPError(str(error), HTTPStatus.UNPROCESSABLE_ENTITY)
    return shown
