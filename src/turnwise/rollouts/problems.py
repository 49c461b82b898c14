"""Problems, and the endless order in which they are trained on.

The order depends only on the seed, the number of problems and, with a curriculum, the outcomes of
groups. So a restored stream continues exactly where the earlier stream stopped.
"""

import logging
import random
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Literal, TypeVar, get_args, overload

import numpy as np
import numpy.typing as npt

from turnwise.config.data import DataConfig
from turnwise.core.json_types import JsonObject
from turnwise.core.user_code import call_user_code
from turnwise.errors import InputError
from turnwise.rollouts.row_marks import changed, marks_of

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
Row = JsonObject  # one row of the data: plain values by field
Pool = Literal["mixed", "mastered", "hopeless"]
"""Outcome of a problem's last group: a "mixed" group has a signal; a "mastered" group has no signal
because all its trajectories are right, and a "hopeless" group because all are wrong."""
_MAX_SILENT = 32
"""After this number of consecutive groups without signal from one environment, groups of any
environment may replace its next groups without signal."""
_SPREAD = 0x9E3779B1
"""Odd factor that spreads consecutive numbers over 32 bits (Knuth's multiplicative hash)."""


class Lazy(Sequence[_T]):
    """Items that are made on each access."""

    def __init__(self, count: int, make: Callable[[int], _T]) -> None:
        self._count = count
        self._make = make

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> _T: ...
    @overload
    def __getitem__(self, index: slice) -> list[_T]: ...
    def __getitem__(self, index: int | slice) -> _T | list[_T]:
        if isinstance(index, slice):
            return [self._make(i) for i in range(self._count)[index]]
        return self._make(range(self._count)[index])


class Joined(Lazy[_T]):
    """The items of several sequences, one after another."""

    def __init__(self, parts: Sequence[Sequence[_T]]) -> None:
        self._ends = ends = list(accumulate(map(len, parts)))

        def item(number: int) -> _T:
            part = bisect_right(ends, number)
            return parts[part][number - (ends[part - 1] if part else 0)]

        super().__init__(ends[-1] if ends else 0, item)


@dataclass(frozen=True, slots=True)
class Problem:
    id: str
    """File and number of the row: `train.jsonl:1`, or `NAME/train.jsonl:1` if the run has several
    environments."""
    row: Row
    environment: str = ""
    """Name of the problem's environment in `environments`; "" if the run has one environment."""


class Problems(Lazy[Problem]):
    """A problem for each row. Its name consists of environment, held-out set, last part of the
    data's path, and row number.

    Args:
        change: Function that is applied to a row on each access.
        marked: Whether to read some rows and keep their digests (marks), which
            `ProblemStream.restore` compares.
    """

    def __init__(
        self,
        path: str,
        rows: Sequence[Row],
        environment: str = "",
        heldout_set: str = "",
        *,
        change: Callable[[Row], Row] | None = None,
        marked: bool = False,
    ) -> None:
        read = rows.__getitem__ if change is None else lambda index: change(rows[index])
        super().__init__(len(rows), lambda i: Problem(self.name(i), read(i), environment))
        self._name = "/".join(filter(None, (environment, heldout_set, Path(path).name)))
        self.in_memory = isinstance(rows, list) and change is None  # reading them runs no code
        self.marks = marks_of(rows) if marked else {}

    def name(self, index: int) -> str:
        """Return the id of a problem without reading its row."""
        return f"{self._name}:{index + 1}"


class JoinedProblems(Joined[Problem]):
    """The problems of several named parts (environments or held-out sets), one after another."""

    def __init__(self, parts: Mapping[str, Problems]) -> None:
        super().__init__(list(parts.values()))
        self.parts = parts
        self.in_memory = all(part.in_memory for part in parts.values())

    def name_of_part(self, index: int) -> str:
        """Return the name of the part that a problem is in."""
        return [*self.parts][bisect_right(self._ends, index)]


def first_of_each(problems: Sequence[Problem]) -> list[Problem]:
    parts = problems.parts.values() if isinstance(problems, JoinedProblems) else [problems]
    return [part[0] for part in parts]


async def problem_at(problems: Sequence[Problem], index: int, seconds: float) -> Problem:
    """Return a problem. Reading its row may run user code, for at most `seconds`."""
    if getattr(problems, "in_memory", isinstance(problems, list)):
        return problems[index]
    name, key = f"row {index + 1} of the data", "rollout.environment_timeout"
    problem: Problem = await call_user_code(
        problems.__getitem__, index, name=name, seconds=seconds, key=key
    )
    return problem


class ProblemStream:
    """All problems in an endless sequence of epochs. Each epoch is shuffled differently or, without
    `shuffle`, in the order of the data. Problems that are left out, cannot be read, or rest are
    skipped.

    With a curriculum (`max_rest`), a problem rests after k consecutive groups without signal (all
    right, or all wrong): it takes part in one of 2^k epochs, and at least in one of `max_rest`
    epochs. Resting problems come back in different epochs, so that no step has many of them.

    Example:
        >>> stream = ProblemStream([Problem("a", {}), Problem("b", {})], seed=0)
        >>> len(stream.take(3)), stream.state()["epoch"]
        (3, 1)
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        seed: int,
        max_rest: int | None = None,
        *,
        shuffle: bool = True,
    ) -> None:
        if not problems:
            raise InputError("there are no problems to train on")
        self._problems = problems
        self._seed = seed
        self._shuffle = shuffle
        self._max_rest = max_rest
        count = 0 if max_rest is None else len(problems)
        self._pools = np.zeros(count, dtype=np.uint8)
        """Outcome of each problem's last group: 1 + index in `Pool`; 0 before the first group."""
        self._equal = np.zeros(count, dtype=np.int64)
        """For each problem, the number of groups without signal since a group with one."""
        self._epoch = self._position = 0
        self._order = self._ordered(0)
        self._left_out: set[int] = set()
        if isinstance(problems, list):
            self._marks = marks_of(Lazy(len(problems), lambda index: problems[index].row))
        else:
            self._marks = problems.marks if isinstance(problems, Problems) else {}

    def find(self, name: str) -> Problem:
        """Return the problem with a name; raise InputError if the data no longer has it."""
        return self._problems[self._index(name)]

    def _index(self, name: str) -> int:
        problems, number = self._problems, name.rpartition(":")[2]
        if number.isdecimal() and 0 < int(number) <= len(problems):  # as `Problems.name` makes it
            index = int(number) - 1
            known = problems.name(index) if isinstance(problems, Problems) else problems[index].id
            if name == known:
                return index
        if not isinstance(problems, Problems):
            for index, problem in enumerate(problems):
                if problem.id == name:
                    return index
        raise InputError(f"the data no longer has {name}, which was in progress at the checkpoint")

    def take(self, count: int) -> list[Problem]:
        """Return the next `count` problems, across epochs if necessary."""
        taken: list[Problem] = []
        while len(taken) < count:
            with self._taking() as index:
                taken.append(self._problems[index])
        return taken

    async def take_one(self, seconds: float) -> Problem:
        """Return the next problem, read as by `problem_at`; a cancelled call does not take a
        problem."""
        while True:
            with self._taking() as index:
                return await problem_at(self._problems, index, seconds)

    @contextmanager
    def _taking(self) -> Iterator[int]:
        """Yield the next index that is not skipped. If the row cannot be read in the `with` block,
        leave the problem out."""
        while True:
            if self._position == len(self._order):
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._ordered(self._epoch)
            index = self._order[self._position]
            if index not in self._left_out and not self.rests(index, self._epoch):
                break
            self._position += 1
        try:
            yield index
        except InputError as error:
            logger.warning("a row is left out: %s", error)
            self._leave_out(index, str(error))
        self._position += 1

    def rests(self, index: int, epoch: int) -> bool:
        """Return whether the curriculum leaves a problem out of an epoch."""
        return self._max_rest is not None and bool(self._resting([index], epoch)[0])

    def _resting(
        self, indices: Sequence[int] | npt.NDArray[np.int64], epoch: int
    ) -> npt.NDArray[np.bool_]:
        turns = (np.array(indices, dtype=np.uint64) * _SPREAD % 2**32) >> 16
        every = np.minimum(1 << np.minimum(self._equal[indices], 62), self._max_rest or 1)
        resting: npt.NDArray[np.bool_] = (turns.astype(np.int64) + epoch) % every != 0
        return resting

    def leave_out(self, problem: Problem, reason: str) -> None:
        """Skip a problem from now on; raise InputError with the reason if no problem is left."""
        self._leave_out(self._index(problem.id), reason)

    def _leave_out(self, index: int, reason: str) -> None:
        self._left_out.add(index)
        if len(self._left_out) == len(self._problems):
            raise InputError(f"no row of the data can be used; the last one: {reason}")

    def learn(self, name: str, pool: Pool, *, replaced: bool = False) -> None:
        """Record the outcome of a group of the problem `name`, for the curriculum.

        Args:
            replaced: Whether the group is not trained, and a different group takes its place.
        """
        if self._max_rest is not None:
            index = self._index(name)
            self._pools[index] = 1 + get_args(Pool).index(pool)
            self._equal[index] = 0 if pool == "mixed" else self._equal[index] + 1

    def pools(self) -> dict[str, dict[str, int]]:
        """Return, under the key "", the number of problems by the outcome of their last group
        ("fresh" before the first group), and the number of resting problems. Problems that are
        left out do not count. Without a curriculum, return an empty dictionary."""
        if self._max_rest is None:
            return {}
        names, left_out = ("fresh", *get_args(Pool)), sorted(self._left_out)
        counts = np.bincount(np.delete(self._pools, left_out), minlength=len(names)).tolist()
        rests_P = self._resting(np.arange(len(self._equal)), self._epoch)
        resting = int(np.delete(rests_P, left_out).sum())
        return {"": dict(zip(names, counts, strict=True)) | {"resting": resting}}

    def state(self) -> JsonObject:
        state: JsonObject = {
            "epoch": self._epoch,
            "position": self._position,
            "problems": len(self._problems),
            "left_out": sorted(self._left_out),
            "marks": self._marks,
        }
        if self._max_rest is not None:
            known = np.flatnonzero(self._pools).tolist()
            state["curriculum"] = {
                str(i): [get_args(Pool)[self._pools[i] - 1], int(self._equal[i])] for i in known
            }
        return state

    def restore(self, state: JsonObject) -> None:
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
        self._check_marks(state.get("marks", {}))  # older checkpoints lack marks
        self._epoch, self._position = state["epoch"], state["position"]
        self._left_out = set(state.get("left_out", ()))
        if self._max_rest is not None:
            self._pools[:] = self._equal[:] = 0
            for index, (pool, equal) in state.get("curriculum", {}).items():
                self._pools[int(index)] = 1 + get_args(Pool).index(pool)
                self._equal[int(index)] = equal
        self._order = self._ordered(self._epoch)

    def _check_marks(self, before: Mapping[str, str]) -> None:
        """Raise InputError if most marks (row digests) differ from those of a saved state; warn if
        a few differ, because these rows were edited."""
        others, compared = changed(before, self._marks)
        if not others:
            return
        what = f"{len(others)} of {compared} rows that were compared, such as row {others[0]:,},"
        if 2 * len(others) > compared:
            moved = sorted(before.values()) == sorted(self._marks.values())
            how = "are in another order" if moved else "are others now"
            raise InputError(
                f"the run stopped with other data, of as many rows: {what} {how}; "
                "give it the same data to resume, or train a new run from its checkpoint"
            )
        logger.warning("%s were edited since the run stopped", what)

    def _ordered(self, epoch: int) -> Sequence[int]:
        count = len(self._problems)
        if not self._shuffle:
            return range(count)
        return array("Q", random.Random(f"{self._seed}-{epoch}").sample(range(count), count))


class MixedStream:
    """The streams of several environments, with the methods of `ProblemStream`.

    The next problem comes from the environment that is furthest below its share (its part of the
    weights) so far. So each environment has its share of any consecutive groups, to within a group
    or two. Groups that are replaced because they have no signal do not count, so the shares hold
    for the groups that are trained. After `_MAX_SILENT` replaced groups in a row, an environment's
    next replaced groups do count, because otherwise a step might never become full.
    """

    def __init__(self, streams: Mapping[str, ProblemStream], weights: Mapping[str, float]) -> None:
        self._streams = streams
        total = sum(weights[name] for name in streams)
        self._shares = {name: weights[name] / total for name in streams}
        self._lacking = dict.fromkeys(streams, 0.0)
        """For each environment, the number of groups of its share minus the number of groups that
        it has received."""
        self._silent = dict.fromkeys(streams, 0)
        """For each environment, the number of replaced groups since its last trained group."""

    def find(self, name: str) -> Problem:
        return self._stream_of(name).find(name)

    async def take_one(self, seconds: float) -> Problem:
        chosen = self._lacks_most()
        problem = await self._streams[chosen].take_one(seconds)
        self._count(chosen, 1.0)
        return problem

    def take(self, count: int) -> list[Problem]:
        """Return the next `count` problems."""
        taken: list[Problem] = []
        for _ in range(count):
            chosen = self._lacks_most()
            taken += self._streams[chosen].take(1)
            self._count(chosen, 1.0)
        return taken

    def _lacks_most(self) -> str:
        return max(self._shares, key=lambda name: self._lacking[name] + self._shares[name])

    def _count(self, environment: str, groups: float) -> None:
        for name, share in self._shares.items():
            self._lacking[name] += groups * share
        self._lacking[environment] -= groups

    def leave_out(self, problem: Problem, reason: str) -> None:
        self._stream_of(problem.id).leave_out(problem, reason)

    def learn(self, name: str, pool: Pool, *, replaced: bool = False) -> None:
        self._stream_of(name).learn(name, pool, replaced=replaced)
        environment = name.partition("/")[0]
        self._silent[environment] = self._silent[environment] + 1 if replaced else 0
        if 0 < self._silent[environment] <= _MAX_SILENT:
            self._count(environment, -1.0)

    def pools(self) -> dict[str, dict[str, int]]:
        each = {name: stream.pools() for name, stream in self._streams.items()}
        return {name: pools[""] for name, pools in each.items() if pools}

    def _stream_of(self, problem: str) -> ProblemStream:
        stream = self._streams.get(problem.partition("/")[0])
        if stream is None:
            raise InputError(f"no environment has {problem}, which was in progress")
        return stream

    def state(self) -> JsonObject:
        return {
            "environments": {
                name: {
                    "lacking": self._lacking[name],
                    "silent": self._silent[name],
                    "stream": stream.state(),
                }
                for name, stream in self._streams.items()
            }
        }

    def restore(self, state: JsonObject) -> None:
        saved = state.get("environments", {})
        if saved.keys() != self._streams.keys():
            before = f"the environments {', '.join(saved)}" if saved else "a single environment"
            raise InputError(
                f"the run stopped with {before} and now has {', '.join(self._streams)}: give "
                "environments the same names to resume"
            )
        for name, stream in self._streams.items():
            try:
                stream.restore(saved[name]["stream"])
            except InputError as error:
                raise InputError(f"environments.{name}: {error}") from error
            self._lacking[name] = saved[name]["lacking"]
            self._silent[name] = saved[name].get("silent", 0)


Stream = ProblemStream | MixedStream


def make_stream(
    problems: Sequence[Problem], data: DataConfig, seed: int, weights: Mapping[str, float]
) -> Stream:
    """Return the order of a run's rows; `weights` holds the weight of each environment by name, if
    there are several."""
    max_rest = data.max_rest if data.curriculum else None
    make = partial(ProblemStream, seed=seed, max_rest=max_rest, shuffle=data.shuffle)
    if not isinstance(problems, JoinedProblems):
        return make(problems)
    parts = {name: make(part) for name, part in problems.parts.items()}
    return MixedStream(parts, weights)
