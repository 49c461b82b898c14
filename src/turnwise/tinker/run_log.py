"""The run folder of a client's model: metrics, trajectories and token values of its steps.

A client sends only token ids, and its claims about them are not used. Instead, `Provenance` finds
the engines' recent samples in the client's data. So a turn has exactly an engine's prompt and
samples, even if the client's program does not say where its tokens come from.
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
import numpy.typing as npt

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
from turnwise.trajectory import Prompt, Trajectory
from turnwise.trajectory.provenance import Provenance, SampledPart, without_overlap

logger = logging.getLogger(__name__)

_MAX_SAMPLED = 2**25  # maximum tokens of samples that are kept
_MAX_TRAINED = 2**24  # maximum tokens of all models' passes that are kept until their steps
_DATUM_TOKENS = 32  # added to the tokens of each datum, for the memory of its Python objects


class _Sampled(NamedTuple):
    ids: npt.NDArray[np.int32]
    logprobs: Array
    finish_reason: str
    version: int


class _Trained(NamedTuple):
    """The forward-backward pass of one datum."""

    ids: Prompt
    """The datum's tokens and its last target; empty if a target with a value other than 0 is not
    the next token."""
    inputs: dict[str, Array]
    """Arrays by name: `value` (the weight or advantage of each target), `loss`, and `logprobs` if
    the client gave log-probs."""
    logprobs_T: Array
    """The trainer's log-probs."""


class SampleIndex:
    """Recent samples of the engines, by the client that owns them; old samples are forgotten."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self.decode = decode
        self.trained = 0
        """Size, in tokens, of the passes that run logs keep until the models' next steps."""
        self._older: dict[str, tuple[Provenance, list[_Sampled]]] = {}
        self._calls: dict[str, tuple[Provenance, list[_Sampled]]] = {}
        self._size = 0  # tokens in `_calls`

    def add(self, owner: str, prompt: Prompt, done: Sequence[Completion], version: int) -> None:
        calls, records = self._calls.setdefault(owner, (Provenance(), []))
        # An image counts one token per 64 bytes.
        self._size += len(prompt) + sum(len(one.image.data) // 64 for one in prompt.images)
        for each in filter(lambda one: one.token_ids, done):
            ids, logprobs = np.asarray(each.token_ids, np.int32), np.asarray(each.logprobs)
            records.append(_Sampled(ids, logprobs, each.finish_reason, version))
            calls.add(prompt, ids)  # after the record: another thread may look it up from now on
            self._size += len(ids)
        if self._size > _MAX_SAMPLED // 2:
            self._older, self._calls, self._size = self._calls, {}, 0

    def turns(self, owner: str, ids: Prompt) -> list[tuple[SampledPart, _Sampled]]:
        """Return the parts of a sequence that the owner's calls sampled, in order."""
        none = Provenance(), list[_Sampled]()
        (older, of_older), (calls, of_calls) = (
            each.get(owner, none) for each in (self._older, self._calls)
        )
        found = [part._replace(call=~part.call) for part in older.matches(ids)]
        found += calls.matches(ids)
        found.sort(key=lambda part: (part.start, -part.length, -part.call))
        return [
            (part, of_calls[part.call] if part.call >= 0 else of_older[~part.call])
            for part in without_overlap(found)
        ]


class RunLog:
    """Writes the run folder of one model; nothing is written before the model's first step."""

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
        """Add a pass to the next step, unless it is forward-only; `outputs` come from
        `AdapterTrainer.run`."""
        if request.forward_only:
            return
        self._loss += loss
        factor = LOSSES[request.loss].factor
        for datum, (logprobs_T, loss_T) in zip(request.data, outputs, strict=True):
            length = len(datum.ids)
            size = length + _DATUM_TOKENS
            value = datum.inputs.get(factor, np.ones(logprobs_T.shape, np.float32))
            self._tokens += int(value.reshape(length, -1).any(axis=1).sum())
            if logprobs_T.ndim > 1 or self._index.trained + size > _MAX_TRAINED:
                self._left_out += 1
                continue
            sampled = datum.inputs.get("logprobs", logprobs_T[:0])
            given = {"logprobs": sampled} if sampled.shape == logprobs_T.shape else {}
            targets = datum.inputs["target_tokens"]
            ids = datum.ids + targets[-1:]
            if (targets != ids.ids[1:])[value != 0].any():
                ids = Prompt()
            self._trained.append(
                _Trained(ids, given | {"value": value, "loss": loss_T}, logprobs_T)
            )
            self._index.trained += size
            self._held += size

    async def step(self, version: int, learning_rate: float, metrics: Mapping[str, float]) -> None:
        """Write, in the background, a step that began with the weights of `version`."""
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
            await asyncio.wait([self._writing])  # if cancelled, the writing goes on

    async def _record(self, row: StepMetrics, data: Sequence[_Trained], version: int) -> None:
        try:
            await run_in_thread(self._write, row, data, version)
        except Exception as error:
            logger.warning("the run folder of %s lacks a step: %s", self._config.name, error)

    def _write(self, row: StepMetrics, data: Sequence[_Trained], version: int) -> None:
        self._run = self._run or RunDir(self._config)
        origins, samples, groups = dict[int, Trajectory](), list[TrainedSample](), Counter[str]()
        differences, exact = [np.zeros(0)], 0
        for ids, given, logprobs_T in data:
            sample, value_T = None, given["value"]
            if made := self._trajectory(ids, groups):
                sample, values_KN = _values(made, value_T, logprobs_T, given["loss"])
                samples.append((sample, values_KN))
                origins[id(sample)] = made
            if "logprobs" in given:
                differences.append(np.subtract(logprobs_T, given["logprobs"])[value_T != 0])
                exact += sample.trained if sample else 0
        trajectories, joined = list(origins.values()), np.concatenate(differences)
        row.add_trajectories(trajectories)
        row.reward_mean = row.reward_std = None  # only the client knows rewards
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

    def _trajectory(self, ids: Prompt, groups: Counter[str]) -> Trajectory | None:
        """Return a trajectory of the turns that engines sampled in a sequence; None if they sampled
        none of it. Trajectories with the same first prompt form a group."""
        if not (turns := self._index.turns(self._owner, ids)):
            return None
        name = f"prompt-{zlib.crc32(ids.ids[: turns[0][0].start].tobytes()):08x}"
        made = Trajectory(name, groups[name])
        groups[name] += 1
        made.status = "length" if turns[-1][1].finish_reason == "length" else "completed"
        for (_, start, count), turn in turns:
            own, logprobs = turn.ids[:count].tolist(), turn.logprobs[:count].tolist()
            versions = [turn.version] * count
            added = made.add_turn(ids[:start], own, logprobs, versions, turn.finish_reason)
            for role, said in (("user", added.added_token_ids), ("assistant", own)):
                made.messages.append({"role": role, "content": self._index.decode(said)})
        return made


def _values(made: Trajectory, value_T: Array, logprobs_T: Array, loss_T: Array) -> TrainedSample:
    """Return the sample of a trajectory that has one branch, with the values of its trained tokens.
    The arguments have an advantage or weight, the trainer's log-prob and a loss for each of the `T`
    targets."""
    branch, is_trained = made.branches()[-1], [False, *(value_T != 0)]
    mask = [m and t for m, t in zip(branch.response_mask, is_trained, strict=False)]
    parts = branch.ids, mask, branch.logprobs, branch.weight_versions
    sample = Sample.of(*parts, 0.0, 0, calls=branch.turns)
    at = np.flatnonzero(sample.response_mask_T)
    own, ones = logprobs_T[at - 1], np.ones(len(at))
    ratio = np.exp(np.subtract(own, sample.logprobs_T[at]))
    values = [own, ones * np.nan, value_T[at - 1], ones, ratio, ones * 0, loss_T[at - 1]]
    return sample, np.stack(values).astype(np.float32)
