"""The ids that a grammar allowed at a sampled token, as bytes.

A set has one bit for each id of the vocabulary, with id 0 in the lowest bit of the first byte, and
is compressed by zlib; b"" is the set of all ids. Most tokens of a completion share a few sets.
"""

import base64
import zlib
from collections.abc import Sequence

from turnwise.core.json_types import JsonObject

_MAX_BYTES = 2**20
"""Maximum bytes of an uncompressed set (8 million ids): a small file must not fill the memory."""


def pack_allowed(bits: bytes) -> bytes:
    """Return a set of ids from its bits.

    Example:
        >>> pack_allowed(bytes([255, 255]))
        b''
    """
    return zlib.compress(bits, 1) if bits.strip(b"\xff") else b""


def allowed_bits(allowed: bytes) -> bytes:
    """Return the bits of a set that `pack_allowed` made; b"" if all ids are allowed."""
    return zlib.decompressobj().decompress(allowed, _MAX_BYTES)


def described_sets(allowed: Sequence[bytes]) -> JsonObject:
    """Return the sets of a completion as JSON: each different set once, and for each token the
    index of its set."""
    numbers: dict[bytes, int] = {}
    tokens = [numbers.setdefault(each, len(numbers)) for each in allowed]
    return {"sets": [base64.b64encode(each).decode() for each in numbers], "tokens": tokens}


def sets_of(described: JsonObject | None) -> tuple[bytes, ...]:
    """Return the sets that `described_sets` describes, one per token; no sets for None."""
    if described is None:
        return ()
    sets = [base64.b64decode(each) for each in described["sets"]]
    return tuple(sets[number] for number in described["tokens"])
