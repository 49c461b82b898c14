"""Prompts that a client has scored, before a simulated engine: what is a turn, and what is not."""

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from tests.simulated import Latency, SimulatedEngine
from turnwise.config import Config
from turnwise.serving.openai.server import OpenAIServer
from turnwise.trajectory import Trajectory, audit

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


async def test_each_choice_has_its_prompt_scored(http: httpx.AsyncClient) -> None:
    made = await ask(http, "n", prompt=PROMPT, n=3, prompt_logprobs=0, max_tokens=2)
    for choice in made["choices"]:
        first, *rest = choice["prompt_logprobs"]
        assert first is None
        assert [list(each) for each in rest] == [[str(token)] for token in PROMPT[1:]]
    assert len((await trajectory(http, "n")).turns) == 3
