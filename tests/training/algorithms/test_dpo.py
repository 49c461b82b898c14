import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.training.algorithms.some_tokens import gradient_N, some_tokens, token_loss, tokens_of
from turnwise.config.algorithm import Dpo
from turnwise.training.algorithms.losses import choose_pairs, token_weights


@given(st.lists(st.integers(-3, 3), max_size=8))
def test_a_pair_is_the_first_best_and_the_first_worst(rewards: list[float]) -> None:
    pair = choose_pairs(rewards)
    if len(set(rewards)) < 2:
        assert pair is None
    else:
        assert pair == (rewards.index(max(rewards)), rewards.index(min(rewards)))


@pytest.mark.parametrize("seed", range(5))
def test_the_mean_over_sequences_is_the_papers_mean_over_pairs(seed: int) -> None:
    tokens = some_tokens([3, 5, 1, 2], seed=seed)
    beta = 0.7
    assert tokens.reference_logprobs_N is not None
    logprobs, reference = tokens.logprobs_N.tolist(), tokens.reference_logprobs_N.tolist()
    gains = [
        sum(p - q for p, q in zip(logprobs[a:b], reference[a:b], strict=True))
        for a, b in ((0, 3), (3, 8), (8, 9), (9, 11))
    ]
    margins = [beta * (gains[0] - gains[1]), beta * (gains[2] - gains[3])]
    expected = sum(math.log(1 + math.exp(-margin)) for margin in margins) / 2
    pulls = [beta / (1 + math.exp(margin)) / 2 for margin in margins]
    slopes = [-pulls[0]] * 3 + [pulls[0]] * 5 + [-pulls[1]] + [pulls[1]] * 2

    weights_N = token_weights(
        "sequence_mean", tokens, total_tokens=11, total_trajectories=4, constant=1
    )
    loss = (weights_N * token_loss(Dpo(beta=beta), tokens).loss_N).sum()
    assert loss.item() == pytest.approx(expected)
    assert gradient_N(loss, tokens).tolist() == pytest.approx(slopes)


def test_every_token_of_both_trajectories_has_the_pairs_loss() -> None:
    tokens = tokens_of([[1.0, 0.5], [-0.5]], [[1.0, 1.0], [-1.0]])
    result = token_loss(Dpo(beta=0.1), tokens)
    assert result.loss_N.tolist() == pytest.approx([math.log(1 + math.exp(-0.2))] * 3)
    assert result.ratio_N.tolist() == pytest.approx([math.exp(r) for r in (1.0, 0.5, -0.5)])
    assert result.clipped_N.tolist() == [False] * 3


def test_a_policy_that_is_the_reference_pays_log_2() -> None:
    tokens = tokens_of([[0.0, 0.0], [0.0]], [[1.0, 1.0], [-1.0]])
    result = token_loss(Dpo(), tokens)
    torch.testing.assert_close(result.loss_N, torch.full_like(result.loss_N, math.log(2)))


def test_sequences_that_are_not_pairs_are_refused() -> None:
    with pytest.raises(AssertionError, match="3 sequences are not pairs"):
        token_loss(Dpo(), some_tokens([1, 2, 3]))


def test_dpo_without_reference_is_refused() -> None:
    with pytest.raises(AssertionError, match="reference model"):
        token_loss(Dpo(), replace(some_tokens([1, 2]), reference_logprobs_N=None))
