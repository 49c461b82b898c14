"""The trainer as clients see it: it runs passes and optimizer steps of one adapter at a time."""

import random
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from turnwise.config import AlgorithmConfig
from turnwise.core.aio import run_in_thread
from turnwise.core.optional import Foreign
from turnwise.errors import InputError
from turnwise.tinker.losses import TinkerLoss, loss_named
from turnwise.tinker.queue import MIN_TOKENS, TrainerQueue
from turnwise.tinker.requests import AdamStep, LoraSpec
from turnwise.tinker.wire import Array, Datum, TrainingRequest
from turnwise.training.adapters import AdapterSpec
from turnwise.training.algorithms import weighted_logprobs
from turnwise.training.reports import RECORDED, TrainedSample
from turnwise.training.sample import Sample
from turnwise.training.trainer_group import TrainerGroup

_T = TypeVar("_T")


class AdapterTrainer:
    """Calls a trainer for models; each call waits for the turn of the model's owner. Adapters whose
    clients give no seed draw theirs; the same `seed` gives the same ones, and None any."""

    def __init__(
        self, trainer: TrainerGroup, algorithm: AlgorithmConfig, seed: int | None = None
    ) -> None:
        self._draw = random.Random(seed)
        self.queue = TrainerQueue()
        self._trainer = trainer
        self._algorithm = weighted_logprobs(algorithm)
        self._owners: dict[str, str] = {}  # owner of each model, by its name

    async def add(self, name: str, spec: LoraSpec, owner: str) -> None:
        seed = self._draw.getrandbits(62) if spec.seed is None else spec.seed
        made = AdapterSpec(spec.rank, seed, spec.train_attn, spec.train_mlp)
        self._owners[name] = owner
        await self._call(name, self._trainer.adapter("add", name, made))

    async def remove(self, name: str) -> None:
        try:
            await self._call(name, self._trainer.adapter("remove", name))
        finally:
            self._owners.pop(name, None)

    async def read(self, name: str, folder: Path, optimizer: bool) -> None:
        await self._call(name, self._trainer.adapter("read", name, folder, optimizer))

    async def write(self, name: str, folder: Path, optimizer: bool) -> None:
        await self._call(name, self._trainer.adapter("write", name, folder, optimizer))

    async def drop(self, name: str) -> None:
        await self._call(name, self._trainer.drop(name))

    async def run(self, name: str, part: TrainingRequest) -> tuple[list[Array], float]:
        """Run a part of a forward-backward pass, and add its gradient unless it is forward-only.
        Return log-prob and loss of each datum's targets, [2, T] or [2, T, K], and the sum of the
        loss."""
        loss = loss_named(part.loss, part.loss_config)
        samples = await run_in_thread(samples_of, part.data, loss)

        async def work() -> Sequence[TrainedSample]:
            how = self._algorithm, loss.loss, name, not part.forward_only
            await self._trainer.forward_backward(samples, *how)
            return self._trainer.trained_tokens

        tokens = sum(len(datum.ids) for datum in part.data)
        trained = await self._call(name, work(), tokens)
        outputs = await run_in_thread(answers_of, trained, part.data)
        return outputs, float(sum(each[1].sum(dtype=np.float64) for each in outputs))

    async def step(self, name: str, step: AdamStep) -> dict[str, float]:
        """Take an optimizer step and return its metrics. If the gradient is not finite, drop the
        gradient and raise an InputError."""
        found = await self._call(name, self._trainer.optim_step(step.settings, name))
        norm = float(found["grad_norm"])
        if found["skipped_updates"]:
            raise InputError(
                f"optim_step: the gradient's norm is {norm}, so the step was skipped and "
                "the gradient dropped: look at the weights, advantages and log-probs of the data"
            )
        return {"grad_norm": norm}

    async def _call(
        self, name: str, work: Coroutine[Foreign, Foreign, _T], tokens: int = MIN_TOKENS
    ) -> _T:
        return await self.queue.call(self._owners.get(name, name), tokens, work)


_Floats = npt.NDArray[np.float32]
_Number = TypeVar("_Number", bound=np.generic)
_LOGPROB, _LOSS = RECORDED.index("trainer_logprob"), RECORDED.index("loss")


def samples_of(data: Sequence[Datum], loss: TinkerLoss) -> list[Sample]:
    """Return one sample for each datum: its tokens followed by its last target, because a sample
    scores each of its tokens after the first."""
    samples: list[Sample] = []
    for number, datum in enumerate(data):
        targets = datum.inputs["target_tokens"]
        length = len(targets)
        ids = datum.ids + targets.reshape(length, -1)[-1, :1]
        made = Sample.to_score(ids, [0] + [1] * length, number)
        follow = targets.ndim == 1 and bool((targets[:-1] == datum.ids.ids[1:]).all())
        samples.append(
            replace(
                made,
                targets_T=None if follow else _after_first(targets.astype(np.int64)),
                logprobs_T=_stream(datum, "logprobs", 0.0),
                advantages_T=_stream(datum, loss.factor, loss.defaults.get(loss.factor, 0.0)),
                streams={
                    name: _stream(datum, name, loss.defaults.get(name, 0.0))
                    for name in loss.streams
                },
            )
        )
    return samples


def _stream(datum: Datum, name: str, default: float) -> _Floats:
    """Return an input of a datum, [T + 1], or [T + 1, K] if it has `K` targets for each token."""
    values = datum.inputs.get(name)
    if values is None:
        values = np.full(datum.inputs["target_tokens"].shape, default)
    return _after_first(values.astype(np.float32))


def _after_first(values: npt.NDArray[_Number]) -> npt.NDArray[_Number]:
    return np.concatenate([np.zeros_like(values[:1]), values])


def answers_of(trained: Sequence[TrainedSample], data: Sequence[Datum]) -> list[Array]:
    """Return log-prob and loss of each datum's targets: [2, T] or [2, T, K]."""
    found = {sample.sequence: values_KN[[_LOGPROB, _LOSS]] for sample, values_KN in trained}
    shapes = (datum.inputs["target_tokens"].shape for datum in data)
    return [found[number].reshape(2, *shape) for number, shape in enumerate(shapes)]
