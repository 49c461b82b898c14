"""Problems, and the endless stream of them that training takes from.

The order depends on the seed and on the number of problems alone, so a stream that was restored
goes on exactly where the one before it stopped.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.errors import InputError

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Problem:
    """One row under a name that tells where it came from."""

    id: str
    row: Row


class ProblemStream:
    """All problems again and again, shuffled anew for each epoch.

    Args:
        problems: At least one; only an epoch's order is kept beside them.
        seed: With the epoch's number it decides the order.

    Raises:
        InputError: when there are no problems.
    """

    def __init__(self, problems: Sequence[Problem], seed: int) -> None:
        if not problems:
            raise InputError("there are no problems to train on")
        self._problems = problems
        self._seed = seed
        self._epoch = self._position = 0
        self._order = self._shuffled(0)

    @property
    def by_id(self) -> dict[str, Problem]:
        """All problems by their names."""
        return {problem.id: problem for problem in self._problems}

    def take(self, count: int) -> list[Problem]:
        """The next `count` problems, across as many epochs as that takes."""
        taken: list[Problem] = []
        while len(taken) < count:
            if self._position == len(self._order):
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._shuffled(self._epoch)
            end = self._position + count - len(taken)
            taken += [self._problems[index] for index in self._order[self._position : end]]
            self._position = min(end, len(self._order))
        return taken

    def state(self) -> dict[str, int]:
        """Where the stream is, as plain numbers for `restore`."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "problems": len(self._problems),
        }

    def restore(self, state: dict[str, int]) -> None:
        """Go on where the stream was whose `state` this is.

        Raises:
            InputError: when that one had another number of problems.
        """
        if state["problems"] != len(self._problems):
            raise InputError(
                f"the run stopped among {state['problems']} problems and now has "
                f"{len(self._problems)}; give it the same data to go on"
            )
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._shuffled(self._epoch)

    def _shuffled(self, epoch: int) -> list[int]:
        count = len(self._problems)
        return random.Random(f"{self._seed}-{epoch}").sample(range(count), count)
