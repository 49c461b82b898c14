"""The policy: a Transformers model, its optimizer, and its weights' way to the engines.

Knows samples and tensors; nothing of trajectories, engines or the loop. The weight version is
the number of optimizer steps.
"""

import copy
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from turnwise.config import Config, SamplingConfig, TrainingConfig
from turnwise.errors import InputError
from turnwise.training.grpo import TokenLoss, grpo_loss
from turnwise.training.sample import MicroBatch, Sample, micro_batches
from turnwise.training.scoring import token_logprobs
from turnwise.weights.canary import canary_prompt
from turnwise.weights.shm import ShmSender

_PLAIN = SamplingConfig()
_ADAM_BETAS = (0.9, 0.95)  # gradients of RL change too fast for torch's second 0.999


class Policy:
    """The model in training.

    Weights and optimizer are float32 whatever `model.dtype` is, since steps of a small learning
    rate vanish in bfloat16; forward passes, engines and checkpoints have `model.dtype`.

    Raises:
        InputError: when the model cannot be loaded, or shared memory cannot hold its weights.
    """

    def __init__(self, config: Config) -> None:
        self._config = config.training
        self._sampling = config.sampling
        torch.manual_seed(config.seed)
        if config.deterministic:
            torch.use_deterministic_algorithms(True)
        torch.set_num_threads(config.training.threads or os.cpu_count() or 1)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._dtype: torch.dtype = getattr(torch, config.model.dtype)
        self._model = self._load(config)
        self._reference = self._load(config).requires_grad_(False) if self._config.kl_coef else None
        self._tokenizer = AutoTokenizer.from_pretrained(
            config.model.path, trust_remote_code=config.model.trust_remote_code
        )
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=self._config.learning_rate,
            weight_decay=self._config.weight_decay,
            betas=_ADAM_BETAS,
        )
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: _rate(step, self._config)
        )
        self._sender = ShmSender(self._model.named_parameters(), self._dtype)
        self._canary = canary_prompt(self._model.config.vocab_size)
        self.version = 0

    def _load(self, config: Config) -> Any:
        try:
            model = AutoModelForCausalLM.from_pretrained(
                config.model.path,
                dtype=torch.float32,
                trust_remote_code=config.model.trust_remote_code,
            )
        except (OSError, ValueError) as error:
            raise InputError(f"the model {config.model.path} cannot be loaded: {error}") from error
        return model.to(self._device).eval()  # eval: dropout would make every ratio wrong

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._model.parameters())

    def train(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Take `updates_per_step` optimizer steps, each on an equal share of the samples.

        Returns:
            What the step looked like: means are over trained tokens; `logprob_diff_*` compare
            the engine's log-probs with this model's before its first update.
        """
        started = time.perf_counter()
        shares = _shares(samples, self._config.updates_per_step)
        staleness = max(
            self.version - version for s in samples for version in s.weight_versions if version >= 0
        )
        updates = [self._update(share) for share in shares]
        metrics = {key: sum(u[key] for u in updates) / len(updates) for key in updates[0]}
        for key in ("logprob_diff_mean", "logprob_diff_max"):
            metrics[key] = updates[0][key]
        seconds = time.perf_counter() - started
        tokens = sum(len(sample.token_ids) for sample in samples)
        return metrics | {
            "staleness_max": staleness,
            "trained_tokens": sum(sum(sample.response_mask) for sample in samples),
            "train_seconds": seconds,
            "train_tokens_per_s": tokens / seconds,
            "learning_rate": self._optimizer.param_groups[0]["lr"],
        }

    def _update(self, samples: Sequence[Sample]) -> dict[str, float]:
        """One optimizer step; the loss is the mean over all its trained tokens."""
        batches = micro_batches(samples, self._config.micro_batch_tokens, self._device)
        tokens = sum(int(batch.mask_BT.sum()) for batch in batches)
        sums: dict[str, float] = dict.fromkeys(("loss", "ratio", "clip_fraction", "kl"), 0.0)
        diff_sum, diff_max = 0.0, 0.0
        for batch in batches:
            logprobs_N, engine_N, result = self._loss(batch)
            (result.loss_N.sum() / tokens).backward()  # type: ignore[no-untyped-call]
            diff_N = (logprobs_N.detach() - engine_N).abs()
            diff_sum += float(diff_N.sum())
            diff_max = max(diff_max, float(diff_N.max()))
            sums["loss"] += float(result.loss_N.detach().sum())
            sums["ratio"] += float(result.ratio_N.sum())
            sums["clip_fraction"] += float(result.clipped_N.sum())
            sums["kl"] += float(result.kl_N.detach().sum()) if result.kl_N is not None else 0.0
        norm = torch.nn.utils.clip_grad_norm_(
            self._model.parameters(), self._config.max_grad_norm, error_if_nonfinite=False
        )
        finite = bool(torch.isfinite(norm))
        if finite:
            self._optimizer.step()
            self._schedule.step()
            self.version += 1
        self._optimizer.zero_grad(set_to_none=True)
        return {key: value / tokens for key, value in sums.items()} | {
            "grad_norm": float(norm),
            "skipped_updates": float(not finite),
            "logprob_diff_mean": diff_sum / tokens,
            "logprob_diff_max": diff_max,
        }

    def _loss(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor, TokenLoss]:
        scored = (batch.token_ids_BT, batch.mask_BT, self._sampling)
        logprobs_N = self._score(self._model, *scored)
        reference_N = None
        if self._reference is not None:
            with torch.no_grad():
                reference_N = self._score(self._reference, *scored)
        engine_N = batch.logprobs_BT[batch.mask_BT]
        result = grpo_loss(
            logprobs_N,
            engine_N,
            batch.advantages_BT[batch.mask_BT],
            clip_low=self._config.clip_low,
            clip_high=self._config.clip_high,
            kl_coef=self._config.kl_coef,
            reference_logprobs_N=reference_N,
        )
        return logprobs_N, engine_N, result

    def _score(self, model: Any, *scored: Any) -> torch.Tensor:
        lower = self._dtype != torch.float32
        with torch.autocast(self._device.type, dtype=self._dtype, enabled=lower):
            return token_logprobs(model, *scored)

    def publish(self) -> tuple[dict[str, Any], list[int], list[float]]:
        """Write the weights where engines can read them.

        Returns:
            The manifest, the canary prompt and this model's log-probs of its tokens 1..T-1.
        """
        manifest = self._sender.write(self.version, self._model.named_parameters())
        token_ids_1T = torch.tensor([self._canary], device=self._device)
        mask_1T = torch.ones_like(token_ids_1T, dtype=torch.bool)
        mask_1T[:, 0] = False
        with torch.no_grad():
            expected = self._score(self._model, token_ids_1T, mask_1T, _PLAIN).tolist()
        return manifest.to_dict(), self._canary, expected

    def save(self, folder: Path) -> None:
        """Write a checkpoint in Hugging Face format; it appears whole or not at all."""
        temporary = folder.with_name(folder.name + ".tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        lower = self._dtype != torch.float32
        model = copy.deepcopy(self._model).to(self._dtype) if lower else self._model
        model.save_pretrained(temporary)
        self._tokenizer.save_pretrained(temporary)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)


def _rate(step: int, training: TrainingConfig) -> float:
    """The share of the learning rate that optimizer step `step` (from 0) takes."""
    rising = (step + 1) / (training.warmup_steps + 1)
    if training.lr_schedule == "constant":
        return min(1.0, rising)
    total = training.steps * training.updates_per_step
    return max(0.0, min(1.0, rising, (total - step) / max(1, total - training.warmup_steps)))


def _shares(samples: Sequence[Sample], count: int) -> Iterator[Sequence[Sample]]:
    """Equal shares, each with samples from all over the batch; none is empty."""
    for i in range(min(count, len(samples))):
        yield samples[i::count]
