"""Problems, and an endless stream of them for training.

The order depends only on the seed and the number of problems, so a restored stream continues
exactly where the earlier one stopped.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.errors import InputError

Row = dict[str, Any]
"""One row of the data: plain values by field."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One row of the data, with a unique name.

    Example:
        problem = Problem("train.jsonl:1", {"question": "2 + 2?", "answer": "4"})
    """

    id: str
    """File and number of the row: `train.jsonl:1`."""
    row: Row


class ProblemStream:
    """All problems in an endless sequence of epochs, each shuffled differently.

    Args:
        problems: At least one.
        seed: Together with the epoch's number it determines the order.

    Raises:
        InputError: when there are no problems.

    Example:
        >>> stream = ProblemStream([Problem("a", {}), Problem("b", {})], seed=0)
        >>> len(stream.take(3)), stream.state()["epoch"]
        (3, 1)
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
        """Return the next `count` problems, across epochs if necessary."""
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
        """Return the position as plain numbers for `restore`."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "problems": len(self._problems),
        }

    def restore(self, state: dict[str, int]) -> None:
        """Continue from the position that `state` returned.

        Raises:
            InputError: when that stream had a different number of problems.
        """
        if state["problems"] != len(self._problems):
            raise InputError(
                f"the run stopped with {state['problems']} problems and now has "
                f"{len(self._problems)}; give it the same data to resume"
            )
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._shuffled(self._epoch)

    def _shuffled(self, epoch: int) -> list[int]:
        count = len(self._problems)
        return random.Random(f"{self._seed}-{epoch}").sample(range(count), count)
