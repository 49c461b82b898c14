"""Samples to micro-batches: within a budget of tokens, balanced over ranks, in one of 3 layouts.

Every rank gets the same number of micro-batches, because ranks that share a model compute
together; micro-batches computed at the same time are of similar size. The assignment to ranks
changes no result.
"""

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from turnwise.config import TrainingConfig
from turnwise.training.algorithms import Tokens
from turnwise.training.context import ContextGroup
from turnwise.training.sample import Array, Sample

Layout = Literal["padded", "packed", "shared"]
"""Layout of a micro-batch: rows with padding, one row of concatenated samples, or one row in which
samples with a common beginning compute it once (`Columns.shared`)."""
_Ids = npt.NDArray[np.int64]
_Unit = tuple[list[Sample], int, int]
"""A pair or a sequence, and the tokens that are computed for it: as the first of its micro-batch,
and after the unit before it."""


@dataclass(frozen=True, slots=True)
class RankBatches:
    """One rank's micro-batches of one optimizer step, and the totals over all ranks."""

    micro_batches: list[list[Sample]]
    trajectory_tokens: dict[int, int]
    """Trained tokens of each trajectory, on all ranks, including those that are only counted."""

    @property
    def total_tokens(self) -> int:
        return sum(self.trajectory_tokens.values())

    @property
    def total_trajectories(self) -> int:
        """Trajectories with trained tokens."""
        return sum(tokens > 0 for tokens in self.trajectory_tokens.values())


def micro_batch_tokens(training: TrainingConfig, on_gpu: bool) -> int:
    """Return `training.micro_batch_tokens`, or what null stands for on such a device.

    A CPU's cores have enough to do with few tokens, so more of them only take memory.
    """
    return training.micro_batch_tokens or (16_384 if on_gpu else 2048)


def threads_of(training: TrainingConfig) -> int:
    """Return the threads of a rank: `training.threads`, or its share of the cores."""
    return training.threads or max(1, (os.cpu_count() or 1) // training.ranks)


def plan_micro_batches(
    samples: Sequence[Sample], updates: int, ranks: int, max_tokens: int, layout: Layout
) -> list[list[RankBatches]]:
    """Return, for each rank, its share of each optimizer step.

    Args:
        samples: At least one of them is not `counted_only`.
        updates: Optimizer steps; fewer if there are fewer trajectories.
        max_tokens: Maximum size of a micro-batch, padding included; a longer pair or sequence gets
            its own.
    """
    computed: dict[int, list[Sample]] = {}
    counted: dict[int, list[Sample]] = {}
    for sample in samples:
        trajectories = counted if sample.counted_only else computed
        trajectories.setdefault(sample.trajectory, []).append(sample)
    updates = min(updates, len(computed))
    shares: list[list[RankBatches]] = [[] for _ in range(ranks)]
    for index in range(updates):  # each with trajectories from the whole batch
        own, others = (
            [s for trajectory in list(kind.values())[index::updates] for s in trajectory]
            for kind in (computed, counted)
        )
        tokens = Counter[int]()
        units: dict[int, list[Sample]] = {}
        for sample in (*own, *others):
            tokens[sample.trajectory] += sample.trained
        for sample in own:
            units.setdefault(sample.pair_id, []).append(sample)
        buckets = _buckets(_units(list(units.values()), layout), max_tokens, ranks, layout)
        buckets.sort(key=lambda bucket: -_cost(bucket, "packed"))
        dealt: list[list[list[Sample]]] = [[] for _ in range(ranks)]
        for number, start in enumerate(range(0, len(buckets), ranks)):  # of similar size
            row = [[s for unit, _, _ in b for s in unit] for b in buckets[start : start + ranks]]
            row += [[] for _ in range(ranks - len(row))]
            # Every other round in reverse order: no rank always gets the largest.
            for rank, bucket in enumerate(row[::-1] if number % 2 else row):
                dealt[rank].append(bucket)
        for share, micro_batches in zip(shares, dealt, strict=True):
            share.append(RankBatches(micro_batches, dict(tokens)))
    return shares


def _units(units: Sequence[list[Sample]], layout: Layout) -> list[_Unit]:
    """Return units in an order in which neighbours go well together."""
    if layout != "shared":
        by_length = sorted(units, key=lambda samples: max(sample.length for sample in samples))
        sizes = [sum(sample.length for sample in samples) for samples in by_length]
        return [(samples, size, size) for samples, size in zip(by_length, sizes, strict=True)]
    ordered, before = list[_Unit](), None
    for number in _in_order([samples[0].token_ids_T for samples in units]):
        alone = saved = 0
        for index, sample in enumerate(units[number]):
            common = 0 if before is None else _common_length(before, sample.token_ids_T)
            alone += sample.length - (common if index else 0)
            saved += 0 if index else common
            before = sample.token_ids_T
        ordered.append((units[number], alone, alone - saved))
    return ordered


def _buckets(
    units: Sequence[_Unit], max_tokens: int, ranks: int, layout: Layout
) -> list[list[_Unit]]:
    """Put pairs and sequences in buckets of at most `max_tokens`; their number is a multiple of the
    ranks if possible."""
    while True:
        buckets: list[list[_Unit]] = []
        for unit in units:
            if buckets and _cost([*buckets[-1], unit], layout) <= max_tokens:
                buckets[-1].append(unit)
            else:
                buckets.append([unit])
        missing = -len(buckets) % ranks
        if not missing or len(units) < len(buckets) + missing:
            return buckets
        # Shrink the buckets until they can be distributed evenly.
        largest = max(_cost(bucket, layout) for bucket in buckets)
        max_tokens = min(max_tokens, largest) * len(buckets) // (len(buckets) + 1)


def _cost(bucket: Sequence[_Unit], layout: Layout) -> int:
    """Return the tokens that are computed, padding included."""
    if layout == "padded":
        lengths = [sample.length for samples, _, _ in bucket for sample in samples]
        return len(lengths) * max(lengths)
    (_, alone, _), *others = bucket
    return alone + sum(after for _, _, after in others)


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of `B` rows of `T` tokens that this rank computes: all, or its share.

    *Targets* are the tokens to score, each from the logits before it. When packed, B is 1 and
    `position_ids_BT` restarts at each sample.
    """

    token_ids_BT: torch.Tensor
    position_ids_BT: torch.Tensor | None  # None where each row begins at 0
    before_N: torch.Tensor  # positions before masked tokens, counted row by row
    targets_N: torch.Tensor  # the masked tokens that follow them
    lengths: list[int] | None
    """Number of tokens of each sequence of the whole packed row; None if it is not packed."""
    group: ContextGroup | None
    number_N: torch.Tensor  # number of each target among those of all columns
    total: int  # number of targets in all columns
    experts_BTR: torch.Tensor | None = None
    """Recorded choice of experts of each token: rows of `trajectory/experts.py`, after a byte that
    is 1 where there is one; None if no token has one."""
    column_S: torch.Tensor | None = None
    """The column of each token of each sequence, if sequences share columns; None: in order."""
    own: list[int] | None = None
    """If they do, the number of tokens at the end of each sequence that are computed for it."""

    @classmethod
    def of(
        cls,
        token_ids_BT: torch.Tensor,
        mask_BT: torch.Tensor,
        position_ids_BT: torch.Tensor | None,
        group: ContextGroup | None,
        experts_BTR: torch.Tensor | None = None,
    ) -> "Columns":
        """Return this rank's columns; without a group, all of them. The mask is True at targets;
        there are position ids only for a packed row."""
        columns = token_ids_BT.shape[1]
        lengths: list[int] | None = None
        if position_ids_BT is not None:  # each sequence begins at position 0
            starts = (position_ids_BT[0] == 0).nonzero()[:, 0].tolist()
            lengths = [b - a for a, b in zip(starts, [*starts[1:], columns], strict=True)]
        before_BT, following_BT = (
            functional.pad(x[:, 1:], (0, 1)) for x in (mask_BT, token_ids_BT)
        )
        own = slice(None)
        if group is not None:
            width = -(-columns // group.size)
            missing = width * group.size - columns
            if position_ids_BT is None:
                position_ids_BT = torch.arange(columns, device=mask_BT.device)[None]
            if lengths is not None:
                lengths[-1] += missing  # the padding: attention is causal, and nothing reads it
            before_BT, following_BT, token_ids_BT, position_ids_BT = (
                functional.pad(x, (0, missing))
                for x in (before_BT, following_BT, token_ids_BT, position_ids_BT)
            )
            if experts_BTR is not None:
                experts_BTR = functional.pad(experts_BTR, (0, 0, 0, missing))
            own = slice(group.number * width, (group.number + 1) * width)
        number_BT = (before_BT.flatten().cumsum(0) - 1).view_as(before_BT)
        return cls(
            token_ids_BT[:, own],
            None if position_ids_BT is None else position_ids_BT[:, own],
            before_BT[:, own].flatten().nonzero()[:, 0],
            following_BT[:, own][before_BT[:, own]],
            lengths,
            group,
            number_BT[:, own][before_BT[:, own]],
            int(before_BT.sum()),
            None if experts_BTR is None else experts_BTR[:, own],
        )

    @classmethod
    def shared(cls, samples: Sequence[Sample], device: torch.device) -> "Columns":
        """Return one row in which samples with a common beginning compute it once: a group's
        prompt, the history of a trajectory's branches.

        The samples are sorted by their tokens, so that each begins like the one before it as far as
        any does. A sample's own columns are those of its tokens after that beginning; its other
        tokens have their columns in the samples before. Each token attends to its own sample's
        tokens alone, so log-probs are those of samples computed one by one, and gradients of a
        common beginning add up.

            tokens of two samples    1 2 3 4    1 2 5
            the row                  1 2 3 4 5
            their columns            0 1 2 3    0 1 4
        """
        tokens = [sample.token_ids_T for sample in samples]
        masks = [sample.response_mask_T for sample in samples]
        numbers = _in_order(tokens)
        ids, positions, own = list[_Ids](), list[_Ids](), list[int]()
        columns: dict[int, _Ids] = {}
        before, width = None, 0
        for number in numbers:
            current = tokens[number]
            common = 0 if before is None else _common_length(tokens[before], current)
            new = len(current) - common
            shared = columns[before][:common] if before is not None else np.zeros(0, np.int64)
            columns[number] = np.concatenate([shared, np.arange(width, width + new)])
            ids.append(current[common:])
            positions.append(np.arange(common, len(current)))
            own.append(new)
            width += new
            before = number

        def tensor(arrays: Iterable[_Ids]) -> torch.Tensor:
            return torch.from_numpy(np.concatenate([*arrays])).to(device)

        targets_N = tensor(t[mask] for t, mask in zip(tokens, masks, strict=True))
        return cls(
            tensor(ids)[None],
            tensor(positions)[None],
            tensor(columns[i][:-1][mask[1:]] for i, mask in enumerate(masks)),
            targets_N,
            lengths=[len(columns[number]) for number in numbers],
            group=None,
            number_N=torch.arange(len(targets_N), device=device),
            total=len(targets_N),
            column_S=tensor(columns[number] for number in numbers),
            own=own,
        )

    def whole(self, values_N: torch.Tensor) -> torch.Tensor:
        """Return the values of all columns' targets, row by row, from those of this rank's."""
        if self.group is None:
            return values_N
        return self.group.union(values_N, self.number_N, self.total)


def _in_order(tokens: Sequence[_Ids]) -> list[int]:
    """Return the numbers of token sequences, sorted by their tokens."""
    keys = [ids.astype(">u4").tobytes() for ids in tokens]
    return sorted(range(len(tokens)), key=keys.__getitem__)


def _common_length(one: _Ids, other: _Ids) -> int:
    """Return the number of tokens with which both begin."""
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length


@dataclass(slots=True)
class MicroBatch:
    """The columns of some samples, and their `N` trained tokens, in order."""

    columns: Columns
    tokens: Tokens
    """The input of the loss. Until the policy has scored them, all log-probs are the engine's."""
    turn_N: torch.Tensor  # index of each token's turn in its trajectory
    size: int  # tokens without padding, trained or not
    old_logprobs_N: torch.Tensor | None = None
    values_N: torch.Tensor | None = None
    returns_N: torch.Tensor | None = None

    def spans(self) -> Iterable[slice]:
        """Yield the trained tokens of each sequence as a slice."""
        sequence_N = self.tokens.sequence_N
        bounds = torch.searchsorted(
            sequence_N, torch.arange(self.tokens.sequences + 1, device=sequence_N.device)
        ).tolist()
        return (slice(a, b) for a, b in pairwise(bounds) if b > a)


def make_micro_batch(
    samples: Sequence[Sample],
    trajectory_tokens: Mapping[int, int],
    version: int,
    layout: Layout,
    device: torch.device,
    group: ContextGroup | None = None,
) -> MicroBatch:
    """Return the tensors of samples, of which a group's ranks have a share of the columns each.

    Without samples, it is a batch of one token that is not trained. `trajectory_tokens` are those
    of the rank's share, and `version` is the weight version at the start of the step.
    """
    packed = layout != "padded"
    if samples and layout == "shared":
        columns = Columns.shared(samples, device)
    elif samples:
        ids = _joined([s.token_ids_T for s in samples], packed).to(device)
        mask = _joined([s.response_mask_T for s in samples], packed).to(device)
        positions = None
        if packed:
            positions = _joined([np.arange(s.length) for s in samples], packed).to(device)
        columns = Columns.of(ids, mask, positions, group, _experts(samples, packed, device))
    else:
        ids = torch.zeros(1, 1, dtype=torch.long, device=device)
        columns = Columns.of(ids, ids.bool(), None, group)
    numbers: dict[int, int] = {}
    for sample in samples:
        numbers.setdefault(sample.sequence, len(numbers))
    masks, repeats = [s.response_mask_T for s in samples], [s.trained for s in samples]

    def picked(rows: Iterable[Array], dtype: type) -> torch.Tensor:
        parts = [row[mask] for row, mask in zip(rows, masks, strict=True)]
        joined = np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype)
        return torch.from_numpy(joined).to(device)

    def spread(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        repeated = np.repeat(np.asarray(values, dtype=np.float64), repeats)
        return torch.from_numpy(repeated).to(device, dtype)

    engine_N = picked((s.logprobs_T for s in samples), np.float32)
    tokens = Tokens(
        engine_N,
        engine_N,
        engine_N,
        picked((s.advantages_T for s in samples), np.float32),
        spread([numbers[s.sequence] for s in samples], torch.long),
        len(numbers),
        spread([trajectory_tokens[s.trajectory] for s in samples], torch.float32),
        version - picked((s.weight_versions_T for s in samples), np.int64),
    )
    turn_N = picked((s.turns_T for s in samples), np.int64)
    return MicroBatch(columns, tokens, turn_N, sum(s.length for s in samples))


def _experts(samples: Sequence[Sample], packed: bool, device: torch.device) -> torch.Tensor | None:
    """Return the rows of samples; the last token of each has none, and needs none."""
    sizes = {len(s.experts) // (s.length - 1) for s in samples if s.experts}
    if not sizes:
        return None
    (size,) = sizes
    rows = []
    for sample in samples:
        row_TR = np.zeros((sample.length, 1 + size), np.uint8)
        if sample.experts:
            row_TR[:-1, 0] = 1
            row_TR[:-1, 1:] = np.frombuffer(sample.experts, np.uint8).reshape(-1, size)
        rows.append(row_TR)
    return _joined(rows, packed).to(device)


def _joined(rows: Sequence[Array], packed: bool) -> torch.Tensor:
    if packed:
        return torch.from_numpy(np.concatenate(rows))[None]
    longest = max(map(len, rows))
    padded = np.zeros((len(rows), longest, *rows[0].shape[1:]), dtype=rows[0].dtype)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return torch.from_numpy(padded)
