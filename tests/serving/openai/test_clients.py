"""What served clients of each API get: all sampled text, sub-sessions, stored responses, /docs.

Before a simulated engine, without a socket.
"""

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError

from tests.serving.openai.test_http_limits import HELLO, QUICK, Noting, chat, told
from turnwise.chat import session_store
from turnwise.chat.session import Session
from turnwise.config import Config, SamplingConfig
from turnwise.serving.openai.server import OpenAIServer
from turnwise.trajectory import ChatTemplate, Trajectory, audit

CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def engine(tokenizer: Any) -> Noting:
    return Noting(latency=QUICK, vocab_size=len(tokenizer))


@pytest.fixture(scope="module")
async def server(make_config: Callable[..., Config], engine: Noting) -> OpenAIServer:
    return OpenAIServer(make_config(sampling={"max_tokens": 48}), engine)


@pytest.fixture(scope="module")
async def http(server: OpenAIServer) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(await server.application())
    async with httpx.AsyncClient(transport=transport, base_url="http://t") as http:
        yield http


def events(body: str) -> list[dict[str, Any]]:
    """The events of a stream, as JSON."""
    data = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in data if line != "[DONE]"]


def text_of(path: str, answer: httpx.Response, stream: bool) -> str:
    """The text that a client of each API reads in an answer."""
    if not stream:
        tree = answer.json()
        if path == "messages":
            return "".join(block.get("text", "") for block in tree["content"])
        if path == "responses":
            said = [item for item in tree["output"] if item["type"] == "message"]
            return "".join(part["text"] for item in said for part in item["content"])
        return str(tree["choices"][0]["message"]["content"])
    found = events(answer.text)
    if path == "messages":
        return "".join(e["delta"].get("text", "") for e in found if "delta" in e)
    if path == "responses":
        return "".join(e["delta"] for e in found if e["type"] == "response.output_text.delta")
    return "".join(c["delta"].get("content") or "" for e in found for c in e["choices"])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
async def test_text_like_a_call_reaches_a_client_without_tools(
    http: httpx.AsyncClient, engine: Noting, template: ChatTemplate, path: str, stream: bool
) -> None:
    body: dict[str, Any] = {"model": "any", "stream": stream}
    body |= {"input": HELLO} if path == "responses" else {"messages": HELLO}
    if path == "messages":
        body["max_tokens"] = 40
    engine.says = template.encode(CALL)
    try:
        answer = await http.post(f"/v1/{path}", json=body)
        assert answer.status_code == 200, answer.text
        assert CALL in text_of(path, answer, stream)
    finally:
        engine.says = []


async def test_a_call_without_arguments_is_continued(
    http: httpx.AsyncClient, engine: Noting, template: ChatTemplate, rollout: Session
) -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": {}}}
    asked = {"tools": [{"type": "function", "function": function}], "max_tokens": 48}
    engine.says = template.encode(CALL)
    try:
        own, messages = f"/sessions/{rollout.id}", list[Any](HELLO)
        for _ in range(2):
            answer = await chat(http, own, messages=messages, **asked)
            message = answer.json()["choices"][0]["message"]
            (call,) = message["tool_calls"]
            result = {"role": "tool", "tool_call_id": call["id"], "content": "done"}
            messages += [message, result]
    finally:
        engine.says = []
    assert [turn.fork_reason for turn in rollout.finish().turns] == [None, None]


@pytest.mark.parametrize("path", ["chat/completions", "messages"])
async def test_a_malformed_call_is_continued_as_it_was_streamed(
    http: httpx.AsyncClient,
    server: OpenAIServer,
    engine: Noting,
    template: ChatTemplate,
    rollout: Session,
    path: str,
) -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": {}}}
    tools: list[Any] = [{"type": "function", "function": function}]
    if path == "messages":
        tools = [{"name": "f", "input_schema": function["parameters"]}]
    messages: list[Any] = list(HELLO)
    body = {"model": "any", "stream": True, "max_tokens": 48, "tools": tools}
    says = '<tool_call>\n{"name": "f", "arguments": {"a": }}\n</tool_call><tool_call>\n, "b": 7}}'
    engine.says = template.encode(says)
    try:
        for _ in range(3):
            url = f"/sessions/{rollout.id}/v1/{path}"
            answer = await http.post(url, json={**body, "messages": messages})
            assert answer.status_code == 200, answer.text
            messages += echoed(path, events(answer.text))
    finally:
        engine.says = []
    trajectory = rollout.finish()
    assert [turn.fork_reason for turn in trajectory.turns] == [None] * 3
    assert audit(trajectory).first_violation is None


def echoed(path: str, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages that a client sends back after a stream with one call."""
    if path == "messages":
        begun = [e["content_block"] for e in found if e["type"] == "content_block_start"]
        (call,) = (block for block in begun if block["type"] == "tool_use")
        text = "".join(e["delta"].get("text", "") for e in found if "delta" in e)
        blocks = [*([{"type": "text", "text": text}] if text else []), {**call, "input": {}}]
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "error"}
        return [{"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]
    deltas = [choice["delta"] for e in found for choice in e["choices"]]
    pieces = [piece for delta in deltas for piece in delta.get("tool_calls") or []]
    assert {piece["index"] for piece in pieces} == {0}
    functions = [piece["function"] for piece in pieces]
    function = {key: "".join(f.get(key) or "" for f in functions) for key in ("name", "arguments")}
    call = {"id": pieces[0]["id"], "type": "function", "function": function}
    said = {"content": "".join(delta.get("content") or "" for delta in deltas)}
    return [
        {"role": "assistant", **said, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "error"},
    ]


async def test_a_session_opened_without_a_body_tells_its_base_urls(
    http: httpx.AsyncClient, server: OpenAIServer
) -> None:
    opened = (await http.post("/sessions")).json()
    assert opened["base_url"] == server.session_url(opened["id"])
    assert opened["base_url"] == opened["anthropic_base_url"] + "/v1"
    assert opened["id"] in {s["id"] for s in (await http.get("/sessions")).json()["sessions"]}


async def test_the_documentation_page_needs_no_network(http: httpx.AsyncClient) -> None:
    assert (await http.get("/")).json()["reference"] == "/docs"
    page = (await http.get("/docs")).text
    assert "/static/swagger-ui-bundle.js" in page
    assert "cdn" not in page
    assert (await http.get("/static/swagger-ui-bundle.js")).status_code == 200
    assert (await http.get("/static/../vllm_app.py")).status_code == 404
    paths = (await http.get("/openapi.json")).json()["paths"]
    assert {"/v1/chat/completions", "/sessions/{session_id}/reward"} <= paths.keys()
    assert not {path for path in paths if "pause" in path or "weights" in path}


# Responses that continue another


async def respond(http: httpx.AsyncClient, base: str, stream: bool, **body: Any) -> dict[str, Any]:
    """The whole response of a request, streamed or not."""
    body = {"model": "any", "stream": stream, "max_output_tokens": 40, **body}
    answer = await http.post(f"{base}/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    if not stream:
        return dict(answer.json())
    (last,) = (e["response"] for e in events(answer.text) if e["type"] == "response.completed")
    return dict(last)


TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("kind", ["rollout", "client", "nameless"])
async def test_a_response_continues_another_exactly(
    http: httpx.AsyncClient,
    server: OpenAIServer,
    engine: Noting,
    template: ChatTemplate,
    rollout: Session,
    kind: str,
    stream: bool,
) -> None:
    base = {"rollout": f"/sessions/{rollout.id}", "client": f"/sessions/r-{stream}"}.get(kind, "")
    tools = [TOOL]
    try:
        engine.says = template.encode(f"Let me see. {CALL}")
        first = await respond(http, base, stream, input="12 plus 30?", tools=tools)
        (call,) = (item for item in first["output"] if item["type"] == "function_call")
        engine.says = template.encode("42, I think")
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "42"}
        second = await respond(
            http, base, stream, input=[result], tools=tools, previous_response_id=first["id"]
        )
        assert second["previous_response_id"] == first["id"]
        third = await respond(
            http, base, stream, input="Sure?", tools=tools, previous_response_id=second["id"]
        )
        other = await respond(  # a second answer to the first response
            http, base, stream, input=[result], tools=tools, previous_response_id=first["id"]
        )
    finally:
        engine.says = []
    assert len({first["id"], second["id"], third["id"], other["id"]}) == 4
    session = server.sessions.of_response(None, first["id"])
    if kind == "rollout":
        assert session is None
        session = rollout
    elif kind == "client":
        assert session is server.sessions.get(f"r-{stream}")
    assert session is not None
    trajectory = session.finish()
    assert audit(trajectory).first_violation is None
    # The second answer to the first response shares all but its own tokens with the other.
    assert [turn.fork_reason for turn in trajectory.turns[:3]] == [None] * 3
    assert [turn.parent for turn in trajectory.turns[:3]] == [None, 0, 1]
    assert trajectory.prompt_token_ids(3) == trajectory.prompt_token_ids(1)
    assert "42" in template.decode_all(trajectory.turns[1].added_token_ids)
    assert server.sessions._bytes >= 0
    for made in (first, other):
        again = await http.get(f"{base}/v1/responses/{made['id']}")
        assert again.json() == made


async def test_a_response_of_another_session_or_unstored_is_not_found(
    http: httpx.AsyncClient, rollout: Session, server: OpenAIServer
) -> None:
    first = await respond(http, f"/sessions/{rollout.id}", False, input="1?")
    size = rollout.size
    for base, kept in (("", first["id"]), ("/sessions/other", first["id"]), ("", "resp_none")):
        body = {"model": "any", "input": "2?", "previous_response_id": kept}
        assert kept in told(await http.post(f"{base}/v1/responses", json=body), 404)
        assert kept in told(await http.get(f"{base}/v1/responses/{kept}"), 404)
    unstored = await respond(http, f"/sessions/{rollout.id}", False, input="1?", store=False)
    body = {"model": "any", "input": "2?", "previous_response_id": unstored["id"]}
    told(await http.post(f"/sessions/{rollout.id}/v1/responses", json=body), 404)
    assert rollout.size > size
    for response_id in (first["id"], unstored["id"]):
        assert server.sessions.of_response(None, response_id) is None


async def test_stored_responses_count_as_memory_of_their_session(
    http: httpx.AsyncClient, server: OpenAIServer
) -> None:
    held = server.sessions._bytes
    first = await respond(http, "", False, input="x" * 100)
    grown = server.sessions._bytes - held
    assert grown > 2_000
    second = await respond(http, "", False, input="y", previous_response_id=first["id"])
    session = server.sessions.of_response(None, second["id"])
    assert session is not None
    assert len(session.trajectory.turns) == 2
    server.sessions._remove(session, "is closed")
    assert server.sessions._bytes == held
    body = {"model": "any", "input": "2?", "previous_response_id": second["id"]}
    told(await http.post("/v1/responses", json=body), 404)


async def test_openais_client_reads_and_deletes_what_is_stored(http: httpx.AsyncClient) -> None:
    client = AsyncOpenAI(base_url="http://t/v1", api_key="none", max_retries=0, http_client=http)
    first = await client.responses.create(model="any", input="12 plus 30?", store=True)
    second = await client.responses.create(
        model="any", input=[{"role": "user", "content": "Sure?"}], previous_response_id=first.id
    )
    assert (await client.responses.retrieve(first.id)).output_text == first.output_text
    listed = await client.responses.input_items.list(second.id, order="asc")
    texts = [item.content[0].text for item in listed.data]  # type: ignore[union-attr]
    assert texts == ["12 plus 30?", first.output_text, "Sure?"]
    newest = [item.id async for item in client.responses.input_items.list(second.id, limit=1)]
    assert newest == [item.id for item in reversed(listed.data)]
    with pytest.raises(BadRequestError, match="is complete: only background responses"):
        await client.responses.cancel(second.id)
    await client.responses.delete(first.id)
    for lost in (first.id, "resp_none"):
        for ask in (
            client.responses.retrieve,
            client.responses.delete,
            client.responses.cancel,
        ):
            with pytest.raises(NotFoundError, match="there is no response"):
                await ask(lost)
        with pytest.raises(NotFoundError):
            await client.responses.create(model="any", input="?", previous_response_id=lost)
    third = await client.responses.create(model="any", input="And?", previous_response_id=second.id)
    whole = await client.responses.input_items.list(third.id, order="asc")
    assert len(whole.data) == 5


# Sessions under a session


@pytest.fixture
def rollout(server: OpenAIServer) -> Session:
    """A rollout's session, as the agent loop opens it."""
    return server.sessions.open_private(Trajectory("p"), sampling=SamplingConfig(max_tokens=48))


async def test_sub_agents_make_further_branches_of_one_trajectory(
    http: httpx.AsyncClient, server: OpenAIServer, rollout: Session
) -> None:
    own = f"/sessions/{rollout.id}"
    first = (await chat(http, own)).json()["choices"][0]["message"]["content"]
    opened = await http.post(f"{own}/v1/sessions", json={"id": "critic"})
    assert opened.status_code == 201
    critic = httpx.URL(opened.json()["base_url"]).path.removesuffix("/v1")
    assert opened.json()["base_url"] == server.session_url(opened.json()["id"])
    ask = [{"role": "user", "content": "Is that right?"}]
    said = (await chat(http, critic, messages=ask)).json()["choices"][0]["message"]
    await chat(http, critic, messages=[*ask, said, {"role": "user", "content": "Sure?"}])
    # The same session by its name, and one that a header opens.
    await chat(http, own, messages=ask, headers={"X-Session-ID": "critic"})
    await chat(http, own, messages=ask, headers={"X-Session-ID": "planner"})
    again = [*HELLO, {"role": "assistant", "content": first}, {"role": "user", "content": "Then?"}]
    await chat(http, own, messages=again)
    trajectory = rollout.finish()
    reasons = [turn.fork_reason for turn in trajectory.turns]
    assert reasons == [None, "new_session", None, "history_changed", "new_session", None]
    assert [turn.parent for turn in trajectory.turns][2] == 1
    assert trajectory.turns[5].parent == 0
    assert trajectory.messages[: len(again)] == again
    assert audit(trajectory).first_violation is None
    assert {sample.leaf for sample in trajectory.samples()} == {2, 3, 4, 5}
    assert sum(sum(sample.response_mask) for sample in trajectory.samples()) == (
        trajectory.sampled_tokens
    )
    assert list(rollout.children) == ["critic", "planner"]
    server.sessions.close(rollout.id)
    assert "is closed" in told(await chat(http, critic), 410)
    assert "is closed" in told(await chat(http, own, headers={"X-Session-ID": "critic"}), 410)


async def test_a_sub_agent_has_the_rights_of_its_agent_and_no_more(
    http: httpx.AsyncClient, server: OpenAIServer, rollout: Session
) -> None:
    other = server.sessions.open_private(Trajectory("q"), sampling=SamplingConfig())
    own = f"/sessions/{rollout.id}"
    child = (await http.post(f"{own}/v1/sessions")).json()
    for session in (child["id"], rollout.id, other.id):
        assert "agent_rewards" in told(await http.get(f"/sessions/{session}"), 403)
        reward = await http.post(f"/sessions/{session}/reward", json={"reward": 1.0})
        assert "agent_rewards" in told(reward, 403)
    assert child["id"] not in json.dumps((await http.get("/sessions")).json())
    # Another's session, named in a header, is a new one under its own.
    assert (await chat(http, own, headers={"X-Session-ID": other.id})).status_code == 200
    assert other.trajectory.turns == []
    assert len(rollout.trajectory.turns) == 1
    cold = await chat(http, f"/sessions/{child['id']}", temperature=0.1)
    assert "off-policy" in told(cold, 400)
    assert told(await http.post("/sessions/not-there/v1/sessions"), 404)


async def test_names_under_a_session_are_unique_and_limited_in_number(
    http: httpx.AsyncClient, rollout: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_store, "MAX_CHILDREN", 2)
    path = f"/sessions/{rollout.id}/v1/sessions"
    assert (await http.post(path, json={"id": "a"})).status_code == 201
    assert "already open" in told(await http.post(path, json={"id": "a"}), 409)
    assert (await http.post(path)).status_code == 201
    assert "at most 2" in told(await http.post(path), 409)
    more = await chat(http, f"/sessions/{rollout.id}", headers={"X-Session-ID": "c"})
    assert "at most 2" in told(more, 409)
    assert "a session's name" in told(
        await chat(http, f"/sessions/{rollout.id}", headers={"X-Session-ID": "a b"}), 400
    )


async def test_ending_a_clients_session_ends_the_sessions_under_it(
    http: httpx.AsyncClient, server: OpenAIServer
) -> None:
    child = (await http.post("/sessions/mine/v1/sessions")).status_code
    assert child == 404  # a session is opened by its first request, or by POST /sessions
    await http.post("/sessions", json={"id": "mine"})
    await chat(http, "/sessions/mine", headers={"X-Session-ID": "sub"})
    described = (await http.get("/sessions/mine")).json()
    assert described["turns"] == 1
    sub = described["sessions"]["sub"]
    assert (await http.get(f"/sessions/{sub}")).json()["parent"] == "mine"
    assert described["trajectory"]["messages"][0]["content"] == HELLO[0]["content"]
    held = server.sessions._bytes
    await http.delete("/sessions/mine")
    assert server.sessions.get(sub) is None
    assert server.sessions._bytes < held


@pytest.mark.parametrize("more", [{}, {"logprobs": True}, {"stream": True}], ids=str)
@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses", "messages"])
async def test_more_tokens_than_the_context_has_are_as_many_as_it_has(
    http: httpx.AsyncClient, engine: Noting, path: str, more: dict[str, Any]
) -> None:
    asked = {
        "chat/completions": {"messages": HELLO, "max_tokens": 100_000},
        "completions": {"prompt": "12 plus", "max_tokens": 100_000},
        "responses": {"input": "12 plus", "max_output_tokens": 100_000},
        "messages": {"messages": HELLO, "max_tokens": 100_000},
    }
    if "logprobs" in more and path != "chat/completions":
        more = {"top_logprobs": 1} if path == "responses" else {}
    answer = await http.post(f"/v1/{path}", json={"model": "any", **asked[path], **more})
    assert answer.status_code == 200, answer.text
    assert "error" not in answer.text
    assert 400 < engine.sampled[-1].max_tokens < 512
