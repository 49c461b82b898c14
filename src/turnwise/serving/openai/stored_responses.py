"""Responses that later requests continue by `previous_response_id`.

A session keeps the input and the output of each of its responses, as long as it lives. A request
that continues one is sent to vLLM with the whole conversation as its input, so that it takes the
same path as one that sends all items itself. vLLM's own store is off: it is never emptied, and it
loses calls of functions.
"""

import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request

from turnwise.chat.session_store import SessionStore
from turnwise.serving.openai.request_context import CURRENT
from turnwise.serving.openai.vllm_api import (
    ResponsesRequest,
    ResponsesResponse,
    VLLMValidationError,
)

_ITEM_BYTES = 1_000
"""Estimated memory of an item without its text."""

Item = Any
"""One input or output item: vLLM's models or dictionaries, of many types."""
Create = Callable[..., Awaitable[object]]


def storing(create_responses: Create, store: SessionStore) -> Create:
    """Wrap vLLM's method that answers a request, so that responses are kept and continued.

    A request whose `store` is false is not kept. An unknown id is answered by vLLM, with 404.

    Args:
        create_responses: The method of vLLM's `OpenAIServingResponses`.
        store: The server's sessions.

    Example:
        >>> responses.create_responses = storing(responses.create_responses, sessions)
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
        previous, kept, new = request.previous_response_id, request.store, _items(request.input)
        if previous is not None:
            session = store.of_response(context.session, previous)
            if session is not None:
                context.move_to(session, store)
                request.input = [*session.responses.items(previous), *new]
                request.previous_response_id = None
        session = context.session

        def finished(response: ResponsesResponse) -> None:
            response.previous_response_id = previous
            if kept and not session.closed:
                items, body = [*new, *response.output], response.model_dump_json(by_alias=True)
                session.responses.add(response.id, previous, items, json.loads(body))
                session.size += sum(map(_bytes_of, items)) + 2 * len(body)
                store.remember_completion(response.id, session)

        answer = await create_responses(request, raw_request)
        if isinstance(answer, ResponsesResponse):
            finished(answer)
        elif isinstance(answer, AsyncGenerator):
            request.previous_response_id = previous  # for the events
            return _watched(answer, finished)
        return answer

    return create


async def _watched(
    events: AsyncGenerator[Any, None], finished: Callable[[ResponsesResponse], None]
) -> AsyncGenerator[object, None]:
    async for event in events:
        response = getattr(event, "response", None)
        if event.type == "response.completed" and isinstance(response, ResponsesResponse):
            finished(response)
        yield event


def _items(given: str | list[Item]) -> list[Item]:
    return [{"role": "user", "content": given}] if isinstance(given, str) else list(given)


def _bytes_of(item: Item) -> int:
    text = item.model_dump_json() if isinstance(item, BaseModel) else json.dumps(item, default=str)
    return _ITEM_BYTES + len(text)
