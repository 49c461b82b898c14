"""Problems, and an endless stream of them for training.

The order depends only on the seed and the number of problems, and with a curriculum on the groups
that were reported, so a restored stream continues exactly where the earlier one stopped.
"""

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from turnwise.core.json_types import JsonObject
from turnwise.core.user_code import call_user_code
from turnwise.errors import InputError
from turnwise.rollouts.curriculum import Curriculum, Pool

logger = logging.getLogger(__name__)

Row = dict[str, Any]
"""One row of the data: plain values by field."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One row of the data, with a unique name.

    Example:
        problem = Problem("train.jsonl:1", {"question": "2 + 2?", "answer": "4"})
    """

    id: str
    """File and number of the row: `train.jsonl:1`, or with several environments
    `NAME/train.jsonl:1`."""
    row: Row
    environment: str = ""
    """Name of its environment in `environments`; "" if the run has one environment."""


class Problems(Sequence[Problem]):
    """A problem for each row, named by the last part of the data's path and the row's number.

    Args:
        environment: Name in `environments`, which the names then begin with.
    """

    def __init__(self, path: str, rows: Sequence[Row], environment: str = "") -> None:
        self._name = f"{environment}/{Path(path).name}" if environment else Path(path).name
        self._rows = rows
        self._environment = environment

    @property
    def in_memory(self) -> bool:
        """Whether the rows are in a list, so that reading one runs no other code."""
        return isinstance(self._rows, list)

    def name(self, index: int) -> str:
        """Return the id of a problem without reading its row."""
        return f"{self._name}:{index + 1}"

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Problem: ...
    @overload
    def __getitem__(self, index: slice) -> list[Problem]: ...
    def __getitem__(self, index: int | slice) -> Problem | list[Problem]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        number = range(len(self))[index]
        return Problem(self.name(number), self._rows[number], self._environment)


async def read_problem(problems: Sequence[Problem], index: int, seconds: float) -> Problem:
    """Return a problem, outside the event loop unless its row is in a list.

    Reading a row may take time, and it may be user code.

    Args:
        seconds: Deadline, `rollout.environment_timeout`.

    Raises:
        InputError: when the row cannot be read.
        DeadlineError: naming the row's number.
    """
    if getattr(problems, "in_memory", isinstance(problems, list)):
        return problems[index]
    name, key = f"row {index + 1} of the data", "rollout.environment_timeout"
    problem: Problem = await call_user_code(
        problems.__getitem__, index, name=name, seconds=seconds, key=key
    )
    return problem


class ProblemStream:
    """All problems in an endless sequence of epochs, each shuffled differently.

    Problems that are left out, rows that cannot be read, and those that rest are skipped.

    Args:
        problems: At least one; each is asked for when it is taken.
        seed: Together with the epoch's number it determines the order.
        curriculum: Decides which problems rest; None lets none.

    Raises:
        InputError: when there are no problems.

    Example:
        >>> stream = ProblemStream([Problem("a", {}), Problem("b", {})], seed=0)
        >>> len(stream.take(3)), stream.state()["epoch"]
        (3, 1)
    """

    def __init__(
        self, problems: Sequence[Problem], seed: int, curriculum: Curriculum | None = None
    ) -> None:
        if not problems:
            raise InputError("there are no problems to train on")
        self._problems = problems
        self._seed = seed
        self._curriculum = curriculum
        self._epoch = self._position = 0
        self._order = self._shuffled(0)
        self._left_out: set[int] = set()

    def find(self, name: str) -> Problem:
        """Return the problem with a name.

        Raises:
            InputError: when the data does not have it.
        """
        return self._problems[self._index(name)]

    def _index(self, name: str) -> int:
        problems, number = self._problems, name.rpartition(":")[2]
        if number.isdecimal() and 0 < int(number) <= len(problems):  # as `Problems` names
            index = int(number) - 1
            if name == (
                problems.name(index) if isinstance(problems, Problems) else problems[index].id
            ):
                return index
        if not isinstance(problems, Problems):
            for index, problem in enumerate(problems):
                if problem.id == name:
                    return index
        raise InputError(f"the data no longer has {name}, which was in progress at the checkpoint")

    def take(self, count: int) -> list[Problem]:
        """Return the next `count` problems, across epochs if necessary.

        Raises:
            InputError: when every problem is left out.
        """
        taken: list[Problem] = []
        while len(taken) < count:
            index = self._next()
            try:
                taken.append(self._problems[index])
            except InputError as error:
                self._unreadable(index, error)
            self._position += 1
        return taken

    async def take_one(self, seconds: float) -> Problem:
        """Return the next problem, whose row is read outside the event loop.

        Cancelling this takes none.

        Args:
            seconds: Deadline for a row, `rollout.environment_timeout`.

        Raises:
            InputError: when every problem is left out.
            DeadlineError: naming the row that takes too long.
        """
        while True:
            index = self._next()
            try:
                problem = await read_problem(self._problems, index, seconds)
            except InputError as error:
                self._unreadable(index, error)
            else:
                self._position += 1
                return problem
            self._position += 1

    def _next(self) -> int:
        """Return the index of the next problem that is not skipped, without taking it."""
        curriculum = self._curriculum
        while True:
            if self._position == len(self._order):
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._shuffled(self._epoch)
            index = self._order[self._position]
            rests = curriculum is not None and curriculum.rests(index, self._epoch)
            if index not in self._left_out and not rests:
                return index
            self._position += 1

    def _unreadable(self, index: int, error: InputError) -> None:
        logger.warning("a row is left out: %s", error)
        self._leave_out(index, str(error))

    def leave_out(self, problem: Problem, reason: str) -> None:
        """Skip a problem from now on.

        Raises:
            InputError: with the reason, when none is left.
        """
        self._leave_out(self._index(problem.id), reason)

    def _leave_out(self, index: int, reason: str) -> None:
        self._left_out.add(index)
        if len(self._left_out) == len(self._problems):
            raise InputError(f"no row of the data can be used; the last one: {reason}")

    def learn(self, name: str, pool: Pool) -> None:
        """Note the outcome of a group of the problem with a name, for the curriculum.

        Raises:
            InputError: when the data does not have it.
        """
        if self._curriculum is not None:
            self._curriculum.learn(self._index(name), pool)

    def pools(self) -> dict[str, dict[str, int]]:
        """Return the number of problems in each pool of the curriculum, under the name "" of the
        run's only environment; nothing without a curriculum."""
        if self._curriculum is None:
            return {}
        return {"": self._curriculum.pools(len(self._problems), self._left_out, self._epoch)}

    def state(self) -> JsonObject:
        """Return the position as plain values for `restore`."""
        known = {} if self._curriculum is None else {"curriculum": self._curriculum.state()}
        return {
            "epoch": self._epoch,
            "position": self._position,
            "problems": len(self._problems),
            "left_out": sorted(self._left_out),
            **known,
        }

    def restore(self, state: JsonObject) -> None:
        """Continue from the position that `state` returned.

        Raises:
            InputError: when that stream had a different number of problems, or several
                environments.
        """
        if "environments" in state:
            raise InputError(
                f"the run stopped with the environments {', '.join(state['environments'])}: give "
                "it the same environments to resume"
            )
        if state["problems"] != len(self._problems):
            raise InputError(
                f"the run stopped with {state['problems']} problems and now has "
                f"{len(self._problems)}; give it the same data to resume"
            )
        self._epoch, self._position = state["epoch"], state["position"]
        self._left_out = set(state.get("left_out", ()))
        if self._curriculum is not None:
            self._curriculum.restore(state.get("curriculum", {}))
        self._order = self._shuffled(self._epoch)

    def _shuffled(self, epoch: int) -> list[int]:
        count = len(self._problems)
        return random.Random(f"{self._seed}-{epoch}").sample(range(count), count)
