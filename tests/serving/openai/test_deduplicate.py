"""Retries join the request that they repeat, and never another client's equal one."""

import asyncio
from collections import Counter
from typing import Any

import httpx
import pytest
from starlette.responses import PlainTextResponse

from turnwise.serving.openai.middleware import SessionMiddleware

PATH, BODY = "/v1/chat/completions", {"messages": [{"role": "user", "content": "12 plus 30?"}]}


@pytest.mark.parametrize(
    ("path", "named", "joins"),
    [
        (PATH, {}, False),
        (PATH, {"x-session-id": ""}, False),
        (PATH, {"x-session-id": "a"}, True),
        (f"/sessions/a{PATH}", {}, True),
        (PATH, {"x-request-id": "chatcmpl-1"}, True),
        (PATH, {"idempotency-key": "k"}, True),
    ],
)
async def test_a_retry_joins_only_what_it_names(
    path: str, named: dict[str, str], joins: bool
) -> None:
    asked, counts, answer = Counter[str](), Counter[str](), asyncio.Event()

    class Waiting(SessionMiddleware):
        async def _handle(self, scope: Any, body: Any, receive: Any, send: Any) -> None:
            asked["requests"] += 1
            number = asked["requests"]
            await answer.wait()
            await PlainTextResponse(str(number))(scope, receive, send)

    unused: Any = None
    transport = httpx.ASGITransport(Waiting(unused, unused, counts, None, None))
    async with httpx.AsyncClient(transport=transport, base_url="http://t") as http:
        first, retry = (
            asyncio.create_task(
                http.post(path, json=BODY, headers={**named, "x-stainless-retry-count": str(count)})
            )
            for count in (0, 1)
        )
        async with asyncio.timeout(60):
            while asked["requests"] + counts["joined"] < 2:
                await asyncio.sleep(0.001)
        answer.set()
        said = {(await first).text, (await retry).text}
    assert (len(said), counts["joined"]) == ((1, 1) if joins else (2, 0))
