"""Files of trajectories, one a line: whole ones, and logs that grow group by group."""

import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import overload

from turnwise.errors import translate_unwritable
from turnwise.trajectory.trajectory import Trajectory


def write_jsonl(path: Path, trajectories: Iterable[Trajectory]) -> None:
    """Write one trajectory a line; the file appears whole or not at all.

    Raises:
        TurnwiseError: when it cannot be written.
    """
    temporary = path.with_suffix(".tmp")
    with translate_unwritable(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w", encoding="utf-8") as file:
            for trajectory in trajectories:
                file.write(trajectory.to_json() + "\n")
        temporary.replace(path)


def read_jsonl(path: Path) -> Iterator[Trajectory]:
    """Yield the trajectories of a file; a last line that was never completed is left out.

    Example:
        for trajectory in read_jsonl(Path("runs/demo/trajectories/step-0001.jsonl")):
            print(trajectory.problem_id, trajectory.reward)
    """
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                trajectory = Trajectory.from_json(line)
            except json.JSONDecodeError:
                if line.endswith("\n") or not line.startswith("{"):
                    raise
                return  # the program ended while it wrote the line, as in an evaluation
            yield trajectory


class TrajectoryLog(Sequence[Trajectory]):
    """The trajectories of a JSON Lines file, in the order of their places; 24 bytes of memory each.

    The file has them in the order in which they were appended. An existing file is replaced by
    the first append.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begun = False
        self._starts, self._places, self._sorted = array("Q"), array("Q"), array("Q")

    def append(self, place: int, trajectories: Sequence[Trajectory]) -> None:
        """Append the trajectories of one problem, whose position among all is `place`.

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
        (trajectory,) = self._read([self._order[index]])
        return trajectory

    def __iter__(self) -> Iterator[Trajectory]:
        return self._read(self._order)

    @property
    def _order(self) -> "array[int]":
        """Positions of the trajectories in the file, in the order of their places."""
        if len(self._sorted) < len(self):
            self._sorted = array("Q", sorted(range(len(self)), key=self._places.__getitem__))
        return self._sorted

    def _read(self, numbers: Sequence[int]) -> Iterator[Trajectory]:
        if not len(numbers):
            return
        with self.path.open("rb") as file:
            for number in numbers:
                file.seek(self._starts[number])
                yield Trajectory.from_json(file.readline().decode())
