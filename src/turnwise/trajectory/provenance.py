"""Provenance: which call of an engine a prompt continues, and which calls sampled a sequence.

The ids of all calls form a prefix tree, in which the first call that has an id owns it. A search
for a prompt reads only the ids that the prompt shares with the tree.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from turnwise.trajectory.prompt import Prompt, common_length

_Key = npt.NDArray[np.integer]
_Sampled = Sequence[int] | npt.NDArray[np.int32]
_Place = tuple[int | None, int]
"""A pair: a call (None for the root of the tree), and a position in that call's path, which is its
prompt followed by its sampled ids."""


class SampledPart(NamedTuple):
    """Ids of a sequence that a call sampled; its prompt was exactly the ids before them."""

    call: int
    """The call's number, in the order in which calls were added."""
    start: int
    """Position of the first id: the length of the call's prompt."""
    length: int
    """Number of ids; a call may have sampled more."""


def without_overlap(parts: Iterable[SampledPart]) -> list[SampledPart]:
    """Return parts of a sequence in their order, without overlaps. A part is cut where a later part
    that reaches further begins; a part that reaches no further than earlier parts is left out."""
    kept = list[SampledPart]()
    for part in parts:
        before = kept[-1] if kept else SampledPart(part.call, part.start, 0)
        if before.start + before.length < part.start + part.length:
            if before.start + before.length > part.start:
                kept[-1] = before._replace(length=part.start - before.start)
            kept.append(part)
    return kept


class Provenance:
    """An index of the calls of engines by their prompt and sampled ids.

    Args:
        images: Whether prompts with the same ids but different images differ; if False, only the
            ids count.

    Example:
        >>> calls = Provenance()
        >>> calls.add(Prompt([11, 12]), [7, 2]), calls.add(Prompt([11, 12, 7, 2, 13]), [8, 9])
        (0, 1)
        >>> calls.attribute(Prompt([11, 12, 7, 2, 13, 8]))
        [SampledPart(call=0, start=2, length=2), SampledPart(call=1, start=5, length=1)]
    """

    def __init__(self, *, images: bool = True) -> None:
        self._images = images
        self._keys: list[_Key] = []
        """The ids of each call from `_starts` on."""
        self._starts: list[int] = []
        self._prompts: list[int] = []
        """Length of each call's prompt."""
        self._sampled: list[_Sampled] = []
        self._begins: list[_Place] = []
        """The place where each call's path leaves earlier paths; the call owns the ids after that
        place."""
        self._next: dict[tuple[int | None, int, int], int] = {}
        """The call that leaves a path, by the place where it does, and by its next id."""
        self._ends: defaultdict[int | None, list[int]] = defaultdict(list)
        """By owner (a call), the calls whose prompts end with an id of that owner."""
        self._uses = Counter[int]()

    def __len__(self) -> int:
        return len(self._keys)

    def add(
        self, prompt: Prompt, sampled: _Sampled, parent: int | None = None, start: int = 0
    ) -> int:
        """Add a call, and return its number. If its prompt begins with the first `start` ids of the
        path of an earlier call, `parent`, then `prompt` has only the ids after these `start`
        ids."""
        number, key = len(self._keys), self._key(prompt + sampled)
        node, at = begin = self._walk(self._owner(parent, start), key, start)[-1]
        self._keys.append(key[at - start :].copy() if at > start else key)
        self._starts.append(at)
        self._prompts.append(start + len(prompt))
        self._sampled.append(sampled)
        self._begins.append(begin)
        if at < start + len(key):
            self._next[node, at, int(key[at - start])] = number
        self._ends[self._owner(number, self._prompts[number])[0]].append(number)
        return number

    def find(self, prompt: Prompt, after: int | None = None, shared: int = 0) -> _Place:
        """Return the first call that shares the longest prefix with a prompt, and the length of
        this prefix; None and 0 if no call shares an id. If it is known that the prompt shares
        `shared` ids with the call `after`, the search begins behind these ids."""
        return self._walk(self._owner(after, shared), self._key(prompt), 0)[-1]

    def attribute(
        self, ids: Prompt, among: Callable[[int], bool] = lambda call: True
    ) -> list[SampledPart]:
        """Return the parts of a sequence that calls sampled, in order and without overlaps. The
        prompt of a call must be exactly the ids before its part. If calls are equal, the least used
        one is named."""
        found = [part for part in self.matches(ids) if among(part.call)]
        found.sort(key=lambda part: (part.start, -part.length, self._uses[part.call], part.call))
        parts = without_overlap(found)
        self._uses.update(part.call for part in parts)
        return parts

    def matches(self, ids: Prompt) -> Iterator[SampledPart]:
        """For each call whose prompt begins a sequence, yield the part of it that the call
        sampled."""
        key = self._key(ids)
        for node, end in self._walk((None, 0), key, 0):
            for call in self._ends.get(node, ()):
                if (start := self._prompts[call]) <= end:
                    sampled = np.asarray(self._sampled[call], np.int64)
                    if count := common_length(sampled, key[start:]):
                        yield SampledPart(call, start, count)

    def after(self, place: _Place) -> int | None:
        """Return the next id on a call's path, at the place where a prompt left the path; None if
        all paths end there."""
        node, at = place
        if node is not None and at - self._starts[node] < len(self._keys[node]):
            return int(self._keys[node][at - self._starts[node]])
        return next((token for owner, where, token in self._next if (owner, where) == place), None)

    def _key(self, prompt: Prompt) -> _Key:
        return prompt.key if self._images else prompt.ids

    def _owner(self, call: int | None, position: int) -> _Place:
        """Return the owner of the id before a position on a call's path, and the position."""
        while call is not None and position <= self._begins[call][1]:
            call = self._begins[call][0]
        return call, position

    def _walk(self, place: _Place, key: _Key, start: int) -> list[_Place]:
        """Return the places where ids leave the paths of their owners; at the last place, they
        leave the tree. The first id is at position `start`; the ids before `place` are known to
        match."""
        node, at = place
        places = list[_Place]()
        while True:
            if node is not None:
                rest = self._keys[node][at - self._starts[node] :]
                at += common_length(key[at - start : at - start + len(rest)], rest)
            places.append((node, at))
            step = node, at, int(key[at - start]) if at < start + len(key) else -1
            if at == start + len(key) or step not in self._next:
                return places
            node = self._next[step]
