"""The producer: keeps as many groups in flight as can still be trained.

For each group there is a last step that may train it (`GroupProducer._last_step`). This bounds the
number of groups in flight; `rollout.oversample` adds a few spare groups. Every group is returned
once: either in a step's batch, which takes the ready groups that began first, or in the batch's
`discarded`.

When a batch is taken, remaining groups that are too old for the next step are discarded, but not
more than the number of spare groups. Their problems begin again before new problems. So a step need
not wait for its slowest groups, and every row is still trained. The curriculum learns outcomes in
the order in which the groups began, so the choice of the next problem does not depend on which
group ended first.
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
    """Groups that are not trained on, each with the reason: no_signal, failed, oversampled,
    prompt_too_long."""
    seconds: float = 0.0
    """Seconds from the first group's start, or from the previous batch if that was later, to the
    last group's end."""
    pools: dict[str, dict[str, int]] = field(default_factory=dict)
    """Number of problems in each pool of the curriculum, by environment; empty if there is no
    curriculum."""

    @property
    def ended(self) -> list[Group]:
        """All groups that count for the share of failed trajectories, including discarded ones."""
        return [*self.groups, *(group for _, group in self.discarded if not group.left_out)]

    @property
    def discarded_by_reason(self) -> dict[str, int]:
        return dict(sorted(Counter(reason for reason, _ in self.discarded).items()))


class _Started(NamedTuple):
    problem: Problem
    task: asyncio.Task[None]
    after: int
    """Number of finished steps when the group began."""


class _Ready(NamedTuple):
    problem: Problem
    group: Group
    began: float
    ended: float
    after: int


class GroupProducer:
    """Begins groups and returns them in batches, one batch for each step; `has_signal` returns
    whether a group gives the model anything to learn."""

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
        self._training = config.training
        self._row_seconds = config.rollout.environment_timeout
        self._run_group = run_group
        self._stream = stream
        self._has_signal = has_signal
        self._on_group = on_group
        self._number = 0
        self._finished = 0
        """Number of finished steps."""
        self._taken = 0
        """Number of steps whose batch was taken: the finished steps, and the step in training."""
        self._waiting: list[tuple[int, Problem]] = []
        """Number and problem of each group that begins before new groups: groups that were in
        flight at the checkpoint of a resumed run, groups to begin again, and a group for which
        there was no room after its row had been read."""
        self._started: dict[int, _Started] = {}
        self._ready: dict[int, _Ready] = {}
        self._batch: dict[int, _Ready] = {}  # groups taken for the step in training, by number
        self._discarded: list[tuple[str, Group]] = []
        self._recent: dict[str, Outcomes] = {}
        """Outcomes of each environment since its failures were last checked; empty in a run with
        one environment."""
        self._outcomes: dict[int, tuple[str, Pool]] = {}
        """Problem and outcome of each group whose outcome the stream has not learned yet, by the
        group's number."""
        self._changed = asyncio.Condition()
        self._last_batch = 0.0

    async def run(self) -> None:
        """Keep groups in flight until cancelled; raise the first error that `run_group` raises."""
        async with task_group() as tasks:
            while True:
                async with self._changed:
                    if not self._has_room():
                        self._changed.notify_all()  # see `all_begun`
                    await self._changed.wait_for(self._has_room)
                if not self._waiting:
                    self._enqueue(await self._stream.take_one(self._row_seconds))
                    continue  # reading the row took time: check the room again
                number, problem = self._waiting.pop(0)
                work = self._one(number, problem, time.perf_counter(), self._finished)
                task = tasks.create_task(work)
                self._started[number] = _Started(problem, task, self._finished)

    def _last_step(self, after: int) -> int:
        """Return the last step that may train a group which began after `after` finished steps."""
        return min(after + self._training.steps_of_group, self._training.steps)

    def _has_room(self) -> bool:
        """Return whether a new group may begin: whether the steps that could train it still need
        groups."""
        steps = self._last_step(self._finished) - self._taken
        limit = steps * self._per_step + self._spare if steps > 0 else 0
        return len(self._started) + len(self._ready) < limit

    def _enqueue(self, problem: Problem) -> None:
        """Append the group of a problem to the groups that wait to begin."""
        self._waiting.append((self._number, problem))
        self._number += 1

    async def _one(self, number: int, problem: Problem, began: float, after: int) -> None:
        try:
            group = await self._run_group(problem, f"group{number}")
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            # Something inside was cancelled, which a task group would treat as success.
            group = Group.of(problem)
            group.dropped["cancelled"] = count = self._config.sampling.n
            group.note("cancelled", "something in it was cancelled", count)
        reason, outcome = await self._outcome_of(group)
        async with self._changed:
            del self._started[number]
            if outcome is not None:
                self._outcomes[number] = problem.id, outcome
            if not reason:
                self._ready[number] = _Ready(problem, group, began, time.perf_counter(), after)
                self._on_group()
            else:
                self._discarded.append((reason, group))
                if group.left_out:
                    self._stream.leave_out(problem, group.causes[reason])
                else:
                    self._check_discarded()
            self._check_environment(group)
            self._changed.notify_all()

    async def _outcome_of(self, group: Group) -> tuple[str, Pool | None]:
        """Return the reason why a group cannot be trained on ("" if it can), and the outcome for
        the curriculum, if known."""
        if group.left_out:
            return group.left_out, None
        if group.not_failed < min(2, self._config.sampling.n):
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
        return reason, outcome

    def _check_environment(self, group: Group) -> None:
        """Check which fraction of an environment's trajectories failed. The check of a batch would
        miss an environment that always fails, because its groups are never in a batch, and an
        environment that has only a few trajectories in each step."""
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
            self._batch = {number: self._ready.pop(number) for number in first}
            taken = [*self._batch.values()]
            began = max(min(ready.began for ready in taken), self._last_batch)
            self._last_batch = time.perf_counter()
            ended = max(began, *(ready.ended for ready in taken))
            self._taken += 1
            self._discard_old()
            for number in sorted(self._outcomes.keys() - self._ready.keys()):  # no longer ready
                name, outcome = self._outcomes.pop(number)
                replaced = outcome != "mixed" and self._config.algorithm.dynamic_sampling
                self._stream.learn(name, outcome, replaced=replaced)
            discarded, self._discarded = self._discarded, []
            groups = [ready.group for ready in taken]
            return Batch(groups, discarded, ended - began, self._stream.pools())

    def _discard_old(self) -> None:
        """Discard groups that are too old for the next step, but not more than the number of spare
        groups, and let their problems begin again."""
        begun = {number: started.after for number, started in self._started.items()}
        begun |= {number: ready.after for number, ready in self._ready.items()}
        old = [n for n, after in sorted(begun.items()) if self._last_step(after) <= self._taken]
        for number in old[: self._spare]:
            if (started := self._started.pop(number, None)) is not None:
                started.task.cancel()
                problem, group = started.problem, Group.of(started.problem)
            else:
                problem, group, *_ = self._ready.pop(number)
                self._outcomes.pop(number, None)  # do not learn it: it depends on timing
            self._discarded.append(("oversampled", group))
            self._enqueue(problem)
        self._changed.notify_all()

    async def advance(self, step: int) -> None:
        """Allow the next groups to begin. The training loop calls this when a step is finished and,
        if a checkpoint is due, saved."""
        async with self._changed:
            self._finished, self._batch = step, {}
            self._changed.notify_all()

    def put_back(self, trained: int) -> None:
        """Let a resumed run begin some groups again; call this when `run` has ended with an error
        and `trained` is the last trained step. These are the groups taken for a step that was not
        trained, and the ready groups with failed trajectories, which may have caused the error."""
        failed = {number: r for number, r in self._ready.items() if r.group.dropped}
        again = failed if trained > self._finished else failed | self._batch
        self._waiting += [(number, again[number].problem) for number in sorted(again)]
        for number in failed:
            del self._ready[number]

    async def all_begun(self) -> None:
        """Wait until all groups that may begin have begun."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._has_room())

    @property
    def in_flight(self) -> int:
        """The number of groups in flight; this may be read from any thread."""
        return len(self._started)

    def waiting_for(self) -> list[str]:
        return [started.problem.id for started in self._started.values()]

    def state(self) -> JsonObject:
        """Return plain values for `restore`. Of a group in flight they hold only the problem, which
        then begins again."""
        return {
            "stream": self._stream.state(),
            "number": self._number,
            "under_way": [*self.waiting_for(), *(problem.id for _, problem in self._waiting)],
            "numbers": [*self._started, *(number for number, _ in self._waiting)],
            "ready": [
                {"number": number, "problem": ready.problem.id, "after": ready.after}
                | {"group": ready.group.to_dict()}
                for number, ready in sorted(self._ready.items())
            ],
            "outcomes": [[number, *known] for number, known in sorted(self._outcomes.items())],
        }

    def restore(self, state: JsonObject, trained: int) -> None:
        """Continue from `state` after step `trained`, with the same data."""
        self._stream.restore(state["stream"])
        self._number = state["number"]
        self._finished = self._taken = trained
        named = [*state["under_way"], *(ready["problem"] for ready in state["ready"])]
        problems = {name: self._stream.find(name) for name in named}
        begun = state["under_way"]
        if (numbers := state.get("numbers")) is None:  # a checkpoint of an older version
            numbers = range(self._number, self._number + len(begun))
            self._number += len(begun)
        self._waiting = [(n, problems[name]) for n, name in zip(numbers, begun, strict=True)]
        now = time.perf_counter()
        for entry in state["ready"]:
            problem, group = problems[entry["problem"]], Group.from_dict(entry["group"])
            after = entry.get("after", trained)
            self._ready[entry["number"]] = _Ready(problem, group, now, now, after)
        self._outcomes = {number: (name, pool) for number, name, pool in state.get("outcomes", ())}
