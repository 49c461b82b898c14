"""Checksums of an engine's calls: a trajectory's ids and samples are compared with them later."""

import zlib
from array import array
from collections.abc import Iterable, Sequence

from turnwise.trajectory.distribution import Distribution
from turnwise.trajectory.images import PlacedImage


def checksums(token_ids: Sequence[int]) -> tuple[int, int]:
    """Return the sums that locate and restore one changed id: of ids, of ids times positions."""
    return sum(token_ids), sum(i * token for i, token in enumerate(token_ids, start=1))


def fingerprint(
    prompt_token_ids: Sequence[int],
    completion_token_ids: Sequence[int],
    logprobs: Sequence[float],
    weight_versions: Sequence[int],
    images: Iterable[PlacedImage] = (),
    distribution: Distribution | None = None,
    allowed: Sequence[bytes] = (),
) -> tuple[int, int, int]:
    """Return the prompt's length, the sum of its ids, and a checksum of its images, at their
    positions, and of the sampled tokens, with the distribution and the sets of allowed ids that
    they were drawn from."""
    sampled = "".join(f"{each.image.hash}{each.start},{each.length};" for each in images).encode()
    sampled += array("q", [*completion_token_ids, *weight_versions]).tobytes()
    sampled += array("d", [*logprobs, *(distribution or ())]).tobytes()
    crc = zlib.crc32(sampled)
    for each in allowed:
        crc = zlib.crc32(each, crc)
    return len(prompt_token_ids), sum(prompt_token_ids), crc
