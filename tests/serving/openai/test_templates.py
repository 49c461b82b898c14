"""A configured chat template, one that leaves out tools, and a model without one, before a server.

Before a simulated engine, without a socket.
"""

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from examples.calculator.tool import TOOL_SCHEMA
from tests.simulated import Latency, SimulatedEngine
from turnwise.config import Config
from turnwise.config.data import template_text
from turnwise.engine.protocol import Chunk, Request
from turnwise.serving.openai.server import OpenAIServer
from turnwise.trajectory import ChatTemplate

QUICK = Latency(prefill_token=0.0, step=1e-4, step_request=0.0)
HELLO = [{"role": "user", "content": "What is 12 plus 30?"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SLOWLY = {"frequency_penalty": 0.0}
"""An option that changes nothing and makes a request one that is not plain."""


class Noting(SimulatedEngine):
    """Notes the prompts."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.prompts: list[list[int]] = []

    def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        self.prompts.append(request.prompt.tolist())
        return super().stream(request)


Serve = Callable[..., Any]


@pytest.fixture
def serve(make_config: Callable[..., Config], model_path: str, tokenizer: Any) -> Serve:
    """Serves with values of the section `model`; yields a client, the server and its engine."""

    @asynccontextmanager
    async def served(
        rollout: dict[str, Any] | None = None, **model: Any
    ) -> AsyncIterator[tuple[httpx.AsyncClient, OpenAIServer, Noting]]:
        config = make_config(
            model={"path": model_path, "max_length": 512, **model},
            serving={"port": 0},
            sampling={"max_tokens": 4},
            rollout=rollout or {},
        )
        engine = Noting(vocab_size=len(tokenizer), latency=QUICK)
        server = OpenAIServer(config, engine)
        transport = httpx.ASGITransport(await server.application())
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
            yield client, server, engine

    return served


async def test_prompts_are_those_of_the_configured_template(serve: Serve, tokenizer: Any) -> None:
    for chat_template in ("hermes", "{{ '-' + messages[0].content + '<|im_end|>' }}"):
        ours = ChatTemplate(tokenizer, chat_template=template_text(chat_template))
        async with serve(chat_template=chat_template) as (http, _, engine):
            for more in ({}, SLOWLY):
                answer = await http.post(CHAT, json={"messages": HELLO, **more})
                assert answer.status_code == 200, answer.text
            assert engine.prompts == [ours.render(HELLO)] * 2
            answer = await http.post(CHAT, json={"messages": HELLO, "tools": [TOOL_SCHEMA]})
            assert answer.status_code == 200, answer.text
            shown = "You can call these tools" in ours.decode_all(engine.prompts[2])
            assert shown == (chat_template == "hermes")


async def test_omitted_tools_warn_once_and_are_refused_in_training(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    asked = {"messages": HELLO, "tools": [TOOL_SCHEMA]}
    async with serve(chat_template="chatml") as (http, server, engine):
        with caplog.at_level(logging.WARNING, logger="turnwise"):
            for more in ({}, {}, SLOWLY):
                assert (await http.post(CHAT, json={**asked, **more})).status_code == 200
        assert (
            caplog.text.count("a request has tools, and the chat template leaves out the to") == 1
        )
        session = server.sessions.open(training=True)
        for more in ({}, SLOWLY):
            answer = await http.post(f"/sessions/{session.id}{CHAT}", json={**asked, **more})
            assert answer.status_code == 400, answer.text
            error = answer.json()["error"]
            assert "rollout.tools_in_prompt" in error["message"]
            assert error["param"] == "tools"
        assert len(engine.prompts) == 3
    async with serve({"tools_in_prompt": False}, chat_template="chatml") as (http, server, _):
        session = server.sessions.open(training=True)
        answer = await http.post(f"/sessions/{session.id}{CHAT}", json=asked)
        assert answer.status_code == 200, answer.text


async def test_a_model_without_a_template_completes_text_but_no_chats(
    serve: Serve, bare_path: str, bare: Any
) -> None:
    async with serve(tokenizer=bare_path) as (http, _, engine):
        answer = await http.post(TEXT, json={"prompt": "2 + 2 ="})
        assert answer.status_code == 200, answer.text
        answer = await http.post(TEXT, json={"prompt": [5, 6, 7]})
        assert answer.status_code == 200, answer.text
        plain = ChatTemplate(bare).render([{"role": "user", "content": "2 + 2 ="}])
        assert engine.prompts == [plain, [5, 6, 7]]
        for path, body in (
            (CHAT, {"messages": HELLO}),
            (CHAT, {"messages": HELLO, **SLOWLY}),
            ("/v1/responses", {"input": "Hello."}),
            ("/v1/messages", {"messages": HELLO, "max_tokens": 4, "model": "any"}),
        ):
            answer = await http.post(path, json=body)
            assert answer.status_code == 400, (path, answer.text)
            assert "has no chat template" in answer.text, path
        assert len(engine.prompts) == 2


@pytest.mark.parametrize("in_parts", [False, True])
async def test_claude_codes_billing_line_begins_no_new_conversation(
    serve: Serve, in_parts: bool
) -> None:
    """It differs in each request, and would make each a conversation of its own."""

    def system(number: int) -> dict[str, Any]:
        text = f"x-anthropic-billing-header: cch={number};\nBe brief."
        return {"role": "system", "content": [{"type": "text", "text": text}] if in_parts else text}

    messages = list(HELLO)
    async with serve() as (http, server, _):
        for number in (1, 2, 3):
            asked = {"messages": [system(number), *messages]}
            answer = await http.post(f"/sessions/bills{CHAT}", json=asked)
            assert answer.status_code == 200, answer.text
            messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "?"}]
        session = server.sessions.get("bills")
        assert session is not None
        assert [turn.fork_reason for turn in session.trajectory.turns] == [None] * 3
