"""A loss: per-token tensors in, per-token losses out. N is the number of trained tokens."""

from turnwise.training.algorithms import Loss, TokenLoss, Tokens


class Reinforce(Loss):
    """REINFORCE: the log-prob of each token, weighted by its advantage; no clip, no ratio.

    Williams 1992. The trainer averages over the batch by `algorithm.reduction`.
    """

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def __call__(self, tokens: Tokens) -> TokenLoss:
        loss_N = -self.scale * tokens.advantages_N * tokens.logprobs_N
        return self.unclipped(tokens, loss_N, surprise=-tokens.logprobs_N)
