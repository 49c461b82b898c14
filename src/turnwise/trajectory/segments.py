"""Encoding of texts whose parts repeat: a chat template's fixed parts are encoded once.

A tokenizer divides a text at its special tokens before anything else, and encodes what lies between
two of them by itself. So the ids of a rendered conversation are those of its segments, each of
which begins with a special token:

    <|im_start|>system\\nYou can call ...<|im_end|>\\n     the same in every prompt
    <|im_start|>user\\nWhat is 12 * 7?<|im_end|>\\n        new
    <|im_start|>assistant\\n                              the same in every prompt
"""

import itertools
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Protocol

_CACHED_CHARACTERS = 2**22
"""Characters of all cached segments; their ids take at most 4 bytes each."""
_CACHED_SEGMENTS = 2**16
"""Maximum number of cached segments; each takes some 300 bytes besides its text and ids."""


class AddedToken(Protocol):
    """The settings of a token that a tokenizer finds before it splits a text into words."""

    content: str
    lstrip: bool
    single_word: bool
    normalized: bool


class SegmentEncoder:
    """Encodes texts by segments, and keeps the ids of those that were used last.

    Threads may share an encoder.

    Args:
        encode: Returns the ids of a text.
        starts: Pattern of the special tokens at which segments begin (`segment_starts`).
        cached_characters: Characters of all cached segments together.

    Example:
        >>> encode = SegmentEncoder(encode, segment_starts(backend.get_added_tokens_decoder()))
        >>> ids = encode("<|im_start|>user\\n2 + 2?<|im_end|>\\n<|im_start|>assistant\\n")
    """

    def __init__(
        self,
        encode: Callable[[str], list[int]],
        starts: re.Pattern[str],
        cached_characters: int = _CACHED_CHARACTERS,
    ) -> None:
        self.encoded = 0
        """Number of segments that were not cached."""
        self._encode = encode
        self._starts = starts
        self._room = cached_characters
        self._cached: OrderedDict[str, array[int]] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, text: str) -> list[int]:
        """Return the ids of a text: those that `encode` returns for it."""
        edges = [found.start() for found in self._starts.finditer(text)]
        if not edges:
            return self._encode(text)
        edges = [*([0] if edges[0] else []), *edges, len(text)]
        ids: list[int] = []
        for start, end in itertools.pairwise(edges):
            ids.extend(self._segment(text[start:end]))
        return ids

    def _segment(self, text: str) -> "array[int]":
        with self._lock:
            cached = self._cached.get(text)
            if cached is not None:
                self._cached.move_to_end(text)
                return cached
        ids = array("I", self._encode(text))
        with self._lock:
            self.encoded += 1
            if text not in self._cached:
                self._cached[text] = ids
                self._room -= len(text)
                while self._room < 0 or len(self._cached) > _CACHED_SEGMENTS:
                    oldest, _ = self._cached.popitem(last=False)
                    self._room += len(oldest)
        return ids


def segment_starts(added: Mapping[int, AddedToken]) -> re.Pattern[str] | None:
    """Return a pattern of the special tokens at which a text may be divided; None if there is none.

    Args:
        added: A tokenizer's added tokens by id. One that takes the spaces before it, that may
            begin inside another, or with which another one begins that is no such token, is no
            such token. Tokens that depend on the characters around them (`single_word`) forbid
            any division.
    """
    if any(token.single_word for token in added.values()):
        return None
    raw = [token for token in added.values() if not token.normalized and token.content]
    starts: list[str] = []
    for token in sorted(raw, key=lambda token: len(token.content), reverse=True):
        # Where a longer token begins with this one, the text may hold the longer one.
        longer = [other.content for other in raw if len(other.content) > len(token.content)]
        if (
            not token.lstrip
            and not any(_begins_inside(token.content, other.content) for other in raw)
            and all(text in starts for text in longer if text.startswith(token.content))
        ):
            starts.append(token.content)
    return re.compile("|".join(map(re.escape, starts))) if starts else None


def _begins_inside(token: str, other: str) -> bool:
    """Return whether a token may begin in a text within the occurrence of another."""
    return any(
        other[index:].startswith(token[: len(other) - index]) for index in range(1, len(other))
    )
