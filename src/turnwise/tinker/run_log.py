"""The run folder of a client's model: metrics, trajectories and token values of its steps.

No claim of a client makes a trajectory: what engines sampled lately is found again in its data, by
the ids of prompt and completion together. So a turn is exactly what an engine had and sampled, also
of programs that do not say where their tokens come from.
"""

import asyncio
import logging
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np

from turnwise.config import Config
from turnwise.core.aio import run_in_thread
from turnwise.engine.protocol import Completion
from turnwise.observe.metrics import StepMetrics
from turnwise.run.run_dir import RunDir
from turnwise.run.token_values import columns_of
from turnwise.tinker.losses import LOSSES
from turnwise.tinker.wire import Array, TrainingRequest
from turnwise.training.reports import TrainedSample
from turnwise.training.sample import Sample
from turnwise.trajectory import PlacedImage, PromptIds, Trajectory
from turnwise.trajectory.images import placed

logger = logging.getLogger(__name__)

_MOST_SAMPLED = 2**25  # tokens of samples that are kept; beyond, the oldest are dropped
_MOST_TRAINED = 2**24  # tokens of all models' passes that are kept until their steps are taken
_DATUM_TOKENS = 32  # as many tokens as a datum counts beside its own, for its objects


class _Sampled(NamedTuple):
    prompt: Array
    ids: Array
    logprobs: Array
    finish_reason: str
    version: int
    images: tuple[PlacedImage, ...]

    @property
    def size(self) -> int:
        """Its tokens, and 1 for each 64 bytes of its images: 2 GiB of these at most."""
        files = sum(len(each.image.data) for each in self.images)
        return len(self.prompt) + len(self.ids) + files // 64


_Trained = tuple[dict[str, Array], Array]
"""A datum's inputs, with all of its `ids` and the `value` by which each target counts, and the
trainer's log-probs."""


class SampleIndex:
    """Samples of the engines of late, of all clients, by owner and a hash of all their ids."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self.decode = decode
        self.trained = 0
        """Size, in tokens, of passes that models keep until their steps are taken."""
        self._kept: dict[tuple[str, int, int], _Sampled] = {}
        self._size = 0

    def add(
        self, owner: str, prompt: Sequence[int], done: Sequence[Completion], version: int
    ) -> None:
        first, images = np.asarray(prompt, np.int32), placed(prompt)
        start = _hashes(_seen(first, images).tolist())[-1]
        for each in filter(lambda one: one.token_ids, done):
            ids, logprobs = np.asarray(each.token_ids, np.int32), np.asarray(each.logprobs)
            key = owner, len(first) + len(ids), _hashes(each.token_ids, start)[-1]
            if (same := self._kept.pop(key, None)) is not None:
                self._size -= same.size
            made = _Sampled(first, ids, logprobs, each.finish_reason, version, images)
            self._kept[key] = made
            self._size += made.size
        while self._size > _MOST_SAMPLED:
            self._size -= self._kept.pop(next(iter(self._kept))).size

    def turns(self, owner: str, ids: Array) -> list[_Sampled]:
        """Return the samples that make up a sequence, in their order: the longest that it begins
        with, then the longest that the prompt of this one begins with ..."""
        hashes, found, length = _hashes(ids.tolist()), list[_Sampled](), len(ids)
        while length:
            kept = self._kept.get((owner, length, hashes[length]))
            if kept and np.array_equal(
                _seen(np.concatenate([kept.prompt, kept.ids]), kept.images), ids[:length]
            ):
                found.insert(0, kept)
                length = len(kept.prompt)
            else:
                length -= 1
        return found


def _hashes(ids: Sequence[int], start: int = 0) -> list[int]:
    """Return a hash of each beginning of a sequence, from that of an empty one on."""
    return list(accumulate(ids, lambda before, each: hash((before, each)), initial=start))


class RunLog:
    """Writes the run folder of one model; nothing is written before its first step."""

    def __init__(
        self, config: Config, folder: Path, name: str, owner: str, index: SampleIndex
    ) -> None:
        self._config = config.model_copy(update={"output_dir": str(folder), "name": name})
        self._owner, self._index = owner, index
        self._step, self._since = 0, time.monotonic()
        self._held = 0
        self.drop()
        self._run: RunDir | None = None
        self._writing: asyncio.Task[None] | None = None

    def drop(self) -> None:
        """Forget the passes since the last step."""
        self._index.trained -= self._held
        self._trained, self._held = list[_Trained](), 0
        self._loss, self._tokens, self._left_out = 0.0, 0, 0

    def add(self, request: TrainingRequest, outputs: Sequence[Array], loss: float) -> None:
        """Add a pass to the next step, unless it is one without gradient; `outputs` are those of
        `AdapterTrainer.run`."""
        if request.forward_only:
            return
        self._loss += loss
        factor = LOSSES[request.loss].factor
        for datum, (logprobs_T, loss_T) in zip(request.data, outputs, strict=True):
            length = len(datum.token_ids_T)
            size = length + _DATUM_TOKENS
            value = datum.inputs.get(factor, np.ones(logprobs_T.shape, np.float32))
            self._tokens += int(value.reshape(length, -1).any(axis=1).sum())
            if logprobs_T.ndim > 1 or self._index.trained + size > _MOST_TRAINED:
                self._left_out += 1
                continue
            sampled = datum.inputs.get("logprobs", logprobs_T[:0])
            given = {"logprobs": sampled} if sampled.shape == logprobs_T.shape else {}
            targets = datum.inputs["target_tokens"]
            ids = np.append(_seen(datum.token_ids_T, datum.images), targets[-1:])
            if (targets != ids[1:])[value != 0].any():  # what counts is not what follows
                ids = ids[:0]
            own = {"ids": ids, "value": value, "loss": loss_T}
            self._trained.append((given | own, logprobs_T))
            self._index.trained += size
            self._held += size

    async def step(self, version: int, learning_rate: float, metrics: Mapping[str, float]) -> None:
        """Write a step that began with the weights of a version, beside what comes next."""
        await self._written()
        self._step, now = max(self._step, version) + 1, time.monotonic()
        row = StepMetrics(step=self._step, learning_rate=learning_rate)
        row.grad_norm, row.step_seconds = metrics.get("grad_norm"), now - self._since
        row.weight_version, row.trained_tokens = version + 1, self._tokens
        row.loss = self._loss / max(1, self._tokens)
        if self._left_out:
            logger.info(
                "%s: step %d has no values of the tokens of %d data, with several targets a token "
                "or too many in all",
                *(self._config.name, self._step, self._left_out),
            )
        self._writing = asyncio.create_task(self._record(row, self._trained, version))
        self._since = now
        self.drop()

    async def close(self) -> None:
        self.drop()
        await self._written()
        if self._run is not None:
            await run_in_thread(self._run.metrics.close)

    async def _written(self) -> None:
        if self._writing is not None:
            await asyncio.wait([self._writing])  # which a cancelled step does not end

    async def _record(self, row: StepMetrics, data: Sequence[_Trained], version: int) -> None:
        try:
            await run_in_thread(self._write, row, data, version)
        except Exception as error:
            logger.warning("the run folder of %s lacks a step: %s", self._config.name, error)

    def _write(self, row: StepMetrics, data: Sequence[_Trained], version: int) -> None:
        self._run = self._run or RunDir(self._config)
        origins, samples, groups = dict[int, Trajectory](), list[TrainedSample](), Counter[str]()
        differences, exact = [np.zeros(0)], 0
        for given, logprobs_T in data:
            sample, value_T = None, given["value"]
            if made := self._trajectory(given["ids"], groups):
                sample, values_KN = _values(made, value_T, logprobs_T, given["loss"])
                samples.append((sample, values_KN))
                origins[id(sample)] = made
            if "logprobs" in given:
                differences.append(np.subtract(logprobs_T, given["logprobs"])[value_T != 0])
                exact += sample.trained if sample else 0
        trajectories, joined = list(origins.values()), np.concatenate(differences)
        row.add_trajectories(trajectories)
        row.reward_mean = row.reward_std = None  # which only the client knows
        if len(joined):
            row.logprob_diff_mean = float(np.abs(joined).mean())
            row.logprob_diff_max = float(np.abs(joined).max())
            row.ratio, row.exact_percent = float(np.exp(joined).mean()), 100 * exact / len(joined)
        if trajectories:
            columns, step = columns_of(samples, origins, trajectories, version), row.step or 0
            ages = Counter(columns["staleness"].tolist())
            row.staleness = {str(age): ages[age] for age in sorted(ages)}
            row.staleness_max = max(ages, default=0)
            self._run.write_trajectories(step, trajectories)
            self._run.write_token_values(step, columns)
        self._run.metrics.write(row.to_json())

    def _trajectory(self, ids: Array, groups: Counter[str]) -> Trajectory | None:
        """Return what engines sampled of a sequence; with one first prompt they are a group."""
        if not (turns := self._index.turns(self._owner, ids)):
            return None
        name = f"prompt-{zlib.crc32(turns[0].prompt.tobytes()):08x}"
        made = Trajectory(name, groups[name])
        groups[name] += 1
        made.status = "length" if turns[-1].finish_reason == "length" else "completed"
        for turn in turns:
            prompt, own, logprobs = (each.tolist() for each in turn[:3])
            seen, versions = PromptIds(prompt, turn.images), [turn.version] * len(own)
            added = made.add_turn(seen, own, logprobs, versions, turn.finish_reason)
            for role, said in (("user", added.added_token_ids), ("assistant", own)):
                made.messages.append({"role": role, "content": self._index.decode(said)})
        return made


def _seen(ids: Array, images: Sequence[PlacedImage]) -> Array:
    """Return ids, with numbers beyond all of them for those of images."""
    seen = ids.astype(np.int64)
    for each in images:
        seen[each.start : each.end] = (1 << 62) + (int(each.image.hash, 16) >> 68)
    return seen


def _values(made: Trajectory, value_T: Array, logprobs_T: Array, loss_T: Array) -> TrainedSample:
    """Return the sample of a trajectory that has one branch, with the values of its trained tokens:
    of `T` targets the advantages, or weights, the trainer's log-probs, and the loss."""
    branch, is_trained = made.branches()[-1], [False, *(value_T != 0)]
    mask = [m and t for m, t in zip(branch.response_mask, is_trained, strict=False)]
    parts = branch.token_ids, mask, branch.logprobs, branch.weight_versions
    sample = Sample.of(*parts, 0.0, 0, calls=branch.turns)
    at = np.flatnonzero(sample.response_mask_T)
    own, ones = logprobs_T[at - 1], np.ones(len(at))
    ratio = np.exp(np.subtract(own, sample.logprobs_T[at]))
    values = [own, ones * np.nan, value_T[at - 1], ones, ratio, ones * 0, loss_T[at - 1]]
    return sample, np.stack(values).astype(np.float32)
