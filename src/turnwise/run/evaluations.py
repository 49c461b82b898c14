"""Evaluations on held-out problems: between two training steps, or beside training.

An evaluation measures one weight version. An evaluation beside training runs during the next step,
on the engines of the rollouts. It ends before the engines get new weights, because the loop calls
`finish` before each update. Trajectories sampled from a different weight version, for example by a
restarted engine, are dropped and counted. No evaluation is lost, because the run waits for the
evaluation of the last step, and a resumed run repeats an evaluation that was cut short. The
repeated evaluation measures the weights of the checkpoint, even if they are of a later step, and
adds its results to the line of the checkpoint's step.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from turnwise.config import Config
from turnwise.core.admission import Priority
from turnwise.core.aio import run_in_thread
from turnwise.core.watchdog import waiting
from turnwise.observe.metrics import StepMetrics
from turnwise.rollouts import Group, Problem
from turnwise.rollouts.evaluation import Evaluation, evaluate, groups_at_once
from turnwise.rollouts.producer import RunGroup
from turnwise.run.display import Display
from turnwise.run.run_dir import RunDir
from turnwise.run.runtime import Runtime

_LEAVE_SECONDS = 5.0  # time to cut an evaluation short; its environments may close later


class Evaluations:
    """The evaluations of a run. With `eval.background`, the training loop waits only for the
    evaluations before the first step, after the last step, and after an evaluation beside training
    that reaches `eval.target`. Evaluations beside training begin once `ready` returns."""

    def __init__(
        self,
        config: Config,
        runtime: Runtime,
        problems: Sequence[Problem],
        folder: RunDir,
        progress: Display,
        ready: Callable[[], Awaitable[None]],
    ) -> None:
        self.heldout: dict[str, float] | None = None
        """Accuracy after the current step; None if the loop did not wait for an evaluation."""
        self._config = config
        self._run = runtime.group_runner(config.eval.sampling)
        self._run_beside = runtime.group_runner(config.eval.sampling, Priority.EVALUATION)
        self._problems = problems
        self._folder = folder
        self._progress = progress
        self._ready = ready
        self._known: dict[str, float] | None = None
        """Accuracy of the last evaluation beside training, until the loop waits for an
        evaluation."""
        self._running: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        """Whether an evaluation runs beside training."""
        return self._running is not None and not self._running.done()

    def _is_due(self, step: int) -> bool:
        every, last = self._config.eval.every, self._config.training.steps
        return bool(self._problems and every) and (step % every == 0 or step == last)

    async def between(self, step: int) -> Evaluation | None:
        """Evaluate the weights after a step if the loop waits for it; otherwise return None."""
        self.heldout = None
        last, background = self._config.training.steps, self._config.eval.background
        awaited = self._is_due(step) and (step in (0, last) or not background)
        if not awaited and not self._config.eval.reached(self._known):
            return None
        self._progress.phase("evaluate", len(self._problems))
        evaluation = await self._evaluate(step, self._run, lambda _: self._progress.advance())
        self._known, self.heldout = None, evaluation.summary
        return evaluation

    def due_beside(self, step: int) -> bool:
        """Return whether to `begin` an evaluation of a finished step beside training."""
        return self._config.eval.background and self._is_due(step) and self.heldout is None

    def cut_short(self, step: int) -> bool:
        """Return whether the run ended before its last evaluation was complete. A run that is
        resumed after `step` then has to `begin` an evaluation of `step`."""
        rows = self._folder.metrics.rows
        measured = {row["step"]: row["heldout"] for row in rows if row.get("heldout")}
        if self._config.eval.background:
            self._known = measured.get(step)
        due = [row["step"] for row in rows if self._is_due(row["step"])]
        return max(due, default=-1) > max(measured, default=-1)

    def begin(self, tasks: asyncio.TaskGroup, step: int, version: int) -> None:
        """Begin to evaluate a step's weights, which have this version, beside training. The results
        are added to the step's line, which has been written already. An error ends all `tasks`."""

        async def run_group(problem: Problem, tag: str) -> Group:
            group = await self._run_beside(problem, tag)
            group.pin(version)
            return group

        async def run() -> None:
            await self._ready()
            evaluation = await self._evaluate(step, run_group)
            self._known = evaluation.summary
            (row,) = (row for row in self._folder.metrics.rows if row["step"] == step)
            metrics = StepMetrics.from_json(row)
            metrics.add_evaluation(evaluation)
            await run_in_thread(self._folder.metrics.amend, metrics.to_json())
            self._progress.evaluated(metrics)
            await run_in_thread(self._folder.draw)

        assert not self.running
        self._running = tasks.create_task(run(), name=f"the evaluation of step {step}")

    async def finish(self, asked: asyncio.Event) -> None:
        """Wait for the evaluation beside training, if there is one; cut it short once the run is
        `asked` to end."""
        if (running := self._running) is None:
            return
        ending = asyncio.ensure_future(asked.wait())
        try:
            with waiting(running.get_name()):
                await asyncio.wait((running, ending), return_when=asyncio.FIRST_COMPLETED)
                running.cancel()  # no effect if it has ended
                await asyncio.wait([running], timeout=_LEAVE_SECONDS)
        finally:
            ending.cancel()

    async def _evaluate(
        self, step: int, run_group: RunGroup, on_group: Callable[[Group], None] = lambda _: None
    ) -> Evaluation:
        kept = self._folder.group_log("eval", step)
        name = f"eval{step}"
        config = self._config
        at_once = groups_at_once(config, config.eval.sampling.n)
        limits = config.eval, config.rollout, at_once
        return await evaluate(run_group, self._problems, *limits, name, on_group, kept)
