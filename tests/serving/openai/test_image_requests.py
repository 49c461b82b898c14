"""Images in requests of each API, by the official clients: sessions, tools' results, refusals.

Before a simulated engine, whose answers depend on the images, and without a socket.
"""

import base64
import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import httpx
import httpx2
import pytest
from openai import AsyncOpenAI

from tests.serving.openai.test_http_limits import QUICK, Noting, told
from tests.vision import asked, encoded, picture, vision_config
from turnwise.chat.images import read_parts
from turnwise.chat.session import Session
from turnwise.chat.template import load_template, load_tokenizer
from turnwise.config import Config, SamplingConfig
from turnwise.engine.protocol import Chunk, Request
from turnwise.serving.openai.server import OpenAIServer
from turnwise.trajectory import ChatTemplate, PlacedImage, Prompt, Trajectory, audit

FUNCTION = {"name": "zoom", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "zoom", "arguments": {}}\n</tool_call>'


class Seeing(Noting):
    """Notes prompts and images as well."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.asked: list[tuple[list[int], list[PlacedImage]]] = []

    async def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        self.asked.append((request.prompt.tolist(), [*request.prompt.images]))
        async for chunk in super().stream(request):
            yield chunk


@pytest.fixture(scope="module")
def config(vision_path: str) -> Config:
    # The tiny model's template shows no tools: its calls are scripted.
    return vision_config(
        vision_path,
        serving={"port": 0},
        engine={"images_per_prompt": 3},
        sampling={"max_tokens": 48},
        rollout={"tools_in_prompt": False},
    )


@pytest.fixture(scope="module")
def seeing(config: Config) -> ChatTemplate:
    return load_template(config.model, config.sampling, config.engine, load_tokenizer(config.model))


@pytest.fixture(scope="module")
def engine(seeing: ChatTemplate) -> Seeing:
    return Seeing(vocab_size=len(seeing.tokenizer), latency=QUICK)


@pytest.fixture(scope="module")
async def server(config: Config, engine: Seeing) -> OpenAIServer:
    return OpenAIServer(config, engine)


@pytest.fixture(scope="module")
async def app(server: OpenAIServer) -> Any:
    return await server.application()


@pytest.fixture(scope="module")
async def http(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://t") as http:
        yield http


@pytest.fixture
def rollout(server: OpenAIServer) -> Session:
    """A rollout's session, as the agent loop opens it."""
    return server.sessions.open_private(Trajectory("p"), sampling=SamplingConfig(max_tokens=48))


def coded(seed: int) -> str:
    """The base64 of a picture of 56 x 84 pixels."""
    return base64.b64encode(encoded(picture(seed=seed))).decode()


def shown(seed: int) -> dict[str, Any]:
    """A part of a chat completion's message."""
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{coded(seed)}"}}


def block(seed: int) -> dict[str, Any]:
    """A block of Anthropic's."""
    source = {"type": "base64", "media_type": "image/png", "data": coded(seed)}
    return {"type": "image", "source": source}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def openai(app: Any, base: str) -> AsyncOpenAI:
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app))
    return AsyncOpenAI(base_url=f"http://t{base}/v1", api_key="none", http_client=http)


async def by_chat(app: Any, base: str, stream: bool) -> None:
    """A picture, a call, a result with a picture, an answer, and a question."""
    tools: Any = [{"type": "function", "function": FUNCTION}]
    messages: list[Any] = [{"role": "user", "content": [text("What?"), shown(0)]}]
    client = openai(app, base)
    for turn in range(3):
        options: Any = {"model": "any", "messages": messages, "tools": tools}
        if stream:
            async with client.chat.completions.stream(**options) as events:
                answer = (await events.get_final_completion()).choices[0].message
        else:
            answer = (await client.chat.completions.create(**options)).choices[0].message
        said = answer.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})
        for call in said.get("tool_calls") or ():
            call["function"].pop("parsed_arguments", None)
        messages.append(said)
        if turn == 0:
            (call,) = said["tool_calls"]
            result = {"role": "tool", "tool_call_id": call["id"]}
            messages.append({**result, "content": [text("closer:"), shown(1)]})
        else:
            messages.append({"role": "user", "content": "Sure?"})


async def by_responses(app: Any, base: str, stream: bool) -> None:
    tools: Any = [{"type": "function", **FUNCTION}]
    image = {"type": "input_image", "image_url": f"data:image/png;base64,{coded(0)}"}
    content = [{"type": "input_text", "text": "What?"}, image]
    items: list[Any] = [{"role": "user", "content": content}]
    client = openai(app, base)
    previous: Any = {}
    for turn in range(3):
        asking: Any = {"model": "any", "input": items, "tools": tools, **previous}
        if stream:
            async with client.responses.stream(**asking) as events:
                response = await events.get_final_response()
        else:
            response = await client.responses.create(**asking)
        previous = {"previous_response_id": response.id}
        items = [{"role": "user", "content": "Sure?"}]
        if turn == 0:
            (call,) = (item for item in response.output if item.type == "function_call")
            closer = {"type": "input_image", "image_url": f"data:image/png;base64,{coded(1)}"}
            output = [{"type": "input_text", "text": "closer:"}, closer]
            result = {"type": "function_call_output", "call_id": call.call_id}
            items = [{**result, "output": output}]


async def by_anthropic(app: Any, base: str, stream: bool) -> None:
    from anthropic import AsyncAnthropic  # seconds to import

    tools: Any = [{"name": "zoom", "input_schema": FUNCTION["parameters"]}]
    messages: list[Any] = [{"role": "user", "content": [text("What?"), block(0)]}]
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app))
    client = AsyncAnthropic(base_url=f"http://t{base}", api_key="none", http_client=http)
    for turn in range(3):
        options: Any = {"model": "any", "messages": messages, "tools": tools, "max_tokens": 48}
        if stream:
            async with client.messages.stream(**options) as events:
                answer: Any = await events.get_final_message()
        else:
            answer = await client.messages.create(**options)
        blocks = [each.model_dump(exclude_none=True) for each in answer.content]
        messages.append({"role": "assistant", "content": blocks})
        content: Any = "Sure?"
        if turn == 0:
            (call,) = (each for each in blocks if each["type"] == "tool_use")
            result = {"type": "tool_result", "tool_use_id": call["id"]}
            content = [{**result, "content": [text("closer:"), block(1)]}]
        messages.append({"role": "user", "content": content})


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("ask", [by_chat, by_responses, by_anthropic])
async def test_a_conversation_with_images_is_exact_by_each_client(
    app: Any,
    engine: Seeing,
    seeing: ChatTemplate,
    rollout: Session,
    ask: Any,
    stream: bool,
) -> None:
    engine.says, engine.asked = seeing.encode(CALL), []
    sample = engine.stream

    def answering(request: Request) -> AsyncGenerator[Chunk, None]:
        engine.says = seeing.encode(CALL if len(request.prompt.images) == 1 else "a cat")
        return sample(request)

    engine.stream = answering  # type: ignore[method-assign]
    try:
        await ask(app, f"/sessions/{rollout.id}", stream)
    finally:
        del engine.stream
        engine.says = []
    trajectory = rollout.finish()
    assert [turn.fork_reason for turn in trajectory.turns] == [None] * 3
    assert [turn.parent for turn in trajectory.turns] == [None, 0, 1]
    assert [len(turn.images) for turn in trajectory.turns] == [1, 1, 0]
    report = audit(trajectory)
    assert (report.first_violation, report.percent) == (None, 100.0)
    for index, (prompt, images) in enumerate(engine.asked):
        assert trajectory.prompt(index) == Prompt(prompt, images)
    assert [one.image.read() for one in engine.asked[2][1]] == [
        encoded(picture(seed=0)),
        encoded(picture(seed=1)),
    ]
    first = read_parts(asked("What?", picture(seed=0)), "a message")
    assert engine.asked[0][0] == seeing.render([first]).tolist()
    results = [asked("closer:", picture(seed=1), role="tool")]
    if ask is by_anthropic:  # vLLM moves images of a result into a message of the user
        results = [{"role": "tool", "content": "closer:"}, asked(picture(seed=1))]
    closer = seeing.render([read_parts(result, "a message") for result in results])
    assert seeing.decode_all(closer) in seeing.decode_all(engine.asked[1][0])


async def test_a_replay_with_another_image_forks_with_its_reason(
    http: httpx.AsyncClient, server: OpenAIServer
) -> None:
    path, sure = "/sessions/changed/v1/chat/completions", {"role": "user", "content": "Sure?"}
    question = {"role": "user", "content": [text("What?"), shown(0)]}
    answer = await http.post(path, json={"messages": [question], "seed": 1})
    said = answer.json()["choices"][0]["message"]
    other = {"role": "user", "content": [text("What?"), shown(1)]}
    for asking in (question, other):
        answer = await http.post(path, json={"messages": [asking, said, sure]})
        assert answer.status_code == 200, answer.text
    described = (await http.get("/sessions/changed")).json()["trajectory"]
    trajectory = Trajectory.from_json(json.dumps(described))
    assert [turn.fork_reason for turn in trajectory.turns] == [None, None, "image_changed"]
    assert audit(trajectory).first_violation is None
    assert len(trajectory.images) == 2
    assert server.sessions.get("changed") is not None


async def test_several_choices_and_beams_see_the_images(
    http: httpx.AsyncClient, engine: Seeing
) -> None:
    question = {"role": "user", "content": [text("What?"), shown(0)]}
    beams = {"use_beam_search": True, "n": 2}
    for more in ({"n": 2}, {"logprobs": True, "top_logprobs": 1}, beams):
        engine.asked = []
        answer = await http.post(
            "/v1/chat/completions", json={"messages": [question], "max_tokens": 4, **more}
        )
        assert answer.status_code == 200, answer.text
        assert engine.asked
        assert all(len(images) == 1 for _, images in engine.asked)


async def test_tokens_are_counted_as_they_would_be_sampled(
    http: httpx.AsyncClient, seeing: ChatTemplate
) -> None:
    message = read_parts(asked("What?", picture(seed=0)), "a message")
    question = {"role": "user", "content": [text("What?"), shown(0)]}
    answer = await http.post("/tokenize", json={"messages": [question]})
    assert answer.json()["tokens"] == seeing.render([message]).tolist()
    body = {"messages": [question], "add_generation_prompt": False}
    answer = await http.post("/tokenize", json=body)
    expected = seeing.render([message], add_generation_prompt=False)
    assert answer.json()["tokens"] == expected.tolist()
    question = {"role": "user", "content": [text("What?"), block(0)]}
    answer = await http.post(
        "/v1/messages/count_tokens", json={"model": "any", "messages": [question]}
    )
    assert answer.json()["input_tokens"] == len(seeing.render([message]))


def url(given: str) -> list[dict[str, Any]]:
    return [text("What?"), {"type": "image_url", "image_url": {"url": given}}]


def data_url(data: bytes) -> list[dict[str, Any]]:
    return url(f"data:image/png;base64,{base64.b64encode(data).decode()}")


REFUSED: dict[str, tuple[list[dict[str, Any]], str]] = {
    "a URL": (url("http://169.254.169.254/latest/meta-data"), "is a URL"),
    "a file": (url("file:///etc/passwd"), "is a URL"),
    "a path": (url("/etc/passwd"), "may be a data: URL"),
    "SVG": (data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>"), "no image that can be read"),
    "half a file": (data_url(encoded(picture())[:300]), "broken"),
    "a strip": (data_url(encoded(picture(1, 2_000))), "more than 100 times"),
    "no base64": (url("data:image/png;base64,%%%"), "no data: URL"),
    "too many": (
        [shown(seed) for seed in range(4)],
        "more than 3 images (engine.images_per_prompt)",
    ),
    "a video": (
        [{"type": "video_url", "video_url": {"url": "http://127.0.0.1/v.mp4"}}],
        "it may be text or image",
    ),
    "a marker": ([text("<|image_pad|>"), shown(0)], "holds the marker"),
}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "/v1/messages"])
@pytest.mark.parametrize(("content", "why"), REFUSED.values(), ids=REFUSED)
async def test_an_image_that_cannot_be_served_is_refused_with_a_reason(
    http: httpx.AsyncClient, path: str, content: list[dict[str, Any]], why: str
) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": content}]}
    if path == "/v1/messages":
        if any(part["type"] == "video_url" for part in content):
            pytest.skip("no block of Anthropic's")
        blocks = []
        for part in content:
            given = part.get("image_url", {}).get("url", "")
            data = given.removeprefix("data:image/png;base64,")
            source: dict[str, Any] = {"type": "url", "url": given}
            if data != given:
                source = {"type": "base64", "media_type": "image/png", "data": data}
            blocks.append({"type": "image", "source": source} if given else part)
        body = {"messages": [{"role": "user", "content": blocks}], "model": "any", "max_tokens": 4}
    answer = await http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert why in answer.text


@pytest.mark.parametrize(
    ("name", "value"),
    [("echo", True), ("continue_final_message", True), ("required_prefix_token_ids", [1])],
)
async def test_a_parameter_that_would_lose_images_is_refused(
    http: httpx.AsyncClient, name: str, value: object
) -> None:
    question = {"role": "user", "content": [text("What?"), shown(0)]}
    body: dict[str, Any] = {"messages": [question], name: value}
    body |= {"add_generation_prompt": False} if name == "continue_final_message" else {}
    refused = await http.post("/v1/chat/completions", json=body)
    assert f"{name} is not served where a message has an image" in told(refused, 400)


async def test_images_beyond_the_number_are_not_even_decoded(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turnwise.chat.images.check_image", lambda *_: pytest.fail("decoded"))
    parts = [data_url(encoded(picture(seed=seed)))[1] for seed in range(70, 74)]
    body: dict[str, Any] = {"messages": [{"role": "user", "content": parts}]}
    refused = await http.post("/v1/chat/completions", json=body)
    assert "more than 3 images" in told(refused, 400)


async def test_texts_of_a_model_that_sees_are_served_as_before(
    http: httpx.AsyncClient, engine: Seeing, seeing: ChatTemplate
) -> None:
    engine.asked = []
    for content in ("What?", [text("What?")]):
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4}
        answer = await http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
    expected = seeing.render([{"role": "user", "content": "What?"}])
    assert engine.asked == [(expected, [])] * 2


async def test_a_model_of_text_refuses_images(
    make_config: Any, model_path: str, tokenizer: Any
) -> None:
    engine = Noting(vocab_size=len(tokenizer), latency=QUICK)
    app = await OpenAIServer(make_config(serving={"port": 0}), engine).application()
    question = {"role": "user", "content": [text("What?"), shown(0)]}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://t") as http:
        for path in ("/v1/chat/completions", "/tokenize"):
            answer = await http.post(path, json={"messages": [question]})
            assert "this server takes text alone" in answer.text
            assert answer.status_code == 400
