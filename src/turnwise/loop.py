"""The training loop: two coroutines and a bound between them.

The producer starts the groups of step s as soon as the trainer has finished step
s - 1 - max_staleness; the consumer waits for a step's groups, trains on them, and hands the new
weights to the engine. With max_staleness 0 the two take turns, which is synchronous training;
there is no other loop.
"""

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.config import Config
from turnwise.errors import ExactnessError
from turnwise.machinery import Evaluation, Machinery, Progress, evaluate, mean
from turnwise.rollout import Group, Problem, check_failures
from turnwise.run_folder import RunFolder
from turnwise.tasks import task_group
from turnwise.training import Sample, group_advantages
from turnwise.trajectory import Branch, ExactnessReport, audit
from turnwise.weights.canary import check_canary
from turnwise.weights.delivery import Delivery

_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2}


@dataclass(slots=True)
class _Batch:
    """The groups of one step, under way."""

    groups: "list[asyncio.Task[Group]]"
    started: float
    finished: float = 0.0


class TrainingLoop:
    """Trains the policy; see the module's docstring.

    Args:
        machinery: With a policy.
        problems: To train on, in an order that the seed shuffles anew each epoch.
        heldout: To evaluate on; may be empty.
        folder: Where everything is written.
        progress: Told what happens.
    """

    def __init__(
        self,
        config: Config,
        machinery: Machinery,
        problems: Sequence[Problem],
        heldout: Sequence[Problem],
        folder: RunFolder,
        progress: Progress,
    ) -> None:
        assert machinery.policy is not None
        self._config = config
        self._machinery = machinery
        self._policy = machinery.policy
        self._delivery = Delivery(
            machinery.policy, config.weights.update_timeout, config.engine.start_timeout
        )
        self._problems = _endless(problems, config.seed)
        self._heldout = heldout
        self._folder = folder
        self._progress = progress
        self._batches: asyncio.Queue[_Batch] = asyncio.Queue()
        self.exactness = ExactnessReport()
        """Of all that was trained so far."""
        self._trained = 0
        self._advanced = asyncio.Condition()

    async def run(self) -> None:
        """Train for `training.steps` steps; raises what ended the run early."""
        await self._measure_given_model()
        async with task_group() as tasks:
            tasks.create_task(self._produce(tasks))
            tasks.create_task(self._consume())

    async def _produce(self, tasks: asyncio.TaskGroup) -> None:
        config, ahead = self._config, self._config.training.max_staleness
        for step in range(1, config.training.steps + 1):
            async with self._advanced:
                while step - 1 - self._trained > ahead:
                    await self._advanced.wait()
            problems = list(itertools.islice(self._problems, config.rollout.prompts_per_step))
            self._progress.phase("rollout", len(problems))
            batch = _Batch([], time.perf_counter())
            batch.groups = [
                tasks.create_task(self._group(problem, f"step{step}.{i}", batch))
                for i, problem in enumerate(problems)
            ]
            self._batches.put_nowait(batch)

    async def _group(self, problem: Problem, tag: str, batch: _Batch) -> Group:
        group = await self._machinery.runner.run_group(
            self._machinery.generator, problem, self._config.sampling, tag
        )
        self._progress.advance()
        batch.finished = time.perf_counter()
        return group

    async def _consume(self) -> None:
        previous = time.perf_counter()
        for step in range(1, self._config.training.steps + 1):
            batch = await self._batches.get()
            groups = await asyncio.gather(*batch.groups)
            metrics = {"step": step} | self._describe(groups, batch.finished - batch.started)
            metrics |= await self._train_on(groups)
            metrics |= await self._update_weights()
            evaluation = await self._evaluate(step)
            metrics["accuracy_heldout"] = evaluation.accuracy if evaluation else None
            self._trained = step
            async with self._advanced:
                self._advanced.notify_all()
            await self._save(step, groups, evaluation)
            now = time.perf_counter()
            metrics["step_seconds"], previous = now - previous, now
            await self._report(metrics)

    async def _measure_given_model(self) -> None:
        """Step 0: hand the trainer's weights over once, and evaluate before any training."""
        started = time.perf_counter()
        update = await self._update_weights()
        evaluation = await self._evaluate(0)
        if evaluation is None:
            return
        self._folder.write_trajectories("eval", 0, evaluation.trajectories)
        await self._report(
            {
                "step": 0,
                "reward_mean": evaluation.reward_mean,
                "accuracy_heldout": evaluation.accuracy,
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

    def _describe(self, groups: Sequence[Group], seconds: float) -> dict[str, Any]:
        """What the step's rollouts were like.

        Raises:
            StepError: when too many of them failed.
        """
        dropped = check_failures(groups, self._config.rollout.max_failed_fraction, "rollouts")
        trajectories = [t for group in groups for t in group.trajectories]
        count = len(trajectories)
        sampled = sum(t.sampled_tokens for t in trajectories)
        return {
            "reward_mean": mean([t.reward or 0.0 for t in trajectories]),
            "trajectories": count,
            "dropped": dict(sorted(dropped.items())),
            "statuses": dict(sorted(Counter(t.status for t in trajectories).items())),
            "events": dict(sorted(sum((t.events for t in trajectories), Counter[str]()).items())),
            "turns_mean": mean([len(t.turns) for t in trajectories]),
            "sampled_tokens": sampled,
            "rollout_seconds": seconds,
            "rollout_tokens_per_s": sampled / seconds,
        }

    async def _train_on(self, groups: Sequence[Group]) -> dict[str, Any]:
        samples, without_signal, exactness = await asyncio.to_thread(make_samples, groups)
        self.exactness += exactness
        self._folder.write_exactness(self.exactness)
        if exactness.first_violation is not None and self._config.exactness == "stop":
            raise ExactnessError(
                f"{exactness.violations} violations of exactness; the first: "
                f"{exactness.first_violation}; exactness=warn trains all the same"
            )
        empty = {"logprob_diff_mean": None, "logprob_diff_max": None, "staleness_max": 0}
        metrics: dict[str, Any] = {**empty, "train_tokens_per_s": 0.0, "trained_tokens": 0}
        if samples:
            self._progress.phase("train")
            metrics |= await self._policy.train(samples)
        return metrics | {
            "groups_without_signal": without_signal,
            "exact_percent": exactness.percent,
            "forked": dict(sorted(exactness.forked.items())),
        }

    async def _update_weights(self) -> dict[str, Any]:
        """Hand the trainer's weights to the engine and prove that they arrived.

        Raises:
            WeightUpdateError, DeadlineError: when they did not.
        """
        self._progress.phase("update weights")
        weights, started = self._config.weights, time.perf_counter()
        tolerance = weights.canary_tolerance or _TOLERANCE[self._config.model.dtype]
        version = (await self._delivery.publish())["version"]
        prompt, expected = await self._policy.canary()
        canaries = await self._machinery.manager.update_weights(
            self._delivery,
            lambda engine: check_canary(engine, prompt, expected, tolerance, version),
        )
        seconds = time.perf_counter() - started
        return {
            "weight_version": version,
            "weight_update_seconds": seconds,
            "canary_diff_mean": max((mean for mean, _ in canaries), default=0.0),
            "canary_diff_max": max((largest for _, largest in canaries), default=0.0),
        }

    async def _evaluate(self, step: int) -> Evaluation | None:
        every, last = self._config.eval.every, self._config.training.steps
        if not self._heldout or not every or (step % every and step != last):
            return None
        return await evaluate(
            self._machinery, self._heldout, self._config, self._progress, f"eval{step}"
        )

    async def _save(
        self, step: int, groups: Sequence[Group], evaluation: Evaluation | None
    ) -> None:
        trajectories = [t for group in groups for t in group.trajectories]
        await asyncio.to_thread(self._folder.write_trajectories, "step", step, trajectories)
        if evaluation is not None:
            await asyncio.to_thread(
                self._folder.write_trajectories, "eval", step, evaluation.trajectories
            )
        every, last = self._config.training.checkpoint_every, self._config.training.steps
        if step == last or (every and step % every == 0):
            self._progress.phase("save")
            await self._policy.save(self._folder.checkpoint(step))

    async def _report(self, metrics: dict[str, Any]) -> None:
        await asyncio.to_thread(self._folder.write_step, metrics)
        self._progress.step(metrics)
        if (
            metrics["accuracy_heldout"] is not None
            or metrics["step"] == self._config.training.steps
        ):
            await asyncio.to_thread(self._folder.draw)


def make_samples(groups: Sequence[Group]) -> tuple[list[Sample], int, ExactnessReport]:
    """Samples with their advantages, the number of groups whose rewards are all equal, and the
    audit of it all.

    A group of which fewer than two trajectories came through gives no sample either; `dropped`
    tells why.
    """
    samples: list[Sample] = []
    without_signal = 0
    report = ExactnessReport()
    for group in groups:
        for reason, count in group.dropped_tokens.items():
            report.tokens_sampled += count
            report.masked[f"dropped_{reason}"] += count
        advantages = group_advantages([t.reward or 0.0 for t in group.trajectories])
        if advantages is None:
            alone = len(group.trajectories) < 2
            without_signal += not alone
            for trajectory in group.trajectories:
                report += audit(trajectory, [], masked="alone" if alone else "no_signal")
            continue
        for trajectory, advantage in zip(group.trajectories, advantages, strict=True):
            branches = trajectory.samples()
            report += audit(trajectory, branches)
            samples += [_sample(branch, advantage) for branch in branches]
    return samples, without_signal, report


def _sample(branch: Branch, advantage: float) -> Sample:
    return Sample(
        branch.token_ids,
        branch.response_mask,
        branch.logprobs,
        branch.weight_versions,
        advantage,
    )


def _endless(problems: Sequence[Problem], seed: int) -> Iterator[Problem]:
    """The problems, shuffled anew for each epoch."""
    for epoch in itertools.count():
        yield from random.Random(f"{seed}-{epoch}").sample(problems, len(problems))
