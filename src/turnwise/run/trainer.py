"""The loop of reinforcement learning: rollouts, training, the engines' new weights, evaluations."""

from collections.abc import Sequence

from turnwise.config import Config
from turnwise.core.aio import run_in_thread
from turnwise.core.json_types import JsonObject
from turnwise.observe.alarms import alarm_finder
from turnwise.observe.conversations import Overview
from turnwise.observe.metrics import StepMetrics
from turnwise.rollouts import Batch, GroupProducer, Problem, check_failures
from turnwise.rollouts.evaluation import Evaluation
from turnwise.rollouts.problems import make_stream
from turnwise.run.display import Display
from turnwise.run.evaluations import Evaluations
from turnwise.run.loop import Loop
from turnwise.run.run_dir import Resume, RunDir
from turnwise.run.runtime import Runtime, TrainingStep
from turnwise.training.samples import SampleBatch, gives_signal, recent_versions
from turnwise.trajectory import Trajectory


class TrainingLoop(Loop):
    """Trains the policy on what its engines sample."""

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
        producer = GroupProducer(
            config,
            runtime.training_runner(config.sampling),
            make_stream(config, problems),
            lambda group: step.by_algorithm(gives_signal, group, config, step.algorithm),
            progress.advance,
        )
        super().__init__(config, runtime.policy, producer, folder, progress, resume)
        self._evaluations = Evaluations(config, runtime, heldout, folder, progress)
        self._find_alarms = alarm_finder(config)
        for row in folder.metrics.rows:  # of the run that is resumed
            self._find_alarms(row)

    async def run(self) -> None:
        await super().run()
        if self._reached:
            self._progress.warn(
                f"held-out accuracy {self._evaluations.accuracy:.3f} reaches eval.target "
                f"{self._config.eval.target:g}: the run ends"
            )

    @property
    def _reached(self) -> bool:
        return self._config.eval.reached(self._evaluations.accuracy)

    async def _begin(self) -> int:
        """Bring the engines to the trainer's weights too; evaluate those of a resumed run if its
        end cut that short."""
        first = await super()._begin()
        if self._resume is not None:
            version = self._policy.version
            known = self._resume.state.get("versions")
            self._step.versions = recent_versions(self._config, version, known)
            update = await self._update_weights()
            if self._evaluations.cut_short(self._resume.step):
                self._evaluate_beside(self._resume.step, update["weight_version"])
        return first

    async def _consume(self, first: int) -> None:
        await super()._consume(first)
        self._evaluations.cancel()

    async def _make_samples(self, batch: Batch, metrics: StepMetrics) -> SampleBatch:
        failed = self._config.rollout.max_failed_fraction
        metrics.add_rollouts(batch, check_failures(batch.groups, failed, "rollouts"))
        return await self._step.make_samples(batch.groups, batch.discarded)

    async def _train(self, samples: SampleBatch) -> JsonObject:
        return await self._step.learn(samples)

    async def _measure(self, metrics: StepMetrics) -> None:
        """Bring the engines to the trainer's weights and evaluate these. An evaluation beside
        training ends before the weights that it measures are replaced."""
        step = metrics.step or 0
        if self._evaluations.running:
            self._progress.phase("evaluate")
            with self._timed("evaluate"):
                await self._evaluations.settle(self._ending.asked)
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
            "accuracy_heldout": self._evaluations.accuracy,
        }

    async def _go_on(self, metrics: StepMetrics) -> None:
        """Let the next rollouts begin; an evaluation beside training begins after them."""
        await super()._go_on(metrics)
        step, version = metrics.step, metrics.weight_version
        if step is not None and version is not None and self._evaluations.due_beside(step):
            self._evaluate_beside(step, version)

    def _evaluate_beside(self, step: int, version: int) -> None:
        """Begin the evaluation of a step whose line is written, which gets the results."""

        async def report(evaluation: Evaluation) -> None:
            metrics = StepMetrics(step=step)
            metrics.add_evaluation(evaluation)
            await run_in_thread(self._folder.metrics.amend, metrics.evaluation_json())
            self._progress.evaluated(metrics)
            await run_in_thread(self._folder.draw)

        self._evaluations.begin(self._tasks, step, version, self._producer.all_begun, report)

    async def _report(self, metrics: StepMetrics, batch: Batch | None = None) -> None:
        await super()._report(metrics, batch)
        for alarm in self._find_alarms(metrics.to_json()):
            self._progress.warn(alarm.message)
        if metrics.heldout or metrics.step == self._config.training.steps:
            await run_in_thread(self._folder.draw)
        if batch is not None:
            await self._show_samples(metrics.step or 0, batch)

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
