"""A session knows each answer as its client got it, through every API, whole and streamed: what the
client sends back continues the turn."""

import json
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from tests.serving.openai.test_http_limits import HELLO, QUICK, Noting
from turnwise.config import Config
from turnwise.serving.openai.server import OpenAIServer
from turnwise.trajectory import ChatTemplate

PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}}}
LONG = "words " * 200
"""Longer than what is parsed without another process."""
MORE = {"role": "user", "content": "And now?"}


def called(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'


ONE, TWO = called('{"a": "1"}'), called('{"a": "2"}')
WRITTEN = {
    "a long text": (LONG, False, 0),
    "a long text and a call": (LONG + ONE, False, 1),
    "two calls": (f"{ONE}\n{TWO}", False, 2),
    "two calls, of which the client gets one": (f"{ONE}\n{TWO}", True, 1),
    "half a character": (called('{"a": "\\ud800"}'), False, 1),
}


@pytest.fixture(scope="module")
def engine(tokenizer: Any) -> Noting:
    return Noting(latency=QUICK, vocab_size=len(tokenizer))


@pytest.fixture(scope="module")
async def server(
    make_config: Callable[..., Config], model_path: str, engine: Noting
) -> OpenAIServer:
    model = {"path": model_path, "max_length": 4096}
    return OpenAIServer(make_config(model=model, sampling={"max_tokens": 1500}), engine)


@pytest.fixture(scope="module")
async def http(server: OpenAIServer) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(await server.application())
    async with httpx.AsyncClient(transport=transport, base_url="http://t", timeout=60) as http:
        yield http


def events(body: str) -> list[dict[str, Any]]:
    data = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in data if line != "[DONE]"]


async def of_chat(post: Callable[..., Any], stream: bool, one: bool) -> int:
    """Ask twice; return the number of calls in the first answer."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}]
    asked: dict[str, Any] = {"messages": HELLO, "tools": tools, "stream": stream}
    asked |= {"parallel_tool_calls": False} if one else {}
    answer = await post("chat/completions", asked)
    if stream:
        texts, calls = "", dict[int, dict[str, Any]]()
        for event in events(answer.text):
            for choice in event["choices"]:
                texts += choice["delta"].get("content") or ""
                for piece in choice["delta"].get("tool_calls") or ():
                    call = calls.setdefault(piece["index"], {"name": "", "arguments": ""})
                    for key, value in piece["function"].items():
                        call[key] += value or ""
        said: dict[str, Any] = {"role": "assistant", "content": texts}
        if calls:
            said["tool_calls"] = [
                {"id": f"c{index}", "type": "function", "function": call}
                for index, call in calls.items()
            ]
    else:
        said = answer.json()["choices"][0]["message"]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "1"}
        for call in said.get("tool_calls") or ()
    ]
    await post("chat/completions", {**asked, "messages": [*HELLO, said, *results, MORE]})
    return len(results)


async def of_responses(post: Callable[..., Any], stream: bool, one: bool) -> int:
    tools = [{"type": "function", "name": "f", "parameters": PARAMETERS}]
    asked: dict[str, Any] = {"input": HELLO, "tools": tools, "stream": stream}
    asked |= {"parallel_tool_calls": False} if one else {}
    answer = await post("responses", asked)
    found = events(answer.text)[-1]["response"] if stream else answer.json()
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "1"}
        for item in found["output"]
        if item["type"] == "function_call"
    ]
    items = [*HELLO, *found["output"], *results, MORE]
    await post("responses", {**asked, "input": items})
    return len(results)


async def of_messages(post: Callable[..., Any], stream: bool, one: bool) -> int:
    asked: dict[str, Any] = {"model": "any", "messages": HELLO, "stream": stream}
    asked |= {"max_tokens": 1500, "tools": [{"name": "f", "input_schema": PARAMETERS}]}
    asked |= {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}} if one else {}
    answer = await post("messages", asked)
    if stream:
        blocks = list[dict[str, Any]]()
        for event in events(answer.text):
            if event["type"] == "content_block_start":
                blocks.append({**event["content_block"], "json": ""})
            if event["type"] == "content_block_delta":
                blocks[-1]["json"] += event["delta"].get("partial_json", "")
                if "text" in event["delta"]:
                    blocks[-1]["text"] += event["delta"]["text"]
        for block in blocks:
            given = block.pop("json")
            if block["type"] == "tool_use":
                block["input"] = json.loads(given or "{}")
    else:
        blocks = answer.json()["content"]
    calls = [block for block in blocks if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": c["id"], "content": "1"} for c in calls]
    after: list[Any] = [{"role": "assistant", "content": blocks}]
    after += [{"role": "user", "content": results}] if results else [MORE]
    await post("messages", {**asked, "messages": [*HELLO, *after]})
    return len(calls)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("ask", [of_chat, of_responses, of_messages])
@pytest.mark.parametrize("name", WRITTEN)
async def test_what_a_client_sends_back_continues_the_turn(
    http: httpx.AsyncClient,
    server: OpenAIServer,
    engine: Noting,
    template: ChatTemplate,
    name: str,
    ask: Callable[..., Any],
    stream: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "vllm")  # vLLM writes bodies to its log, which may fail
    text, one, calls = WRITTEN[name]
    session = f"noted-{ask.__name__}-{stream}-{[*WRITTEN].index(name)}"

    async def post(path: str, body: dict[str, Any]) -> httpx.Response:
        headers = {"content-type": "application/json"}
        content = json.dumps(body).encode()
        url = f"/sessions/{session}/v1/{path}"
        answer = await http.post(url, content=content, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer

    engine.says = template.encode(text)
    try:
        assert await ask(post, stream, one) == calls
    finally:
        engine.says = []
    found = server.sessions.get(session)
    assert found is not None
    trajectory = found.finish()
    assert [turn.fork_reason for turn in trajectory.turns] == [None, None]
    assert trajectory.events["tool_malformed"] == 0


@pytest.mark.parametrize("kind", [None, "application/vnd.api+json"])
@pytest.mark.parametrize("path", ["chat/completions", "responses"])
async def test_a_body_of_another_type_is_refused_in_a_sentence(
    http: httpx.AsyncClient, path: str, kind: str | None
) -> None:
    body = json.dumps({"messages": HELLO, "input": "a"}).encode()
    headers = {} if kind is None else {"content-type": kind}
    answer = await http.post(f"/v1/{path}", content=body, headers=headers)
    if answer.status_code != 200:
        assert answer.status_code in (400, 415)
        assert "application/json" in answer.json()["error"]["message"]
