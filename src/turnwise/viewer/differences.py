"""The differences between two lists of token ids, in time that grows with their length.

Stretches of ids that occur once in each list are matched first, in the longest common order; what
lies between two matches is compared id by id if it is short, and differs as a whole if it is long.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from typing import NamedTuple

from turnwise.trajectory.trajectory import common_prefix

_STRETCH = 4
"""Ids of a stretch."""
_MOST_COMPARED = 250_000
"""Largest product of two lengths that are compared id by id."""


class Difference(NamedTuple):
    """A place in which two lists differ: a range of each, of which one may be empty."""

    start: int
    end: int
    other_start: int
    other_end: int


def differences(ids: Sequence[int], other: Sequence[int]) -> list[Difference]:
    """Return the places in which two lists of ids differ, in their order.

    Example:
        >>> [tuple(place) for place in differences([1, 2, 3, 4], [1, 9, 3, 4, 5])]
        [(1, 2, 1, 2), (4, 4, 4, 5)]
    """
    found, at, other_at = list[Difference](), 0, 0
    for start, other_start, length in _matches(ids, other):
        if start > at or other_start > other_at:
            found.append(Difference(at, start, other_at, other_start))
        at, other_at = start + length, other_start + length
    return found


def _matches(ids: Sequence[int], other: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield equal stretches as (start, start in the other, length); the last is at both ends."""
    first = common_prefix(ids, other)
    rest, other_rest = ids[first:], other[first:]
    last = common_prefix(rest[::-1], other_rest[::-1])
    end, other_end = len(ids) - last, len(other) - last
    yield 0, 0, first
    at, other_at = first, first
    for anchor, other_anchor in _anchors(ids[first:end], other[first:other_end]):
        anchor, other_anchor = anchor + first, other_anchor + first
        if anchor < at or other_anchor < other_at:
            continue  # inside the match before
        yield from _between(ids, other, (at, anchor), (other_at, other_anchor))
        length = common_prefix(ids[anchor:end], other[other_anchor:other_end])
        yield anchor, other_anchor, length
        at, other_at = anchor + length, other_anchor + length
    yield from _between(ids, other, (at, end), (other_at, other_end))
    yield end, other_end, last


def _between(
    ids: Sequence[int], other: Sequence[int], place: tuple[int, int], other_place: tuple[int, int]
) -> Iterator[tuple[int, int, int]]:
    """Yield the matches of two short ranges; of long ones, none."""
    own, theirs = ids[slice(*place)], other[slice(*other_place)]
    if 0 < len(own) * len(theirs) <= _MOST_COMPARED:
        for block in SequenceMatcher(None, own, theirs, autojunk=False).get_matching_blocks():
            if block.size:
                yield place[0] + block.a, other_place[0] + block.b, block.size


def _anchors(ids: Sequence[int], other: Sequence[int]) -> list[tuple[int, int]]:
    """Return the starts of stretches that occur once in each list, in the longest common order."""
    places, others = _once(ids), _once(other)
    pairs = [(at, others[stretch]) for stretch, at in places.items() if stretch in others]
    tops: list[int] = []
    """The smallest last place of a common order of each length, as an index of `pairs`."""
    before: list[int] = []
    ends: list[int] = []
    for number, (_, place) in enumerate(pairs):
        length = bisect_left(ends, place)
        before.append(tops[length - 1] if length else -1)
        ends[length : length + 1] = [place]
        tops[length : length + 1] = [number]
    order, number = list[tuple[int, int]](), tops[-1] if tops else -1
    while number >= 0:
        order.append(pairs[number])
        number = before[number]
    return order[::-1]


def _once(ids: Sequence[int]) -> dict[tuple[int, ...], int]:
    """Return the places of the stretches that occur once, in their order."""
    places: dict[tuple[int, ...], int] = {}
    several = set()
    for at in range(len(ids) - _STRETCH + 1):
        stretch = tuple(ids[at : at + _STRETCH])
        if places.setdefault(stretch, at) != at:
            several.add(stretch)
    return {stretch: at for stretch, at in places.items() if stretch not in several}
