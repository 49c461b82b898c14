"""Online DPO: a group's best trajectory is preferred to its worst.

    h(y) = sum over y's trained tokens of (log pi(t) - log pi_ref(t))
    loss of a pair = -log sigmoid(beta * (h(chosen) - h(rejected)))

Rafailov et al., "Direct Preference Optimization" (arXiv 2305.18290), eq. 7; online: Guo et al.,
"Direct Language Model Alignment from Online AI Feedback" (arXiv 2402.04792). Differences: pairs
are ranked by reward, where the paper asks a language model to compare two answers, and a pair is
the best and worst of a group, where the paper samples two.
"""

from collections.abc import Sequence

import torch

from turnwise.config import Dpo
from turnwise.training.algorithms.dapo import has_signal
from turnwise.training.algorithms.loss import Loss
from turnwise.training.tokens import TokenLoss, Tokens


def choose_pairs(rewards: Sequence[float]) -> tuple[int, int] | None:
    """Return the indices of a group's best and worst reward, the first of ties; None if all rewards
    are equal or there are fewer than two."""
    if not has_signal(rewards):
        return None
    indices = range(len(rewards))
    return max(indices, key=rewards.__getitem__), min(indices, key=rewards.__getitem__)


class DpoLoss(Loss):
    """Each pair's loss on all tokens of both sequences; `sequence_mean` is the mean over pairs."""

    needs_reference = True
    needs_pairs = True

    def __init__(self, config: Dpo) -> None:
        self._config = config

    def __call__(self, tokens: Tokens) -> TokenLoss:
        """Return the loss of each token; advantages and old log-probs are not used."""
        assert tokens.sequences % 2 == 0, f"{tokens.sequences} sequences are not pairs"
        assert tokens.reference_logprobs_N is not None, "DPO needs the reference model's log-probs"
        gain_S = tokens.sums_S(tokens.logprobs_N - tokens.reference_logprobs_N)
        margin_P = gain_S[0::2] - gain_S[1::2]
        pair_loss_P = -torch.nn.functional.logsigmoid(self._config.beta * margin_P)
        return self.unclipped(tokens, pair_loss_P[tokens.sequence_N // 2])
