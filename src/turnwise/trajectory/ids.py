"""Sequences of token ids: their common beginning, and sums that tell whether they changed."""

import zlib
from array import array
from collections.abc import Sequence


def common_prefix(a: Sequence[object], b: Sequence[object]) -> int:
    """Return the length of the longest common prefix of two sequences of ids or characters."""
    length, step = 0, 64
    limit = min(len(a), len(b))
    while length < limit:
        step = min(step, limit - length)
        if a[length : length + step] == b[length : length + step]:
            length, step = length + step, step * 2
        elif step == 1:
            break
        else:
            step //= 2
    return length


def checksums(token_ids: Sequence[int]) -> tuple[int, int]:
    """Return the sums that locate and restore one changed id: of ids, of ids times positions."""
    return sum(token_ids), sum(i * token for i, token in enumerate(token_ids, start=1))


def fingerprint(
    prompt_token_ids: Sequence[int],
    completion_token_ids: Sequence[int],
    logprobs: Sequence[float],
    weight_versions: Sequence[int],
) -> tuple[int, int, int]:
    """Return the prompt's length, the sum of its ids, and a checksum of the sampled tokens."""
    sampled = array("q", [*completion_token_ids, *weight_versions]).tobytes()
    sampled += array("d", logprobs).tobytes()
    return len(prompt_token_ids), sum(prompt_token_ids), zlib.crc32(sampled)
