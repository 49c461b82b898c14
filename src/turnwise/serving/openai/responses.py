"""OpenAI's Responses API: chats whose input and output are items, and whose responses are kept.

A request is a chat of the `ChatService`; vLLM's functions translate its items to messages, and the
parsed answer to items or events. A session keeps the responses that later requests may continue.
vLLM's own store is not used, because it is never emptied and loses calls.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from pydantic import BaseModel
from starlette.datastructures import State

from turnwise.chat.session import StoredResponse
from turnwise.chat.session_store import SessionStore
from turnwise.core.json_types import JsonObject
from turnwise.core.optional import Foreign
from turnwise.internals import vllm_server as vllm
from turnwise.serving.openai.chat_sampler import Chat
from turnwise.serving.openai.chat_service import ChatService
from turnwise.serving.openai.choices import Piece
from turnwise.serving.openai.event_stream import StreamedChoice
from turnwise.serving.openai.request_context import CURRENT, RequestContext
from turnwise.serving.openai.vllm_errors import client_error, for_clients

_ITEM_BYTES = 1_000  # estimated memory of an item of a response without its text
Keep = Callable[[vllm.ResponsesResponse], None]
"""Keeps a finished response in its session."""


class ResponseService:
    """Answers requests of the Responses API; `state` is the state of vLLM's application."""

    def __init__(self, chats: ChatService, state: State, store: SessionStore) -> None:
        self._chats, self._store = chats, store
        self._responses = state.openai_serving_responses
        self._models = state.openai_serving_models

    async def create(
        self, request: vllm.ResponsesRequest, _: object = None
    ) -> vllm.ResponsesResponse | AsyncGenerator[Foreign, None]:
        """Return the response, or its events if it is streamed; this method replaces vLLM's
        method."""
        if request.background:
            raise vllm.VLLMValidationError(
                "background responses are not served: leave `background` out, and read the answer "
                "from this request or, with `store`, later by its id",
                parameter="background",
            )
        await asyncio.sleep(0)  # let other requests run between the steps of this one
        context = CURRENT.get()
        assert context is not None  # the route is served in sessions
        asked, previous = request.input, request.previous_response_id
        new: list[Foreign] = (
            [{"role": "user", "content": asked}] if isinstance(asked, str) else list(asked)
        )
        before: StoredResponse | None = None
        if previous is not None:
            if (found := self._store.of_response(context.session, previous)) is None:
                raise vllm.VLLMNotFoundError(f"Response with id '{previous}' not found.")
            if found is not context.session:
                context.session = context.held.enter_context(self._store.holding(found))
            before = found.responses[previous]
        given = new if before is None else [*before.whole_input, *before.output, *new]
        messages = vllm.construct_input_messages(
            request_instructions=request.instructions,
            request_input=asked if before is None and isinstance(asked, str) else given,
        )
        tools = vllm.construct_tool_dicts(request.tools, request.tool_choice)
        with for_clients():
            chat = await self._chats.prepare(request, messages, tools, context, request.request_id)
            keep = self._keeping(context, before, new) if request.store else lambda response: None
            if request.stream:
                return self._events(chat, keep)
            created = int(time.time())
            ((piece, _scored),) = await self._chats.sampler.whole(chat)
        await self._chats.parsing.prepare(piece.text, context.conversation.tools)
        response = self._response(chat, piece, self._items(chat, piece), created)
        keep(response)
        return response

    def _keeping(
        self, context: RequestContext, before: StoredResponse | None, new: list[Foreign]
    ) -> Keep:
        session, store = context.session, self._store

        def keep(response: vllm.ResponsesResponse) -> None:
            if session.closed:
                return
            output, body = list(response.output), response.model_dump_json(by_alias=True)
            session.responses[response.id] = StoredResponse(before, new, output, json.loads(body))
            session.size += 2 * len(body)
            for item in [*new, *output]:
                is_model = isinstance(item, BaseModel)
                text = item.model_dump_json() if is_model else json.dumps(item, default=str)
                session.size += _ITEM_BYTES + len(text)
            store.remember_completion(response.id, session)

        return keep

    def _items(self, chat: Chat, piece: Piece) -> list[Foreign]:
        """Return the items of a whole answer."""
        request = chat.request
        _, reasoning, content, calls = self._chats.writer.parsed(chat, piece)
        chat.context.note(0, content, [(call.name, call.arguments) for call in calls])
        items: list[Foreign] = vllm.build_response_output_items(
            reasoning=reasoning if request.include_reasoning else None,
            content=content,
            tool_calls=calls,
            logprobs=self._logprobs(chat, piece) or None,
            tools=request.tools,
        )
        return items

    def _logprobs(self, chat: Chat, piece: Piece) -> list[Foreign]:
        """Return the log-probs for the client; an empty list if the reasoning is hidden, because
        the log-probs would reveal it."""
        if piece.logprobs is None or not chat.request.include_reasoning:
            return []
        return vllm.response_logprobs(
            self._responses, chat.request, piece.token_ids, piece.logprobs
        )

    def _response(
        self, chat: Chat, piece: Piece, output: Sequence[Foreign], created: int
    ) -> vllm.ResponsesResponse:
        """Return the finished response of a whole answer."""
        request, prompt = chat.request, chat.prompt.tolist()
        counted = self._chats.writer.parser(chat).count_reasoning_tokens(piece.token_ids)
        usage = vllm.ResponseUsage(
            input_tokens=len(prompt),
            output_tokens=len(piece.token_ids),
            total_tokens=len(prompt) + len(piece.token_ids),
            input_tokens_details=vllm.InputTokensDetails(
                cache_write_tokens=piece.stored_tokens,
                cached_tokens=piece.cached_tokens,
                input_tokens_per_turn=[],
                cached_tokens_per_turn=[],
            ),
            output_tokens_details=vllm.OutputTokensDetails(
                reasoning_tokens=counted,
                tool_output_tokens=0,
                output_tokens_per_turn=[],
                tool_output_tokens_per_turn=[],
            ),
        )
        shown: JsonObject = {}
        if request.enable_response_messages:
            text = self._chats.prompts.template_of(request).decode_all(prompt)
            both = {"input_messages": (text, prompt), "output_messages": piece[:2]}
            shown = {
                name: [vllm.ResponseRawMessageAndToken(message=said, tokens=ids)]
                for name, (said, ids) in both.items()
            }
        return self._begun(
            chat,
            created,
            output=list(output),
            status="incomplete" if piece.finish_reason == "length" else "completed",
            usage=usage,
            **shown,
        )

    def _begun(self, chat: Chat, created: int, **details: object) -> vllm.ResponsesResponse:
        assert chat.core is not None
        model = self._models.model_name(chat.adapter)
        params = chat.core.sampling_params
        return vllm.ResponsesResponse.from_request(
            chat.request, params, model_name=model, created_time=created, **details
        )

    async def _events(self, chat: Chat, keep: Keep) -> AsyncGenerator[Foreign, None]:
        """Sample, and yield the events of the response."""
        numbers = 0

        def numbered(event: Foreign) -> Foreign:
            nonlocal numbers
            event.sequence_number, numbers = numbers, numbers + 1
            return event

        created, begun = int(time.time()), Piece("", [], None, None, None)
        first = self._begun(chat, created, output=[], status="in_progress", usage=None)
        tree = first.model_dump(mode="json", by_alias=True)
        for kind in (vllm.ResponseCreatedEvent, vllm.ResponseInProgressEvent):
            name = kind.model_fields["type"].annotation.__args__[0]
            yield numbered(kind(type=name, sequence_number=-1, response=tree))
        written = vllm.EventProcessor(tools=chat.request.tools)
        parser, prompt = self._chats.writer.parser(chat), chat.prompt.tolist()
        choice, texts, last = StreamedChoice(chat.request, prompt, parser), list[str](), begun
        try:
            async with aclosing(self._chats.sampler.pieces(chat)) as pieces:
                async for _, last in pieces:
                    texts.append(last.text)
                    delta = choice.read(last)
                    for part in () if delta is None else vllm.split_delta(delta):
                        for event in self._part_events(chat, written, part, last):
                            yield numbered(event)
            chat.context.note(0, choice.content, choice.calls.values())
        except Exception as error:  # raised to this request's client; other requests continue
            wrong = vllm.create_error_response(client_error(error)).error
            said = {"message": wrong.message, "code": str(wrong.code), "param": wrong.param}
            yield numbered(vllm.ResponseErrorEvent(type="error", sequence_number=-1, **said))
            return
        whole = last._replace(text="".join(texts), token_ids=choice.sampled)
        for event in written.close_current():
            yield numbered(event)
        response = self._response(chat, whole, written.output_items, created)
        keep(response)
        done = vllm.ResponseCompletedEvent
        yield numbered(done(type="response.completed", sequence_number=-1, response=response))

    def _part_events(
        self, chat: Chat, written: vllm.EventProcessor, part: vllm.DeltaMessage, piece: Piece
    ) -> list[Foreign]:
        """Return the events of a part of an answer: text, reasoning or a call."""
        events = list[Foreign]()
        state, call = written.resolve_target_state(part)
        if state.name != "NONE":
            if written.needs_transition(state, call):
                events += written.close_current()
                events += written.open(state, call)
            events += written.emit_delta(part, piece, lambda piece: self._logprobs(chat, piece))
        return events
