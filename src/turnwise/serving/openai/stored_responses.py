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

from turnwise.chat.session import Session, StoredResponse
from turnwise.chat.session_store import SessionStore
from turnwise.core.json_types import JsonObject
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
        new: list[Item] = (
            [{"role": "user", "content": asked}] if isinstance(asked, str) else list(asked)
        )
        before: StoredResponse | None = None
        if previous is not None and (found := store.of_response(context.session, previous)):
            context.move_to(found, store)
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


def page_of_input(
    session: Session, response_id: str, *, after: str | None, limit: int, newest_first: bool
) -> JsonObject:
    """Return a page of a response's input items, as OpenAI's API lists them.

    Args:
        after: Id of the item before the page; None begins with the first one.
        limit: Maximum number of items.

    Raises:
        KeyError: when no item has the id `after`.
    """
    items: list[JsonObject] = []
    given: list[Item] = session.responses[response_id].given
    for index, item in enumerate(given):
        tree = item.model_dump(mode="json") if isinstance(item, BaseModel) else dict(item)
        if isinstance(tree.get("content"), str):
            tree["content"] = [{"type": "input_text", "text": tree["content"]}]
        tree = {"type": "message", **tree}
        tree["id"] = tree.get("id") or f"{response_id}-{index}"
        items.append(tree)
    if newest_first:
        items.reverse()
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise KeyError(after)
    begin = 0 if after is None else ids.index(after) + 1
    page = items[begin : begin + limit]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {}
    more = len(items) > begin + limit
    return {"object": "list", "data": page, "first_id": None, "last_id": None} | {
        **ends,
        "has_more": more,
    }


def _bytes_of(item: Item) -> int:
    text = item.model_dump_json() if isinstance(item, BaseModel) else json.dumps(item, default=str)
    return _ITEM_BYTES + len(text)
