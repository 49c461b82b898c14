"""The producer: keeps as many groups under way as could still be trained, and no more.

With k = max_staleness, a group that begins while the trainer has done t steps is meant for step
t + 1 + k at the latest. So the groups that have begun, without those that were thrown away, are at
most (t + 1 + k) * prompts_per_step, and a few spare ones where `rollout.oversample` asks for them;
none is begun for steps after the last.
With k = 0 a step's groups begin when the step before is done: that is synchronous training.

Every group that is begun comes out once: in a step's batch, or among its `discarded` with the
reason. A step takes the groups that have waited longest; one straggler holds up nobody but itself
where others may run ahead of it.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from turnwise.config import Config
from turnwise.errors import InputError, StepError
from turnwise.rollout.group import Group, check_failures
from turnwise.rollout.problems import Problem, ProblemStream
from turnwise.tasks import is_cancelled, task_group

_MAX_ROUNDS = 10
"""Steps' worth of groups that may be thrown away before a step is given up."""

RunGroup = Callable[[Problem, str], Awaitable[Group]]


@dataclass(slots=True)
class Batch:
    """The groups of one training step."""

    groups: list[Group]
    discarded: list[tuple[str, Group]] = field(default_factory=list)
    """Groups that are not trained on, and why: no_signal, failed, oversampled."""
    seconds: float = 0.0
    """From the first one's begin, or the batch before, to the last one's end."""

    @property
    def discarded_by_reason(self) -> dict[str, int]:
        return dict(sorted(Counter(reason for reason, _ in self.discarded).items()))


@dataclass(slots=True)
class _Started:
    problem: Problem
    task: "asyncio.Task[None]"


@dataclass(slots=True)
class _Ready:
    number: int
    problem: Problem
    group: Group
    began: float
    ended: float


class GroupProducer:
    """Begins groups and hands them out, a step's worth at a time; see the module's docstring.

    Args:
        run_group: Makes the group of a problem under a tag of its own.
        stream: Where problems come from.
        has_signal: Whether a group can train anything; asked where
            `algorithm.dynamic_sampling` is set.
        on_group: Told of each group that is done.
    """

    def __init__(
        self,
        config: Config,
        run_group: RunGroup,
        stream: ProblemStream,
        has_signal: Callable[[Group], bool],
        on_group: Callable[[], None] = lambda: None,
    ) -> None:
        self._config = config
        self._per_step = config.rollout.prompts_per_step
        self._spare = math.ceil(config.rollout.oversample * self._per_step)
        self._ahead = config.training.max_staleness
        self._run_group = run_group
        self._stream = stream
        self._has_signal = has_signal
        self._on_group = on_group
        self._trained = 0
        self._number = 0
        self._counted = 0
        """Groups begun, without those that were thrown away."""
        self._again: list[Problem] = []
        """Problems that a resumed run begins first: they were under way."""
        self._started: dict[int, _Started] = {}
        self._ready: dict[int, _Ready] = {}
        self._discarded: list[tuple[str, Group]] = []
        self._changed = asyncio.Condition()
        self._last_batch = 0.0

    async def run(self) -> None:
        """Keep groups under way until cancelled; raises what one of them raised."""
        async with task_group() as tasks:
            while True:
                async with self._changed:
                    while self._counted >= self._bound:
                        await self._changed.wait()
                    self._begin(tasks)

    @property
    def _bound(self) -> int:
        steps = min(self._trained + 1 + self._ahead, self._config.training.steps)
        return steps * self._per_step + self._spare

    def _begin(self, tasks: asyncio.TaskGroup) -> None:
        problem = self._again.pop(0) if self._again else self._stream.take(1)[0]
        number = self._number
        self._number += 1
        self._counted += 1
        began = time.perf_counter()
        task = tasks.create_task(self._one(number, problem, began))
        self._started[number] = _Started(problem, task)

    async def _one(self, number: int, problem: Problem, began: float) -> None:
        try:
            group = await self._run_group(problem, f"group{number}")
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            # Something in it was cancelled; a task group would take that for a success.
            group = Group(problem.id, causes={"cancelled": "something in it was cancelled"})
            group.dropped["cancelled"] = self._config.sampling.n
        async with self._changed:
            del self._started[number]
            if reason := self._unfit(group):
                self._discard(reason, group)
            else:
                now = time.perf_counter()
                self._ready[number] = _Ready(number, problem, group, began, now)
                self._on_group()
            self._changed.notify_all()

    def _unfit(self, group: Group) -> str:
        if len(group.trajectories) < min(2, self._config.sampling.n):
            return "failed"
        if self._config.algorithm.dynamic_sampling and not self._has_signal(group):
            return "no_signal"
        return ""

    def _discard(self, reason: str, group: Group) -> None:
        self._counted -= 1
        self._discarded.append((reason, group))
        groups = [group for _, group in self._discarded]
        if len(groups) >= self._per_step:
            ready = [ready.group for ready in self._ready.values()]
            check_failures([*groups, *ready], self._config.rollout.max_failed_fraction, "rollouts")
        if len(groups) >= _MAX_ROUNDS * self._per_step:
            count = Counter(reason for reason, _ in self._discarded)
            told = ", ".join(f"{n} {why}" for why, n in count.items())
            raise StepError(
                f"{len(groups)} groups in a row could not be trained on ({told}): the problems "
                "are all too easy or too hard for this model (algorithm.dynamic_sampling=false "
                "trains on what there is)"
            )

    async def next_batch(self) -> Batch:
        """A step's groups, as soon as there are as many as it takes."""
        async with self._changed:
            while len(self._ready) < self._per_step:
                await self._changed.wait()
            taken = [self._ready.pop(number) for number in sorted(self._ready)[: self._per_step]]
            began = max(min(ready.began for ready in taken), self._last_batch)
            self._last_batch = time.perf_counter()
            ended = max(ready.ended for ready in taken)
            if self._ahead == 0:
                self._end_spare()
            batch = Batch([ready.group for ready in taken], self._discarded, ended - began)
            self._discarded = []
            return batch

    def _end_spare(self) -> None:
        """Groups beyond a synchronous step: the next step must not train on them."""
        for started in self._started.values():
            started.task.cancel()
            self._discarded.append(("oversampled", Group(started.problem.id)))
        self._discarded += [("oversampled", ready.group) for ready in self._ready.values()]
        self._counted -= len(self._started) + len(self._ready)
        self._started.clear()
        self._ready.clear()

    async def advance(self, step: int) -> None:
        """The trainer has done a step, and its weights are on their way: more may begin."""
        async with self._changed:
            self._trained = step
            self._changed.notify_all()

    def waiting_for(self) -> list[str]:
        """The problems under way, the oldest first."""
        return [started.problem.id for started in self._started.values()]

    def state(self) -> dict[str, Any]:
        """All that `restore` needs; groups under way begin again from their problems."""
        return {
            "stream": self._stream.state(),
            "number": self._number,
            "under_way": [*self.waiting_for(), *(problem.id for problem in self._again)],
            "ready": [_to_dict(ready) for _, ready in sorted(self._ready.items())],
        }

    def restore(self, state: dict[str, Any], trained: int) -> None:
        """Go on from `state` after step `trained`.

        Raises:
            InputError: when the data no longer holds a problem of the state.
        """
        problems = self._stream.by_id
        self._stream.restore(state["stream"])
        self._number = state["number"]
        self._trained = trained
        missing = [name for name in state["under_way"] if name not in problems]
        missing += [r["problem"] for r in state["ready"] if r["problem"] not in problems]
        if missing:
            raise InputError(
                f"the data no longer has {missing[0]}, which the checkpoint was working on"
            )
        self._again = [problems[name] for name in state["under_way"]]
        now = time.perf_counter()
        for entry in state["ready"]:
            group = Group.from_dict(entry["group"])
            number = entry["number"]
            self._ready[number] = _Ready(number, problems[entry["problem"]], group, now, now)
        self._counted = trained * self._per_step + len(self._ready)


def _to_dict(ready: _Ready) -> dict[str, Any]:
    return {
        "number": ready.number,
        "problem": ready.problem.id,
        "group": ready.group.to_dict(),
    }
