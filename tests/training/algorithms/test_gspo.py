import math

import pytest
import torch

from tests.training.algorithms.some_tokens import gradient_N, some_tokens, token_loss, tokens_of
from turnwise.config.algorithm import Gspo
from turnwise.training.algorithms import Tokens
from turnwise.training.algorithms.losses import token_weights


def sequence_mean(tokens: Tokens, loss_N: torch.Tensor) -> torch.Tensor:
    weights_N = token_weights(
        "sequence_mean", tokens, total_tokens=0, total_trajectories=tokens.sequences, constant=1
    )
    return (weights_N * loss_N).sum()


def papers_loss(tokens: Tokens, config: Gspo) -> torch.Tensor:
    """-1/G sum_i min(s_i A_i, clip(s_i) A_i), differentiated through s_i itself."""
    losses = []
    for i in range(tokens.sequences):
        mine = tokens.sequence_N == i
        log_ratio = (tokens.logprobs_N[mine] - tokens.old_logprobs_N[mine]).mean()
        ratio, advantage = log_ratio.exp(), tokens.advantages_N[mine][0]
        bounded = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
        losses.append(-torch.minimum(ratio * advantage, bounded * advantage))
    return torch.stack(losses).mean()


@pytest.mark.parametrize("clip", [0.01, 0.1, 10.0])
@pytest.mark.parametrize("seed", range(5))
def test_the_sequence_mean_has_the_papers_value_and_gradient(seed: int, clip: float) -> None:
    tokens = some_tokens([3, 1, 5, 2], seed=seed)
    tokens.advantages_N.copy_(tokens.means_S(tokens.advantages_N)[tokens.sequence_N])
    config = Gspo(clip_low=clip, clip_high=clip)
    mine = sequence_mean(tokens, token_loss(config, tokens).loss_N)
    papers = papers_loss(tokens, config)
    torch.testing.assert_close(mine, papers)
    torch.testing.assert_close(gradient_N(mine, tokens), gradient_N(papers, tokens))


def test_tokens_of_a_sequence_share_loss_ratio_and_clipping() -> None:
    tokens = tokens_of([[0.5, -0.1], [-0.4, 0.0, 0.1]], [[1.0, 1.0], [-2.0, -2.0, -2.0]])
    result = token_loss(Gspo(clip_low=0.2, clip_high=0.2), tokens)
    first, second = math.exp(0.2), math.exp(-0.1)
    assert result.ratio_N.tolist() == pytest.approx([first] * 2 + [second] * 3)
    assert result.loss_N.tolist() == pytest.approx([-1.2] * 2 + [2 * second] * 3)
    assert result.clipped_N.tolist() == [True, True, False, False, False]


def test_an_advantage_of_one_token_moves_that_token_alone() -> None:
    tokens = tokens_of([[0.1, 0.3]], [[0.0, 2.0]])
    gradient = gradient_N(token_loss(Gspo(clip_high=1.0), tokens).loss_N.sum(), tokens)
    assert gradient.tolist() == pytest.approx([0.0, -2 * math.exp(0.2)])
