"""The loop of supervised training (`turnwise sft`): cross-entropy on rows, with the same trainer.

A row is a group of one trajectory; the next step's rows are read while the trainer trains. Rows
that cannot be trained exactly are left out for the rest of the run, counted by reason, and named in
refused.jsonl.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial

from turnwise.chat.template import load_template, load_tokenizer, missing_stop
from turnwise.config import Config
from turnwise.core.aio import run_in_thread
from turnwise.core.json_types import JsonObject
from turnwise.core.ray import watching_ray
from turnwise.core.run_files import RunFiles
from turnwise.core.watchdog import waiting
from turnwise.errors import TrajectoryError, translate_unwritable
from turnwise.observe.metrics import StepMetrics
from turnwise.rollouts import Batch, Group, GroupProducer, Problem
from turnwise.rollouts.evaluation import run_groups
from turnwise.rollouts.group import Outcomes
from turnwise.rollouts.problems import make_stream
from turnwise.run.display import Display
from turnwise.run.fleet import ray_running
from turnwise.run.run_dir import Resume, RunDir
from turnwise.run.runtime import start_policy
from turnwise.run.trainer import Loop
from turnwise.training.sample import Sample
from turnwise.training.samples import SampleBatch
from turnwise.training.supervised import RowReader, supervised_samples
from turnwise.training.trainer_group import TrainerGroup
from turnwise.trajectory import ExactnessReport

_OF_ROLLOUTS = ("ratio", "clip_fraction", "correction", "logprob_diff", "staleness")
"""Prefixes of trainer metrics that compare the trainer's log-probs with an engine's."""
_REFUSED = "refused.jsonl"
_SCORED = 64
"""Maximum number of held-out samples in one call to the trainer, because each call has a
deadline."""
_FEW = 20  # rows; among fewer rows, a high share of refused rows may be chance


async def train_on_rows(
    config: Config,
    problems: Sequence[Problem],
    heldout: Sequence[Problem],
    folder: RunDir,
    progress: Display,
    resume: Resume | None,
) -> ExactnessReport:
    """Start Ray and the trainer, without engines, and train; return the audit."""
    async with ray_running(config, progress) as (known, gpus), AsyncExitStack() as stack:
        policy = await start_policy(known, folder.path, min(1.0, gpus), stack, progress)
        async with watching_ray(config.ray_address):
            made = partial(SupervisedLoop, config, policy, problems, heldout, folder, progress)
            loop = await run_in_thread(made, resume)
            await loop.run()
    return loop.exactness


class SupervisedLoop(Loop):
    """Trains the policy on rows; see the module's docstring."""

    _waits = "read"

    def __init__(
        self,
        config: Config,
        policy: TrainerGroup,
        problems: Sequence[Problem],
        heldout: Sequence[Problem],
        folder: RunDir,
        progress: Display,
        resume: Resume | None = None,
    ) -> None:
        template = load_template(
            config.model, config.sampling, config.engine, load_tokenizer(config.model)
        )
        if why := missing_stop(config.model, config.sampling, template):
            progress.warn(why)
        self._reader = RowReader(config.model.max_length, template, progress.warn)
        self._rows, self._heldout = len(problems), heldout
        self._stream = make_stream(problems, config.data, config.seed, config.environment_weights)
        self._files = RunFiles(folder.path)
        self._rollout = config.rollout
        self._turn = asyncio.Lock()  # one row is read at a time, so that rows are trained in order
        self._read_so_far = Outcomes()  # outcomes of training rows
        self._measured: list[Sample] = []  # samples of held-out rows

        async def has_signal(_: Group) -> bool:
            return True

        producer = GroupProducer(
            config, self._read_to_train, self._stream, has_signal, progress.advance
        )
        super().__init__(config, policy, producer, folder, progress, resume)

    async def _read(self, problem: Problem, _: str) -> Group:
        """Return a row's group, with the row's trajectory, or with the reason why the row is
        refused."""

        def read() -> Group:
            group = Group.of(problem)
            try:
                group.trajectories.append(self._reader.read(problem))
            except TrajectoryError as error:
                group.dropped[error.reason] += 1
                group.note(error.reason, f"{problem.id}: {error}")
                why = {"row": problem.id, "reason": error.reason, "detail": str(error)}
                with translate_unwritable(self._files.path(_REFUSED)):
                    self._files.append(_REFUSED, json.dumps(why, ensure_ascii=False) + "\n")
            return group

        return await run_in_thread(read)

    async def _read_to_train(self, problem: Problem, tag: str) -> Group:
        async with self._turn:
            group = await self._read(problem, tag)
        self._read_so_far.add(group)
        for reason in group.dropped:
            group.left_out = reason
            read = self._read_so_far.finished + self._read_so_far.dropped.total()
            if read >= min(_FEW, self._rows):
                self._read_so_far.check(self._rollout.max_failed_fraction, "data.path")
        return group

    async def _begin(self) -> int:
        if self._heldout and self._config.eval.every:
            await self._read_heldout()
        return await super()._begin()

    async def _read_heldout(self) -> None:
        def add(group: Group) -> None:
            self._measured += supervised_samples(group.trajectories, 0).samples
            self._progress.advance()

        self._progress.phase("read held-out rows", len(self._heldout))
        seconds, failed = self._rollout.environment_timeout, self._rollout.max_failed_fraction
        with waiting("held-out rows"):  # one at a time, in their order
            read = await run_groups(
                self._read, self._heldout, "", on_group=add, at_once=1, row_seconds=seconds
            )
        for reason, count in read.check(failed, "data.eval_path").items():
            self._progress.warn(f"{count:,} held-out rows are refused: {read.causes[reason]}")

    async def _make_samples(self, batch: Batch, metrics: StepMetrics) -> SampleBatch:
        trajectories = [t for group in batch.groups for t in group.trajectories]
        metrics.reward_mean, metrics.trajectories = None, len(trajectories)
        refused = (group.dropped for _, group in batch.discarded)
        metrics.dropped = dict(sorted(sum(refused, Counter[str]()).items()))
        metrics.epoch = (metrics.step or 0) * len(trajectories) / self._rows
        return await run_in_thread(supervised_samples, trajectories, self._policy.version)

    async def _train(self, samples: SampleBatch) -> JsonObject:
        if not samples.samples:
            return {}
        with waiting("the trainer to train"):
            trained = await self._policy.train(samples.samples)
        return {key: v for key, v in trained.items() if not key.startswith(_OF_ROLLOUTS)}

    async def _measure(self, metrics: StepMetrics) -> None:
        """Measure the loss on held-out rows, if it is due at this step."""
        every, last = self._config.eval.every, self._config.training.steps
        metrics.reward_mean, metrics.heldout, step = None, {}, metrics.step or 0
        if not self._measured or (step % every and step != last):
            return
        self._progress.phase("evaluate")
        total = 0.0
        with self._timed("evaluate"):
            for start in range(0, len(self._measured), _SCORED):
                part = self._measured[start : start + _SCORED]
                with waiting("the trainer to score held-out rows"):
                    scored = await self._policy.forward("policy", part)
                total -= sum(sum(values) for values in scored)
        metrics.loss_heldout = total / sum(sample.trained for sample in self._measured)
        metrics.heldout = {"loss": metrics.loss_heldout}

    def _is_written(self, step: int) -> bool:
        every = self._config.samples_every
        return bool(every) and (step == 1 or step % every == 0)

    def _state(self) -> JsonObject:
        return {"supervised": True}
