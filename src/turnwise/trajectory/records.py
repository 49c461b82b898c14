"""Checksums of an engine's calls: a trajectory's ids and samples are compared with them later."""

import zlib
from array import array
from collections.abc import Sequence

import numpy as np

from turnwise.trajectory.distribution import Distribution
from turnwise.trajectory.prompt import Ids, Prompt


def checksums(ids_T: Ids) -> tuple[int, int]:
    """Return the sums that locate and restore one changed id: of ids, of ids times positions."""
    places_T = np.arange(1, len(ids_T) + 1, dtype=np.int64)
    return int(ids_T.sum(dtype=np.int64)), int((ids_T * places_T).sum())


def fingerprint(
    prompt: Prompt,
    completion_token_ids: Sequence[int],
    logprobs: Sequence[float],
    weight_versions: Sequence[int],
    distribution: Distribution | None = None,
    allowed: Sequence[bytes] = (),
) -> tuple[int, int, int]:
    """Return the prompt's length, the sum of its ids, and a checksum of its images, at their
    positions, and of the sampled tokens, with the distribution and the sets of allowed ids that
    they were drawn from."""
    seen = (f"{each.image.hash}{each.start},{each.length};" for each in prompt.images)
    sampled = "".join(seen).encode()
    sampled += array("q", [*completion_token_ids, *weight_versions]).tobytes()
    sampled += array("d", [*logprobs, *(distribution or ())]).tobytes()
    crc = zlib.crc32(sampled)
    for each in allowed:
        crc = zlib.crc32(each, crc)
    return len(prompt), int(prompt.ids.sum(dtype=np.int64)), crc
