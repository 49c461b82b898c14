"""Answers that vLLM's parsers read for a long time: they hold no event loop of the server."""

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from vllm.parser.parser_manager import ParserManager

from tests.chat.test_parsing_time import SLOW, Held
from tests.rollouts.test_runner import Saying
from tests.simulated import Latency
from turnwise.config import Config
from turnwise.internals import vllm_server as vllm
from turnwise.serving.openai.bounded_parser import BoundedParsing
from turnwise.serving.openai.server import OpenAIServer

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Go."}],
    "tools": [TOOL],
    "max_tokens": 20_000,
}
MESSAGES = CHAT | {"model": "m", "tools": [{"name": "add", "input_schema": {"type": "object"}}]}
RESPONSES = {"input": "Go.", "tools": [{"type": "function", "name": "add", "parameters": {}}]}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/chat/completions", CHAT),
    "chat, not plain": ("/chat/completions", CHAT | {"frequency_penalty": 0.0}),
    "two chats": ("/chat/completions", CHAT | {"n": 2}),
    "messages": ("/messages", MESSAGES),
    "responses": ("/responses", RESPONSES),
}
LONG = (
    "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>" + "words " * 500 + "</arg_value>\n"
    "</tool_call>"
)


@pytest.fixture
async def engine(tokenizer: Any) -> Saying:
    return Saying([], vocab_size=len(tokenizer), latency=Latency(0.0, 0.0, 0.0))


@pytest.fixture
async def server(
    engine: Saying,
    make_config: Callable[..., Config],
    model_path: str,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[OpenAIServer]:
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")  # no model reads the prompts
    config = make_config(
        serving={"port": 0},
        rollout={"tool_parser": "glm45"},
        model={"path": model_path, "max_length": 32_768},
        sampling={"max_tokens": 20_000},
    )
    server = OpenAIServer(config, engine)
    await server.start()
    yield server
    await server.stop()


async def test_no_answer_holds_the_event_loop(
    server: OpenAIServer, engine: Saying, tokenizer: Any
) -> None:
    for kind, (path, body) in ASKED.items():
        for text in (SLOW["glm45"], LONG):
            engine.said = tokenizer.encode(text, add_special_tokens=False)
            url = server.base_url.removesuffix("/v1") + f"/sessions/{abs(hash((kind, text)))}"
            async with httpx.AsyncClient(timeout=300) as http:
                with Held() as held:
                    answer = await http.post(url + "/v1" + path, json=body)
                assert answer.status_code == 200, (kind, answer.text)
                events = (await http.get(url)).json()["trajectory"]["events"]
            assert held.longest < 0.5, kind
            if text is LONG:
                assert "parse_timeout" not in events, kind
                assert events["tool_call"] >= 1, kind
                if path == "/chat/completions":
                    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
                    arguments = json.loads(call["function"]["arguments"])
                    assert arguments["a"].split() == ["words"] * 500
            else:
                assert events["parse_timeout"] >= 1, (kind, events)
                assert events["tool_malformed"] >= 1, (kind, events)


async def test_a_stream_whose_pieces_take_long_goes_on_as_text(
    server: OpenAIServer, tokenizer: Any
) -> None:
    late: list[None] = []
    config = server._config
    parsing = BoundedParsing(
        config.rollout.tool_parser,
        config.model,
        tokenizer,
        lambda: late.append(None),
        reasons=bool(config.serving.reasoning_parser),
    )
    request = vllm.ChatCompletionRequest(messages=[], tools=[TOOL], tool_choice="auto")
    usual = ParserManager.get_parser(
        tool_parser_name="glm45", reasoning_parser_name=None, enable_auto_tools=True
    )
    parser = parsing.bounded(usual)(tokenizer, request.tools)
    mark = "<tool_call>"
    text = SLOW["glm45"].removeprefix(mark).removesuffix("</tool_call>")
    pieces = [mark, *(text[begin : begin + 300] for begin in range(0, len(text), 300))]
    found = [
        parser.parse_delta(
            piece,
            tokenizer.encode(piece, add_special_tokens=False),
            request,
            prompt_token_ids=[],
            finished=False,
        )
        for piece in pieces
    ]
    assert len(late) == 1
    assert found[-1].content == pieces[-1]
    assert not found[-1].tool_calls
    calls = [call for delta in found if delta is not None for call in delta.tool_calls]
    assert calls  # until then
