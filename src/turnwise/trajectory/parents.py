"""The search for the turn that a prompt goes on from, in a time that follows the prompt's length.

The paths of all turns are a tree of ids, in which the first turn that has an id owns it. A search
begins where the prompt leaves the last turn's path, and reads only ids that the prompt has too.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from turnwise.trajectory.images import as_seen

if TYPE_CHECKING:
    from turnwise.trajectory.trajectory import Turn

_Place = tuple[int | None, int]
"""A turn, or None for the beginning of all, and a position on its path."""


class Parents:
    """The tree of a list of turns that only grows, with their images or by ids alone."""

    def __init__(self, *, images: bool) -> None:
        self._images = images
        self._begins: list[_Place] = []
        """The place where each turn's path leaves those of earlier turns; it owns what follows."""
        self._next: dict[tuple[int | None, int, int], int] = {}
        """The turn that leaves a path at a position with an id."""

    def find(
        self, turns: Sequence["Turn"], prompt: Sequence[int], of_last: int
    ) -> tuple[int | None, int]:
        """Return the first turn that has the longest prefix in common with a prompt, and its
        length; None and 0 if none has any. `of_last` is that length for the last turn. If images
        count, the prompt is as `as_seen` makes it."""
        for index in range(len(self._begins), len(turns)):
            turn, own = turns[index], self._own_ids(turns[index])
            start = turn.prefix_length
            begin = self._followed(turns, self._owner(turn.parent, start), own, start)
            self._begins.append(begin)
            node, at = begin
            if at < start + len(own):
                self._next[node, at, own[at - start]] = index
        last = len(turns) - 1 if turns else None
        return self._followed(turns, self._owner(last, of_last), prompt, 0)

    def _owner(self, turn: int | None, position: int) -> _Place:
        """Return a position on a turn's path, with the owner of the id before it."""
        while turn is not None and position <= self._begins[turn][1]:
            turn = self._begins[turn][0]
        return turn, position

    def _followed(
        self, turns: Sequence["Turn"], place: _Place, ids: Sequence[int], start: int
    ) -> _Place:
        """Return the place where ids, the first of which is at position `start`, leave the tree;
        they have been followed up to `place`."""
        node, at = place
        while True:
            if node is not None:
                rest = self._own_ids(turns[node])[at - turns[node].prefix_length :]
                at += common_prefix(ids[at - start : at - start + len(rest)], rest)
            if at == start + len(ids) or (node, at, ids[at - start]) not in self._next:
                return node, at
            node = self._next[node, at, ids[at - start]]

    def _own_ids(self, turn: "Turn") -> list[int]:
        own = [*turn.added_token_ids, *turn.completion_token_ids]
        return as_seen(own, turn.images if self._images else (), turn.prefix_length)


def common_prefix(a: Sequence[object], b: Sequence[object]) -> int:
    """Return the length of the longest common prefix of two sequences of ids or characters."""
    length, step, limit = 0, 64, min(len(a), len(b))
    while length < limit:
        step = min(step, limit - length)
        if a[length : length + step] == b[length : length + step]:
            length, step = length + step, step * 2
        elif step == 1:
            break
        else:
            step //= 2
    return length
