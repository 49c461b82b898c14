"""Several environments in one run: their problems, and the order in which their groups begin."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import overload

from turnwise.config import Config
from turnwise.core.json_types import JsonObject
from turnwise.errors import InputError
from turnwise.rollouts.curriculum import Curriculum, Pool
from turnwise.rollouts.problems import Problem, Problems, ProblemStream


class JoinedProblems(Sequence[Problem]):
    """The problems of several environments, one environment after another.

    Args:
        parts: Problems by the environment's name, which each problem's id begins with.
    """

    def __init__(self, parts: Mapping[str, Problems]) -> None:
        self.parts = parts
        self._each = list(parts.values())
        self._ends = list(accumulate(map(len, self._each)))

    @property
    def in_memory(self) -> bool:
        """Whether all rows are in lists, so that reading one runs no other code."""
        return all(part.in_memory for part in self._each)

    def __len__(self) -> int:
        return self._ends[-1]

    @overload
    def __getitem__(self, index: int) -> Problem: ...
    @overload
    def __getitem__(self, index: slice) -> list[Problem]: ...
    def __getitem__(self, index: int | slice) -> Problem | list[Problem]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        number = range(len(self))[index]
        part = bisect_right(self._ends, number)
        return self._each[part][number - (self._ends[part - 1] if part else 0)]


class MixedStream:
    """The streams of several environments, of which each gets its share of the groups.

    The next problem is one of the environment that lacks most of its share so far, so that any
    number of groups that begin one after another has each share to within a group or two. The
    order within each environment is its stream's own.

    Args:
        streams: Streams by the environments' names.
        weights: Shares by the same names, relative to each other.
    """

    def __init__(self, streams: Mapping[str, ProblemStream], weights: Mapping[str, float]) -> None:
        self._streams = streams
        total = sum(weights[name] for name in streams)
        self._shares = {name: weights[name] / total for name in streams}
        self._lacking = dict.fromkeys(streams, 0.0)
        """The groups that each environment should have had, less those that it had."""

    def find(self, name: str) -> Problem:
        """Return the problem with a name.

        Raises:
            InputError: when the data does not have it.
        """
        return self._stream_of(name).find(name)

    async def take_one(self, seconds: float) -> Problem:
        """Return the next problem, as `ProblemStream.take_one` does."""
        chosen = max(self._shares, key=lambda name: self._lacking[name] + self._shares[name])
        problem = await self._streams[chosen].take_one(seconds)
        for name, share in self._shares.items():
            self._lacking[name] += share
        self._lacking[chosen] -= 1.0
        return problem

    def leave_out(self, problem: Problem, reason: str) -> None:
        """Skip a problem from now on.

        Raises:
            InputError: with the reason, when its environment has no other.
        """
        self._stream_of(problem.id).leave_out(problem, reason)

    def learn(self, name: str, pool: Pool) -> None:
        """Note the outcome of a group of the problem with a name."""
        self._stream_of(name).learn(name, pool)

    def pools(self) -> dict[str, dict[str, int]]:
        """Return the pools of each environment by its name; none without a curriculum."""
        return {
            name: pools
            for name, stream in self._streams.items()
            for pools in stream.pools().values()
        }

    def _stream_of(self, problem: str) -> ProblemStream:
        stream = self._streams.get(problem.partition("/")[0])
        if stream is None:
            raise InputError(f"no environment has {problem}, which was in progress")
        return stream

    def state(self) -> JsonObject:
        """Return the positions as plain values for `restore`."""
        return {
            "environments": {
                name: {"lacking": self._lacking[name], "stream": stream.state()}
                for name, stream in self._streams.items()
            }
        }

    def restore(self, state: JsonObject) -> None:
        """Continue from the positions that `state` returned.

        Raises:
            InputError: when these were other environments, or one had another number of problems.
        """
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


Stream = ProblemStream | MixedStream
"""An endless order of problems for training."""


def make_stream(config: Config, problems: Sequence[Problem]) -> Stream:
    """Return the order in which problems are trained on: by the seed, weights and curriculum."""

    def one(problems: Sequence[Problem]) -> ProblemStream:
        curriculum = Curriculum(config.data.max_rest) if config.data.curriculum else None
        return ProblemStream(problems, config.seed, curriculum)

    if not isinstance(problems, JoinedProblems):
        return one(problems)
    weights = {name: entry.weight for name, entry in config.environments.items()}
    return MixedStream({name: one(part) for name, part in problems.parts.items()}, weights)


def first_of_each(problems: Sequence[Problem]) -> list[Problem]:
    """Return the first problem of each environment."""
    parts = problems.parts.values() if isinstance(problems, JoinedProblems) else [problems]
    return [part[0] for part in parts]
