"""Checksums of an engine's calls, with which a trajectory's ids and samples are compared later."""

import zlib
from array import array
from collections.abc import Sequence

import numpy as np

from turnwise.trajectory.distribution import Distribution
from turnwise.trajectory.prompt import Ids, Prompt


def checksums(ids_T: Ids) -> tuple[int, int]:
    """Return the sum of the ids, and the sum of ids times positions (from 1). Together they locate
    and restore one changed id."""
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
    """Return the prompt's length, the sum of its ids, and a checksum of all else: the prompt's
    images with their positions, and the sampled tokens with their log-probs, weight versions,
    distribution and sets of allowed ids."""
    seen = (f"{each.image.hash}{each.start},{each.length};" for each in prompt.images)
    sampled = "".join(seen).encode()
    sampled += array("q", [*completion_token_ids, *weight_versions]).tobytes()
    sampled += array("d", [*logprobs, *(distribution or ())]).tobytes()
    crc = zlib.crc32(sampled)
    for each in allowed:
        crc = zlib.crc32(each, crc)
    return len(prompt), int(prompt.ids.sum(dtype=np.int64)), crc
