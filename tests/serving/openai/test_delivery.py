"""A turn is what the client got: recorded once its end is sent, under its own choice, or lost."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from tests.serving.openai.test_http_limits import HELLO, QUICK, Noting
from tests.simulated import Latency, SimulatedEngine
from turnwise.config import Config
from turnwise.engine.protocol import Chunk, Request
from turnwise.serving.openai.server import OpenAIServer
from turnwise.serving.scheduler import Scheduler

SLOWLY = {"frequency_penalty": 0.0}
"""An option that changes nothing and makes a request one that is not plain."""


class Doubling(Noting):
    """Gives each completion log-probs of its own, and tells when one is sampled whole."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.count = 0
        self.ended = asyncio.Event()
        self.lingers = False

    def _sample(self, prompt_token_ids: Any, max_tokens: int) -> tuple[list[int], list[float]]:
        token_ids, logprobs = super()._sample(prompt_token_ids, max_tokens)
        self.count += 1
        return token_ids, [-float(self.count)] * len(logprobs)

    async def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        async for chunk in super().stream(request):
            yield chunk
        self.ended.set()
        for _ in range(20 if self.lingers else 0):
            await asyncio.sleep(0)


@pytest.fixture(scope="module")
def engine(tokenizer: Any) -> Doubling:
    return Doubling(vocab_size=len(tokenizer), latency=QUICK)


@pytest.fixture(scope="module")
async def server(
    make_config: Callable[..., Config], engine: Doubling
) -> AsyncIterator[OpenAIServer]:
    server = OpenAIServer(make_config(serving={"port": 0}, sampling={"max_tokens": 8}), engine)
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def http(server: OpenAIServer) -> AsyncIterator[httpx.AsyncClient]:
    root = server.base_url.removesuffix("/v1")
    async with httpx.AsyncClient(base_url=root, timeout=60) as client:
        yield client


async def test_choices_with_the_same_tokens_keep_their_own_log_probs(
    http: httpx.AsyncClient, server: OpenAIServer, engine: Doubling
) -> None:
    engine.says = [5, 6, 7]
    try:
        body = {"messages": HELLO, "n": 3, "return_token_ids": True, "max_tokens": 4}
        made = await http.post("/sessions/same/v1/chat/completions", json=body)
        several = {"model": "any", "prompt": ["a", "b"], "n": 2, "max_tokens": 4}
        whole = await http.post("/sessions/texts/v1/completions", json=several)
    finally:
        engine.says = []
    choices = made.json()["choices"]
    said = {choice["message"]["generation_log_probs"][0] for choice in choices}
    assert len({tuple(choice["token_ids"]) for choice in choices}) == 1
    assert len(said) == 3
    session, texts = server.sessions.get("same"), server.sessions.get("texts")
    assert session is not None
    assert {turn.logprobs[0] for turn in session.trajectory.turns} == said
    assert whole.status_code == 200
    assert texts is not None
    assert len({turn.logprobs[0] for turn in texts.trajectory.turns}) == 4


@pytest.mark.parametrize("more", [{}, SLOWLY], ids=["plain", "slowly"])
async def test_an_answer_that_cannot_be_read_is_no_turn(
    http: httpx.AsyncClient,
    server: OpenAIServer,
    engine: Doubling,
    monkeypatch: pytest.MonkeyPatch,
    more: dict[str, Any],
) -> None:
    """Injected: vLLM's parser fails."""
    from vllm.parser.abstract_parser import DelegatingParser

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("the parser is broken")

    name = f"unreadable-{len(more)}"
    with monkeypatch.context() as patched:
        patched.setattr(DelegatingParser, "parse", broken)
        answer = await http.post(
            f"/sessions/{name}/v1/chat/completions", json={"messages": HELLO, **more}
        )
    assert answer.status_code >= 400
    session = server.sessions.get(name)
    assert session is not None
    assert (len(session.trajectory.turns), session.lost_turns) == (0, 1)


@pytest.mark.parametrize("more", [{}, SLOWLY], ids=["plain", "slowly"])
async def test_a_client_that_leaves_before_the_answer_has_no_turn(
    server: OpenAIServer, engine: Doubling, more: dict[str, Any]
) -> None:
    name, body = f"left-{len(more)}", json.dumps({"messages": HELLO, **more}).encode()
    sent: list[Any] = []
    waiting = [{"type": "http.request", "body": body, "more_body": False}]
    engine.ended.clear()

    async def receive() -> Any:
        if waiting:
            return waiting.pop()
        await engine.ended.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    path = f"/sessions/{name}/v1/chat/completions"
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode()}
    scope |= {"query_string": b"", "headers": headers, "server": ("127.0.0.1", 80)}
    assert server._server is not None
    engine.lingers = True
    try:
        await server._server.config.app(scope, receive, send)  # type: ignore[operator, arg-type]
    finally:
        engine.lingers = False
    session = server.sessions.get(name)
    assert session is not None
    assert (len(session.trajectory.turns), session.lost_turns) == (0, 1)


@pytest.mark.parametrize(
    ("path", "body", "end"),
    [
        ("chat/completions", {"messages": HELLO}, b'"finish_reason":"'),
        ("responses", {"input": "12 plus 30?"}, b"response.completed"),
        ("messages", {"messages": HELLO, "max_tokens": 8}, b"message_stop"),
    ],
)
async def test_a_client_that_ends_on_the_last_event_has_its_turn(
    server: OpenAIServer, path: str, body: dict[str, Any], end: bytes
) -> None:
    """verifiers 1864: the program exits as soon as it has read the end of its streamed answer."""
    url = httpx.URL(server.base_url)

    async def program(number: int) -> int:
        name = f"exits-{path.partition('/')[0]}-{number}"
        content = json.dumps({"model": "any", "stream": True, **body}).encode()
        head = f"POST /sessions/{name}/v1/{path} HTTP/1.1\r\nHost: localhost\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(head.encode() + content)
        read = b""
        while end not in read:
            piece = await asyncio.wait_for(reader.read(65_536), 60)
            assert piece, read
            read += piece
        writer.transport.abort()
        session = server.sessions.get(name)  # as a rollout does once its agent has ended
        assert session is not None
        return len(session.trajectory.turns)

    for begin in range(0, 100, 20):
        turns = await asyncio.gather(*map(program, range(begin, begin + 20)))
        assert turns == [1] * 20


@pytest.mark.parametrize(
    "more",
    [
        *({}, {"seed": 7}, {"stop": ["###"]}, {"frequency_penalty": 0.1}, {"n": 2, "seed": 7}),
        {"stop": ["###"], "logprobs": True, "top_logprobs": 2},
    ],
    ids=str,
)
async def test_an_unsent_answer_begins_again_when_its_worker_dies(
    make_config: Callable[..., Config], tokenizer: Any, more: dict[str, Any]
) -> None:
    config = make_config(serving={"workers": 2})
    scheduler = Scheduler(config.serving, 60.0)
    slow = Latency(prefill_token=0, step=0.003, step_request=0)
    for name in ("worker-0", "worker-1"):
        worker = SimulatedEngine(
            seed=1, latency=slow, vocab_size=len(tokenizer), mean_tokens=100_000
        )
        scheduler.add(name, worker)
    engines = [worker.engine for worker in scheduler.workers.values()]
    app = await OpenAIServer(config, scheduler).application()

    async def kill() -> None:
        async with asyncio.timeout(60):
            while True:
                for engine in engines:
                    if engine._running and next(iter(engine._running)).delivered:
                        engine.die()
                        return
                await asyncio.sleep(0.001)

    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://t") as http:
        killing = asyncio.create_task(kill())
        answer = await http.post(
            "/sessions/dying/v1/chat/completions",
            json={"messages": HELLO, "max_tokens": 80, **more},
        )
        await killing
        assert answer.status_code == 200, answer.text
        choices = answer.json()["choices"]
        assert answer.json()["usage"]["completion_tokens"] == 80 * len(choices)
        described = (await http.get("/sessions/dying")).json()
    turns = described["trajectory"]["turns"]
    assert [len(turn["completion_token_ids"]) for turn in turns] == [80] * len(choices)
    assert scheduler.events["restarted" if more else "continued"] >= 1
    if more.get("logprobs"):
        assert len(choices[0]["logprobs"]["content"]) == 80
