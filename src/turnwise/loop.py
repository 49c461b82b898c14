"""The training loop: two coroutines and a bound between them.

The producer (`rollout.producer`) keeps as many groups under way as could still be trained; the
consumer waits for a step's groups, trains on them, and hands the new weights to the engines. With
max_staleness 0 the two take turns, which is synchronous training; there is no other loop.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from turnwise.config import Config
from turnwise.machinery import Evaluation, Machinery, Progress, evaluate, mean
from turnwise.rollout import (
    Batch,
    Group,
    GroupProducer,
    Problem,
    ProblemStream,
    check_failures,
)
from turnwise.run_folder import Resume, RunFolder
from turnwise.tasks import stuck_calls, task_group
from turnwise.training.samples import Made, gives_signal, make_samples
from turnwise.training_step import UNTRAINED, TrainingStep, check_exactness, describe
from turnwise.trajectory import ExactnessReport, Trajectory, audit
from turnwise.watchdog import Watchdog, waiting


@dataclass(slots=True)
class _Clock:
    """Seconds of a step by what the consumer did meanwhile, or waited for."""

    seconds: dict[str, float] = field(default_factory=dict)

    def spend(self, phase: str, since: float) -> None:
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - since


class TrainingLoop:
    """Trains the policy; see the module's docstring.

    Args:
        machinery: With a policy.
        problems: To train on, in an order that the seed shuffles anew each epoch.
        heldout: To evaluate on; may be empty.
        folder: Where everything is written.
        progress: Told what happens.
        resume: The checkpoint to go on from.
    """

    def __init__(
        self,
        config: Config,
        machinery: Machinery,
        problems: Sequence[Problem],
        heldout: Sequence[Problem],
        folder: RunFolder,
        progress: Progress,
        resume: Resume | None = None,
    ) -> None:
        assert machinery.policy is not None
        self._config = config
        self._machinery = machinery
        self._policy = machinery.policy
        self._heldout = machinery.fitting(heldout)
        self._folder = folder
        self._progress = progress
        self._resume = resume
        self._producer = GroupProducer(
            config,
            self._group,
            ProblemStream(machinery.fitting(problems), config.seed),
            lambda group: gives_signal(group, config),
            progress.advance,
        )
        self._step = TrainingStep(config, machinery)
        self.exactness = ExactnessReport()
        """Of all that was trained so far."""
        self._clock = _Clock()
        self._accuracy: float | None = None
        """On held-out problems, after the step under way; None where it is not measured."""

    async def run(self) -> None:
        """Train until step `training.steps`, or until `eval.target` is reached; raises what ended
        the run early."""
        async with Watchdog(self._config.watchdog, self._tell_stall), task_group() as tasks:
            watch = tasks.create_task(self._policy.watch())
            first = await self._begin()
            if not self._reached:
                producing = tasks.create_task(self._producer.run())
                await self._consume(first)
                producing.cancel()
            watch.cancel()
        if self._reached:
            self._progress.warn(
                f"held-out accuracy {self._accuracy:.3f} reaches eval.target "
                f"{self._config.eval.target:g}: the run ends"
            )

    @property
    def _reached(self) -> bool:
        return self._config.eval.reached(self._accuracy)

    def _tell_stall(self, line: str) -> None:
        stuck = stuck_calls()
        self._progress.warn(f"{line}; {stuck}" if stuck else line)

    async def _group(self, problem: Problem, tag: str) -> Group:
        return await self._machinery.runner.run_group(
            self._machinery.generator, problem, self._config.sampling, tag
        )

    async def _begin(self) -> int:
        """Bring the engines to the trainer's weights; returns the first step."""
        if self._resume is None:
            await self._measure_given_model()
            if self._reached:
                await self._save(0)
            return 1
        self._progress.phase("resume")
        state = self._resume.state
        await self._policy.load(self._resume.checkpoint)
        self._producer.restore(state["producer"], self._resume.step)
        self.exactness = ExactnessReport.from_dict(state["exactness"])
        await self._update_weights()
        return self._resume.step + 1

    async def _consume(self, first: int) -> None:
        previous = time.perf_counter()
        for step in range(first, self._config.training.steps + 1):
            batch = await self._wait_for_batch(step)
            metrics = {"step": step} | self._describe(batch)
            metrics |= await self._train_on(batch)
            metrics |= await self._update_weights()
            evaluation = await self._evaluate(step)
            metrics["accuracy_heldout"] = evaluation.accuracy if evaluation else None
            metrics["heldout"] = evaluation.summary if evaluation else {}
            await self._write_trajectories(step, batch, evaluation)
            now = time.perf_counter()
            metrics["step_seconds"], previous = now - previous, now
            metrics["phase_seconds"] = self._phases(batch)
            await self._report(metrics)
            self._clock = _Clock()
            await self._save(step)
            if self._reached:
                break
            await self._producer.advance(step)

    async def _wait_for_batch(self, step: int) -> Batch:
        self._progress.phase("rollout", self._config.rollout.prompts_per_step)
        started = time.perf_counter()
        with waiting(f"the groups of step {step}"):
            batch = await self._producer.next_batch()
        self._clock.spend("idle", started)
        return batch

    async def _measure_given_model(self) -> None:
        """Step 0: hand the trainer's weights over once, and evaluate before any training."""
        started = time.perf_counter()
        update = await self._update_weights()
        evaluation = await self._evaluate(0)
        if evaluation is None:
            return
        await self._keep("eval", 0, evaluation.trajectories)
        await self._report(
            {
                "step": 0,
                "reward_mean": evaluation.summary["reward_mean"],
                "accuracy_heldout": evaluation.accuracy,
                "heldout": evaluation.summary,
                "rollout_tokens_per_s": evaluation.tokens_per_s,
                "train_tokens_per_s": 0.0,
                "logprob_diff_mean": update["canary_diff_mean"],
                "logprob_diff_max": update["canary_diff_max"],
                "staleness_max": 0,
                "trajectories": len(evaluation.trajectories),
                "dropped": dict(evaluation.dropped),
                **update,
                "step_seconds": time.perf_counter() - started,
            }
        )

    def _describe(self, batch: Batch) -> dict[str, Any]:
        """What the step's rollouts were like.

        Raises:
            StepError: when too many of them failed.
        """
        groups = batch.groups
        dropped = check_failures(groups, self._config.rollout.max_failed_fraction, "rollouts")
        trajectories = [t for group in groups for t in group.trajectories]
        count = len(trajectories)
        sampled = sum(t.sampled_tokens for t in trajectories)
        parts: dict[str, list[float]] = {}
        for trajectory in trajectories:
            for name, value in trajectory.reward_parts.items():
                parts.setdefault(name, []).append(value)
        return {
            "reward_mean": mean([t.reward or 0.0 for t in trajectories]),
            "reward_parts": {name: mean(values) for name, values in sorted(parts.items())},
            "trajectories": count,
            "dropped": dict(sorted(dropped.items())),
            "retried": dict(sorted(sum((g.retried for g in groups), Counter[str]()).items())),
            "groups_discarded": batch.discarded_by_reason,
            "statuses": dict(sorted(Counter(t.status for t in trajectories).items())),
            "events": dict(sorted(sum((t.events for t in trajectories), Counter[str]()).items())),
            "turns_mean": mean([len(t.turns) for t in trajectories]),
            "sampled_tokens": sampled,
            "rollout_seconds": batch.seconds,
            # A resumed run may find all of them ready.
            "rollout_tokens_per_s": sampled / batch.seconds if batch.seconds else 0.0,
        }

    async def _train_on(self, batch: Batch) -> dict[str, Any]:
        made = await asyncio.to_thread(self._make_samples, batch)
        self.exactness += made.report
        await asyncio.to_thread(self._folder.write_exactness, self.exactness)
        check_exactness(made.report, self._config)
        metrics = dict(UNTRAINED)
        if made.samples:
            self._progress.phase("train")
            started = time.perf_counter()
            metrics |= await self._step.train(made.samples)
            self._clock.spend("train", started)
        return metrics | describe(made)

    def _make_samples(self, batch: Batch) -> Made:
        made = make_samples(batch.groups, self._config, self._policy.version)
        for reason, group in batch.discarded:
            for trajectory in group.trajectories:
                made.report += audit(trajectory, [], masked=reason)
        return made

    async def _update_weights(self) -> dict[str, Any]:
        """Hand the trainer's weights to the engines and prove that they arrived.

        Raises:
            WeightUpdateError, DeadlineError: when they did not.
        """
        self._progress.phase("update weights")
        started = time.perf_counter()
        metrics = await self._step.update_weights()
        self._clock.spend("weights", started)
        return metrics

    async def _evaluate(self, step: int) -> Evaluation | None:
        self._accuracy = None
        every, last = self._config.eval.every, self._config.training.steps
        if not self._heldout or not every or (step % every and step != last):
            return None
        started = time.perf_counter()
        evaluation = await evaluate(
            self._machinery, self._heldout, self._config, self._progress, f"eval{step}"
        )
        self._accuracy = evaluation.accuracy
        self._clock.spend("evaluate", started)
        return evaluation

    async def _write_trajectories(
        self, step: int, batch: Batch, evaluation: Evaluation | None
    ) -> None:
        trajectories = [t for group in batch.groups for t in group.trajectories]
        await self._keep("step", step, trajectories)
        if evaluation is not None:
            await self._keep("eval", step, evaluation.trajectories)

    async def _keep(self, kind: str, step: int, trajectories: Sequence[Trajectory]) -> None:
        await asyncio.to_thread(self._folder.write_trajectories, kind, step, trajectories)

    async def _save(self, step: int) -> None:
        """After the step's metrics are written, so that a resumed run lacks none."""
        every, last = self._config.training.checkpoint_every, self._config.training.steps
        if step != last and not self._reached and not (every and step % every == 0):
            return
        started = time.perf_counter()
        self._progress.phase("save")
        with waiting(f"the trainer to save step {step}"):
            place = await asyncio.to_thread(self._folder.begin_checkpoint, step)
            await self._policy.save(place)
            state = {
                "step": step,
                "producer": self._producer.state(),
                "exactness": self.exactness.to_dict(),
                "accuracy_heldout": self._accuracy,
            }
            await asyncio.to_thread(self._folder.commit_checkpoint, step, state)
        self._clock.spend("save", started)

    def _phases(self, batch: Batch) -> dict[str, float]:
        """The consumer's seconds by phase, and what the step's trajectories waited for, summed
        over them."""
        waits: Counter[str] = Counter()
        for group in batch.groups:
            for phase, seconds in group.seconds.items():
                waits[phase] += seconds  # type: ignore[assignment]
        return {**self._clock.seconds, **waits}

    async def _report(self, metrics: dict[str, Any]) -> None:
        await asyncio.to_thread(self._folder.write_step, metrics)
        self._progress.step(metrics)
        if (
            metrics["accuracy_heldout"] is not None
            or metrics["step"] == self._config.training.steps
        ):
            await asyncio.to_thread(self._folder.draw)
