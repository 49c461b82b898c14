"""The agentic load: what its seed decides, and sessions that a server has whole and exact."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from benchmarks.agentic import LONGEST, Answer, Measured, figures, plan, play
from benchmarks.agents import check
from examples.calculator.tool import TOOL_SCHEMA
from tests.simulated import Latency, SimulatedEngine
from turnwise.config import Config
from turnwise.serving.openai.server import OpenAIServer
from turnwise.trajectory import ChatTemplate

QUICK = Latency(prefill_token=0.0, step=1e-4, step_request=0.0)


@pytest.fixture(scope="module")
async def base_url(
    make_config: Callable[..., Config], model_path: str, tokenizer: Any
) -> AsyncIterator[str]:
    engine = SimulatedEngine(vocab_size=len(tokenizer), latency=QUICK, mean_tokens=10**9)
    config = make_config(
        model={"path": model_path, "max_length": LONGEST},
        serving={"port": 0},
        rollout={"tool_parser": "hermes"},
    )
    server = OpenAIServer(config, engine)
    yield await server.start()
    await server.stop()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_every_turn_is_in_a_session_of_the_server(base_url: str, stream: bool) -> None:
    tag = f"load-{stream}"
    measured = await play(base_url, "any", 5, tag, sessions=6, lanes=3, stream=stream)
    turns = sum(len(plan(5, number)) for number in range(6))
    assert len(measured.turns) == len(measured.ended) == turns
    assert len(measured.first) == (turns if stream else 0)
    kept = await check(base_url, sorted(measured.histories), turns)
    sampled = sorted(trajectory.sampled_tokens for trajectory in kept)
    assert sampled == sorted(sum(step.tokens for step in plan(5, n)) for n in range(6))
    found = figures(measured)
    assert found["turns/s"] > 0
    assert ("p99 of a first token" in found) is stream
    assert found["p50 of a turn"] <= found["p99 of a turn"]


def test_a_seed_decides_on_every_message_and_delay() -> None:
    assert plan(1, 2) == plan(1, 2)
    assert plan(1, 2) != plan(1, 3)
    assert plan(1, 2) != plan(2, 2)
    steps = [step for number in range(200) for step in plan(0, number)]
    assert {step.seconds for step in steps} == {0.0, 0.01, 0.2, 2.0}


def test_every_session_fits_the_context(template: ChatTemplate) -> None:
    def tokens(number: int) -> int:
        steps = plan(0, number)
        messages = [{"role": "user", "content": step.text} for step in steps]
        whole = len(template.render_first(messages, [TOOL_SCHEMA]))
        return whole + sum(step.tokens + 8 for step in steps)  # answers, in their turns' frames

    assert max(map(tokens, range(300))) < LONGEST


def test_pieces_of_a_stream_make_the_message() -> None:
    answer = Answer()
    pieces = [
        {"role": "assistant", "content": ""},
        {"content": "I "},
        {"content": "call"},
        {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a": '}}]},
        {"tool_calls": [{"index": 1, "id": "c2", "function": {"name": "g"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]},
    ]
    assert [answer.add(piece) for piece in pieces] == [False] + [True] * 6
    message = answer.message()
    assert message["content"] == "I call"
    calls = [(call["id"], *call["function"].values()) for call in message["tool_calls"]]
    assert calls == [("c1", "f", '{"a": 1}'), ("c2", "g", "")]


def test_the_rate_leaves_out_the_last_tenth() -> None:
    measured = Measured(ended=[*(0.1 * turn for turn in range(1, 10)), 100.0])
    assert measured.rate == pytest.approx(10.0)
