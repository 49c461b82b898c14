"""A client whose answer was lost on the way asks again, and gets the answer that was sampled.

Before a simulated engine, without a socket.
"""

from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from tests.serving.openai.test_http_limits import QUICK, Noting
from turnwise.chat import session as session_module
from turnwise.chat.session import Session
from turnwise.config import Config, SamplingConfig
from turnwise.serving.openai.server import OpenAIServer
from turnwise.trajectory import Trajectory, audit

ASKED: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [{"role": "user", "content": "12 plus 30?"}]},
    "responses": {"model": "any", "input": "12 plus 30?"},
    "messages": {
        "model": "any",
        "max_tokens": 16,
        "messages": [{"role": "user", "content": "12 plus 30?"}],
    },
}


@pytest.fixture(scope="module")
def engine(tokenizer: Any) -> Noting:
    return Noting(latency=QUICK, vocab_size=len(tokenizer))


@pytest.fixture(scope="module")
async def server(make_config: Callable[..., Config], engine: Noting) -> OpenAIServer:
    return OpenAIServer(make_config(), engine)


@pytest.fixture
async def http(server: OpenAIServer) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(await server.application())
    async with httpx.AsyncClient(transport=transport, base_url="http://t") as http:
        yield http


@pytest.fixture
def rollout(server: OpenAIServer) -> Session:
    sampling = SamplingConfig(max_tokens=16)
    return server.sessions.open_private(Trajectory("p"), sampling=sampling, max_turns=2)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ASKED)
@pytest.mark.parametrize(
    ("first", "again"),
    [
        ({"x-stainless-retry-count": "0"}, {"x-stainless-retry-count": "1"}),
        ({"idempotency-key": "k"}, {"idempotency-key": "k"}),
    ],
    ids=["a retry by its count", "a retry by its key"],
)
async def test_a_retry_after_a_lost_answer_gets_it_and_samples_nothing(
    first: dict[str, str],
    again: dict[str, str],
    api: str,
    stream: bool,
    http: httpx.AsyncClient,
    rollout: Session,
    engine: Noting,
) -> None:
    url, body = f"/sessions/{rollout.id}/v1/{api}", {**ASKED[api], "stream": stream}
    answer = await http.post(url, json=body, headers=first)
    assert answer.status_code == 200
    sampled = len(engine.sampled)
    for _ in range(2):
        repeated = await http.post(url, json=body, headers=again)
        assert (repeated.status_code, repeated.content) == (200, answer.content)
        assert repeated.headers["content-type"] == answer.headers["content-type"]
    assert len(engine.sampled) == sampled
    trajectory = rollout.finish()
    assert len(trajectory.turns) == rollout.begun_turns == 1
    assert trajectory.events["repeated_answer"] == 2
    assert audit(trajectory).first_violation is None


async def test_only_a_retry_of_an_equal_request_repeats_an_answer(
    http: httpx.AsyncClient, rollout: Session, server: OpenAIServer, engine: Noting
) -> None:
    other = server.sessions.open_private(Trajectory("q"), sampling=SamplingConfig(max_tokens=16))
    url, body = f"/sessions/{rollout.id}/v1/chat/completions", ASKED["chat/completions"]
    first, retry = ({"x-stainless-retry-count": number} for number in "01")
    await http.post(url, json=body, headers=first)
    sampled = len(engine.sampled)
    await http.post(url, json=body, headers=first)  # asks for another sample
    await http.post(url.replace(rollout.id, other.id), json=body, headers=retry)
    await http.post(
        url.replace(rollout.id, other.id), json={**body, "max_tokens": 3}, headers=retry
    )
    assert len(engine.sampled) == sampled + 3
    assert len(rollout.trajectory.turns) == 2
    server.sessions.close(rollout.id)
    assert (await http.post(url, json=body, headers=retry)).status_code == 410


async def test_refusals_are_not_kept(http: httpx.AsyncClient, rollout: Session) -> None:
    url, body = f"/sessions/{rollout.id}/v1/chat/completions", ASKED["chat/completions"]
    wrong = {**body, "temperature": "warm"}
    for count in "01":
        headers = {"x-stainless-retry-count": count}
        assert (await http.post(url, json=wrong, headers=headers)).status_code == 400
    assert rollout.answers == {}
    assert rollout.trajectory.events == {}


def test_kept_answers_are_bounded_and_counted_as_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "_ANSWERS_BYTES", 250)
    session = Session("s")
    empty = session.size
    for number in range(50):
        session.keep_answer(b"%d" % number, [{"type": "a"}], 100)
    assert [*session.answers] == [b"48", b"49"]
    assert session.size == empty + 200
    session.keep_answer(b"large", [{"type": "a"}], 1_000)
    assert (session.answers, session.size) == ({}, empty)
