"""The log-probs of given tokens beside those of the likeliest, in one step of vLLM's sampler."""

import pytest
import torch
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata

from turnwise.engine.vllm_requests import sampling_params
from turnwise.internals import vllm

LOGITS = torch.tensor([[3.0, 2.0, 1.0, 0.0, -1.0], [0.0, 1.0, 2.0, 3.0, 4.0]])
LOGPROBS = LOGITS.log_softmax(-1)


def step(likeliest: int | None, given: dict[int, list[int]]) -> vllm.LogprobsTensors:
    """Sample greedily for two requests, and return the step's log-probs."""
    none = torch.zeros(2)
    metadata = SamplingMetadata(
        temperature=None,
        all_greedy=True,
        all_random=False,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=likeliest,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=none,
        presence_penalties=none,
        repetition_penalties=none,
        output_token_ids=[[], []],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
        logprob_token_ids=given,
    )
    made = vllm.sampler.Sampler("processed_logprobs")(
        logits=LOGITS.clone(), sampling_metadata=metadata
    )
    assert made.sampled_token_ids.flatten().tolist() == [0, 4]
    return made.logprobs_tensors


@pytest.mark.parametrize("given", [[3], [4, 3, 2, 1]], ids=["fewer", "more"])
def test_requests_of_one_step_get_what_each_asked_for(given: list[int]) -> None:
    rows = step(2, {1: given})
    likeliest = [0, 0, 1]  # the sampled one comes first
    assert rows.logprob_token_ids[0, :3].tolist() == likeliest
    assert rows.logprobs[0, :3].tolist() == pytest.approx(LOGPROBS[0, likeliest].tolist())
    wanted = [4, *given]
    assert rows.logprob_token_ids[1, : len(wanted)].tolist() == wanted
    assert rows.logprobs[1, : len(wanted)].tolist() == pytest.approx(LOGPROBS[1, wanted].tolist())
    assert rows.selected_token_ranks.tolist() == [1, 1]


@pytest.mark.parametrize("likeliest", [None, 0])
def test_a_step_without_the_likeliest_has_the_given_tokens_alone(likeliest: int | None) -> None:
    rows = step(likeliest, {0: [3], 1: [2]})
    assert rows.logprob_token_ids.tolist() == [[0, 3], [4, 2]]


def test_the_engine_gets_given_tokens_in_a_form_vllm_accepts() -> None:
    params = sampling_params(vllm.SamplingParams(logprob_token_ids=[5, 6, 7]), None)
    assert params.logprobs is None
    assert params.num_logprobs == 3
    assert sampling_params(vllm.SamplingParams(), None).logprobs == 0
