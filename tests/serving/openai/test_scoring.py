"""Prompts that a client has scored, before a simulated engine: what is a turn, and what is not."""

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from tests.simulated import Latency, SimulatedEngine
from turnwise.config import Config, SamplingConfig
from turnwise.serving.openai.server import OpenAIServer
from turnwise.serving.worker_handle import WorkerHandle
from turnwise.trajectory import Trajectory, audit

SLOWLY = {"frequency_penalty": 0.0}
"""An option that changes nothing and makes a request one that is not plain."""
PROMPT = [20, 21, 22, 23, 24]
SCORES = [None, -0.021, -0.022, -0.023, -0.024]
"""Log-probs that the simulated engine gives."""
USER = {"role": "user", "content": "What is 12 plus 30?"}


@pytest.fixture(scope="module")
async def http(
    make_config: Callable[..., Config], tokenizer: Any
) -> AsyncIterator[httpx.AsyncClient]:
    quick = Latency(prefill_token=0.0, step=1e-4, step_request=0.0)
    engine = SimulatedEngine(vocab_size=len(tokenizer), latency=quick, mean_tokens=1 << 40)
    server = OpenAIServer(make_config(serving={"port": 0}), engine)
    root = (await server.start()).removesuffix("/v1")
    async with httpx.AsyncClient(base_url=root, timeout=60) as client:
        yield client
    await server.stop()


async def ask(http: httpx.AsyncClient, session: str, **options: Any) -> dict[str, Any]:
    path = "chat/completions" if "messages" in options else "completions"
    answer = await http.post(f"/sessions/{session}/v1/{path}", json={"model": "any", **options})
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    return made


async def trajectory(http: httpx.AsyncClient, session: str) -> Trajectory:
    described = (await http.get(f"/sessions/{session}")).json()
    return Trajectory.from_json(json.dumps(described["trajectory"]))


async def test_a_prompt_that_is_only_scored_is_no_turn(http: httpx.AsyncClient) -> None:
    await http.post("/sessions", json={"id": "scored", "training": True})
    scoring = {"prompt": [PROMPT, PROMPT[:3]], "echo": True, "logprobs": 1, "max_tokens": 0}
    made = await ask(http, "scored", **scoring)
    scores = [choice["logprobs"]["token_logprobs"] for choice in made["choices"]]
    assert scores == [pytest.approx(SCORES), pytest.approx(SCORES[:3])]
    assert (await trajectory(http, "scored")).turns == []
    await ask(http, "scored", messages=[USER], max_completion_tokens=4)
    assert len((await trajectory(http, "scored")).turns) == 1


async def test_a_scored_prompt_is_never_part_of_what_was_sampled(http: httpx.AsyncClient) -> None:
    await http.post("/sessions", json={"id": "both", "training": True})
    asked = {"return_token_ids": True, "max_tokens": 4}
    echoed = await ask(http, "both", prompt=PROMPT, echo=True, logprobs=1, **asked)
    shown = echoed["choices"][0]["logprobs"]["token_logprobs"]
    assert len(shown) == len(PROMPT) + 4
    assert shown[: len(PROMPT)] == pytest.approx(SCORES)
    chat = await ask(http, "both", messages=[USER], prompt_logprobs=1, **asked)
    assert len(chat["prompt_logprobs"]) == len(chat["prompt_token_ids"])
    made = await trajectory(http, "both")
    sampled = [echoed["choices"][0]["token_ids"], chat["choices"][0]["token_ids"]]
    assert [turn.completion_token_ids for turn in made.turns] == sampled
    assert audit(made).first_violation is None
    for branch in made.branches():
        assert sum(branch.response_mask) == 4


async def test_a_stream_begins_with_the_scores_of_its_prompt(http: httpx.AsyncClient) -> None:
    asked = {"prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 3, "stream": True}
    answer = await http.post("/v1/completions", json=asked)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line[:7] == "data: {"]
    pieces = [each["choices"][0]["logprobs"]["token_logprobs"] for each in events]
    assert pieces[0][: len(PROMPT)] == pytest.approx(SCORES)
    assert sum(map(len, pieces)) == len(PROMPT) + 3


async def test_the_steps_of_a_beam_search_are_no_turns(http: httpx.AsyncClient) -> None:
    made = await ask(http, "beam", prompt=PROMPT, use_beam_search=True, max_tokens=3)
    assert made["usage"]["completion_tokens"] == 3
    assert (await trajectory(http, "beam")).turns == []


async def test_each_choice_has_its_prompt_scored(http: httpx.AsyncClient) -> None:
    made = await ask(http, "n", prompt=PROMPT, n=3, prompt_logprobs=0, max_tokens=2)
    for choice in made["choices"]:
        first, *rest = choice["prompt_logprobs"]
        assert first is None
        assert [list(each) for each in rest] == [[str(token)] for token in PROMPT[1:]]
    assert len((await trajectory(http, "n")).turns) == 3


@pytest.mark.parametrize("more", [{}, SLOWLY, {"stream": True}, {"prompt_logprobs": 2}, {"n": 2}])
async def test_an_agents_turns_have_the_log_probs_of_their_prompts(
    make_config: Callable[..., Config], tokenizer: Any, more: dict[str, Any]
) -> None:
    """Whoever answers, by sampling.prompt_logprobs; its client sees them only if it asks itself."""
    quick = Latency(prefill_token=0.0, step=1e-4, step_request=0.0)
    engine = SimulatedEngine(vocab_size=len(tokenizer), latency=quick)
    server = OpenAIServer(make_config(serving={"port": 0}), engine)
    transport = httpx.ASGITransport(await server.application())
    sampling = SamplingConfig(max_tokens=4, prompt_logprobs=True)
    trajectory = Trajectory("p")
    session = server.sessions.open_private(trajectory, sampling=sampling)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        messages = [USER]
        for _ in range(2):
            asked = {"model": "any", "messages": messages, **more}
            path = f"/sessions/{session.id}/v1/chat/completions"
            answer = await http.post(path, json=asked)
            assert answer.status_code == 200, answer.text
            if "stream" in more or "n" in more:
                break
            assert bool(answer.json()["prompt_logprobs"]) == ("prompt_logprobs" in more)
            said = answer.json()["choices"][0]["message"]["content"]
            messages = [*messages, {"role": "assistant", "content": said}, USER]
    assert len(trajectory.turns) == (1 if "stream" in more else 2)
    for number, turn in enumerate(trajectory.turns):
        scores = [-1e-3 * token for token in turn.added_token_ids]
        assert turn.added_logprobs is not None
        if number == 0:
            assert turn.added_logprobs[0] is None
        assert turn.added_logprobs[number == 0 :] == pytest.approx(scores[number == 0 :])


async def test_a_cached_prompt_is_scored_as_a_whole(
    engine: WorkerHandle, make_config: Callable[..., Config]
) -> None:
    """In each turn, however its request is read."""
    server = OpenAIServer(make_config(serving={"port": 0}), engine)
    transport = httpx.ASGITransport(await server.application())
    sampling = SamplingConfig(max_tokens=4, prompt_logprobs=True)
    messages = [{"role": "user", "content": "What is 12 plus 30? " * 8}]
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        for more in (SLOWLY, {}, SLOWLY):
            trajectory = Trajectory("p")
            session = server.sessions.open_private(trajectory, sampling=sampling)
            path = f"/sessions/{session.id}/v1/chat/completions"
            answer = await http.post(path, json={"model": "any", "messages": messages, **more})
            assert answer.status_code == 200, answer.text
            (turn,) = trajectory.turns
            assert turn.added_logprobs is not None
            assert len(turn.added_logprobs) == len(turn.added_token_ids)
            assert [place for place, one in enumerate(turn.added_logprobs) if one is None] == [0]
