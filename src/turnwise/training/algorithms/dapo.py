"""Parts of DAPO other than advantage and loss: dynamic sampling and the overlong penalty.

    dynamic sampling (eq. 11): keep a group only if its rewards are not all equal
    soft overlong punishment (eq. 13), buffer = the last tokens before the longest length L:
        0                                  up to L - buffer
        (L - buffer - length) / buffer     in the buffer
        -1                                 beyond L

Yu et al., "DAPO" (arXiv 2503.14476). Differences: the punishment is multiplied by a weight, and
rewards are arbitrary numbers instead of right or wrong. The paper's other parts are `ppo_clip` with
two bounds and `algorithm.reduction: token_mean`.
"""

from collections.abc import Sequence


def has_signal(rewards: Sequence[float]) -> bool:
    """Return whether the rewards are not all equal."""
    return len(set(rewards)) > 1


def overlong_penalty(length: int, max_length: int, buffer_tokens: int, penalty: float) -> float:
    """Return the term, between -penalty and 0, that is added to the reward of `length` tokens; 0
    without a buffer."""
    if not buffer_tokens:
        return 0.0
    room = min(0, max_length - buffer_tokens - length)
    return penalty * max(-1.0, room / buffer_tokens)
