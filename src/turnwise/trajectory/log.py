"""A file of trajectories that grows group by group, and is read back one trajectory at a time."""

from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import overload

import numpy as np

from turnwise.errors import translate_unwritable
from turnwise.trajectory.trajectory import Trajectory


class TrajectoryLog(Sequence[Trajectory]):
    """The trajectories of a JSON Lines file, in the order of their places; 16 bytes of memory each.

    The file has them in the order in which they were appended. An existing file is replaced by
    the first append.

    Example:
        >>> log = TrajectoryLog(Path("eval.jsonl"))
        >>> log.append(1, [Trajectory("rows:2")])
        >>> log.append(0, [Trajectory("rows:1")])
        >>> [trajectory.problem_id for trajectory in log]
        ['rows:1', 'rows:2']
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begun = False
        self._starts, self._places = array("Q"), array("Q")
        self._sorted = np.zeros(0, dtype=np.int64)

    def append(self, place: int, trajectories: Sequence[Trajectory]) -> None:
        """Append the trajectories of one problem.

        Args:
            place: The problem's position among all.

        Raises:
            TurnwiseError: when they cannot be written.
        """
        lines = [f"{trajectory.to_json()}\n".encode() for trajectory in trajectories]
        with translate_unwritable(self.path):
            if not self._begun:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab" if self._begun else "wb") as file:
                start = file.tell()
                file.write(b"".join(lines))
        self._begun = True
        for line in lines:
            self._starts.append(start)
            self._places.append(place)
            start += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> Trajectory: ...
    @overload
    def __getitem__(self, index: slice) -> list[Trajectory]: ...
    def __getitem__(self, index: int | slice) -> Trajectory | list[Trajectory]:
        if isinstance(index, slice):
            return list(self._read(self._order[index]))
        (trajectory,) = self._read(self._order[[index]])
        return trajectory

    def __iter__(self) -> Iterator[Trajectory]:
        return self._read(self._order)

    @property
    def _order(self) -> "np.ndarray":
        """Positions of the trajectories in the file, in the order of their places."""
        if len(self._sorted) < len(self):
            self._sorted = np.argsort(np.array(self._places), kind="stable")
        return self._sorted

    def _read(self, numbers: "np.ndarray") -> Iterator[Trajectory]:
        if not len(numbers):
            return
        with self.path.open("rb") as file:
            for number in numbers:
                file.seek(self._starts[number])
                yield Trajectory.from_json(file.readline().decode())
