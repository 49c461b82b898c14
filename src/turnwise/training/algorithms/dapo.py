"""DAPO's parts that are neither advantage nor loss: which groups teach, and the price of length.

    dynamic sampling (eq. 11): keep a group only if its rewards are not all equal
    soft overlong punishment (eq. 13), buffer = the last tokens before the longest length L:
        0                                  up to L - buffer
        (L - buffer - length) / buffer     in the buffer
        -1                                 beyond L

Yu et al., "DAPO" (arXiv 2503.14476). What differs: the punishment is multiplied by a weight; and
rewards are any numbers, where the paper's are right or wrong. Its other parts are `ppo_clip` with
two bounds and `algorithm.reduction: token_mean`.
"""

from collections.abc import Sequence


def has_signal(rewards: Sequence[float]) -> bool:
    """Whether some reward differs from another."""
    return len(set(rewards)) > 1


def overlong_penalty(length: int, max_length: int, buffer_tokens: int, penalty: float) -> float:
    """What a trajectory of `length` tokens adds to its reward, from 0 down to -penalty; without
    a buffer it is 0."""
    if not buffer_tokens:
        return 0.0
    room = min(0, max_length - buffer_tokens - length)
    return penalty * max(-1.0, room / buffer_tokens)
