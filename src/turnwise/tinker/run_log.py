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
from pathlib import Path
from typing import NamedTuple

import numpy as np

from turnwise.config import Config
from turnwise.core.aio import run_in_thread
from turnwise.engine.protocol import Completion
from turnwise.observe.metrics import StepMetrics
from turnwise.run.run_dir import RunDir
from turnwise.run.token_values import columns_of
from turnwise.tinker.wire import Array, Datum, TrainingRequest
from turnwise.training.reports import TrainedSample
from turnwise.training.sample import Sample
from turnwise.trajectory import Trajectory

logger = logging.getLogger(__name__)

_FACTOR = 0x9E3779B97F4A7C15  # of the hashes; odd, so that none of its powers is 0
_MOST_SAMPLED = 2**25  # tokens of samples that are kept; beyond, the oldest are dropped
_MOST_TRAINED = 2**22  # tokens of a step that are kept until it is taken


class _Sampled(NamedTuple):
    prompt: Array
    ids: Array
    logprobs: Array
    finish_reason: str
    version: int


class SampleIndex:
    """Samples of the engines of late, of all clients, by owner and ids.

    Args:
        longest: Maximum number of ids of a prompt and its completion.
        decode: Returns the text of ids.
    """

    def __init__(self, longest: int, decode: Callable[[list[int]], str]) -> None:
        self.decode = decode
        self._powers = np.cumprod(np.full(longest + 1, _FACTOR, np.uint64))
        self._kept: dict[tuple[str, int, int], _Sampled] = {}
        self._size = 0

    def add(
        self, owner: str, prompt: Sequence[int], done: Sequence[Completion], version: int
    ) -> None:
        first = np.asarray(prompt, np.int32)
        for each in filter(lambda one: one.token_ids, done):
            ids, logprobs = np.asarray(each.token_ids, np.int32), np.asarray(each.logprobs)
            key = owner, len(first) + len(ids), self._hashes(np.concatenate([first, ids]))[-1]
            self._size += key[1] if self._kept.pop(key, None) is None else 0
            self._kept[key] = _Sampled(first, ids, logprobs, each.finish_reason, version)
        while self._size > _MOST_SAMPLED:
            self._size -= (oldest := next(iter(self._kept)))[1]
            del self._kept[oldest]

    def turns(self, owner: str, ids: Array) -> list[_Sampled]:
        """Return the samples that make up a sequence, in their order: the longest that it begins
        with, then the longest that the prompt of this one begins with ..."""
        hashes, found, length = self._hashes(ids), list[_Sampled](), len(ids)
        while length:
            kept = self._kept.get((owner, length, hashes[length - 1]))
            if kept and np.array_equal(np.concatenate([kept.prompt, kept.ids]), ids[:length]):
                found.insert(0, kept)
                length = len(kept.prompt)
            else:
                length -= 1
        return found

    def _hashes(self, ids: Array) -> list[int]:
        """Return a hash of each beginning of some ids."""
        terms = (ids.astype(np.uint64) + np.uint64(1)) * self._powers[: len(ids)]
        hashes: list[int] = np.cumsum(terms).tolist()
        return hashes


class RunLog:
    """Writes the run folder of one model; nothing is written before its first step."""

    def __init__(
        self, config: Config, folder: Path, name: str, owner: str, index: SampleIndex
    ) -> None:
        self._config = config.model_copy(update={"output_dir": str(folder), "name": name})
        self._owner, self._index = owner, index
        self._step, self._since = 0, time.monotonic()
        self.drop()
        self._run: RunDir | None = None
        self._writing: asyncio.Future[None] | None = None

    def drop(self) -> None:
        """Forget the passes since the last step."""
        self._trained, self._held, self._loss = list[tuple[Datum, Array]](), 0, 0.0

    def add(
        self,
        request: TrainingRequest,
        outputs: Sequence[Mapping[str, Array]],
        metrics: Mapping[str, float],
    ) -> None:
        """Add a pass to the next step, unless it is one without gradient."""
        if request.forward_only:
            return
        self._loss += metrics["loss:sum"]
        for datum, output in zip(request.data, outputs, strict=True):
            self._held += len(datum.token_ids_T)
            if self._held <= _MOST_TRAINED and output["logprobs"].ndim == 1:
                self._trained.append((datum, output["logprobs"]))

    async def step(self, version: int, learning_rate: float, metrics: Mapping[str, float]) -> None:
        """Write a step that began with the weights of a version, beside what comes next."""
        await self._written()
        self._step, now = max(self._step, version) + 1, time.monotonic()
        row = StepMetrics(step=self._step, loss=self._loss, learning_rate=learning_rate)
        row.grad_norm, row.step_seconds = metrics.get("grad_norm"), now - self._since
        row.weight_version = version + 1
        self._writing = asyncio.ensure_future(
            run_in_thread(self._write, row, self._trained, version)
        )
        self._since = now
        self.drop()

    async def close(self) -> None:
        await self._written()
        if self._run is not None:
            await run_in_thread(self._run.metrics.close)

    async def _written(self) -> None:
        writing, self._writing = self._writing, None
        try:
            if writing is not None:
                await writing
        except Exception as error:
            logger.warning("the run folder of %s lacks a step: %s", self._config.name, error)

    def _write(self, row: StepMetrics, data: Sequence[tuple[Datum, Array]], version: int) -> None:
        self._run = self._run or RunDir(self._config)
        origins, samples, groups = dict[int, Trajectory](), list[TrainedSample](), Counter[str]()
        differences, exact, row.trained_tokens = [np.zeros(0)], 0, 0
        for datum, logprobs_T in data:
            given = {k: v for k, v in datum.inputs.items() if v.shape == logprobs_T.shape}
            value_T = given.get("advantages", given.get("weights", np.ones(len(logprobs_T))))
            row.trained_tokens += int((value_T != 0).sum())
            ids = np.concatenate([datum.token_ids_T[:1], given["target_tokens"]])
            sample = None
            if made := self._trajectory(ids, groups):
                sample, values_KN = _values(made, value_T, logprobs_T)
                samples.append((sample, values_KN))
                origins[id(sample)] = made
            if "logprobs" in given:
                differences.append((logprobs_T - given["logprobs"])[value_T != 0])
                exact += sample.trained if sample else 0
        trajectories, joined = list(origins.values()), np.concatenate(differences)
        row.add_trajectories(trajectories)
        row.reward_mean = row.reward_std = None  # which only the client knows
        row.loss = (row.loss or 0.0) / max(1, row.trained_tokens)
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
            versions = [turn.version] * len(own)
            added = made.add_turn(prompt, own, logprobs, versions, turn.finish_reason)
            for role, said in (("user", added.added_token_ids), ("assistant", own)):
                made.messages.append({"role": role, "content": self._index.decode(said)})
        return made


def _values(made: Trajectory, value_T: Array, logprobs_T: Array) -> TrainedSample:
    """Return the sample of a trajectory that has one branch, with the values of its trained tokens:
    of `T` targets the advantages, or weights, and the trainer's log-probs."""
    branch, is_trained = made.branches()[-1], [False, *(value_T != 0)]
    mask = [m and t for m, t in zip(branch.response_mask, is_trained, strict=False)]
    parts = branch.token_ids, mask, branch.logprobs, branch.weight_versions
    sample = Sample.of(*parts, 0.0, 0, turns=branch.turns)
    at = np.flatnonzero(sample.response_mask_T)
    own, ones = logprobs_T[at - 1], np.ones(len(at))
    ratio = np.exp(own - sample.logprobs_T[at])
    values = [own, ones * np.nan, value_T[at - 1], ones, ratio, ones * 0]
    return sample, np.stack(values).astype(np.float32)
