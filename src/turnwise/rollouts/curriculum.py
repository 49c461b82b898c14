"""The curriculum: rows whose groups give no signal rest, and come back less and less often.

A group whose trajectories are all right, or all wrong, trains nothing, and a row that gave one will
probably give another. After k such groups in a row, it takes part in one of 2^k epochs, at least in
one of `data.max_rest`; a group with a signal brings it back to every epoch. No row is given up: a
model that learns meets again what it could not do, and proves again what it could. Rows come back
in different epochs, so that no step has many of them.
"""

from collections import Counter
from collections.abc import Set
from typing import Literal, NamedTuple

from turnwise.core.json_types import JsonObject

Pool = Literal["mixed", "mastered", "hopeless"]
"""The last group of a row: with a signal; without one, and right; without one, and wrong."""

_SPREAD = 0x9E3779B1
"""Odd factor that spreads neighbouring numbers over 32 bits (Knuth's multiplicative hash)."""


class _Known(NamedTuple):
    pool: Pool
    equal: int
    """Number of groups without signal in a row."""


class Curriculum:
    """Remembers the last groups of rows, and when each row rests.

    Args:
        max_rest: The largest number of epochs after which a row comes back (`data.max_rest`).
    """

    def __init__(self, max_rest: int) -> None:
        self._max_rest = max_rest
        self._rows: dict[int, _Known] = {}

    def learn(self, index: int, pool: Pool) -> None:
        """Note the outcome of a group of the row with this index."""
        before = self._rows.get(index)
        equal = 0 if pool == "mixed" else 1 if before is None else before.equal + 1
        self._rows[index] = _Known(pool, equal)

    def rests(self, index: int, epoch: int) -> bool:
        """Return whether a row is left out of an epoch."""
        known = self._rows.get(index)
        if known is None or not known.equal:
            return False
        turn = (index * _SPREAD % 2**32) >> 16
        every: int = min(2**known.equal, self._max_rest)
        return (epoch + turn) % every != 0

    def pools(self, rows: int, left_out: Set[int], epoch: int) -> dict[str, int]:
        """Return the number of rows by their last group, and of those that rest in an epoch.

        Args:
            rows: Number of all rows.
            left_out: Those that are never used, which are not counted.
        """
        known = {index: row.pool for index, row in self._rows.items() if index not in left_out}
        counts = Counter(known.values())
        return {
            "fresh": rows - len(left_out) - len(known),
            "mixed": counts["mixed"],
            "mastered": counts["mastered"],
            "hopeless": counts["hopeless"],
            "resting": sum(self.rests(index, epoch) for index in known),
        }

    def state(self) -> JsonObject:
        """Return plain values for `restore`."""
        return {str(index): list(known) for index, known in self._rows.items()}

    def restore(self, state: JsonObject) -> None:
        """Continue from the values that `state` returned."""
        self._rows = {int(index): _Known(*known) for index, known in state.items()}
