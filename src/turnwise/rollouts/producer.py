"""The producer: keeps as many groups in flight as can still be trained.

A group that begins when the trainer has finished t steps must be trained in step t + 1 +
max_staleness at the latest, which bounds the groups that have begun (`rollout.oversample` adds a
few spare ones). Every group is returned once: in a step's batch, which takes those that began
first, or among its `discarded`. With `data.curriculum`, outcomes are learned in the same order, so
that what begins next does not depend on which group ended first.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from turnwise.config import Config
from turnwise.core.aio import is_cancelled, task_group
from turnwise.core.json_types import JsonObject
from turnwise.errors import StepError
from turnwise.rollouts.group import ENOUGH, Group, Outcomes, check_failures, is_right
from turnwise.rollouts.problems import Pool, Problem, Stream

_MAX_ROUNDS = 10
"""Number of discarded groups, in multiples of a step's groups, after which a step fails."""

RunGroup = Callable[[Problem, str], Awaitable[Group]]


@dataclass(slots=True)
class Batch:
    groups: list[Group]
    discarded: list[tuple[str, Group]] = field(default_factory=list)
    """Groups that are not trained on, each with its reason: no_signal, failed, oversampled,
    prompt_too_long."""
    seconds: float = 0.0
    """Seconds from the first group's start, or from the previous batch, to the last group's end."""
    pools: dict[str, dict[str, int]] = field(default_factory=dict)
    """Number of problems in each pool of the curriculum, by environment; empty without one."""

    @property
    def ended(self) -> list[Group]:
        """All groups of which trajectories may have failed, discarded ones included."""
        return [*self.groups, *(group for _, group in self.discarded if not group.left_out)]

    @property
    def discarded_by_reason(self) -> dict[str, int]:
        return dict(sorted(Counter(reason for reason, _ in self.discarded).items()))


class _Ready(NamedTuple):
    problem: Problem
    group: Group
    began: float
    ended: float


class GroupProducer:
    """Begins groups and returns them in batches of a step; `has_signal` returns whether a group can
    train anything."""

    def __init__(
        self,
        config: Config,
        run_group: RunGroup,
        stream: Stream,
        has_signal: Callable[[Group], Awaitable[bool]],
        on_group: Callable[[], None] = lambda: None,
    ) -> None:
        self._config = config
        self._per_step = config.rollout.prompts_per_step
        self._spare = math.ceil(config.rollout.oversample * self._per_step)
        self._ahead = config.training.max_staleness
        self._row_seconds = config.rollout.environment_timeout
        self._run_group = run_group
        self._stream = stream
        self._has_signal = has_signal
        self._on_group = on_group
        self._number = 0
        self._counted = 0  # number of groups begun, not counting discarded ones
        self._trained = 0  # the last step that is finished
        self._allowed = self._bound(0)
        """Number of groups that may begin until the next step is trained."""
        self._resumed: list[tuple[int, Problem]] = []
        """Number and problem of groups that a resumed run begins first, because they were in
        flight."""
        self._started: dict[int, tuple[Problem, asyncio.Task[None]]] = {}
        self._ready: dict[int, _Ready] = {}
        self._taken: dict[int, _Ready] = {}  # those of the last batch
        self._discarded: list[tuple[str, Group]] = []
        self._recent: dict[str, Outcomes] = {}
        """Outcomes of each of several environments since they were judged last."""
        self._outcomes: dict[int, tuple[str, Pool]] = {}
        """Problem and outcome, by number, of groups that no batch has taken or discarded yet."""
        self._changed = asyncio.Condition()
        self._last_batch = 0.0

    async def run(self) -> None:
        """Keep groups in flight until cancelled; raises the first error that `run_group` raised."""
        async with task_group() as tasks:
            while True:
                async with self._changed:
                    if self._counted >= self._allowed:
                        self._changed.notify_all()  # see `all_begun`
                    await self._changed.wait_for(lambda: self._counted < self._allowed)
                if self._resumed:
                    number, problem = self._resumed.pop(0)
                else:
                    problem = await self._stream.take_one(self._row_seconds)
                    number, self._number = self._number, self._number + 1
                self._counted += 1
                task = tasks.create_task(self._one(number, problem, time.perf_counter()))
                self._started[number] = problem, task

    def _bound(self, trained: int) -> int:
        steps = min(trained + 1 + self._ahead, self._config.training.steps)
        return steps * self._per_step + self._spare

    async def _one(self, number: int, problem: Problem, began: float) -> None:
        try:
            group = await self._run_group(problem, f"group{number}")
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            # Something inside was cancelled, which a task group would treat as success.
            group = Group.of(problem)
            group.dropped["cancelled"] = count = self._config.sampling.n
            group.note("cancelled", "something in it was cancelled", count)
        reason, outcome = await self._judge(group)
        async with self._changed:
            del self._started[number]
            if outcome is not None:
                self._outcomes[number] = problem.id, outcome
            if not reason:
                self._ready[number] = _Ready(problem, group, began, time.perf_counter())
                self._on_group()
            else:
                self._counted -= 1
                self._discarded.append((reason, group))
                if group.left_out:
                    self._stream.leave_out(problem, group.causes[reason])
                else:
                    self._check_discarded()
            self._check_environment(group)
            self._changed.notify_all()

    async def _judge(self, group: Group) -> tuple[str, Pool | None]:
        """Return the reason why a group cannot be trained on, "" if it can, and its outcome."""
        if group.left_out:
            return group.left_out, None
        if group.judged < min(2, self._config.sampling.n):
            return "failed", None
        dynamic, curriculum = self._config.algorithm.dynamic_sampling, self._config.data.curriculum
        if not (dynamic or curriculum):
            return "", None
        outcome: Pool = "mixed"
        if not await self._has_signal(group):
            lowest = min((t.reward or 0.0 for t in group.trajectories), default=0.0)
            right = is_right(lowest, self._config.eval.success_reward)
            outcome = "mastered" if right else "hopeless"
        reason = "no_signal" if dynamic and outcome != "mixed" else ""
        return reason, outcome if curriculum else None

    def _check_environment(self, group: Group) -> None:
        """Judge the share of an environment's failures: those of one that always fails are in no
        batch, and those of a small one are few in each step."""
        if not (name := group.environment):
            return
        own = self._recent.setdefault(name, Outcomes())
        own.add(group)
        if own.total >= ENOUGH:
            who = f"rollouts of the environment {name}"
            self._recent.pop(name).check(self._config.rollout.max_failed_fraction, who)

    def _check_discarded(self) -> None:
        groups = [(why, group) for why, group in self._discarded if not group.left_out]
        if len(groups) >= self._per_step:
            known = [group for _, group in groups] + [r.group for r in self._ready.values()]
            check_failures(known, self._config.rollout.max_failed_fraction, "rollouts")
        if len(groups) >= _MAX_ROUNDS * self._per_step:
            counts = Counter(why for why, _ in groups)
            reasons = ", ".join(f"{n} {why}" for why, n in counts.items())
            raise StepError(
                f"{len(groups)} groups in a row could not be trained on ({reasons}): the problems "
                "are all too easy or too hard for this model (algorithm.dynamic_sampling=false "
                "trains on them all the same)"
            )

    async def next_batch(self) -> Batch:
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._ready) >= self._per_step)
            first = sorted(self._ready)[: self._per_step]
            self._taken = {number: self._ready.pop(number) for number in first}
            taken = [*self._taken.values()]
            began = max(min(ready.began for ready in taken), self._last_batch)
            self._last_batch = time.perf_counter()
            ended = max(ready.ended for ready in taken)
            if self._ahead == 0:  # the next step must not train on the spare groups of this one
                for problem, task in self._started.values():
                    task.cancel()
                    self._discarded.append(("oversampled", Group.of(problem)))
                self._discarded += [("oversampled", ready.group) for ready in self._ready.values()]
                self._counted -= len(self._started) + len(self._ready)
                for number in self._ready:  # which of them ended in time is chance
                    self._outcomes.pop(number, None)
                self._started.clear()
                self._ready.clear()
            for number in sorted(self._outcomes.keys() - self._ready.keys()):  # taken or discarded
                self._stream.learn(*self._outcomes.pop(number))
            discarded, self._discarded = self._discarded, []
            groups = [ready.group for ready in taken]
            return Batch(groups, discarded, ended - began, self._stream.pools())

    async def advance(self, step: int) -> None:
        """Allow the next groups to begin; the training loop calls it when a step is finished, and
        saved if a checkpoint is due."""
        async with self._changed:
            self._trained, self._allowed, self._taken = step, self._bound(step), {}
            self._changed.notify_all()

    def put_back(self, trained: int) -> None:
        """Once `run` has ended with an error, after step `trained`: let a resumed run begin those
        groups again that were taken for a step that is not trained, and those that wait in which
        trajectories failed: the error may be about these."""
        failed = {number: r for number, r in self._ready.items() if r.group.dropped}
        again = failed if trained > self._trained else failed | self._taken
        self._resumed += [(number, again[number].problem) for number in sorted(again)]
        for number in failed:
            del self._ready[number]

    async def all_begun(self) -> None:
        """Wait until all groups that may begin have begun."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._counted >= self._allowed)

    @property
    def in_flight(self) -> int:
        """The number of groups in flight; may be read from any thread."""
        return len(self._started)

    def waiting_for(self) -> list[str]:
        return [problem.id for problem, _ in self._started.values()]

    def state(self) -> JsonObject:
        """Return plain values for `restore`; groups in flight are kept as problems to begin."""
        return {
            "stream": self._stream.state(),
            "number": self._number,
            "under_way": [*self.waiting_for(), *(problem.id for _, problem in self._resumed)],
            "numbers": [*self._started, *(number for number, _ in self._resumed)],
            "ready": [
                {"number": number, "problem": ready.problem.id, "group": ready.group.to_dict()}
                for number, ready in sorted(self._ready.items())
            ],
            "outcomes": [[number, *known] for number, known in sorted(self._outcomes.items())],
        }

    def restore(self, state: JsonObject, trained: int) -> None:
        """Continue from `state` after step `trained`, with the same data."""
        self._stream.restore(state["stream"])
        self._number, self._trained = state["number"], trained
        self._allowed = self._bound(trained)
        named = [*state["under_way"], *(ready["problem"] for ready in state["ready"])]
        problems = {name: self._stream.find(name) for name in named}
        begun = state["under_way"]
        if (numbers := state.get("numbers")) is None:  # of an older version
            numbers = range(self._number, self._number + len(begun))
            self._number += len(begun)
        self._resumed = [(n, problems[name]) for n, name in zip(numbers, begun, strict=True)]
        now = time.perf_counter()
        for entry in state["ready"]:
            problem, group = problems[entry["problem"]], Group.from_dict(entry["group"])
            self._ready[entry["number"]] = _Ready(problem, group, now, now)
        self._outcomes = {number: (name, pool) for number, name, pool in state.get("outcomes", ())}
        self._counted = trained * self._per_step + len(self._ready)
