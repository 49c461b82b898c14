"""One rank of the trainer: its shard of the models, the optimizers, and the weight sender.

It works on samples and tensors, and knows nothing about trajectories, engines or the training loop.
The weight version is the number of optimizer steps. All ranks make the same calls in the same
order; each rank computes sums, and the caller adds up the sums of all ranks.
"""

import resource
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch

from turnwise.config import AlgorithmConfig, Config, SamplingConfig, TrainingConfig
from turnwise.errors import InputError, TurnwiseError
from turnwise.training import checkpoint_state
from turnwise.training.adapters import Adapters
from turnwise.training.algorithms import Loss, make_algorithm
from turnwise.training.algorithms.entropy import EntropyControl
from turnwise.training.batching import (
    Columns,
    MicroBatch,
    RankBatches,
    make_micro_batch,
    threads_of,
)
from turnwise.training.context import ContextGroup
from turnwise.training.export import export_adapters, export_model
from turnwise.training.gradient import Gradients, How
from turnwise.training.layout_check import check_run
from turnwise.training.loading import additional_models, load_models, missing_model
from turnwise.training.lora import (
    adapter_tensors,
    changed_parameters,
    merged_tensors,
    note_without_adapter,
    remove_adapter,
)
from turnwise.training.memory import check_room
from turnwise.training.offload import Offload
from turnwise.training.optimizer import TrainableModule, plain_tensors
from turnwise.training.reports import (
    CONFIGURED,
    RECORDED,
    OptimSettings,
    StepReport,
    UpdateReport,
)
from turnwise.training.sample import Sample
from turnwise.training.shards import full_tensors, tensor_shapes
from turnwise.training.vision import probe
from turnwise.trajectory import Prompt
from turnwise.weights.delta import with_deltas
from turnwise.weights.manifest import Manifest, NamedTensors, canary_prompt
from turnwise.weights.process_group import free_address, join_ranks
from turnwise.weights.transport import make_sender

_T = TypeVar("_T")
_PLAIN = SamplingConfig()
_ALL = ("params", "optimizer")


class TrainerRank:
    """One rank of the trainer. Several ranks rendezvous before they load the model.

    Args:
        folder: The run's folder.
        rank: Number of this rank, from 0.
        ranks: Number of ranks.
        address: host:port of rank 0; "" for a single rank, which needs no process group.
    """

    def __init__(
        self,
        config: Config,
        folder: Path | None = None,
        *,
        rank: int = 0,
        ranks: int = 1,
        address: str = "",
    ) -> None:
        self._config = config
        self._training = training = config.training
        self._rank, self._ranks = rank, ranks
        torch.manual_seed(config.seed)
        if config.deterministic:
            torch.use_deterministic_algorithms(True)
        self.device = begin_process(training, rank, ranks, address)
        group = None
        if (size := training.context_parallel) > 1:
            group = ContextGroup.of_this_rank(size, timedelta(seconds=training.step_timeout))
        self._algorithm, algorithm = config.algorithm, make_algorithm(config.algorithm)
        self._advantage, self._loss = algorithm.advantage, algorithm.loss
        beside = additional_models(config.algorithm, config.teachers())
        check_room(config.model, training, config.policies, beside, self.device, ranks)
        self._models = models = load_models(config, beside, self.device, group)
        self.layouts, self.layouts_note, self._no_images = check_run(
            models, config.model, training, config.engine
        )
        self._scorer = self._models.policy
        self._model = self._scorer.get_submodule("model")
        self.adapters_note = note_without_adapter(self._model, config.model.lora)
        needed = self._advantage.value_model
        self._warmup = needed.warmup_steps if needed else 0
        updates = max(0, training.steps - self._warmup) * training.optimizer_steps
        self._policies = config.policies
        self._learners: dict[str, TrainableModule] = {}
        for name in self._policies:
            learning = self._models.trained(name)
            assert learning is not None
            rate = config.learning_rate
            self._learners[name] = TrainableModule(learning, training, rate, updates)
        if needed is not None and (critic := self._models.trained("value")) is not None:
            self._learners["critic"] = TrainableModule(critic, training, needed.learning_rate, None)
        run, shared = folder or config.run_folder, config.weights.folder
        sender = make_sender(
            "in_process" if training.colocated and ranks == 1 else config.weights.transport,
            self._sent(),
            self._scorer.dtype,
            device=self.device,
            rank=rank,
            folder=Path(shared, config.name) if shared else run / "weights",
            timeout=config.weights.update_timeout,
        )
        self._sender = with_deltas(sender) if config.weights.delta else sender
        kinds = {"params": self._models.weights, "optimizer": self._moments}
        self._offload = Offload(kinds, run.absolute())
        self._entropy = EntropyControl(config.algorithm.entropy)
        self._gradients = Gradients(
            config.algorithm,
            training,
            models,
            self._advantage,
            self._entropy,
            ranks,
            longest=config.max_response_tokens,
            teaches=any(teacher.in_ranks for teacher in config.teachers().values()),
        )
        self._adapters: Adapters | None = None
        if config.model.lora.rank:
            self._adapters = Adapters(
                config.model,
                training,
                config.learning_rate,
                self._model,
                self.device,
                run.absolute(),
            )
        self._added = defaultdict[str, list[UpdateReport]](list)
        """Reports of the gradients that wait for `optim_step`, by the name of the policy or
        adapter."""
        self._steps = 0
        self._skipped_in_row: dict[str, int] = {}
        """Number of consecutive updates without a finite gradient, by the learner's name."""
        self.version = 0
        self._whole = True
        """Whether the weights are from the end of a step; False between a step's first update and
        the end of the step."""

    def train(
        self, shares: Sequence[RankBatches], name: str = "policy", version: int | None = None
    ) -> StepReport:
        """Take an optimizer step of a policy on each share, in each pass over the shares.

        Args:
            version: Weight version at the start of the training step, if several policies are
                trained one after the other in it; None: the current version.

        Raises:
            TurnwiseError: when `training.max_skipped` updates in a row had no finite gradient.
        """
        started, passes = time.perf_counter(), self._training.epochs_per_step
        self._offload.bring_back(_ALL)
        steps = [[self._batch(samples, s, version) for samples in s.micro_batches] for s in shares]
        batches = [batch for step in steps for batch in step]
        how = How(self._algorithm, self._loss, name)
        self._gradients.prepare(batches, how, len(steps) * passes)
        recorded = [torch.zeros(len(RECORDED), 0, device=self.device)]
        updates: list[UpdateReport] = []
        for _ in range(passes):
            for step, share in zip(steps, shares, strict=True):
                self.drop(name)  # drop gradients that a failed update left
                self._added[name].append(
                    self._gradients.add(step, share, how, recorded, self._warming)
                )
                updates.append(self._update(name, CONFIGURED))
        self._end_step()
        return self._report(shares, batches, passes, updates, recorded, started)

    def forward_backward(
        self,
        share: RankBatches,
        algorithm: AlgorithmConfig | None = None,
        loss: Loss | None = None,
        name: str = "policy",
        learns: bool = True,
    ) -> StepReport:
        """Add the gradient of a share to the gradients that wait for `optim_step`; an error drops
        all of these gradients.

        Args:
            algorithm: Loss, penalties and reduction, in place of the configured ones.
            loss: Loss in place of the loss of `algorithm`.
            name: A policy or an added adapter; an adapter's tokens are scored at temperature 1.
            learns: Whether to add the gradient; if False, only make the report.
        """
        started = time.perf_counter()
        self._offload.bring_back(["params"])
        if algorithm is None:
            algorithm, loss = self._algorithm, loss or self._loss
        elif loss is None:
            loss = make_algorithm(algorithm).loss
        how, warming = How(algorithm, loss, name, learns=learns), self._warming
        if name not in self._learners:
            label, warming = self._added_adapters.use(name).label, False
            how = how._replace(model=label, sampling=_PLAIN)
        batches = [self._batch(samples, share) for samples in share.micro_batches]
        recorded = [torch.zeros(len(RECORDED), 0, device=self.device)]
        try:
            with torch.set_grad_enabled(learns):
                self._gradients.prepare(batches, how, 1)
                report = self._gradients.add(batches, share, how, recorded, warming)
        except BaseException:
            if learns:  # a part of the gradient may have been added
                self.drop(name)
            raise
        if learns:
            self._added[name].append(report)
        return self._report([share], batches, 1, [report], recorded, started)

    def optim_step(
        self, settings: OptimSettings, name: str | None = None
    ) -> tuple[int, dict[str, UpdateReport]]:
        """Take an optimizer step of an added adapter, or of all policies, with the gradients that
        were added since the last step. Return the weight version, and a report for each policy
        that had gradients; an adapter always gets a report."""
        if name is not None:
            adapter, added = self._added_adapters.use(name), self._added.pop(name, [])
            if added:
                adapter.average()
            report = added[-1] if added else UpdateReport()
            report.grad_norm, finite = adapter.learner.step(settings)
            report.learning_rate, report.skipped = settings.learning_rate or 0.0, not finite
            return self.version, {name: report}
        if not (waiting := [each for each in self._policies if self._added[each]]):
            raise InputError("optim_step: no gradient was added since the last step")
        self._offload.bring_back(_ALL)
        reports = {each: self._update(each, settings) for each in waiting}
        self._end_step()
        return self.version, reports

    def drop(self, name: str | None = None) -> None:
        """Drop the gradients that were added since the last step: the gradients of the policy or
        added adapter `name`, or, with None, of all policies."""
        for each in self._policies if name is None else [name]:
            self._added.pop(each, None)
            learner = self._learners.get(each) or self._added_adapters.use(each).learner
            learner.optimizer.zero_grad()
        if (critic := self._learners.get("critic")) is not None:
            critic.optimizer.zero_grad()

    @property
    def _added_adapters(self) -> Adapters:
        if self._adapters is None:
            raise InputError("adapters can be added to a trainer with model.lora.rank alone")
        return self._adapters

    def adapter(self, method: str, name: str, *arguments: object) -> None:
        """Call a method of `Adapters`: add, remove, write or read."""
        if method == "remove":
            self._added.pop(name, None)
        getattr(self._added_adapters, method)(name, *arguments)

    def remove_policy(self) -> None:
        """Free the memory of the policy's own adapter, in a trainer that trains only added
        adapters."""
        remove_adapter(self._model, "default")
        self._learners.clear()

    def vocabulary(self) -> int:
        """Return the number of token ids in the model's vocabulary."""
        return int(self._scorer.model.config.get_text_config().vocab_size)

    def _end_step(self) -> None:
        self._steps += 1
        self._whole = True
        if "optimizer" in self._training.offload:
            self._offload.put_away(["optimizer"])  # nothing needs it until the next step
        if self._training.colocated and self.device.type == "cuda":
            torch.cuda.empty_cache()  # the engines wake up next, and need the memory

    def _report(
        self,
        shares: Sequence[RankBatches],
        batches: Sequence[MicroBatch],
        passes: int,
        updates: list[UpdateReport],
        recorded: list[torch.Tensor],
        started: float,
    ) -> StepReport:
        on_gpu = self.device.type == "cuda"
        staleness = Counter(age for b in batches for age in b.tokens.staleness_N.tolist())
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return StepReport(
            self.version,
            updates,
            torch.cat(recorded, dim=1).cpu().numpy(),
            staleness,
            Counter(share.layout for share in shares for _ in range(passes)),
            sum(batch.size for batch in batches) * passes,
            time.perf_counter() - started,
            (torch.cuda.max_memory_allocated(self.device) if on_gpu else peak) / 2**30,
        )

    def _batch(
        self, samples: Sequence[Sample], share: RankBatches, version: int | None = None
    ) -> MicroBatch:
        if share.images and self._no_images:
            raise InputError(self._no_images)
        return make_micro_batch(
            samples,
            share.trajectory_tokens,
            self.version if version is None else version,
            share.layout,
            self.device,
            self._models.group,
            share.images and self._ranks > 1,
        )

    @property
    def _warming(self) -> bool:
        """Whether only the value model is trained."""
        return self._steps < self._warmup

    def _update(self, name: str, settings: OptimSettings) -> UpdateReport:
        """Take one optimizer step of a policy; return the report of the last gradient that was
        added, completed with the values of the step."""
        added, warming, learner = self._added.pop(name), self._warming, self._learners[name]
        report, critic, self._whole = added[-1], self._learners.get("critic"), False
        if not warming:
            own = settings.learning_rate
            report.learning_rate = learner.rate if own is None else own
            report.grad_norm, finite = learner.step(settings)
            report.skipped = not finite
            self.version += finite
            self._check_skips(name, finite)
            if self._algorithm.entropy.adaptive and finite:
                entropy = sum(each.mean_entropy for each in added) / len(added)
                self._entropy.adapt(sum(self._gradients.of_all_ranks(entropy)))
            if self._algorithm.entropy.has_bonus:
                report.entropy_coef = self._entropy.coef
            if finite and (every := self._algorithm.kl.sync_steps) and self.version % every == 0:
                self._models.move_reference(self._algorithm.kl.mixup_alpha)
        if critic is not None:
            _, finite = critic.step()
            report.skipped |= not finite
            self._check_skips("critic", finite)
        return report

    def _check_skips(self, name: str, finite: bool) -> None:
        skipped = 0 if finite else self._skipped_in_row.get(name, 0) + 1
        self._skipped_in_row[name] = skipped
        if skipped >= self._training.max_skipped:
            section = "algorithm.advantage" if name == "critic" else "training"
            raise TurnwiseError(
                f"{skipped} updates in a row had no finite loss and gradient of the {name}; "
                f"the weights are still those of version {self.version} (lower "
                f"{section}.learning_rate, or look at the rewards)"
            )

    def forward(self, name: str, share: RankBatches) -> list[tuple[int, list[float]]]:
        """Return, for each sequence of this rank's share, its number and the values of its trained
        tokens: log-probs or, from the value model, expected returns."""
        if why := missing_model(self._config.algorithm, name):
            raise InputError(why)
        self._offload.bring_back(["params"])
        scored: list[tuple[int, list[float]]] = []
        for samples in share.micro_batches:
            batch = self._batch(samples, share)
            with torch.no_grad():
                if name == "value":
                    values_N = self._models.estimate(batch.columns)
                else:
                    values_N, _ = self._models.score(name, batch.columns)
            parts = torch.split(values_N.float().cpu(), [sample.trained for sample in samples])
            scored += [(s.sequence, part.tolist()) for s, part in zip(samples, parts, strict=True)]
        return scored

    def publish(self) -> Manifest:
        """Publish this version for engines; return its manifest with the canary, which is a prompt
        whose log-probs engines must reproduce."""
        self._offload.bring_back(["params"])
        manifest = self._sender.publish(self.version, self._tensors())
        canary = self._canary()
        inside = {at for one in canary.images for at in range(one.start, one.end)}
        mask = [at not in inside for at in range(len(canary))]
        sample = Sample.to_score(canary, mask)
        columns = Columns.of([sample], "padded", self.device, self._models.group)
        scorer = self._policies[0]
        with torch.no_grad():
            expected, _ = self._models.score(scorer, columns, _PLAIN)
        by = scorer if self._config.rollout.policies else ""
        return replace(manifest, prompt=canary, logprobs=expected.tolist(), adapter=by)

    def _canary(self) -> Prompt:
        """Return the canary prompt, which engines and the policy score. It has an image if they
        read images and the image fits."""
        canary = Prompt(canary_prompt(self._scorer.model.config.get_text_config().vocab_size))
        if self._no_images or self._scorer.images is None:
            return canary
        half = len(canary) // 2
        image = self._scorer.images.ids_of(probe(0))
        longer = Prompt.joined(canary[:half], image, canary[half:])
        return longer if len(longer) < self._config.model.max_length else canary

    def _tensors(self) -> NamedTensors:
        """Yield the whole tensors of a weight update."""
        if not self._config.model.lora.rank:
            return full_tensors(self._model)
        if self._config.weights.lora == "merged":
            return merged_tensors(self._model)
        return adapter_tensors(self._model, self._policies)

    def _sent(self) -> NamedTensors:
        """Yield tensors with the names and shapes of a weight update's tensors."""
        if self._config.model.lora.rank and self._config.weights.lora == "merged":
            return ((name, parameter) for name, parameter, _ in changed_parameters(self._model))
        return self._tensors() if self._config.model.lora.rank else tensor_shapes(self._model)

    def send(self, devices: Sequence[str]) -> None:
        """Send the published version to the engine workers on these devices, if the transport
        streams weights."""
        self._offload.bring_back(["params"])
        self._sender.send(self.version, self._tensors(), devices)

    def offload(self) -> int:
        """Offload the tensors that `training.offload` names until they are needed; return the
        number of offloaded bytes."""
        return self._offload.put_away(self._training.offload)

    def _moments(self) -> Iterator[torch.Tensor]:
        for learner in self._learners.values():
            for state in learner.optimizer.state.values():
                for value in state.values():
                    yield from plain_tensors(value)

    def rendezvous(self) -> tuple[str, int]:
        """Return an address and a free port for a process group with the engines."""
        return free_address()

    def join(self, address: str, port: int, engine_workers: int, timeout: float) -> None:
        """Create the process group that the `collective` transport needs."""
        self._sender.join(address, port, engine_workers, timeout)

    def close(self) -> None:
        self._sender.close()

    def whole_version(self) -> int | None:
        """Return the version of the weights; None if a step has not ended."""
        return self.version if self._whole else None

    def save(self, folder: Path) -> None:
        """Write this rank's part of a checkpoint: the state to resume from, and, on rank 0, the
        model in Hugging Face's format or the adapter in PEFT's. If there are several policies, each
        has its adapter in a subfolder of `POLICIES`.
        """
        rank, lora = self._rank, self._config.model.lora.rank
        state = {
            "version": self.version,
            "steps": self._steps,
            "skipped_in_row": self._skipped_in_row,
            "entropy": self._entropy.state,
            "rng": torch.get_rng_state(),
        }
        with self._offload.brought_back(_ALL):
            checkpoint_state.save_state(folder, rank, self._learners, state, self._moving)
            if lora:
                export_adapters(folder, rank, self._config.model, self._policies, self._model)
            else:
                export_model(folder, rank, self._config.model, self._model)

    @property
    def _moving(self) -> torch.nn.Module | None:
        """The reference model, if its weights change."""
        return self._models.reference if self._algorithm.kl.sync_steps else None

    def load(self, folder: Path) -> int:
        """Resume from a checkpoint; return its weight version."""
        self._offload.bring_back(_ALL)
        self._whole = False
        state = checkpoint_state.load_state(folder, self._rank, self._learners, self._moving)
        self.version, self._steps = state["version"], state["steps"]
        self._skipped_in_row = state["skipped_in_row"]
        self._entropy.resume(state.get("entropy", {}))
        torch.set_rng_state(state["rng"])
        self._whole = True
        return self.version


def begin_process(training: TrainingConfig, rank: int, ranks: int, address: str) -> torch.device:
    """Set up torch in a rank's process, and join the process group if there is an address; return
    the rank's device."""
    torch.set_num_threads(threads_of(training))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    if address:
        join_ranks(address, rank, ranks, device, training.step_timeout)
    return device
