"""A request that is not valid gets one sentence: the place, and what is wrong there."""

import logging
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tests.serving.openai.test_http_limits import HELLO, QUICK
from tests.simulated import SimulatedEngine
from turnwise.config import Config
from turnwise.serving.openai.server import OpenAIServer

CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c"}
CHAT_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}


@pytest.fixture(scope="module")
async def http(make_config: Callable[..., Config], tokenizer: Any) -> AsyncIterator[Any]:
    engine = SimulatedEngine(vocab_size=len(tokenizer), latency=QUICK)
    app = await OpenAIServer(make_config(sampling={"max_tokens": 4}), engine).application()
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://t") as http:
        yield http


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": None}]},
            "messages[0].content",
            "Input should be a valid string or iterable",
        ),
        ("chat/completions", {"messages": [{"content": "x"}]}, "messages[0].role", "required"),
        ("chat/completions", {"messages": [5]}, "messages[0]", "should be a valid dictionary"),
        ("chat/completions", {"messages": HELLO, "temperature": "hot"}, "temperature", "number"),
        ("chat/completions", {}, "messages", "Field required"),
        (
            "chat/completions",
            {"messages": HELLO, "tools": [{"type": "function"}]},
            "tools[0].function",
            "Field required",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages",
            "[0].text: Field required",
        ),
        (
            "responses",
            {"input": [{**RESULT, "output": {"a": 1}}]},
            "input[0].output",
            "Input should be a valid string or a valid list",
        ),
        (
            "responses",
            {"input": [CALL, {**RESULT, "output": [{"type": "output_text", "text": "42"}]}]},
            "input[1].output[0].type",
            "'output_text' is not one of 'input_text', 'input_image', 'input_file'",
        ),
        ("responses", {"input": [{"type": "strange"}]}, "input[0].type", "'strange' is not one"),
        ("responses", {"input": [{"role": "user", "content": None}]}, "input[0].content", "string"),
        ("responses", {"input": HELLO, "background": True}, "background", "are not served"),
        ("responses", {"input": 5}, "input", "a valid string or a valid list"),
        ("completions", {"prompt": [1, "a"]}, "prompt[1]", "a valid integer"),
        ("messages", {"messages": [{"role": "user"}], "max_tokens": 4}, "messages[0].content", "r"),
    ],
)
async def test_a_mistake_is_one_sentence_with_its_place(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], param: str, said: str
) -> None:
    for base in ("", "/sessions/wrong"):
        answer = await http.post(f"{base}/v1/{path}", json={"model": "any", **body})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == param
        assert said in error["message"]
        assert len(error["message"]) < 300
        assert "\n" not in error["message"]


async def test_what_is_no_json_is_said_so(http: httpx.AsyncClient) -> None:
    headers = {"content-type": "application/json"}
    answer = await http.post("/v1/chat/completions", content=b'{"messages": [', headers=headers)
    assert answer.status_code == 400
    assert "JSON decode error: Expecting value" in answer.json()["error"]["message"]


@pytest.mark.parametrize("base", ["", "/sessions/own"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        *(("chat/completions", {"messages": HELLO, **more}) for more in ({"metadata": None},)),
        *(("responses", {"input": HELLO, **more}) for more in ({"metadata": None},)),
        *(
            ("chat/completions", {"messages": HELLO, "tool_choice": choice, **tools, **more})
            for choice in ("auto", "none", None)
            for tools in ({}, {"tools": []}, {"tools": None})
            for more in ({}, {"logprobs": True}, {"stream": True})
        ),
        *(("responses", {"input": HELLO, "tool_choice": choice}) for choice in ("auto", "none")),
        *(
            ("responses", {"input": [*HELLO, CALL, {**RESULT, "output": said}], "tools": [TOOL]})
            for said in ("42", [{"type": "input_text", "text": "42"}])
        ),
    ],
)
async def test_what_clients_send_without_meaning_it_is_accepted(
    http: httpx.AsyncClient, base: str, path: str, body: dict[str, Any]
) -> None:
    """NeMo-Gym 2139, 1925 and 2490."""
    answer = await http.post(f"{base}/v1/{path}", json={"model": "any", **body})
    assert answer.status_code == 200, answer.text


async def test_a_call_that_must_be_made_needs_a_tool(http: httpx.AsyncClient) -> None:
    for path, asked in (("chat/completions", {"messages": HELLO}), ("responses", {"input": HELLO})):
        answer = await http.post(f"/v1/{path}", json={**asked, "tool_choice": "required"})
        assert answer.status_code == 400
        assert "tools" in answer.json()["error"]["message"]
    named = {"type": "function", "function": {"name": "g"}}
    body = {"messages": HELLO, "tools": [CHAT_TOOL], "tool_choice": named}
    assert (await http.post("/v1/chat/completions", json=body)).status_code == 400


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("messages", {"messages": HELLO, "max_tokens": 4, "tools": [{"type": "web_search_1"}]}),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "document"}]}]}),
        ("messages", {"messages": [{"role": "tool", "content": "x"}], "max_tokens": 4}),
        ("messages", {"messages": [{"role": "user", "content": "x" * 9_000}], "max_tokens": 4}),
        ("messages/count_tokens", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
        ("responses", {"input": "a", "tools": [{"type": "custom", "name": "a"}]}),
        ("responses", {"input": "a", "tools": [{"type": "web_search"}]}),
        ("chat/completions", {"messages": [{"role": "user", "content": "x" * 9_000}]}),
        ("completions", {"prompt": "x" * 9_000}),
    ],
)
async def test_a_clients_mistake_is_no_traceback_in_the_log(
    http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture, path: str, body: dict[str, Any]
) -> None:
    log = logging.getLogger("vllm")  # which passes nothing on
    log.addHandler(caplog.handler)
    try:
        await http.post(f"/v1/{path}", json={"model": "any", **body})
    finally:
        log.removeHandler(caplog.handler)
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("base", ["", "/sessions/asked"])
async def test_clients_find_a_server_at_the_base_url(http: httpx.AsyncClient, base: str) -> None:
    for path in ("/v1", "/v1/"):
        assert (await http.head(f"{base}{path}")).status_code == 200
        assert (await http.get(f"{base}{path}")).json()["server"] == "turnwise"


async def test_the_openapi_description_is_built_off_the_event_loop(
    make_config: Callable[..., Config], tokenizer: Any
) -> None:
    made, apps = list[int](), list[FastAPI]()

    def extend(app: FastAPI) -> FastAPI:
        describe = app.openapi

        def noting() -> dict[str, Any]:
            made.append(threading.get_ident())
            return describe()

        app.openapi = noting  # type: ignore[method-assign]
        apps.append(app)
        return app

    engine = SimulatedEngine(vocab_size=len(tokenizer), latency=QUICK)
    app = await OpenAIServer(make_config(), engine, extend=extend).application()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://t") as http:
        answer = await http.get("/openapi.json")
    assert "/v1/chat/completions" in answer.json()["paths"]
    assert made
    assert threading.get_ident() not in made


async def test_programs_that_name_their_requests_alike_share_nothing(
    http: httpx.AsyncClient,
) -> None:
    first, second = [
        (await http.post("/v1/responses", json={"input": said, "request_id": "resp_1"})).json()
        for said in ("ALICE", "BOB")
    ]
    assert len({first["id"], second["id"], "resp_1"}) == 3
    body = {"input": "more", "previous_response_id": first["id"]}
    more = (await http.post("/v1/responses", json=body)).json()
    shown = (await http.get(f"/v1/responses/{more['id']}/input_items")).text
    assert "ALICE" in shown
    assert "BOB" not in shown
    assert (await http.get("/v1/responses/resp_1")).status_code == 404
    for path, asked in (
        ("chat/completions", {"messages": HELLO}),
        ("chat/completions", {"messages": HELLO, "logprobs": True}),
        ("completions", {"prompt": "a"}),
    ):
        names = {
            (await http.post(f"/v1/{path}", json={**asked, "request_id": "own"})).json()["id"]
            for _ in range(2)
        }
        assert len(names) == 2
        assert not any("own" in name for name in names)
