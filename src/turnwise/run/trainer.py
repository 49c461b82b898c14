"""The training loops: a producer of groups, and a consumer that trains on them.

The producer keeps as many groups in flight as can still be trained. With max_staleness 0, producer
and consumer alternate: synchronous training needs no separate loop. `Loop` is the base class of
reinforcement learning (`TrainingLoop`) and supervised training (`run.supervised`).
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager

from turnwise.config import Config
from turnwise.core.aio import run_in_thread, task_group
from turnwise.core.interrupt import SAVE_SECONDS, Ending
from turnwise.core.json_types import JsonObject
from turnwise.core.stacks import write_report
from turnwise.core.user_code import call_user_code, stuck_calls
from turnwise.core.watchdog import waiting, watching_progress
from turnwise.errors import DeadlineError, TrainerError, describe_error
from turnwise.observe.alarms import alarm_finder
from turnwise.observe.conversations import Overview
from turnwise.observe.metrics import StepMetrics
from turnwise.rollouts import Batch, GroupProducer, Problem, check_failures
from turnwise.rollouts.group import turn_times
from turnwise.rollouts.problems import make_stream
from turnwise.run.display import Display
from turnwise.run.evaluations import Evaluations
from turnwise.run.run_dir import Resume, RunDir
from turnwise.run.runtime import Runtime, TrainingStep
from turnwise.run.token_values import columns_of
from turnwise.training.samples import RewardRules, SampleBatch, gives_signal
from turnwise.training.trainer_group import TrainerGroup
from turnwise.trajectory import ExactnessReport, Trajectory

_ANSWER_SECONDS = 2.0  # time for ranks to answer after one has failed


class Loop(ABC):
    """Trains the policy; a subclass makes samples from groups, and measures the new weights."""

    _waits = "rollout"  # phase in which a step waits for its groups

    def __init__(
        self,
        config: Config,
        policy: TrainerGroup,
        producer: GroupProducer,
        folder: RunDir,
        progress: Display,
        resume: Resume | None,
    ) -> None:
        self._config = config
        self._policy = policy
        self._producer = producer
        self._folder = folder
        self._progress = progress
        self._resume = resume
        self.exactness = ExactnessReport()
        """Audit of every token trained so far."""
        self._seconds: dict[str, float] = {}
        """Seconds since the last line of metrics, by the loop's phase."""
        self._finished = 0 if resume is None else resume.step
        """The last step that is finished."""
        self._version = 0
        """Version of the weights after the last finished step."""
        self._trained: StepMetrics | None = None
        """Metrics of a trained step, until its line is written and the step is finished; else
        None."""
        self._saved = self._finished
        """The last step that is saved."""
        self._saved_at = time.monotonic()
        self._state_between_steps: JsonObject | None = None
        """The producer's state after the last finished step, before the next step's groups begin.
        It is saved if the run is asked to end after those groups have begun. None in asynchronous
        runs, and until a step is finished."""
        self._ending = Ending(lambda: self._finished > self._saved)
        self._tasks: asyncio.TaskGroup  # tasks that run next to the steps
        self._work: asyncio.Future[None] | None = None
        """The trainer's latest work; see `_shielded`."""

    @abstractmethod
    async def _make_samples(self, batch: Batch, metrics: StepMetrics) -> SampleBatch:
        """Return a step's samples, and add the groups' own metrics; raise StepError if too many
        trajectories failed."""

    @abstractmethod
    async def _train(self, samples: SampleBatch) -> JsonObject:
        """Train on a step's samples, if there are any; return the trainer's metrics."""

    @abstractmethod
    async def _measure(self, metrics: StepMetrics) -> None:
        """Measure the weights after a step (0: the initial weights); if needed, send them to the
        engines first."""

    @abstractmethod
    def _state(self) -> JsonObject:
        """Return the state that a checkpoint keeps in addition to step, producer's state and
        audit."""

    def _is_written(self, step: int) -> bool:
        """Return whether a step's trajectories and the values of their tokens are written."""
        return True

    @property
    def _reached(self) -> bool:
        """Whether the run ends before its last step, because the model is good enough."""
        return False

    def in_flight(self) -> int:
        """Return the number of groups in flight; may be called from any thread."""
        return self._producer.in_flight

    async def run(self) -> None:
        """Train until step `training.steps`, or until `eval.target` is reached; raise the error
        that ended the run early. A run that is asked to end, or that an error ends, saves its last
        finished step first."""
        seconds = self._config.watchdog_seconds
        watchdog = watching_progress(seconds, self._report_stall, self._folder.path)
        with self._ending:
            async with watchdog:
                try:
                    await self._play()
                except Exception as error:
                    await self._save_after(error)
                    raise
                finally:
                    if self._work is not None:
                        self._work.cancel()

    async def _play(self) -> None:
        async with task_group() as self._tasks:
            watch = self._tasks.create_task(self._policy.watch())
            first = await self._begin()
            if not self._reached:
                producing = self._tasks.create_task(self._producer.run())
                await self._consume(first)
                producing.cancel()
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

    async def _save_after(self, error: Exception) -> None:
        """Save the last step whose weights the trainer has completely, before an error ends the
        run. Wait first for the trainer's work in progress. A failure to save is only reported."""
        if self._work is not None and not self._work.done():
            self._progress.warn(f"{error}; the trainer's work is completed before the run ends")
            await asyncio.wait([self._work])
        step = self._finished if self._trained is None else self._trained.step or 0
        version = self._version if self._trained is None else self._policy.version
        failed = isinstance(error, TrainerError | DeadlineError)  # a rank may hang
        seconds = _ANSWER_SECONDS if failed else SAVE_SECONDS
        if step <= self._saved or not await self._policy.holds(version, seconds):
            return
        self._progress.warn(f"step {step} is saved before the run ends: {error}")
        try:
            self._producer.put_back(step)
            if self._trained is not None:  # the error came after training
                rows, line = self._folder.metrics.rows, self._trained.to_json()
                if not rows or rows[-1]["step"] != step:
                    unmeasured: JsonObject = {"accuracy_heldout": None, "heldout": {}}
                    await run_in_thread(self._folder.metrics.write, unmeasured | line)
                self._finish(step)
            await self._save(step)
        except Exception as failure:
            self._progress.warn(f"step {step} cannot be saved: {describe_error(failure)}")
        else:
            self._progress.warn(f"to go on from step {step}: --resume {self._folder.path}")

    def _report_stall(self, line: str) -> None:
        stuck = stuck_calls()
        line = f"{line}; {stuck}" if stuck else line
        report = write_report(self._folder.path, line)
        self._progress.warn(f"{line} (all stacks: {report})" if report else line)

    async def _begin(self) -> int:
        """Measure the weights of a new run as step 0, or restore the weights of a resumed run;
        return the first step to train."""
        if self._resume is None:
            started = time.perf_counter()
            metrics = StepMetrics(step=0)
            await self._measure(metrics)
            if metrics.heldout:
                metrics.step_seconds = time.perf_counter() - started
                metrics.phase_seconds = dict(self._seconds)
                await self._report(metrics)
            if self._reached:
                await self._save(0)
            return 1
        self._progress.phase("resume")
        state = self._resume.state
        await self._policy.load(self._resume.checkpoint)
        await call_user_code(  # this reads the rows that were in progress
            *(self._producer.restore, state["producer"], self._resume.step),
            name="the data",
            seconds=self._config.training.step_timeout,
            key="training.step_timeout",
        )
        self.exactness = ExactnessReport.from_dict(state["exactness"])
        return self._resume.step + 1

    async def _consume(self, first: int) -> None:
        """Train steps from `first` on.

        The order matters. The line of metrics is written before the checkpoint, so that every saved
        step has its line; therefore the seconds of saving are in the next step's line. The next
        step's groups begin after the checkpoint, so that a synchronous run's checkpoint contains
        none of these groups.
        """
        previous = time.perf_counter()
        self._seconds = {}  # the seconds of `_begin` do not belong to the first step
        self._saved_at = time.monotonic()
        training = self._config.training
        for step in range(first, training.steps + 1):
            if (batch := await self._wait_for_batch(step)) is None:
                break
            metrics = StepMetrics(step=step)
            await self._learn(step, batch, metrics)
            await self._measure(metrics)
            if self._is_written(step):
                await run_in_thread(  # a variable would keep trajectories through the next step
                    self._folder.write_trajectories,
                    step,
                    [t for group in batch.groups for t in group.trajectories],
                )
                await run_in_thread(self._folder.write_timeline, step, turn_times(batch.groups))
            now = time.perf_counter()
            metrics.step_seconds, previous = now - previous, now
            waits = defaultdict[str, float](float)  # waiting times of the step's trajectories
            for phase, seconds in (each for g in batch.groups for each in g.seconds.items()):
                waits[phase] += seconds
            metrics.phase_seconds = {**self._seconds, **waits}
            await self._report(metrics, batch)
            self._seconds = {}
            self._finish(step)
            every, minutes = training.checkpoint_every, training.checkpoint_minutes
            old = minutes and time.monotonic() - self._saved_at >= 60 * minutes
            if step == training.steps or self._reached or (every and step % every == 0) or old:
                await self._save(step)
            if self._reached or self._ending.asked.is_set():
                break
            await self._begin_next_groups(metrics)

    def _finish(self, step: int) -> None:
        """Count a step as finished: its line is written, and its groups are trained."""
        self._finished, self._version, self._trained = step, self._policy.version, None
        if not self._config.training.max_staleness:
            self._state_between_steps = self._producer.state()

    async def _begin_next_groups(self, metrics: StepMetrics) -> None:
        """Let the next step's groups begin, after a step is finished."""
        await self._producer.advance(metrics.step or 0)

    async def _wait_for_batch(self, step: int) -> Batch | None:
        """Wait for a step's groups; return None if the run is asked to end first."""
        self._progress.phase(self._waits, self._config.rollout.prompts_per_step)
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
        """Train on a step's groups, and write the values of their trained tokens."""
        version = self._policy.version
        samples = await self._make_samples(batch, metrics)
        self.exactness += samples.report
        await run_in_thread(self._folder.write_exactness, self.exactness)
        metrics.add_samples(samples)
        if samples.samples:
            self._progress.phase("train")

        async def train() -> None:
            metrics.add(await self._train(samples))
            self._trained = metrics

        with self._timed("train"):
            await self._shielded(train())
        trained = self._policy.trained_tokens
        if not samples.samples or not trained or not self._is_written(step):
            return
        trajectories = [t for group in batch.groups for t in group.trajectories]
        with self._timed("write"):
            columns = await run_in_thread(
                columns_of, trained, samples.origins, trajectories, version
            )
            await run_in_thread(self._folder.write_token_values, step, columns)

    async def _save(self, step: int) -> None:
        """Save a checkpoint; called after the step's metrics are written, so that no metrics are
        lost."""
        self._progress.phase("save")

        async def save() -> None:
            place = await run_in_thread(self._folder.begin_checkpoint, step)
            await self._policy.save(place)
            state = {
                "step": step,
                "producer": self._state_between_steps or self._producer.state(),
                "exactness": self.exactness.to_dict(),
                **self._state(),
            }
            await run_in_thread(self._folder.commit_checkpoint, step, state)
            self._saved, self._saved_at = step, time.monotonic()

        with self._timed("save"), waiting(f"the trainer to save step {step}"):
            await self._shielded(save())

    async def _shielded(self, work: Coroutine[object, object, None]) -> None:
        """Do work of the trainer that an error elsewhere must not cancel, because `_save_after`
        waits for the work; only the end of the run cancels it."""
        self._work = asyncio.ensure_future(work)
        await asyncio.shield(self._work)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        """Add the seconds spent in a `with` block to a phase of the step."""
        started = time.perf_counter()
        yield
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - started

    async def _report(self, metrics: StepMetrics, batch: Batch | None = None) -> None:
        """Write and show a step's metrics; step 0 has no batch."""
        await run_in_thread(self._folder.metrics.write, metrics.to_json())
        self._progress.step(metrics)


class TrainingLoop(Loop):
    """Trains the policy on trajectories that the engines sample."""

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
        self._step = step = TrainingStep(config, runtime)
        rules = RewardRules.of(config)
        producer = GroupProducer(
            config,
            runtime.training_runner(config.sampling),
            make_stream(problems, config.data, config.seed, config.environment_weights),
            lambda group: step.by_algorithm(gives_signal, group, rules, step.algorithm),
            progress.advance,
        )
        super().__init__(config, runtime.policy, producer, folder, progress, resume)
        ready = producer.all_begun
        self._evaluations = Evaluations(config, runtime, heldout, folder, progress, ready)
        runtime.manager.must_keep_version = lambda: self._evaluations.running
        self._find_alarms = alarm_finder(config)
        for row in folder.metrics.rows:  # of a resumed run
            self._find_alarms(row)

    async def run(self) -> None:
        await super().run()
        if (heldout := self._evaluations.heldout) and self._reached:
            self._progress.warn(
                f"held-out accuracy {heldout['accuracy']:.3f} reaches eval.target "
                f"{self._config.eval.target}: the run ends"
            )

    @property
    def _reached(self) -> bool:
        return self._config.eval.reached(self._evaluations.heldout)

    async def _begin(self) -> int:
        """Also send a resumed run's weights to the engines, and evaluate them if the end of the run
        cut its last evaluation short."""
        first = await super()._begin()
        if self._resume is not None:
            version = self._policy.version
            known = self._resume.state.get("versions")
            self._step.versions = self._config.recent_versions(version, known)
            update = await self._update_weights()
            if self._evaluations.cut_short(self._resume.step):
                self._evaluations.begin(self._tasks, self._resume.step, update["weight_version"])
        return first

    async def _consume(self, first: int) -> None:
        await super()._consume(first)
        await self._evaluations.finish(self._ending.asked)

    async def _make_samples(self, batch: Batch, metrics: StepMetrics) -> SampleBatch:
        failed = self._config.rollout.max_failed_fraction
        metrics.add_rollouts(batch, check_failures(batch.ended, failed, "rollouts"))
        return await self._step.make_samples(batch.groups, batch.discarded)

    async def _train(self, samples: SampleBatch) -> JsonObject:
        return await self._step.learn(samples)

    async def _measure(self, metrics: StepMetrics) -> None:
        """Send the trainer's weights to the engines, and evaluate them. Wait first for an
        evaluation beside training, because the update replaces the weights that this evaluation
        measures."""
        step = metrics.step or 0
        if self._evaluations.running:
            self._progress.phase("evaluate")
            with self._timed("evaluate"):
                await self._evaluations.finish(self._ending.asked)
        update = await self._update_weights()
        metrics.add(update)
        evaluation = await self._evaluations.between(step)
        metrics.add_evaluation(evaluation)
        if evaluation is None:
            return
        self._seconds["evaluate"] = self._seconds.get("evaluate", 0.0) + evaluation.seconds
        if not step:
            metrics.reward_mean = evaluation.summary["reward_mean"]
            metrics.rollout_tokens_per_s = evaluation.tokens_per_s
            metrics.logprob_diff_mean = update["canary_diff_mean"]
            metrics.logprob_diff_max = update["canary_diff_max"]
            metrics.trajectories = evaluation.finished
            metrics.dropped = dict(evaluation.dropped)

    async def _update_weights(self) -> JsonObject:
        """Transfer the new weights to the engines, which sample the next trajectories."""
        self._progress.phase("update weights")
        with self._timed("weights"):
            return await self._step.update_weights()

    def _state(self) -> JsonObject:
        return {
            "versions": list(self._step.versions),
            "heldout": self._evaluations.heldout,
        }

    async def _begin_next_groups(self, metrics: StepMetrics) -> None:
        """Let the next rollouts begin; an evaluation beside training begins after they have
        begun."""
        await super()._begin_next_groups(metrics)
        step, version = metrics.step, metrics.weight_version
        if step is not None and version is not None and self._evaluations.due_beside(step):
            self._evaluations.begin(self._tasks, step, version)

    async def _report(self, metrics: StepMetrics, batch: Batch | None = None) -> None:
        await super()._report(metrics, batch)
        for alarm in self._find_alarms(metrics.to_json()):
            self._progress.warn(alarm.message)
        if metrics.heldout or metrics.step == self._config.training.steps:
            await run_in_thread(self._folder.draw)
        if batch is not None:
            await self._show_samples(metrics.step or 0, batch)

    async def _show_samples(self, step: int, batch: Batch) -> None:
        """Show the best and worst conversations of a step, every `samples_every` steps."""
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
