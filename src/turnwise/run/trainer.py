"""The training loop: a producer of groups, and a consumer that trains on them.

The producer keeps as many groups in flight as can still be trained. With max_staleness 0 the two
alternate, which is synchronous training; there is no separate loop for it.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from turnwise.config import Config
from turnwise.core.aio import run_in_thread, task_group
from turnwise.core.interrupt import SAVE_SECONDS, Ending
from turnwise.core.json_types import JsonObject
from turnwise.core.stacks import write_report
from turnwise.core.user_code import call_user_code, stuck_calls
from turnwise.core.watchdog import waiting, watching_progress
from turnwise.observe.alarms import alarm_finder
from turnwise.observe.conversations import Overview
from turnwise.observe.metrics import StepMetrics
from turnwise.rollouts import Batch, GroupProducer, Problem, check_failures
from turnwise.rollouts.evaluation import Evaluation
from turnwise.rollouts.group import turn_times
from turnwise.rollouts.problems import make_stream
from turnwise.run.display import Display
from turnwise.run.evaluations import Evaluations
from turnwise.run.run_dir import Resume, RunDir
from turnwise.run.runtime import Runtime, TrainingStep
from turnwise.run.token_values import columns_of
from turnwise.training.samples import gives_signal, recent_versions
from turnwise.trajectory import ExactnessReport, Trajectory


class TrainingLoop:
    """Trains the policy; see the module's docstring."""

    def __init__(
        self,
        config: Config,
        runtime: Runtime,
        problems: Sequence[Problem],
        heldout: Sequence[Problem],
        folder: RunDir,
        progress: Display,
        resume: Resume | None = None,
    ) -> None:
        assert runtime.policy is not None
        self._config = config
        self._policy = runtime.policy
        self._folder = folder
        self._progress = progress
        self._resume = resume
        self._step = step = TrainingStep(config, runtime)
        self._producer = GroupProducer(
            config,
            runtime.training_runner(config.sampling),
            make_stream(config, problems),
            lambda group: step.by_algorithm(gives_signal, group, config, step.algorithm),
            progress.advance,
        )
        self._evaluations = Evaluations(config, runtime, heldout, folder, progress)
        self._find_alarms = alarm_finder(config)
        for row in folder.metrics.rows:  # of the run that is resumed
            self._find_alarms(row)
        self.exactness = ExactnessReport()
        """Audit of every token trained so far."""
        self._seconds: dict[str, float] = {}
        """Seconds since the last line of metrics, by the loop's phase."""
        self._finished = 0 if resume is None else resume.step
        """The last step that is finished."""
        self._saved = self._finished
        """The last step that is saved."""
        self._saved_at = time.monotonic()
        self._state_between_steps: JsonObject | None = None
        """The producer's state after the last finished step, before groups of the next one begin:
        needed where a run is asked to end after they have begun. None when asynchronous, and until
        a step is finished."""
        self._ending = Ending(lambda: self._finished > self._saved)

    def in_flight(self) -> int:
        """Return the number of groups in flight; may be called from any thread."""
        return self._producer.in_flight

    async def run(self) -> None:
        """Train until step `training.steps`, or until `eval.target` is reached; raise the error
        that ended the run early. A run that is asked to end saves its last step first."""
        seconds = self._config.watchdog_seconds
        watchdog = watching_progress(seconds, self._report_stall, self._folder.path)
        with self._ending:
            async with watchdog, task_group() as tasks:
                watch = tasks.create_task(self._policy.watch())
                first = await self._begin(tasks)
                if not self._reached:
                    producing = tasks.create_task(self._producer.run())
                    await self._consume(first, tasks)
                    producing.cancel()
                    self._evaluations.cancel()
                    complete = self._reached or self._finished == self._config.training.steps
                    if self._ending.asked.is_set() and not complete:
                        if self._finished > self._saved:
                            self._progress.warn(
                                f"asked to end: step {self._finished} is saved first, within "
                                f"{SAVE_SECONDS:g} s (Ctrl-C again ends at once)"
                            )
                            await self._save(self._finished)
                        await self._ending.finished()
                watch.cancel()
        if self._reached:
            self._progress.warn(
                f"held-out accuracy {self._evaluations.accuracy:.3f} reaches eval.target "
                f"{self._config.eval.target:g}: the run ends"
            )

    @property
    def _reached(self) -> bool:
        return self._config.eval.reached(self._evaluations.accuracy)

    def _report_stall(self, line: str) -> None:
        stuck = stuck_calls()
        line = f"{line}; {stuck}" if stuck else line
        report = write_report(self._folder.path, line)
        self._progress.warn(f"{line} (all stacks: {report})" if report else line)

    async def _begin(self, tasks: asyncio.TaskGroup) -> int:
        """Bring the engines to the trainer's weights; return the first step. Those of a new run are
        evaluated as step 0; those of a resumed one, if the end of the run cut that short."""
        if self._resume is None:
            started = time.perf_counter()
            update = await self._update_weights()
            if (evaluation := await self._evaluate(0)) is not None:
                metrics = StepMetrics(
                    step=0,
                    reward_mean=evaluation.summary["reward_mean"],
                    rollout_tokens_per_s=evaluation.tokens_per_s,
                    logprob_diff_mean=update["canary_diff_mean"],
                    logprob_diff_max=update["canary_diff_max"],
                    trajectories=evaluation.finished,
                    dropped=dict(evaluation.dropped),
                )
                metrics.add(update)
                metrics.add_evaluation(evaluation)
                metrics.step_seconds = time.perf_counter() - started
                metrics.phase_seconds = dict(self._seconds)
                await self._report(metrics)
            if self._reached:
                await self._save(0)
            return 1
        self._progress.phase("resume")
        state = self._resume.state
        await self._policy.load(self._resume.checkpoint)
        self._step.versions = recent_versions(
            self._config, self._policy.version, state.get("versions")
        )
        await call_user_code(  # which reads the rows that were in progress
            *(self._producer.restore, state["producer"], self._resume.step),
            name="the data",
            seconds=self._config.training.step_timeout,
            key="training.step_timeout",
        )
        self.exactness = ExactnessReport.from_dict(state["exactness"])
        update = await self._update_weights()
        if self._evaluations.cut_short(self._resume.step):
            self._evaluate_beside(tasks, self._resume.step, update["weight_version"])
        return self._resume.step + 1

    async def _consume(self, first: int, tasks: asyncio.TaskGroup) -> None:
        """Train steps from `first` on.

        The order matters: an evaluation beside training ends before the weights that it measures
        are replaced; weights before evaluation, which is of the new ones; the line of metrics
        before the checkpoint, so that no saved step lacks its line (the seconds of saving are in
        the next step's line); then `advance`, so that a checkpoint of a synchronous run holds no
        group of the next step; an evaluation beside training last, because rollouts begin first.
        """
        previous = time.perf_counter()
        self._seconds = {}  # those of `_begin` are no part of the first step
        self._saved_at = time.monotonic()
        for step in range(first, self._config.training.steps + 1):
            if (batch := await self._wait_for_batch(step)) is None:
                break
            metrics = StepMetrics(step=step)
            failed = self._config.rollout.max_failed_fraction
            metrics.add_rollouts(batch, check_failures(batch.groups, failed, "rollouts"))
            await self._learn(step, batch, metrics)
            if self._evaluations.running:
                self._progress.phase("evaluate")
                with self._timed("evaluate"):
                    await self._evaluations.settle(self._ending.asked)
            update = await self._update_weights()
            metrics.add(update)
            metrics.add_evaluation(await self._evaluate(step))
            await run_in_thread(  # in no variable, which would keep them through the next step
                self._folder.write_trajectories,
                step,
                [t for group in batch.groups for t in group.trajectories],
            )
            await run_in_thread(self._folder.write_timeline, step, turn_times(batch.groups))
            now = time.perf_counter()
            metrics.step_seconds, previous = now - previous, now
            waits = defaultdict[str, float](float)  # those of the step's trajectories
            for phase, seconds in (each for g in batch.groups for each in g.seconds.items()):
                waits[phase] += seconds
            metrics.phase_seconds = {**self._seconds, **waits}
            await self._report(metrics)
            await self._show_samples(step, batch)
            self._seconds = {}
            self._finished = step
            if not self._config.training.max_staleness:
                self._state_between_steps = self._producer.state()
            training = self._config.training
            every, minutes = training.checkpoint_every, training.checkpoint_minutes
            old = minutes and time.monotonic() - self._saved_at >= 60 * minutes
            if step == training.steps or self._reached or (every and step % every == 0) or old:
                await self._save(step)
            if self._reached or self._ending.asked.is_set():
                break
            await self._producer.advance(step)
            if self._evaluations.due_beside(step):
                self._evaluate_beside(tasks, step, update["weight_version"])

    async def _wait_for_batch(self, step: int) -> Batch | None:
        """Wait for a step's groups of trajectories with rewards; returns None if the run is asked
        to end before they are there."""
        self._progress.phase("rollout", self._config.rollout.prompts_per_step)
        with self._timed("idle"), waiting(f"the groups of step {step}"):
            batch = asyncio.ensure_future(self._producer.next_batch())
            asked = asyncio.ensure_future(self._ending.asked.wait())
            try:
                await asyncio.wait((batch, asked), return_when=asyncio.FIRST_COMPLETED)
                return batch.result() if batch.done() else None
            finally:
                batch.cancel()
                asked.cancel()

    async def _learn(self, step: int, batch: Batch, metrics: StepMetrics) -> None:
        """Train on a step's groups, and write what its tokens were trained with."""
        version = self._policy.version
        samples = await self._step.make_samples(batch.groups, batch.discarded)
        self.exactness += samples.report
        await run_in_thread(self._folder.write_exactness, self.exactness)
        metrics.add_samples(samples)
        if samples.samples:
            self._progress.phase("train")
        with self._timed("train"):
            metrics.add(await self._step.learn(samples))
        trained = self._policy.trained_tokens
        if not samples.samples or not trained:
            return
        trajectories = [t for group in batch.groups for t in group.trajectories]
        with self._timed("write"):
            columns = await run_in_thread(
                columns_of, trained, samples.origins, trajectories, version
            )
            await run_in_thread(self._folder.write_token_values, step, columns)

    async def _update_weights(self) -> JsonObject:
        """Transfer the new weights to the engines, which sample the next trajectories."""
        self._progress.phase("update weights")
        with self._timed("weights"):
            return await self._step.update_weights()

    async def _evaluate(self, step: int) -> Evaluation | None:
        evaluation = await self._evaluations.between(step)
        if evaluation is not None:
            self._seconds["evaluate"] = self._seconds.get("evaluate", 0.0) + evaluation.seconds
        return evaluation

    def _evaluate_beside(self, tasks: asyncio.TaskGroup, step: int, version: int) -> None:
        """Begin the evaluation of a step whose line is written, which gets the results."""

        async def report(evaluation: Evaluation) -> None:
            metrics = StepMetrics(step=step)
            metrics.add_evaluation(evaluation)
            await run_in_thread(self._folder.metrics.amend, metrics.evaluation_json())
            self._progress.evaluated(metrics)
            await run_in_thread(self._folder.draw)

        self._evaluations.begin(tasks, step, version, self._producer.all_begun, report)

    async def _show_samples(self, step: int, batch: Batch) -> None:
        """Show what was said in the step, every `samples_every` steps."""
        every = self._config.samples_every
        if not every or step % every:
            return
        shown: dict[str, list[Trajectory]] = {}
        for name in sorted({group.environment for group in batch.groups}):
            overview = Overview()
            for group in batch.groups:
                if group.environment == name:
                    overview.add(group.trajectories)
            for label, chosen in overview.best_and_worst().items():
                shown[f"{label} of {name}" if name else label] = chosen
        self._progress.samples(shown)
        both = [trajectory for chosen in shown.values() for trajectory in chosen]
        await run_in_thread(self._folder.metrics.write_samples, step, both)

    async def _save(self, step: int) -> None:
        """Save a checkpoint; called after the step's metrics are written, so none are lost."""
        self._progress.phase("save")
        with self._timed("save"), waiting(f"the trainer to save step {step}"):
            place = await run_in_thread(self._folder.begin_checkpoint, step)
            await self._policy.save(place)
            state = {
                "step": step,
                "producer": self._state_between_steps or self._producer.state(),
                "versions": list(self._step.versions),
                "exactness": self.exactness.to_dict(),
                "accuracy_heldout": self._evaluations.accuracy,
            }
            await run_in_thread(self._folder.commit_checkpoint, step, state)
        self._saved, self._saved_at = step, time.monotonic()

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        """Add the seconds spent in a `with` block to a phase of the step."""
        started = time.perf_counter()
        yield
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - started

    async def _report(self, metrics: StepMetrics) -> None:
        await run_in_thread(self._folder.metrics.write, metrics.to_json())
        self._progress.step(metrics)
        for alarm in self._find_alarms(metrics.to_json()):
            self._progress.warn(alarm.message)
        last = metrics.step == self._config.training.steps
        if metrics.accuracy_heldout is not None or last:
            await run_in_thread(self._folder.draw)
