"""One rank of the policy: its shard of the model, the optimizer, and the way of the weights.

Knows samples and tensors; nothing of trajectories, engines or the loop. The weight version is
the number of optimizer steps. All ranks make the same calls in the same order; what one rank
computes alone is a sum, and whoever holds the ranks adds them up.
"""

import os
import resource
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from turnwise.config import AlgorithmConfig, Config, Dpo, Gae, SamplingConfig, TrainingConfig
from turnwise.errors import InputError, TurnwiseError
from turnwise.training import checkpoint
from turnwise.training.algorithms import (
    gae,
    kl_N,
    moments,
    normalised,
    objective,
    reward_penalty,
    value_loss,
)
from turnwise.training.batching import MicroBatch, Share, make_micro_batch
from turnwise.training.learner import Learner
from turnwise.training.model import (
    POLICY,
    Critic,
    Scorer,
    check_room,
    distribute,
    dtype_of,
    full_tensors,
    load_model,
    load_value_model,
)
from turnwise.training.offload import Offload
from turnwise.training.sample import Array
from turnwise.training.tokens import Tokens
from turnwise.weights.canary import canary_prompt
from turnwise.weights.meeting import join_store, private
from turnwise.weights.outlet import make_outlet

_PLAIN = SamplingConfig()
_ALL = ("params", "optimizer")
ModelName = Literal["policy", "reference", "value"]
"""The models that a policy computes with."""


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's place among all."""

    rank: int = 0
    ranks: int = 1
    address: str = ""
    """Where the ranks meet: host:port of rank 0."""


@dataclass(slots=True)
class UpdateReport:
    """What one rank saw of one optimizer step: sums over its trained tokens, unless told."""

    tokens: int = 0
    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    logprob_diff_max: float = 0.0
    loss: float = 0.0
    """This rank's part of the batch's loss: the parts of all ranks add up to it."""
    grad_norm: float = 0.0
    """Of all ranks together."""
    learning_rate: float = 0.0
    """The policy's; 0 where the value model alone learned."""
    skipped: bool = False


@dataclass(slots=True)
class StepReport:
    """What one rank saw of one training step."""

    version: int
    updates: list[UpdateReport]
    ratios_N: Array
    staleness: Counter[int]
    """Trained tokens by staleness, before the first update."""
    tokens: int
    """Tokens computed, padding left out."""
    seconds: float
    memory_gib: float
    """The most that the rank held so far."""


class Policy:
    """A rank of the model in training.

    Args:
        place: Among all ranks; several ranks meet before the model is loaded.
        folder: Of the run, for transports that write files.

    Raises:
        InputError: when the model cannot be loaded or does not fit, or the transport cannot be
            used on this machine.
    """

    def __init__(self, config: Config, place: Place = Place(), folder: Path | None = None) -> None:
        self._config = config
        self._training = config.training
        self._algorithm = config.algorithm
        self._place = place
        torch.manual_seed(config.seed)
        if config.deterministic:
            torch.use_deterministic_algorithms(True)
        torch.set_num_threads(threads_of(config.training))
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._dtype = dtype_of(config, POLICY)
        self._packed = packs(config.training, self.device)
        if place.ranks > 1:
            _join(place, self.device, config.training.step_timeout)
        kl, advantage = config.algorithm.kl, config.algorithm.advantage
        self._compares = bool(kl.coef) or isinstance(config.algorithm.loss, Dpo)
        frozen = None if missing_model(config.algorithm, "reference") else kl.model
        trained = advantage.model if isinstance(advantage, Gae) else None
        check_room(config, self.device, place.ranks, frozen, trained)
        model = load_model(config)
        self._shape = model.config
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self._scorer = self._placed(Scorer(model, config.sampling, self._dtype))
        self._learner = Learner(
            self._scorer,
            self._training,
            self._training.learning_rate,
            self._training.steps * self._training.updates_per_step,
        )
        self._reference: Scorer | Critic | None = None
        if frozen is not None:
            reference = Scorer(
                load_model(config, frozen), config.sampling, dtype_of(config, frozen)
            )
            self._reference = self._placed(reference.requires_grad_(False), trained=False)
        self._critic: Scorer | Critic | None = None
        self._critic_learner: Learner | None = None
        if isinstance(advantage, Gae):
            critic = Critic(
                load_value_model(config, advantage.model), dtype_of(config, advantage.model)
            )
            self._critic = self._placed(critic)
            self._critic_learner = Learner(
                self._critic, self._training, advantage.learning_rate, None
            )
        self._canary = canary_prompt(self._shape.vocab_size)
        whole_in_process = config.training.colocated and place.ranks == 1
        self._outlet = make_outlet(
            "in_process" if whole_in_process else config.weights.transport,
            self._scorer.get_submodule("model").named_parameters(),
            self._dtype,
            device=self.device,
            rank=place.rank,
            folder=config.weights.folder or (folder / "weights" if folder else ""),
            timeout=config.weights.update_timeout,
        )
        offloaded = (folder or Path(config.output_dir, config.name)) / f"offload-{place.rank}"
        self._offload = Offload(
            {"params": self._weights, "optimizer": self._moments}, offloaded.absolute()
        )
        self._steps = 0
        self._skipped_in_row = 0
        self.version = 0

    def _placed(self, module: Scorer | Critic, *, trained: bool = True) -> Scorer | Critic:
        return distribute(module, self._config, self.device, trained=trained)

    def train(self, shares: Sequence[Share]) -> StepReport:
        """Take an optimizer step on each share.

        Raises:
            TurnwiseError: when `training.max_skipped` updates in a row had no finite gradient.
        """
        started = time.perf_counter()
        self._offload.bring_back(_ALL)
        self._steps += 1
        steps = [
            [
                make_micro_batch(
                    samples, s.trajectory_tokens, self.version, self._packed, self.device
                )
                for samples in s.micro_batches
            ]
            for s in shares
        ]
        self._prepare([batch for batches in steps for batch in batches], len(steps))
        staleness = Counter[int]()
        for batches in steps:
            for batch in batches:
                staleness.update(batch.staleness_N.tolist())
        ratios: list[torch.Tensor] = []
        updates = [
            self._update(batches, share, ratios)
            for batches, share in zip(steps, shares, strict=True)
        ]
        if "optimizer" in self._training.offload:
            self._offload.put_away(["optimizer"])  # nothing needs it until the next step
        return StepReport(
            self.version,
            updates,
            torch.cat(ratios).cpu().numpy() if ratios else np.zeros(0, np.float32),
            staleness,
            sum(batch.tokens for batches in steps for batch in batches),
            time.perf_counter() - started,
            _peak_memory(self.device) / 2**30,
        )

    def _prepare(self, batches: Sequence[MicroBatch], updates: int) -> None:
        """What must be known of all tokens before the first update."""
        algorithm = self._algorithm
        kl_in_reward = bool(algorithm.kl.coef) and algorithm.kl.where == "reward"
        corrected = algorithm.correction.name != "none" and updates > 1
        with torch.no_grad():
            for batch in batches:
                if corrected or kl_in_reward:
                    batch.old_logprobs_N, _ = self._forward(self._scorer, batch)
                if self._compares:
                    assert self._reference is not None
                    batch.reference_logprobs_N, _ = self._forward(self._reference, batch)
                if self._critic is not None:
                    batch.values_N = self._forward(self._critic, batch)
                penalties_N = torch.zeros_like(batch.advantages_N)
                if kl_in_reward:
                    assert batch.old_logprobs_N is not None
                    assert batch.reference_logprobs_N is not None
                    penalties_N = kl_N(
                        batch.old_logprobs_N, batch.reference_logprobs_N, algorithm.kl.estimator
                    )
                self._spread(batch, penalties_N)
        if isinstance(algorithm.advantage, Gae):
            self._normalise(batches)

    def _spread(self, batch: MicroBatch, penalties_N: torch.Tensor) -> None:
        """From a trajectory's advantage, or its reward, to its tokens'."""
        algorithm, coef = self._algorithm, self._algorithm.kl.coef
        if isinstance(algorithm.advantage, Gae):
            assert batch.values_N is not None
            rewards_N = -coef * penalties_N
            returns_N = torch.zeros_like(rewards_N)
            for span in batch.spans():
                rewards_N[span.stop - 1] += batch.advantages_N[span.stop - 1]
                batch.advantages_N[span], returns_N[span] = gae(
                    rewards_N[span], batch.values_N[span], algorithm.advantage
                )
            batch.returns_N = returns_N
        elif penalties_N.any():
            for span in batch.spans():
                batch.advantages_N[span] -= reward_penalty(penalties_N[span], coef)

    def _normalise(self, batches: Sequence[MicroBatch]) -> None:
        """Advantages to mean 0 and deviation 1 over all ranks."""
        sums_3 = moments(torch.cat([batch.advantages_N for batch in batches]))
        if self._place.ranks > 1:
            dist.all_reduce(sums_3)
        for batch in batches:
            batch.advantages_N = normalised(batch.advantages_N, sums_3)

    def _update(
        self, batches: Sequence[MicroBatch], share: Share, ratios: list[torch.Tensor]
    ) -> UpdateReport:
        """One optimizer step; the loss is the sum over all trained tokens of all ranks."""
        report = UpdateReport()
        advantage = self._algorithm.advantage
        warming = isinstance(advantage, Gae) and self._steps <= advantage.warmup_steps
        for batch in batches:
            if not warming:
                self._backward(batch, share, report, ratios)
            if self._critic is not None:
                assert isinstance(advantage, Gae)
                assert batch.values_N is not None
                assert batch.returns_N is not None
                values_N = self._forward(self._critic, batch)
                loss_N = value_loss(values_N, batch.values_N, batch.returns_N, advantage.clip)
                total = loss_N.sum() / share.total_tokens
                (total * self._place.ranks).backward()  # type: ignore[no-untyped-call]
                report.sums["value_loss"] += float(loss_N.detach().sum())
            report.tokens += len(batch.advantages_N)
        if not warming:
            report.learning_rate = self._learner.rate
            report.grad_norm, finite = self._learner.step()
            report.skipped = not finite
            self.version += finite
            self._check_skips(finite)
        if self._critic_learner is not None:
            _, finite = self._critic_learner.step()
            report.skipped |= not finite
        return report

    def _check_skips(self, finite: bool) -> None:
        self._skipped_in_row = 0 if finite else self._skipped_in_row + 1
        if self._skipped_in_row >= self._training.max_skipped:
            raise TurnwiseError(
                f"{self._skipped_in_row} updates in a row had no finite loss and gradient; "
                f"the weights are still those of version {self.version} (lower "
                "training.learning_rate, or look at the rewards)"
            )

    def _backward(
        self, batch: MicroBatch, share: Share, report: UpdateReport, ratios: list[torch.Tensor]
    ) -> None:
        algorithm = self._algorithm
        logprobs_N, entropy_N = self._forward(self._scorer, batch)
        engine_N = batch.engine_logprobs_N
        if algorithm.correction.name == "none":
            old_N = engine_N
        elif batch.old_logprobs_N is not None:
            old_N = batch.old_logprobs_N
        else:
            old_N = logprobs_N.detach()  # the only update of its step
        tokens = Tokens(
            logprobs_N,
            old_N,
            engine_N,
            batch.advantages_N,
            batch.sequence_N,
            batch.sequences,
            batch.trajectory_tokens_N,
            batch.staleness_N,
            batch.reference_logprobs_N,
        )
        made = objective(
            algorithm,
            tokens,
            total_tokens=share.total_tokens,
            total_trajectories=share.total_trajectories,
            constant=self._config.sampling.max_tokens * self._config.rollout.max_turns,
        )
        (made.loss * self._place.ranks).backward()  # type: ignore[no-untyped-call]
        diff_N = (logprobs_N.detach() - engine_N).abs()
        report.loss += float(made.loss.detach())
        report.sums["ratio"] += float(made.result.ratio_N.sum())
        report.sums["clip_fraction"] += float(made.result.clipped_N.sum())
        report.sums["entropy"] += float(entropy_N.sum())
        report.sums["correction"] += float(made.correction_N.sum())
        if made.divergence_N is not None:
            report.sums["kl"] += float(made.divergence_N.sum())
        report.sums["logprob_diff_mean"] += float(diff_N.sum())
        if len(diff_N):
            report.logprob_diff_max = max(report.logprob_diff_max, float(diff_N.max()))
        ratios.append(made.result.ratio_N.float())

    def score(self, name: ModelName, share: Share) -> list[tuple[int, list[float]]]:
        """Compute what one of the models says of tokens, without learning from it.

        Returns:
            For each sequence of this rank's share its number and a value for each masked token:
            its log-prob under `sampling`, or, of the value model, the return that it expects
            before that token.

        Raises:
            InputError: when this policy has no such model.
        """
        module = {
            "policy": self._scorer,
            "reference": self._reference,
            "value": self._critic,
        }[name]
        if module is None:
            raise InputError(missing_model(self._algorithm, name))
        self._offload.bring_back(["params"])
        scored: list[tuple[int, list[float]]] = []
        for samples in share.micro_batches:
            batch = make_micro_batch(
                samples, share.trajectory_tokens, self.version, self._packed, self.device
            )
            with torch.no_grad():
                values_N = self._forward(module, batch)
            if name != "value":
                values_N, _ = values_N
            parts = values_N.float().cpu().split([sample.trained for sample in samples])
            scored += [(s.sequence, part.tolist()) for s, part in zip(samples, parts, strict=True)]
        return scored

    def _forward(self, module: Scorer | Critic, *inputs: Any) -> Any:
        # Sharded modules compute in their dtype by themselves.
        lower = module.dtype != torch.float32 and self._place.ranks == 1
        with torch.autocast(self.device.type, dtype=module.dtype, enabled=lower):
            result = module(*inputs)
        if isinstance(module, FSDPModule) and not torch.is_grad_enabled():
            module.reshard()  # what a backward pass would have done
        return result

    def publish(self) -> tuple[dict[str, Any], list[int], list[float]]:
        """Make this version ready for engines.

        Returns:
            The manifest, the canary prompt and this model's log-probs of its tokens 1..T-1.
        """
        self._offload.bring_back(["params"])
        manifest = self._outlet.publish(self.version, self._tensors())
        token_ids_1T = torch.tensor([self._canary], device=self.device)
        mask_1T = torch.ones_like(token_ids_1T, dtype=torch.bool)
        mask_1T[:, 0] = False
        none = torch.zeros(0)
        canary = MicroBatch(token_ids_1T, mask_1T, None, none, none, none, none, none, 1, 0)
        with torch.no_grad():
            expected, _ = self._forward(self._scorer, canary, _PLAIN)
        return manifest, self._canary, expected.tolist()

    def _tensors(self) -> Any:
        return full_tensors(self._scorer.get_submodule("model"))

    def send(self, devices: Sequence[str]) -> None:
        """Serve the engines' workers, on these devices, that load the published version, where
        the transport needs it."""
        self._offload.bring_back(["params"])
        self._outlet.send(self.version, self._tensors(), devices)

    def offload(self) -> int:
        """Put away what `training.offload` names, until it is needed again; returns its bytes.

        Raises:
            TurnwiseError: when the disk is full.
        """
        return self._offload.put_away(self._training.offload)

    def _modules(self) -> list[Scorer | Critic]:
        modules = (self._scorer, self._reference, self._critic)
        return [module for module in modules if module is not None]

    def _weights(self) -> Iterator[torch.Tensor]:
        for module in self._modules():
            yield from module.parameters()
            yield from module.buffers()

    def _moments(self) -> Iterator[torch.Tensor]:
        for learner in self._learners().values():
            for state in learner.optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    def rendezvous(self) -> tuple[str, int]:
        """Where a process group of this trainer and its engines can meet."""
        return self._outlet.rendezvous()

    def join(self, address: str, port: int, engine_workers: int, timeout: float) -> None:
        """Make the process group that the `collective` transport needs."""
        self._outlet.join(address, port, engine_workers, timeout)

    def save(self, folder: Path) -> None:
        """Write this rank's part of a checkpoint: the state to go on from, and, rank 0, the
        model in Hugging Face's format.

        Raises:
            TurnwiseError: when the disk is full.
        """
        with self._offload.brought_back(_ALL):
            checkpoint.save_state(folder, self._place.rank, self._learners(), self._extra())
            checkpoint.export(folder, self._place.rank, self._config, self._shape, self._tensors())

    def load(self, folder: Path) -> int:
        """Go on from a checkpoint; returns its version.

        Raises:
            InputError: when it does not fit this model.
        """
        self._offload.bring_back(_ALL)
        extra = checkpoint.load_state(folder, self._place.rank, self._learners())
        self.version = extra["version"]
        self._steps = extra["steps"]
        self._skipped_in_row = extra["skipped_in_row"]
        torch.set_rng_state(extra["rng"])
        return self.version

    def _learners(self) -> dict[str, "Learner"]:
        learners = {"policy": self._learner}
        if self._critic_learner is not None:
            learners["critic"] = self._critic_learner
        return learners

    def _extra(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "steps": self._steps,
            "skipped_in_row": self._skipped_in_row,
            "rng": torch.get_rng_state(),
        }


def missing_model(algorithm: AlgorithmConfig, name: ModelName) -> str:
    """Why a policy lacks a model, and which key gives it one; "" where it has it."""
    if name == "value" and not isinstance(algorithm.advantage, Gae):
        return "there is no value model: set algorithm.advantage.name to gae"
    kl, compares = algorithm.kl, isinstance(algorithm.loss, Dpo)
    if name == "reference" and not (kl.coef or kl.model.path or compares):
        return (
            "there is no reference model: set algorithm.kl.coef, algorithm.kl.model.path, or "
            "algorithm.loss.name to dpo"
        )
    return ""


def packs(training: TrainingConfig, device: torch.device) -> bool:
    """Whether micro-batches are packed: attention over a packed row costs a CPU its square."""
    return training.packing == "packed" or (training.packing == "auto" and device.type == "cuda")


def threads_of(training: TrainingConfig) -> int:
    """CPU threads of one rank."""
    return training.threads or max(1, (os.cpu_count() or 1) // training.ranks)


def _join(place: Place, device: torch.device, seconds: float) -> None:
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    host, _, port = place.address.rpartition(":")
    limit = timedelta(seconds=seconds)
    try:
        store = private(join_store(host, int(port), limit))
        dist.init_process_group(
            backend, store=store, rank=place.rank, world_size=place.ranks, timeout=limit
        )
    except (RuntimeError, ValueError) as error:
        raise InputError(
            f"the trainer's {place.ranks} ranks cannot meet at {place.address}: {error}"
        ) from error


def _peak_memory(device: torch.device) -> int:
    """Bytes: of the device's memory on a GPU, of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
