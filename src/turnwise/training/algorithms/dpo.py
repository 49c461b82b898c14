"""Online DPO: a group's best trajectory is preferred to its worst.

    h(y) = sum over y's trained tokens of (log pi(t) - log pi_ref(t))
    loss of a pair = -log sigmoid(beta * (h(chosen) - h(rejected)))

Rafailov et al., "Direct Preference Optimization" (arXiv 2305.18290), eq. 7; online: Guo et al.,
"Direct Language Model Alignment from Online AI Feedback" (arXiv 2402.04792). What differs: the
trajectory's reward judges, where the paper asks a language model to compare two answers, and the
pair is the best and the worst of a group, where the paper samples two.
"""

from collections.abc import Sequence

import torch

from turnwise.config import Dpo
from turnwise.training.algorithms.dapo import has_signal
from turnwise.training.algorithms.ratio import importance_ratio
from turnwise.training.tokens import TokenLoss, Tokens


def choose_pairs(rewards: Sequence[float]) -> tuple[int, int] | None:
    """The places of the best and the worst of a group, the first of equals; None where all
    rewards are equal or there are fewer than two."""
    if not has_signal(rewards):
        return None
    places = range(len(rewards))
    return max(places, key=rewards.__getitem__), min(places, key=rewards.__getitem__)


def loss(tokens: Tokens, config: Dpo) -> TokenLoss:
    """Each pair's loss on every token of both, so that `sequence_mean` is the mean over pairs.

    Sequence 2i is chosen and 2i + 1 rejected. Advantages and old log-probs are not used.
    """
    assert tokens.sequences % 2 == 0, f"{tokens.sequences} sequences are not pairs"
    assert tokens.reference_logprobs_N is not None, "DPO needs the reference model's log-probs"
    gain_S = tokens.sums_S(tokens.logprobs_N - tokens.reference_logprobs_N)
    pair_loss_P = -torch.nn.functional.logsigmoid(config.beta * (gain_S[0::2] - gain_S[1::2]))
    log_ratio_N = (tokens.logprobs_N - tokens.old_logprobs_N).detach()
    return TokenLoss(
        loss_N=pair_loss_P[tokens.sequence_N // 2],
        ratio_N=importance_ratio(log_ratio_N),
        clipped_N=torch.zeros_like(tokens.sequence_N, dtype=torch.bool),
    )
