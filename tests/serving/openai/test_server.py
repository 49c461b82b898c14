"""The OpenAI server before a real engine, by real clients over HTTP."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from examples.calculator.tool import TOOL_SCHEMA
from turnwise.config import Config
from turnwise.engine.protocol import Chunk
from turnwise.errors import InputError
from turnwise.serving.openai.choices import engine_outputs
from turnwise.serving.openai.server import OpenAIServer
from turnwise.serving.worker_handle import WorkerHandle
from turnwise.trajectory import ChatTemplate, Trajectory, audit

QUESTION = {"role": "user", "content": "What is 12 plus 30, then times 2?"}


@pytest.fixture(scope="module")
async def server(
    engine: WorkerHandle, make_config: Callable[..., Config]
) -> AsyncIterator[OpenAIServer]:
    server = OpenAIServer(
        make_config(serving={"port": 0}, sampling={"max_tokens": 48, "top_k": 40}), engine
    )
    await server.start()
    yield server
    await server.stop()


@pytest.fixture(scope="module")
async def http(server: OpenAIServer) -> AsyncIterator[httpx.AsyncClient]:
    root = server.base_url.removesuffix("/v1")
    async with httpx.AsyncClient(base_url=root, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
async def client(server: OpenAIServer) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=server.base_url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
async def model(client: AsyncOpenAI) -> str:
    return (await client.models.list()).data[0].id


@pytest.fixture(scope="module")
def script(template: ChatTemplate) -> dict[str, Any]:
    """Makes the model call the tool twice, in a spelling that no JSON printer has, and answer."""
    turns = [
        '<tool_call>\n{"name":"calculate",  "arguments": {"operation":"+","a":12, "b": 30}}\n'
        "</tool_call><|im_end|>",
        '<tool_call>\n{"name": "calculate", "arguments": {"a": 42,"operation": "*","b":2}}\n'
        "</tool_call><|im_end|>",
        "The answer is 84.<|im_end|>",
    ]
    flat = [token for turn in turns for token in [*template.encode(turn), -1]]
    return {"vllm_xargs": {"script": flat}}


async def converse(
    client: AsyncOpenAI, model: str, script: dict[str, Any], *, stream: bool = False, **options: Any
) -> list[dict[str, Any]]:
    """An agent as anybody would write it: all messages sent again each turn."""
    messages: list[dict[str, Any]] = [QUESTION]
    while True:
        asked: dict[str, Any] = {"model": model, "messages": messages, "tools": [TOOL_SCHEMA]}
        extra = {"extra_body": script, **options}
        if stream:
            message = await streamed(client, **asked, **extra)
        else:
            response = await client.chat.completions.create(**asked, **extra)
            message = response.choices[0].message.model_dump(exclude_none=True)
        messages = [*messages, message]
        if not message.get("tool_calls"):
            return messages
        for call in message["tool_calls"]:
            # parsed and printed again, as clients do
            call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]))
            arguments = json.loads(call["function"]["arguments"])
            a, b = arguments["a"], arguments["b"]
            result = a + b if arguments["operation"] == "+" else a * b
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(result)})


async def streamed(client: AsyncOpenAI, **asked: Any) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    async with client.chat.completions.stream(**asked) as events:
        async for _ in events:
            pass
        final = (await events.get_final_completion()).choices[0].message
    message |= final.model_dump(exclude_none=True, include={"content", "tool_calls"})
    for call in message.get("tool_calls", []):
        call["function"].pop("parsed_arguments", None)
    return message


async def fetched(http: httpx.AsyncClient, session: str) -> Trajectory:
    described = (await http.get(f"/sessions/{session}")).json()
    return Trajectory.from_json(json.dumps(described["trajectory"]))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("way", ["header", "path"])
async def test_tool_turns_are_exact_however_the_client_names_a_session(
    http: httpx.AsyncClient,
    client: AsyncOpenAI,
    model: str,
    script: dict[str, Any],
    template: ChatTemplate,
    way: str,
    stream: bool,
) -> None:
    """By `/v1/chat/completions`."""
    session = f"{way}-{stream}"
    base = f"{http.base_url}/sessions/{session}/v1" if way == "path" else str(client.base_url)
    headers = {"X-Session-ID": session} if way == "header" else {}
    told = client.with_options(base_url=base, default_headers=headers)
    messages = await converse(told, model, script, stream=stream)
    assert messages[-1]["content"] == "The answer is 84."
    trajectory = await fetched(http, session)
    assert audit(trajectory).first_violation is None
    (branch,) = trajectory.branches()
    assert [turn.fork_reason for turn in trajectory.turns] == [None] * 3
    said = template.decode_all(branch.token_ids)
    assert '{"name":"calculate",  "arguments"' in said  # as it was sampled, not as it was sent
    assert "<tool_response>\n42\n</tool_response>" in said
    assert trajectory.final_text == "The answer is 84."
    rewarded = await http.post(f"/sessions/{session}/reward", json={"reward": 1.0})
    assert rewarded.json() == {"id": session, "reward": 1.0}
    closed = (await http.delete(f"/sessions/{session}")).json()
    assert closed["reward"] == closed["trajectory"]["reward"] == 1.0
    assert (await http.get(f"/sessions/{session}")).status_code == 404
    with pytest.raises(openai.APIStatusError, match=f"the session {session} is closed"):
        await converse(told, model, script)


@pytest.mark.parametrize("way", ["chain", "echo", "prefix"])
async def test_a_prompt_continues_earlier_ids_without_a_session_name(
    client: AsyncOpenAI, model: str, script: dict[str, Any], template: ChatTemplate, way: str
) -> None:
    body = {**script, "return_token_ids": True}
    asked: dict[str, Any] = {"model": model, "tools": [TOOL_SCHEMA]}
    first = await client.chat.completions.create(messages=[QUESTION], extra_body=body, **asked)
    message = first.choices[0].message
    extra: Any = message.model_extra
    held = [*extra["prompt_token_ids"], *extra["generation_token_ids"]]
    assert len(extra["generation_log_probs"]) == len(extra["generation_token_ids"])
    plain = message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "42"}  # type: ignore[index]
    sent = {**plain, **extra} if way == "echo" else plain
    if way == "prefix":
        body["required_prefix_token_ids"] = held
    second = await client.chat.completions.create(
        messages=[QUESTION, sent, result],
        extra_body=body,
        extra_headers={"x-request-id": first.id} if way == "chain" else {},
        **asked,
    )
    again: Any = second.choices[0].message.model_extra
    assert again["prompt_token_ids"][: len(held)] == held
    added = template.decode_all(again["prompt_token_ids"][len(held) :])
    assert added.count("42") == 1
    assert added.endswith("<|im_start|>assistant\n")


async def test_a_call_that_a_client_reformats_keeps_the_earlier_ids(
    client: AsyncOpenAI, model: str, script: dict[str, Any], template: ChatTemplate
) -> None:
    """Its keys in another order, and whole numbers as other languages print them."""
    body = {**script, "return_token_ids": True}
    asked: dict[str, Any] = {"model": model, "tools": [TOOL_SCHEMA]}
    first = await client.chat.completions.create(messages=[QUESTION], extra_body=body, **asked)
    message = first.choices[0].message
    extra: Any = message.model_extra
    body["required_prefix_token_ids"] = [
        *extra["prompt_token_ids"],
        *extra["generation_token_ids"],
    ]
    sent = message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})
    (call,) = sent["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "42"}
    for number, fits in ((12.0, True), (13.0, False)):
        printed = {"a": number, "b": 30.0, "operation": "+"}
        call["function"]["arguments"] = json.dumps(printed)
        messages: Any = [QUESTION, sent, result]
        asking = client.chat.completions.create(messages=messages, extra_body=body, **asked)
        if not fits:
            with pytest.raises(openai.BadRequestError, match="where the model's continues with"):
                await asking
            continue
        again: Any = (await asking).choices[0].message.model_extra
        held = body["required_prefix_token_ids"]
        assert again["prompt_token_ids"][: len(held)] == held


async def test_ids_that_do_not_fit_the_messages_are_refused(
    client: AsyncOpenAI, model: str, template: ChatTemplate
) -> None:
    messages: Any = [QUESTION, {"role": "assistant", "content": "42"}, QUESTION]
    for prefix, words in (([1, 2, 3], "required_prefix_token_ids"), ("x", "list of token ids")):
        with pytest.raises(openai.BadRequestError, match=words):
            await client.chat.completions.create(
                model=model,
                messages=messages,
                extra_body={"required_prefix_token_ids": prefix},
            )


async def test_edited_history_and_another_conversation_begin_branches(
    http: httpx.AsyncClient, client: AsyncOpenAI, model: str
) -> None:
    told = client.with_options(default_headers={"X-Session-ID": "edited"})

    async def ask(*contents: str) -> str:
        roles = ["user", "assistant"] * len(contents)
        messages: Any = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]
        made = await told.chat.completions.create(
            model=model, messages=messages, max_completion_tokens=6
        )
        return made.choices[0].message.content or ""

    said = await ask("What is 1 plus 2?")
    await ask("What is 1 plus 2?", said, "And plus 3?")
    await ask("What is 1 plus 2?", f"No: {said}", "And plus 3?")
    await ask("Count to five.")
    trajectory = await fetched(http, "edited")
    reasons = [turn.fork_reason for turn in trajectory.turns]
    assert reasons == [None, None, "history_changed", "new_conversation"]
    assert audit(trajectory).first_violation is None
    assert [len(turn.messages) for turn in trajectory.turns] == [1, 1, 3, 1]


async def test_choices_logprobs_and_stops_are_as_sampled(
    http: httpx.AsyncClient, client: AsyncOpenAI, model: str, template: ChatTemplate
) -> None:
    told = client.with_options(default_headers={"X-Session-ID": "choices"})
    made = await told.chat.completions.create(
        model=model,
        messages=[QUESTION],  # type: ignore[list-item]
        n=3,
        logprobs=True,
        top_logprobs=2,
        max_completion_tokens=8,
        seed=7,
        extra_body={"return_token_ids": True},
    )
    turns = (await fetched(http, "choices")).turns
    assert len(made.choices) == len(turns) == 3
    by_ids = {tuple(turn.completion_token_ids): turn for turn in turns}
    for choice in made.choices:
        ids = choice.model_extra["token_ids"]  # type: ignore[index]
        content: Any = choice.logprobs.content if choice.logprobs else []
        assert [entry.logprob for entry in content] == pytest.approx(by_ids[tuple(ids)].logprobs)
        assert all(len(entry.top_logprobs) == 2 for entry in content)
    stop = template.encode("The answer is 84.<|im_end|>")
    made = await told.chat.completions.create(
        model=model,
        messages=[QUESTION],  # type: ignore[list-item]
        stop=["is 8"],
        extra_body={"vllm_xargs": {"script": stop}},
    )
    assert made.choices[0].message.content == "The answer "
    last = (await fetched(http, "choices")).turns[-1]
    assert template.decode_all(last.completion_token_ids) == "The answer is 8"


def test_a_sampled_token_may_be_among_the_likeliest_or_not() -> None:
    alternatives = [[(7, -0.1, 1), (8, -2.0, 2)], [(9, -6.0, 5), (7, -0.2, 1), (8, -2.5, 2)]]
    chunk = Chunk([7, 9], [-0.1, -6.0], [0, 0], "stop", alternatives=alternatives)
    (output,) = engine_outputs("request", chunk, with_logprobs=True, scored=False)
    told = output.new_logprobs
    assert told is not None
    assert told.logprob_token_ids.tolist() == [[7, 8, 7], [9, 7, 8]]
    assert told.logprobs.tolist() == [[-0.1, -2.0, -0.1], [-6.0, -0.2, -2.5]]


async def test_a_training_session_keeps_its_tokens_on_policy(
    server: OpenAIServer, http: httpx.AsyncClient, client: AsyncOpenAI, model: str
) -> None:
    opened = await http.post("/sessions", json={"id": "trained", "training": True, "group": "g"})
    assert opened.status_code == 201
    assert (await http.post("/sessions", json={"id": "trained"})).status_code == 409
    told = client.with_options(base_url=f"{http.base_url}/sessions/trained/v1")
    ask: Any = {"model": model, "messages": [QUESTION]}
    strict = {**TOOL_SCHEMA, "function": {**TOOL_SCHEMA["function"], "strict": True}}
    await told.chat.completions.create(**ask)
    await told.chat.completions.create(**ask, temperature=1.0, extra_body={"top_k": 40})
    for wrong, words in (
        ({"temperature": 0.2}, "temperature=0.2 .* off-policy: leave it out, or set it to 1"),
        ({"top_p": 0.9}, "top_p=0.9 .* set it to 1"),
        ({"extra_body": {"top_k": 5}}, "top_k=5 .* set it to 40"),
        ({"frequency_penalty": 0.5}, "frequency_penalty=0.5"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [TOOL_SCHEMA], "tool_choice": "required"}, "tool_choice.* use auto"),
        ({"tools": [TOOL_SCHEMA], "parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"tools": [strict]}, "strict tools=True"),
    ):
        with pytest.raises(openai.BadRequestError, match=words):
            await told.chat.completions.create(**ask, **wrong)
    with pytest.raises(openai.BadRequestError, match=r"temperature=0\.5 .*off-policy"):
        await told.completions.create(model=model, prompt="1 plus", temperature=0.5)
    with pytest.raises(openai.BadRequestError, match=r"top_p=0\.5 .*off-policy"):
        await told.responses.create(model=model, input="1 plus", top_p=0.5)
    trajectory = await fetched(http, "trained")
    assert len(trajectory.turns) == 2
    assert trajectory.problem_id == "g"
    assert all(len(turn.completion_token_ids) <= 48 for turn in trajectory.turns)


async def test_bad_requests_are_answered_in_openais_shape(
    http: httpx.AsyncClient, client: AsyncOpenAI, model: str
) -> None:
    long: Any = [{"role": "user", "content": "1 2 3 4 " * 400}]
    with pytest.raises(openai.BadRequestError, match="maximum"):
        await client.chat.completions.create(model=model, messages=long)
    for body, status in (({"messages": 5}, 400), ({"model": model, "messages": []}, 400)):
        answer = await http.post("/v1/chat/completions", json=body)
        assert answer.status_code == status
        assert answer.json()["error"]["code"] == status
    for path in ("/pause", "/v1/nothing", "/collective_rpc", "/sessions/none"):
        answer = await http.get(path)
        assert answer.status_code == 404
        assert answer.json()["error"]["message"]
    assert (await http.post("/update_weights", json={})).status_code == 404


async def test_other_apis_are_served_and_sessions_count_for_them(
    http: httpx.AsyncClient, client: AsyncOpenAI, model: str, template: ChatTemplate
) -> None:
    made = await client.completions.create(model=model, prompt="12 plus", max_tokens=5)
    assert made.usage is not None
    assert made.usage.completion_tokens <= 5
    said = await http.post(
        "/sessions/claude/v1/messages",
        json={"model": model, "max_tokens": 8, "messages": [QUESTION]},
    )
    assert said.json()["type"] == "message"
    told = client.with_options(default_headers={"X-Session-ID": "claude"})
    response = await told.responses.create(
        model=model,
        input="12 plus",
        max_output_tokens=6,
        extra_body={"vllm_xargs": {"script": template.encode("30 is 42")}},
    )
    assert response.output  # an answer without text would have none
    assert len((await fetched(http, "claude")).turns) == 2
    await told.completions.create(model=model, prompt="12 plus", max_tokens=5)
    assert len((await fetched(http, "claude")).turns) == 3
    tokens = (await http.post("/tokenize", json={"model": model, "prompt": "12 plus"})).json()
    assert tokens["tokens"] == template.encode("12 plus")
    assert (await http.get("/health")).status_code == 200
    assert "turnwise_sessions_open" in (await http.get("/metrics")).text


async def test_a_connection_stays_open_longer_than_clients_keep_theirs(
    server: OpenAIServer,
) -> None:
    host, _, port = server.base_url.removeprefix("http://").removesuffix("/v1").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    for pause in (5.5, 0.0):  # OpenAI's client gives a connection up after 5 s
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
        assert answer.startswith(b"HTTP/1.1 200")
        await asyncio.sleep(pause)
    writer.close()


async def test_the_synchronous_client_works_too(server: OpenAIServer, model: str) -> None:
    def use() -> str:
        with OpenAI(base_url=server.base_url, api_key="none") as client:
            made = client.chat.completions.create(
                model=model,
                messages=[QUESTION],  # type: ignore[list-item]
                max_completion_tokens=4,
            )
            return made.object

    assert await asyncio.to_thread(use) == "chat.completion"


async def test_a_client_that_goes_away_ends_its_request(
    http: httpx.AsyncClient, engine: WorkerHandle, model: str
) -> None:
    body = {
        "model": model,
        "messages": [QUESTION],
        "max_tokens": 400,
        "min_tokens": 400,
        "ignore_eos": True,
    }
    await engine.pause("keep")  # so that nothing else ends it
    try:
        for headers in ({}, {"x-stainless-retry-count": "0"}):
            asking = asyncio.create_task(
                http.post(
                    "/v1/chat/completions", json=body, headers={**headers, "X-Session-ID": "gone"}
                )
            )
            async with asyncio.timeout(60):
                while await engine.num_in_flight() == 0:
                    await asyncio.sleep(0.01)
                asking.cancel()
                while await engine.num_in_flight() > 0:
                    await asyncio.sleep(0.01)
    finally:
        await engine.resume()
    described = (await http.get("/sessions/gone")).json()
    assert (described["turns"], described["lost_turns"]) == (0, 2)


async def test_a_retry_joins_the_request_that_it_repeats(
    http: httpx.AsyncClient, engine: WorkerHandle, model: str
) -> None:
    body = {"model": model, "messages": [QUESTION], "max_tokens": 300, "ignore_eos": True}

    async def ask(count: str, session: str = "retried") -> httpx.Response:
        headers = {"x-stainless-retry-count": count, "X-Session-ID": session}
        return await http.post("/v1/chat/completions", json=body, headers=headers)

    async def joined() -> float:
        lines = (await http.get("/metrics")).text.splitlines()
        name = 'turnwise_requests_total{what="joined"} '
        return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))

    before = await joined()
    await engine.pause("keep")  # so that it does not end before its retry comes
    try:
        first = asyncio.create_task(ask("0"))
        async with asyncio.timeout(60):
            while await engine.num_in_flight() == 0:
                await asyncio.sleep(0.01)
            retry = asyncio.create_task(ask("1"))
            while await joined() == before:
                await asyncio.sleep(0.01)
        first.cancel()  # the client gave up on it; the retry still waits
        await asyncio.sleep(0.05)
    finally:
        await engine.resume()
    answer = (await retry).json()
    assert answer["usage"]["completion_tokens"] == 300
    assert len((await fetched(http, "retried")).turns) == 1
    one, two = await asyncio.gather(ask("0", "deliberate"), ask("0", "deliberate"))
    assert one.json()["id"] != two.json()["id"]
    assert len((await fetched(http, "deliberate")).turns) == 2


async def test_the_key_guards_all_but_health(
    engine: WorkerHandle, make_config: Callable[..., Config]
) -> None:
    server = OpenAIServer(make_config(serving={"port": 0, "api_key": "secret"}), engine)
    try:
        root = (await server.start()).removesuffix("/v1")
        async with httpx.AsyncClient(base_url=root, timeout=60) as http:
            assert (await http.get("/health")).status_code == 200
            for path in ("/v1/models", "/metrics", "/sessions/x", "/tokenize", "/openapi.json"):
                for key in ({}, {"Authorization": "Bearer wrong"}):
                    answer = await http.get(path, headers=key)
                    assert answer.status_code == 401, path
                    assert "key" in answer.json()["error"]["message"]
            good = {"Authorization": "Bearer secret"}
            assert (await http.get("/v1/models", headers=good)).status_code == 200
        taken = int(root.rpartition(":")[2])
        with pytest.raises(InputError, match=rf"cannot listen on 127\.0\.0\.1:{taken} .*in use"):
            await OpenAIServer(make_config(serving={"port": taken}), engine).start()
    finally:
        await server.stop()
