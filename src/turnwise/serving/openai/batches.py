"""Chats in other envelopes: several in one request, and requests to one path for every API.

vLLM's own server has both. A batch is taken apart here, so that each of its chats takes the path
of a chat that is sent alone, and is a turn of the request's session.
"""

import asyncio
from collections.abc import Sequence

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from turnwise.core.json_types import JsonObject
from turnwise.serving.openai.middleware import (
    read_body,
    refuse,
    replaying,
    send_json,
    split_path,
    unless_gone,
)
from turnwise.serving.openai.request_options import MAX_COMPLETIONS

BATCH = "/v1/chat/completions/batch"
"""Path of a request with several chats; `messages` is a list of conversations."""
INVOCATIONS = "/invocations"
"""Path of SageMaker's requests."""
_ENDS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_APIS = {"messages": _ENDS[0], "prompt": _ENDS[1], "input": _ENDS[2]}
"""Path of each API, by a key that only its requests have."""


class Batches:
    """ASGI middleware that answers batches of chats, and passes on requests to `INVOCATIONS`.

    The answer to a batch is that of one chat, with a choice for each conversation, in their order.
    If one conversation cannot be answered, its error is the answer.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = split_path(scope["path"])[1] if scope["type"] == "http" else ""
        if path not in (BATCH, INVOCATIONS) or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        body = await read_body(receive)
        if body is None:
            return
        try:
            tree = msgspec.json.decode(body)
            if not isinstance(tree, dict):
                raise ValueError("the body is no object")
        except (ValueError, RecursionError) as error:
            await refuse(send, 400, f"the body is not valid JSON: {error}")
            return
        if path == INVOCATIONS:
            await self._invoke(tree, body, scope, receive, send)
        elif (wrong := _wrong_batch(tree)) is not None:
            await refuse(send, 400, wrong)
        else:
            answered = await unless_gone(self._ask_all(tree, scope), receive)
            if answered is not None:
                await send_json(send, *answered)

    async def _invoke(
        self, tree: JsonObject, body: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        path = next((path for key, path in _APIS.items() if key in tree), None)
        if path is None:
            await refuse(send, 400, f"the body has none of {', '.join(_APIS)}")
            return
        await self._app(_at(scope, path), replaying(body, receive), send)

    async def _ask_all(self, tree: JsonObject, scope: Scope) -> tuple[int, bytes]:
        """Ask for each chat of a batch; return the status and the body of the answer."""
        scope = _at(scope, scope["path"].removesuffix("/batch"))
        async with asyncio.TaskGroup() as group:
            asked = [
                group.create_task(self._ask({**tree, "messages": messages}, scope))
                for messages in tree["messages"]
            ]
        answers = [task.result() for task in asked]
        for status, body in answers:
            if status >= 400:
                return status, body
        return 200, msgspec.json.encode(_joined([msgspec.json.decode(b) for _, b in answers]))

    async def _ask(self, tree: JsonObject, scope: Scope) -> tuple[int, bytes]:
        """Ask for one chat, until cancelled."""
        status, pieces = 500, list[bytes]()

        async def never() -> Message:
            await asyncio.Event().wait()
            raise AssertionError

        async def keep(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                pieces.append(message.get("body", b""))

        await self._app(dict(scope), replaying(msgspec.json.encode(tree), never), keep)
        return status, b"".join(pieces)


def _wrong_batch(tree: JsonObject) -> str | None:
    """Return what is wrong with a batch as a whole; None if nothing is."""
    conversations = tree.get("messages")
    if not isinstance(conversations, list) or not conversations:
        return "messages: a batch needs a list of conversations, each a list of messages"
    if not all(isinstance(messages, list) for messages in conversations):
        return "messages: each conversation of a batch is a list of messages"
    if len(conversations) > MAX_COMPLETIONS:
        return f"messages: a batch has at most {MAX_COMPLETIONS:,} conversations"
    if tree.get("stream"):
        return "stream: a batch is not streamed"
    if tree.get("n") not in (None, 1):
        return "n: a batch has one completion of each conversation"
    return None


def _joined(answers: Sequence[JsonObject]) -> JsonObject:
    choices = [
        {**choice, "index": index}
        for index, answer in enumerate(answers)
        for choice in answer["choices"]
    ]
    usage = dict(answers[0]["usage"])
    for name, value in usage.items():
        if isinstance(value, int):
            usage[name] = sum(answer["usage"][name] for answer in answers)
    return {**answers[0], "choices": choices, "usage": usage}


def _at(scope: Scope, path: str) -> Scope:
    return {**scope, "path": path, "raw_path": path.encode()}
