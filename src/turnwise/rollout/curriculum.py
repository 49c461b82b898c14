"""The curriculum: rows whose groups give no signal rest, and come back later and less often.

A group whose trajectories are all right, or all wrong, trains nothing, and a row that gave one will
probably give another. After the k-th such group in a row, it comes back after 2^k epochs, at most
`data.max_rest`; a group with a signal brings it back to every epoch. No row is given up: a model
that learns meets again what it could not do, and proves again what it could.
"""

from collections import Counter
from collections.abc import Set
from typing import Literal, NamedTuple

from turnwise.core.json_types import JsonObject

Pool = Literal["mixed", "mastered", "hopeless"]
"""The last group of a row: with a signal; without one, and right; without one, and wrong."""


class _Known(NamedTuple):
    pool: Pool
    equal: int
    """Number of groups without signal in a row."""
    due: int
    """The first epoch in which the row does not rest."""


class Curriculum:
    """Remembers the last groups of rows, and when each row comes back.

    Args:
        max_rest: The largest number of epochs after which a row comes back (`data.max_rest`).
    """

    def __init__(self, max_rest: int) -> None:
        self._max_rest = max_rest
        self._rows: dict[int, _Known] = {}

    def learn(self, index: int, pool: Pool, epoch: int) -> None:
        """Note a group of the row with this index, and the epoch in which it is known."""
        before = self._rows.get(index)
        equal = 0 if pool == "mixed" else 1 if before is None else before.equal + 1
        rest = min(2**equal, self._max_rest) if equal else 0
        self._rows[index] = _Known(pool, equal, epoch + rest)

    def rests(self, index: int, epoch: int) -> bool:
        """Return whether a row is left out of an epoch."""
        known = self._rows.get(index)
        return known is not None and epoch < known.due

    def pools(self, rows: int, left_out: Set[int], epoch: int) -> dict[str, int]:
        """Return the number of rows by their last group, and of those that rest.

        Args:
            rows: Number of all rows.
            left_out: Those that are never used, which are not counted.
        """
        known = [row for index, row in self._rows.items() if index not in left_out]
        counts = Counter(row.pool for row in known)
        return {
            "fresh": rows - len(left_out) - len(known),
            "mixed": counts["mixed"],
            "mastered": counts["mastered"],
            "hopeless": counts["hopeless"],
            "resting": sum(epoch < row.due for row in known),
        }

    def state(self) -> JsonObject:
        """Return plain values for `restore`."""
        return {str(index): list(known) for index, known in self._rows.items()}

    def restore(self, state: JsonObject) -> None:
        """Continue from the values that `state` returned."""
        self._rows = {int(index): _Known(*known) for index, known in state.items()}
