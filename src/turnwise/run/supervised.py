"""The loop of supervised training (`turnwise sft`): rows in, cross-entropy, the same trainer.

The next step's rows are read, in their epoch's order, while the trainer trains. Rows that cannot be
exact are left out for the rest of the run, counted by reason, and named in refused.jsonl.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from turnwise.chat.template import load_template, load_tokenizer, missing_stop
from turnwise.config import Config
from turnwise.config.row_filter import RowFilter
from turnwise.core.aio import run_in_thread, task_group
from turnwise.core.interrupt import Ending
from turnwise.core.json_types import JsonObject
from turnwise.core.ray import watching_ray
from turnwise.core.stacks import write_report
from turnwise.core.watchdog import waiting, watching_progress
from turnwise.errors import InputError, StepError, TrajectoryError
from turnwise.observe.metrics import StepMetrics
from turnwise.rollouts import Problem
from turnwise.rollouts.problems import JoinedProblems, make_stream
from turnwise.run.display import Display
from turnwise.run.fleet import ray_running
from turnwise.run.run_dir import Resume, RunDir
from turnwise.run.token_values import columns_of
from turnwise.training.sample import Sample
from turnwise.training.supervised import RowReader, supervised_samples
from turnwise.training.trainer_group import TrainerGroup
from turnwise.trajectory import ExactnessReport, Trajectory

_OF_ROLLOUTS = ("ratio", "clip_fraction", "correction", "logprob_diff", "staleness")
"""Beginnings of the trainer's metrics that compare tokens with what an engine sampled."""
_SCORED = 64
"""Held-out samples in one call of the trainer, whose deadline is that of a call."""


@asynccontextmanager
async def open_trainer(
    config: Config, folder: Path, progress: Display
) -> AsyncIterator[TrainerGroup]:
    """Start Ray and the trainer, without engines; stop both on exit."""
    async with ray_running(config, progress) as gpus:
        with progress.part("starting the trainer"):
            policy = await TrainerGroup.start(config, folder, num_gpus=min(1.0, gpus))
        try:
            async with watching_ray(config.ray_address):
                yield policy
        finally:
            await policy.close()


@dataclass(slots=True)
class _Rows:
    """The rows of a step."""

    trajectories: list[Trajectory] = field(default_factory=list)
    refused: list[JsonObject] = field(default_factory=list)  # as in refused.jsonl
    state: JsonObject = field(default_factory=dict)  # of the stream, after these rows

    def add(self, reader: RowReader, problem: Problem) -> Trajectory | None:
        """Read a row; returns None if it is refused."""
        try:
            self.trajectories.append(reader.read(problem))
        except TrajectoryError as error:
            why = {"row": problem.id, "reason": error.reason, "detail": str(error)}
            self.refused.append(why)
            return None
        return self.trajectories[-1]


class SupervisedLoop:
    """Trains the policy on rows; see the module's docstring."""

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
        self._config = config
        self._policy = policy
        self._problems, self._heldout = problems, heldout
        self._folder = folder
        self._progress = progress
        self._resume = resume
        template = load_template(config, load_tokenizer(config))
        if why := missing_stop(config, template):
            progress.warn(why)
        self._reader = RowReader(config, template)
        self._stream = make_stream(config, problems)
        self._refused = self._read = 0  # rows so far; the second with the first
        self._measured: dict[str, list[Sample]] = {}
        """Samples of held-out rows, by the name of their set."""
        self.exactness = ExactnessReport()
        """Audit of every token trained so far."""
        self._seconds: dict[str, float] = {}
        self._finished = self._saved = 0 if resume is None else resume.step
        self._state: JsonObject = {}
        """State of the stream after the last finished step."""
        self._saved_at = time.monotonic()
        self._ending = Ending(lambda: self._finished > self._saved)

    async def run(self) -> None:
        """Train until step `training.steps`; raise the error that ended the run early. A run that
        is asked to end saves its last step first."""
        seconds = self._config.watchdog_seconds
        watchdog = watching_progress(seconds, self._report_stall, self._folder.path)
        with self._ending:
            async with watchdog, task_group() as tasks:
                watch = tasks.create_task(self._policy.watch())
                first = await self._begin()
                await self._train(first, self._config.training.steps)
                if self._ending.asked.is_set() and self._finished < self._config.training.steps:
                    if self._finished > self._saved:
                        self._progress.warn(f"asked to end: step {self._finished} is saved first")
                        await self._save(self._finished)
                    await self._ending.finished()
                watch.cancel()

    def _report_stall(self, line: str) -> None:
        report = write_report(self._folder.path, line)
        self._progress.warn(f"{line} (all stacks: {report})" if report else line)

    async def _begin(self) -> int:
        """Read the held-out rows, and resume or measure the model before training; return the
        first step."""
        if self._heldout and self._config.eval.every:
            await run_in_thread(self._read_heldout)
        if self._resume is not None:
            self._progress.phase("resume")
            await self._policy.load(self._resume.checkpoint)
            self._state = self._resume.state["rows"]
            self._stream.restore(self._state)
            self.exactness = ExactnessReport.from_dict(self._resume.state["exactness"])
            return self._resume.step + 1
        started = time.perf_counter()
        metrics = StepMetrics(step=0, reward_mean=None)
        if await self._measure(metrics):
            metrics.step_seconds = time.perf_counter() - started
            await self._report(metrics)
        return 1

    def _read_heldout(self) -> None:
        rows, meets = _Rows(), RowFilter(self._config.data.filter or "true")
        for index, problem in enumerate(self._heldout):
            if not meets(problem.row) or (made := rows.add(self._reader, problem)) is None:
                continue
            name = ""
            if isinstance(self._heldout, JoinedProblems):
                name = self._heldout.name_of_part(index)
            self._measured.setdefault(name, []).extend(supervised_samples([made], 0).samples)
        self._folder.write_refused(rows.refused)
        if rows.refused:
            self._progress.warn(f"{len(rows.refused):,} held-out rows are refused (refused.jsonl)")
        if not self._measured:
            raise InputError("data.eval_path: no row can be used (see refused.jsonl)")

    async def _train(self, first: int, last: int) -> None:
        self._progress.phase("read")
        reading = asyncio.ensure_future(self._next_rows())
        previous = time.perf_counter()
        try:
            for step in range(first, last + 1):
                with self._timed("read"), waiting(f"the rows of step {step}"):
                    rows = await reading
                if step < last:  # while the trainer trains
                    reading = asyncio.ensure_future(self._next_rows())
                metrics = StepMetrics(step=step, reward_mean=None)
                await self._learn(step, rows, metrics)
                await self._measure(metrics)
                now = time.perf_counter()
                metrics.step_seconds, previous = now - previous, now
                metrics.phase_seconds, self._seconds = self._seconds, {}
                self._finished, self._state = step, rows.state
                await self._report(metrics)
                training = self._config.training
                every, minutes = training.checkpoint_every, training.checkpoint_minutes
                old = minutes and time.monotonic() - self._saved_at >= 60 * minutes
                if step == last or (every and step % every == 0) or old:
                    await self._save(step)
                if self._ending.asked.is_set():
                    return
        finally:
            reading.cancel()

    async def _next_rows(self) -> _Rows:
        """Read the rows of a step, and as many more as are refused.

        Raises:
            StepError: when more than `rollout.max_failed_fraction` of the rows so far are refused.
        """
        rows, rollout = _Rows(), self._config.rollout

        def read(problems: Sequence[Problem]) -> None:
            for problem in problems:
                if rows.add(self._reader, problem) is None:
                    self._stream.leave_out(problem, rows.refused[-1]["detail"])

        while lacking := rollout.prompts_per_step - len(rows.trajectories):
            seconds = rollout.environment_timeout
            await run_in_thread(
                read, [await self._stream.take_one(seconds) for _ in range(lacking)]
            )
            refused = self._refused + len(rows.refused)
            known = self._read + len(rows.trajectories) + len(rows.refused)
            if refused > rollout.max_failed_fraction * known:
                await run_in_thread(self._folder.write_refused, rows.refused)
                last = rows.refused[-1]
                raise StepError(
                    f"{refused:,} of {known:,} rows are refused, more than "
                    f"rollout.max_failed_fraction allows; the last is {last['row']} "
                    f"({last['reason']}): {last['detail']}; refused.jsonl names all"
                )
        self._refused, self._read = refused, known
        rows.state = self._stream.state()
        return rows

    async def _learn(self, step: int, rows: _Rows, metrics: StepMetrics) -> None:
        """Train on a step's rows, and write them for the viewer every `samples_every` steps."""
        version = self._policy.version
        batch = await run_in_thread(supervised_samples, rows.trajectories, version)
        self.exactness += batch.report
        self._progress.phase("train")
        with self._timed("train"), waiting("the trainer to train"):
            trained = await self._policy.train(batch.samples)
        metrics.add({k: v for k, v in trained.items() if not k.startswith(_OF_ROLLOUTS)})
        metrics.trajectories = len(rows.trajectories)
        metrics.exact_percent = batch.report.percent
        metrics.forked = dict(batch.report.forked)
        metrics.epoch = step * self._config.rollout.prompts_per_step / len(self._problems)
        metrics.refused = dict(Counter(row["reason"] for row in rows.refused)) or None
        await run_in_thread(self._folder.write_refused, rows.refused)
        every = self._config.samples_every
        if every and (step == 1 or step % every == 0):
            with self._timed("write"):
                values, shown = self._policy.trained_tokens, rows.trajectories
                await run_in_thread(self._folder.write_trajectories, step, shown)
                columns = await run_in_thread(columns_of, values, batch.origins, shown, version)
                await run_in_thread(self._folder.write_token_values, step, columns)

    async def _measure(self, metrics: StepMetrics) -> bool:
        """Measure the loss on held-out rows where the step is one for it; returns whether it is."""
        every, last = self._config.eval.every, self._config.training.steps
        metrics.heldout, step = {}, metrics.step or 0
        if not self._measured or (step % every and step != last):
            return False
        self._progress.phase("evaluate")
        losses: dict[str, tuple[float, int]] = {}  # sum and number of tokens, by set
        with self._timed("evaluate"):
            for name, samples in self._measured.items():
                total = 0.0
                for start in range(0, len(samples), _SCORED):
                    part = samples[start : start + _SCORED]
                    ids = [sample.token_ids_T.tolist() for sample in part]
                    masks = [sample.response_mask_T.tolist() for sample in part]
                    with waiting("the trainer to score held-out rows"):
                        scored = await self._policy.score("policy", ids, masks)
                    total -= sum(sum(values) for values in scored)
                losses[name] = total, sum(sample.trained for sample in samples)
        sums, counts = zip(*losses.values(), strict=True)
        metrics.loss_heldout = sum(sums) / sum(counts)
        metrics.heldout = {"loss": metrics.loss_heldout}
        if "" not in losses:
            metrics.heldout_sets = {k: {"loss": s / n} for k, (s, n) in losses.items()}
        return True

    async def _save(self, step: int) -> None:
        """Save a checkpoint; called after the step's metrics are written, so none are lost."""
        self._progress.phase("save")
        with self._timed("save"), waiting(f"the trainer to save step {step}"):
            await run_in_thread(self._folder.write_exactness, self.exactness)
            place = await run_in_thread(self._folder.begin_checkpoint, step)
            await self._policy.save(place)
            exactness = self.exactness.to_dict()
            state = {"step": step, "rows": self._state, "exactness": exactness}
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
        if metrics.loss_heldout is not None or metrics.step == self._config.training.steps:
            await run_in_thread(self._folder.draw)
