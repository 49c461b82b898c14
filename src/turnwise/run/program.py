"""A run whose training loop is the user's own program; its methods are the parts of a step.

The run folder is like a run folder of `turnwise train`, with a line of metrics, trajectories and
token values for each optimizer step. `run.opened` has the same methods as blocking calls.
"""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np

from turnwise.config import Config
from turnwise.config.rollout import BASE
from turnwise.core.aio import run_in_thread, together
from turnwise.core.json_types import JsonObject
from turnwise.core.optional import Foreign
from turnwise.core.user_code import call_user_code
from turnwise.engine.adapters import POLICY
from turnwise.engine.protocol import Request, Route, generate
from turnwise.errors import InputError
from turnwise.observe.metrics import StepMetrics
from turnwise.rollouts import Batch, Group, Problem, check_failures
from turnwise.rollouts.evaluation import Evaluation, evaluate, groups_at_once
from turnwise.rollouts.group import turn_times
from turnwise.rollouts.problems import Row, make_stream
from turnwise.rollouts.sampler import changed_sampling
from turnwise.run.run_dir import RunDir
from turnwise.run.runtime import Runtime, TrainingStep
from turnwise.run.token_values import columns_of
from turnwise.training import checkpoint
from turnwise.training.algorithms import weighted_logprobs, with_loss
from turnwise.training.algorithms.losses import CrossEntropyLoss
from turnwise.training.loading import missing_model
from turnwise.training.reports import OptimSettings, TrainedSample, joined
from turnwise.training.sample import Sample
from turnwise.training.samples import SampleBatch
from turnwise.training.trainer_group import TrainerGroup
from turnwise.trajectory import ExactnessReport, Message, Prompt

_Parts = tuple[Runtime, TrainerGroup, TrainingStep]
_FOREIGN = "these samples are of another run: make them by this run's samples()"


class Answer(NamedTuple):
    """One sampled answer to a prompt."""

    text: str
    """Text of the answer, with its special tokens except a final EOS."""
    token_ids: list[int]
    logprobs: list[float]
    """Natural-log probability of each token under the sampling distribution."""
    finish_reason: str


@dataclass(slots=True)
class Samples(SampleBatch):
    """The samples of some groups, as `samples()` makes them for `forward_backward`."""

    groups: Sequence[Group] = ()
    owner: "AsyncRun | None" = None


class AsyncRun:
    """Engines and trainer of a run, for a training loop of your own in an `async with` block.

    Attributes:
        config: The run's configuration.
        folder: The run's folder.
        step: Number of optimizer steps taken, including those before the run was resumed.
        exactness: Audit of every token trained so far.

    Example:
        async with turnwise.open("config.yaml") as run:
            ahead = asyncio.create_task(run.rollout(run.problems(16)))
            while run.step < 100:
                groups = await ahead
                ahead = asyncio.create_task(run.rollout(run.problems(16)))
                await run.forward_backward(await run.samples(groups))
                await run.optim_step()
                await run.sync()
            ahead.cancel()
    """

    def __init__(
        self,
        config: Config,
        runtime: Runtime,
        data: Sequence[Problem],
        heldout: Sequence[Problem],
        files: RunDir,
    ) -> None:
        assert runtime.policy is not None
        self.config = config
        self.folder = files.path
        self.step = 0
        self.exactness = ExactnessReport()
        self.state: JsonObject = {}
        """Values that the program gave to `save`; empty until a checkpoint is loaded."""
        self._opened: _Parts | None = runtime, runtime.policy, TrainingStep(config, runtime)
        self._stream = make_stream(data, config.data, config.seed, config.environment_weights)
        self._heldout = heldout
        self._files = files
        self._tags = itertools.count(1)
        self._begun = 0  # number of groups that have begun
        self._added: list[Samples] = []
        """Samples whose gradients wait for an optimizer step."""
        self._metrics: list[JsonObject] = []
        self._values: list[TrainedSample] = []
        self._line: StepMetrics | None = None
        """Metrics of the last step, whose line is written already; later metrics are added to the
        line."""
        self._ended = time.perf_counter()
        self._seconds: dict[str, float] = {}

    def close(self) -> None:
        """Refuse all further calls."""
        self._opened = None

    @property
    def _parts(self) -> "_Parts":
        if self._opened is None:
            raise InputError("the run is closed: use it inside its with block")
        return self._opened

    @property
    def _runtime(self) -> Runtime:
        return self._parts[0]

    @property
    def _policy(self) -> TrainerGroup:
        return self._parts[1]

    @property
    def _training(self) -> TrainingStep:
        return self._parts[2]

    @property
    def version(self) -> int:
        """Version of the trainer's weights: the number of optimizer steps that changed them."""
        return self._policy.version

    def problems(self, count: int) -> list[Problem]:
        """Return the next problems of `data.path`, in an endless order of shuffled epochs."""
        return self._stream.take(count)

    async def rollout(self, problems: Sequence[Problem | Row]) -> list[Group]:
        """Sample `sampling.n` trajectories of each problem or row, and reward them.

        Raises:
            StepError: when more than `rollout.max_failed_fraction` of the trajectories fail.
        """
        run_group = self._runtime.training_runner(self.config.sampling)
        tag, started = f"rows{next(self._tags)}", time.perf_counter()
        named = [
            each if isinstance(each, Problem) else Problem(f"{tag}:{number}", dict(each))
            for number, each in enumerate(problems, start=1)
        ]

        async def group_of(problem: Problem, name: str) -> Group:
            return await run_group(problem, name)

        # The same names as in `turnwise train`, because seeds of deterministic runs depend on them.
        first, self._begun = self._begun, self._begun + len(named)
        groups = await together(group_of(p, f"group{n}") for n, p in enumerate(named, first))
        self._spent("idle", started)
        check_failures(groups, self.config.rollout.max_failed_fraction, "rollouts")
        return groups

    async def samples(self, groups: Sequence[Group]) -> Samples:
        """Return the samples of groups, with advantages and masks, audited token by token.

        Raises:
            ExactnessError: when a token differs from the sampled token, unless `exactness` is
                `warn`; the message names the first such token.
        """
        made = await self._training.make_samples(groups)
        self._training.check_exact(made.report)
        fields = {name: getattr(made, name) for name in SampleBatch.__dataclass_fields__}
        return Samples(**fields, groups=groups, owner=self)

    async def forward_backward(
        self,
        samples: Samples | Sequence[Sample],
        loss: object = None,
        reduction: str | None = None,
    ) -> JsonObject:
        """Compute the gradient of samples, and add it to the gradients that wait for `optim_step`.

        Args:
            loss: Name of a loss (`ppo_clip`), or a mapping with its settings; a path,
                package.module:name; a `turnwise.training.algorithms.Loss`; or a function that runs
                in the trainer's processes, takes a micro-batch's `Tokens`, and returns the loss of
                each of the `N` tokens, [N]. None takes `algorithm.loss`.
            reduction: Replaces `algorithm.reduction`; None takes `algorithm.reduction`.

        Returns:
            The metrics of the loss; empty if there is nothing to train.

        Raises:
            InputError: when the loss or the samples cannot be used.
        """
        algorithm, made = with_loss(self.config.algorithm, loss, reduction)
        used = made or self._training.algorithm.loss
        if used.needs_reference and (why := missing_model(self.config.algorithm, "reference")):
            raise InputError(why)
        if used.needs_pairs and not self._training.algorithm.loss.needs_pairs:
            raise InputError(
                "this loss compares pairs, which samples() makes where algorithm.loss does: set it"
            )
        chosen = self._chosen(samples)
        if used.on_policy and any(
            (each.weight_versions_T[each.response_mask_T] < self.version).any() for each in chosen
        ):
            raise InputError(
                f"some of these tokens were sampled before version {self.version}, and this loss "
                "has no importance ratio: sample again, or take a loss such as ppo_clip"
            )
        changes = () if loss is None and reduction is None else (algorithm, made)
        metrics = await self._add(samples, chosen, *changes)
        return metrics

    async def forward_backward_custom(
        self,
        samples: Samples | Sequence[Sample],
        function: Callable[..., Foreign],
    ) -> JsonObject:
        """Compute a loss of log-probs in this process, and add its gradient to those that wait.

        Args:
            function: function(samples, logprobs) -> (loss, metrics): `logprobs` has one tensor for
                each sample: the log-probs of the sample's N trained tokens, with gradient. The loss
                is a scalar.

        Returns:
            The function's metrics, and `loss`.
        """
        import torch

        chosen = self._chosen(samples)
        scored = await self._training.forward("policy", chosen)
        masks = [each.response_mask_T for each in chosen]
        logprobs = [
            torch.tensor(np.asarray(values)[mask], dtype=torch.float32, requires_grad=True)
            for values, mask in zip(scored, masks, strict=True)
        ]

        def compute() -> tuple[float, JsonObject]:
            loss, metrics = function(chosen, logprobs)
            loss.backward()
            return float(loss.detach()), dict(metrics)

        seconds, key = self.config.training.step_timeout, "training.step_timeout"
        loss, metrics = await call_user_code(compute, name="the loss", seconds=seconds, key=key)
        linear: list[Sample] = []
        for sample, mask, leaf in zip(chosen, masks, logprobs, strict=True):
            weights_T = np.zeros(sample.length, np.float32)
            if leaf.grad is not None:
                weights_T[mask] = -leaf.grad.numpy()
            linear.append(replace(sample, advantages_T=weights_T, teacher_weights=(0.0, 0.0)))
        plain = weighted_logprobs(self.config.algorithm)
        await self._add(samples, linear, plain, CrossEntropyLoss())
        return {**metrics, "loss": loss}

    def _chosen(self, samples: Samples | Sequence[Sample]) -> list[Sample]:
        if not isinstance(samples, Samples):
            return list(samples)
        if samples.owner is not self:
            raise InputError(_FOREIGN)
        return samples.samples

    async def _add(
        self, given: Samples | Sequence[Sample], chosen: Sequence[Sample], *how: Foreign
    ) -> JsonObject:
        started = time.perf_counter()
        if isinstance(given, Samples) and all(given is not each for each in self._added):
            self._added.append(given)
            self.exactness += given.report
            await run_in_thread(self._files.write_exactness, self.exactness)
        if not chosen:
            return {}
        metrics = await self._training.forward_backward(chosen, *how)
        self._metrics.append(metrics)
        self._values += self._policy.trained_tokens
        self._spent("train", started)
        return metrics

    async def optim_step(
        self,
        learning_rate: float | None = None,
        *,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        max_grad_norm: float | None = None,
    ) -> JsonObject:
        """Take an optimizer step with the gradients that wait for it, and write the step's files.

        Values that are not given come from the configuration and its schedule.

        Returns:
            `step`, `reward_mean`, `loss`, `grad_norm`, `learning_rate` and `skipped_updates`.

            If there is nothing to train, no optimizer step is taken, and the last four values are
            None.

        Raises:
            InputError: when `forward_backward` was not called.
        """
        started, version = time.perf_counter(), self.version
        settings = OptimSettings(learning_rate, betas, eps, weight_decay, max_grad_norm)
        taken: JsonObject = {}
        if self._metrics or not self._added:  # else there was nothing to train
            taken = await self._training.optim_step(settings)
        self.step += 1
        self._spent("train", started)
        line = StepMetrics(step=self.step)
        line.add_evaluation(None)
        groups = [group for each in self._added for group in each.groups]
        line.add_rollouts(Batch(groups), sum((g.dropped for g in groups), Counter[str]()))
        for each in self._added:
            line.add_samples(each)
        line.add(joined(self._metrics))
        line.add(taken)
        await self._write(line, groups, version)
        self._added, self._metrics, self._values = [], [], []
        names = ("step", "reward_mean", "loss", "grad_norm", "learning_rate", "skipped_updates")
        return {name: getattr(line, name) for name in names}

    async def _write(self, line: StepMetrics, groups: Sequence[Group], version: int) -> None:
        """Write the files of a step."""
        trajectories = [t for group in groups for t in group.trajectories]
        await run_in_thread(self._files.write_trajectories, self.step, trajectories)
        await run_in_thread(self._files.write_timeline, self.step, turn_times(groups))
        origins = {k: v for each in self._added for k, v in each.origins.items()}
        known = list({id(p[0]): p for p in self._values[::-1] if id(p[0]) in origins}.values())
        if known:  # each sample's values in its first pass
            columns = await run_in_thread(columns_of, known, origins, trajectories, version)
            await run_in_thread(self._files.write_token_values, self.step, columns)
        line.step_seconds, self._ended = time.perf_counter() - self._ended, time.perf_counter()
        line.phase_seconds, self._seconds = self._seconds, {}
        self._line = line
        await run_in_thread(self._files.metrics.write, line.to_json())

    async def drop(self) -> None:
        """Drop the gradients that wait for an optimizer step."""
        self._added, self._metrics, self._values = [], [], []
        await self._policy.drop()

    async def sync(self) -> int:
        """Send the trainer's weights to the engines, unless the engines have these weights already;
        return the engines' weight version."""
        started = time.perf_counter()
        update = await self._training.update_weights()
        self._spent("weights", started)
        await self._amend(update)
        return int(update["weight_version"])

    async def _amend(self, metrics: JsonObject) -> None:
        """Add metrics to the line of the last step."""
        if self._line is not None:
            self._line.add(metrics)
            await run_in_thread(self._files.metrics.amend, self._line.to_json())

    def _spent(self, phase: str, started: float) -> None:
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - started

    async def evaluate(self) -> Evaluation:
        """Evaluate the engines' weights on the held-out problems, under `eval.sampling`.

        Raises:
            InputError: when there are no held-out rows.
            StepError: when more than `rollout.max_failed_fraction` of the trajectories fail.
        """
        if not self._heldout:
            raise InputError("there are no held-out rows: set data.eval_path, or give eval_data")
        run_group = self._runtime.group_runner(self.config.eval.sampling)
        kept = self._files.group_log("eval", self.step)
        tag = f"eval{self.step}-{next(self._tags)}"
        config = self.config
        at_once = groups_at_once(config, config.eval.sampling.n)
        limits = config.eval, config.rollout, at_once
        made = await evaluate(run_group, self._heldout, *limits, tag, kept=kept)
        line = StepMetrics(step=self.step) if self._line is None else self._line
        line.add_evaluation(made)
        if self._line is None and not self._files.metrics.rows:
            line.reward_mean, line.trajectories = made.summary["reward_mean"], made.finished
            self._line = line
            await run_in_thread(self._files.metrics.write, line.to_json())
        else:
            await self._amend({})
        return made

    async def sample(
        self,
        /,
        prompt: str | Sequence[int] | Sequence[Message],
        n: int = 1,
        policy: str = "policy",
        **sampling: object,
    ) -> list[Answer]:
        """Sample answers to one prompt, without tools and rewards.

        Args:
            prompt: Messages; a text, which is a user's message; or token ids.
            policy: Name of the policy that answers, in a run of several policies
                (`rollout.policies`), or `base` for the model without an adapter.
            **sampling: Keys of `sampling` with values that replace the configuration's.
        """
        template = self._runtime.runner.template
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        if prompt and not isinstance(prompt[0], int):
            ids = await run_in_thread(template.render, cast("Sequence[Message]", prompt))
        else:
            ids = Prompt(cast("Sequence[int]", prompt))
        chosen = changed_sampling(self.config.sampling, sampling)
        room = self.config.model.max_length - len(ids)
        if room < 1:
            raise InputError(f"a prompt of {len(ids)} tokens leaves no room (model.max_length)")
        chosen = chosen.model_copy(update={"max_tokens": min(chosen.max_tokens, room)})
        tag = f"sample{next(self._tags)}"
        several = self.config.rollout.policies
        if policy not in (known := [*several, BASE] if several else ["policy"]):
            raise InputError(f"sample: there is no policy {policy!r}: name {' or '.join(known)}")
        route = Route(adapter=policy if policy in several else POLICY)
        made = await together(
            generate(self._runtime.generator, Request(ids, chosen, f"{tag}-{number}", route=route))
            for number in range(n)
        )
        return [
            Answer(template.decode(c.token_ids), c.token_ids, c.logprobs, c.finish_reason)
            for c in made
        ]

    async def logprobs(
        self,
        samples: Samples | Sequence[Sample] | Sequence[Sequence[int]],
        model: str = "policy",
    ) -> list[list[float]]:
        """Score samples, or sequences of token ids, with a model of the trainer.

        Args:
            model: `policy`, with its current weights (in a run of several policies, each sample's
                own policy); the name of one of several policies; `reference`; or `value`.

        Returns:
            T floats for each sequence: log-probs, or, from the value model, the expected return
            before each token. They are 0.0 at the first token, and at tokens of samples that are
            not trained.
        """
        if model not in (known := ["policy", "reference", "value", *self.config.policies]):
            raise InputError(f"logprobs: there is no model {model!r}: name {' or '.join(known)}")
        if why := missing_model(self.config.algorithm, model):
            raise InputError(why)
        given: Sequence[Sample | Sequence[int]]
        given = self._chosen(samples) if isinstance(samples, Samples) else list(samples)
        made = [
            each if isinstance(each, Sample) else Sample.to_score(each, [1] * len(each))
            for each in given
        ]
        return await self._training.forward(model, made)

    async def save(
        self, folder: str | Path | None = None, state: Mapping[str, object] | None = None
    ) -> Path:
        """Write a checkpoint atomically: the model in Hugging Face's format (with LoRA, the
        adapter) and the state to continue from. Return the checkpoint's folder.

        Args:
            folder: Folder of the checkpoint; None writes it to the run's own folder, from which
                `turnwise.open(resume=...)` continues.
            state: Plain values that your program wants to keep; a run that loads the checkpoint has
                them as its `state`.

        Raises:
            InputError: when the folder holds anything but an earlier checkpoint.
        """
        own = checkpoint.folder_of(self.folder, self.step)
        loop = {
            "step": self.step,
            "exactness": self.exactness.to_dict(),
            "problems": self._stream.state(),
            "groups": self._begun,
            "program": dict(state or {}),
        }
        place = await self._training.save(own if folder is None else Path(folder), loop)
        if folder is None:
            kept = checkpoint.checkpoints_of(self.folder), self.config.training.keep_last, None
            await run_in_thread(checkpoint.prune, *kept)
        return place

    async def load(self, folder: str | Path) -> int:
        """Continue from a checkpoint that `save` or `turnwise train` wrote: restore model,
        optimizer, `step`, `exactness`, `state`, and the position in the problems. Send the weights
        to the engines, and return their version."""
        loop = await self._training.load(Path(folder))
        if "problems" in loop:
            await run_in_thread(self._stream.restore, loop["problems"])
            self._begun = loop["groups"]
        self.step, self.state = loop["step"], loop.get("program", {})
        rows = [row for row in self._files.metrics.rows if row["step"] == self.step]
        self._line = StepMetrics.from_json(rows[0]) if rows else None
        self.exactness = ExactnessReport.from_dict(loop["exactness"])
        return await self.sync()
