"""Sampling through the protocol: what can be asked of prompts and tokens. See `bench`."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tinker.bench import Client, opened
from turnwise.config import Config
from turnwise.tinker.wire import message_classes

PROMPT = [5, 6, 7, 8]
LONGEST = 64


@pytest.fixture
async def client(
    make_config: Callable[..., Config], model_path: str, tmp_path: Path
) -> AsyncIterator[Client]:
    config = make_config(
        model={"path": model_path, "max_length": LONGEST, "lora": {"rank": 8}},
        weights={"lora": "adapter"},
        training={"threads": 1},
    )
    async with opened(config, tmp_path) as (client, _):
        client.session = (await client.tree("create_session", {}))["session_id"]
        wanted = {"sampling_session_seq_id": 0, "base_model": "model"}
        await client.tree("create_sampling_session", wanted | {"session_id": client.session})
        yield client


async def sampled(client: Client, seq: int = 0, ids: list[int] = PROMPT, **more: Any) -> Any:
    """Return the response to a request for a sample, or the outcome that it failed with."""
    params = {"max_tokens": 4, "seed": 1} | more.pop("sampling_params", {})
    body = {
        "sampling_session_id": f"{client.session}:sample:0",
        "seq_id": seq,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": ids}]},
        "sampling_params": params,
    }
    outcome = await client.result(await client.tree("asample", body | more))
    if isinstance(outcome, dict):
        return outcome
    read = message_classes()["SampleResponse"]()
    read.ParseFromString(outcome)
    return read


def likeliest(top: Any) -> list[list[tuple[int, float]]]:
    ids = np.frombuffer(top.token_ids, np.int32).reshape(top.length, top.k)
    values = np.frombuffer(top.logprobs, np.float32).reshape(top.length, top.k)
    return [list(zip(*pair, strict=True)) for pair in zip(ids.tolist(), values, strict=True)]


async def test_the_likeliest_prompt_tokens_are_given_per_position(client: Client) -> None:
    read = await sampled(client, prompt_logprobs=True, topk_prompt_logprobs=3, num_samples=2)
    rows = likeliest(read.topk_prompt_logprobs)
    assert rows[0] == [(0, -99999.0)] * 3  # the SDK's mark of a position without log-probs
    assert rows[1:] == [[(1, -0.5), (2, -1.0), (3, -1.5)]] * 3
    prompt = np.frombuffer(read.prompt_logprobs, np.float32)
    np.testing.assert_allclose(prompt, [np.nan, -0.006, -0.007, -0.008], rtol=1e-5)
    assert not any(each.HasField("topk_sampled_logprobs") for each in read.sequences)


async def test_the_likeliest_tokens_beside_each_sampled_one(client: Client) -> None:
    read = await sampled(client, topk_sample_logprobs=2)
    (sequence,) = read.sequences
    rows = likeliest(sequence.topk_sampled_logprobs)
    assert rows == [[(1, -0.5), (2, -1.0)]] * len(np.frombuffer(sequence.tokens, np.int32))
    assert not read.HasField("topk_prompt_logprobs")
    assert not read.prompt_logprobs


async def test_the_end_of_a_prompt_can_be_scored_alone(client: Client) -> None:
    read = await sampled(
        client, prompt_logprobs=True, topk_prompt_logprobs=1, prompt_logprobs_last_n=2
    )
    scored = np.isfinite(np.frombuffer(read.prompt_logprobs, np.float32))
    assert scored.tolist() == [False, False, True, True]
    rows = likeliest(read.topk_prompt_logprobs)
    assert [row[0][0] for row in rows] == [0, 0, 1, 1]
    failed = await sampled(client, 1, prompt_logprobs=True, prompt_logprobs_last_n=4)
    assert failed["error"] == "prompt_logprobs_last_n: 4 is not from 1 to 3"


async def test_a_whole_sample_can_be_scored_afterwards(client: Client) -> None:
    read = await sampled(client, sampling_params={"max_tokens": None, "stop": []})
    whole = PROMPT + np.frombuffer(read.sequences[0].tokens, np.int32).tolist()
    assert len(whole) <= LONGEST - 1
    longest = [5] * (LONGEST - 1)
    read = await sampled(client, 1, longest, prompt_logprobs=True)
    assert len(np.frombuffer(read.prompt_logprobs, np.float32)) == LONGEST - 1
    failed = await sampled(client, 2, [5] * LONGEST)
    assert failed["error"] == "prompt: 64 tokens leave no room for another in 64"


async def test_what_cannot_be_sampled_has_a_sentence(client: Client) -> None:
    failed = await sampled(client, prompt_alt_tokens_k=2)
    assert failed == {
        "error": "prompt_alt_tokens_k: vLLM draws no tokens at positions of the prompt",
        "category": "user",
    }
    failed = await sampled(client, 1, record_stability_info=True)
    assert "--stable-reinforce" in failed["error"]
    failed = await sampled(client, 2, target_prompt_logprobs={"data": [1], "shape": [1, 1]})
    assert "forward(cross_entropy) scores any" in failed["error"]
    for seq, stop in enumerate((["\n"] * 1001, [""], ["a" * 1001], [-1], [2**40]), 3):
        failed = await sampled(client, seq, sampling_params={"stop": stop})
        assert "stop may have 1,000 ids from 0 on" in failed["error"]
