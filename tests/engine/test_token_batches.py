"""Tokens that an engine's process sends together."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from turnwise.internals import vllm
from turnwise.internals.vllm import TIMES, TokenBatches

INTERVAL = 4


class Request:
    def __init__(self, **params: Any) -> None:
        self.sampling_params = SimpleNamespace(**params)


def requests(**params: Any) -> Any:
    return {"a": Request(**{"detokenize": False, "stream_interval": INTERVAL, **params})}


def output(token: int, likeliest: int = 1, **fields: Any) -> Any:
    logprobs = vllm.LogprobsLists(
        np.array([[token, *[7] * likeliest]]),
        np.array([[-token / 8, *[-1.0] * likeliest]], np.float32),
        np.array([2]),
    )
    return vllm.EngineCoreOutput("a", [token], logprobs, **fields)


def step(*outputs: Any, version: str = "3") -> Any:
    return {5: vllm.EngineCoreOutputs(outputs=list(outputs), weight_version=version)}


def tokens(sent: Any) -> list[list[int]]:
    return [each.new_token_ids for outputs in sent.values() for each in outputs.outputs]


def test_tokens_are_sent_together_with_their_logprobs() -> None:
    batches = TokenBatches(requests())
    sent = []
    for token in range(1, 10):
        outputs = step(output(token, finish_reason=0 if token == 9 else None))
        batches.collect(outputs)
        sent.append(outputs)
    assert [tokens(each) for each in sent] == [
        *[[], [], [], [[1, 2, 3, 4]]],
        *[[], [], [], [[5, 6, 7, 8]]],
        [[9]],
    ]
    assert sent[0] == {}  # the frontend is not woken
    joined = sent[3][5].outputs[0].new_logprobs
    assert joined.logprob_token_ids.tolist() == [[token, 7] for token in range(1, 5)]
    assert joined.logprobs.tolist() == [[-token / 8, -1.0] for token in range(1, 5)]
    assert joined.sampled_token_ranks.tolist() == [2] * 4


def test_rows_widen_while_another_request_asks_for_more_logprobs() -> None:
    batches = TokenBatches(requests())
    for token, likeliest in ((1, 1), (2, 5), (3, 1), (4, 2)):
        outputs = step(output(token, likeliest))
        batches.collect(outputs)
    joined = outputs[5].outputs[0].new_logprobs
    assert joined.logprob_token_ids.tolist() == [[token, 7] for token in range(1, 5)]
    assert joined.logprobs.tolist() == [[-token / 8, -1.0] for token in range(1, 5)]


def test_a_first_token_and_an_end_wait_for_nothing() -> None:
    batches = TokenBatches(requests())
    first, second = step(output(1, prefill_stats=vllm_stats())), step(output(2))
    last = step(output(3, finish_reason=1, stop_reason="x"))
    for outputs in (first, second, last):
        batches.collect(outputs)
    assert [tokens(each) for each in (first, second, last)] == [[[1]], [], [[2], [3]]]
    assert last[5].outputs[1].stop_reason == "x"


def vllm_stats() -> Any:
    return SimpleNamespace(num_cached_tokens=0)


def test_held_tokens_are_released_under_their_version() -> None:
    batches = TokenBatches(requests())
    sent: list[Any] = []
    for token in (1, 2):
        batches.collect(step(output(token)))
    batches.release(sent.append)
    assert [(client, outputs.weight_version) for client, outputs in sent] == [(5, "3")]
    assert tokens(dict(sent)) == [[1, 2]]
    batches.release(sent.append)
    assert len(sent) == 1
    new = step(output(3, finish_reason=0), version="4")
    batches.collect(new)
    assert tokens(new) == [[3]]


def test_tokens_that_waited_bring_their_times_along() -> None:
    batches = TokenBatches(requests(), timed=True)
    sent = []
    for token in range(1, 8):
        outputs = step(output(token, finish_reason=0 if token == 7 else None))
        outputs[5].timestamp = token / 8
        batches.collect(outputs)
        sent += [each for made in outputs.values() for each in made.outputs]
    assert [each.new_token_ids for each in sent] == [[1, 2, 3, 4], [5, 6], [7]]
    assert [(each.kv_transfer_params or {}).get(TIMES) for each in sent] == [
        [1 / 8, 2 / 8, 3 / 8, 4 / 8],
        [5 / 8, 6 / 8],
        None,
    ]


def test_a_stream_sends_the_tokens_of_a_moment_together() -> None:
    batches = TokenBatches(requests(stream_interval=1))
    sent = []
    for token, at in enumerate((0.0, 0.01, 0.02, 0.03, 0.04, 0.1, 0.101), start=1):
        first = {"prefill_stats": vllm_stats()} if token == 1 else {}
        outputs = step(output(token, finish_reason=0 if token == 7 else None, **first))
        outputs[5].timestamp = 100 + at
        batches.collect(outputs)
        sent.append(tokens(outputs))
    assert sent == [[[1]], [], [], [[2, 3, 4]], [], [[5, 6]], [[7]]]


def test_some_requests_get_each_token_at_once() -> None:
    for params in ({"stream_interval": None}, {"detokenize": True}):
        outputs = step(output(1))
        TokenBatches(requests(**params)).collect(outputs)
        assert tokens(outputs) == [[1]]
    for fields in ({"routed_experts": np.zeros(1)}, {"num_nans_in_logits": 1}, {"events": []}):
        outputs = step(output(1, **fields))
        TokenBatches(requests()).collect(outputs)
        assert tokens(outputs) == [[1]]
