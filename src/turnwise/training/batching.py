"""Samples to micro-batches: within a budget of tokens, balanced over ranks, in one of 3 layouts.

Every rank gets the same number of micro-batches, because ranks that share a model compute
together; micro-batches computed at the same time are of similar size. The assignment to ranks
changes no result.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import torch

from turnwise.config import TrainingConfig
from turnwise.training.prefixes import SharedPrefixes, common_length, in_order
from turnwise.training.sample import Array, Sample

Layout = Literal["padded", "packed", "shared"]
"""Layout of a micro-batch: rows with padding, one row of concatenated samples, or one row in which
samples with a common beginning compute it once (`training/prefixes.py`)."""


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
    computed = _by_trajectory(sample for sample in samples if not sample.counted_only)
    counted = _by_trajectory(sample for sample in samples if sample.counted_only)
    updates = min(updates, len(computed))
    shares: list[list[RankBatches]] = [[] for _ in range(ranks)]
    for index in range(updates):
        own = [s for t in computed[index::updates] for s in t]  # spread over the batch
        tokens = Counter[int]()
        for sample in (*own, *(s for t in counted[index::updates] for s in t)):
            tokens[sample.trajectory] += sample.trained
        units: dict[int, list[Sample]] = {}
        for sample in own:
            units.setdefault(sample.pair_id, []).append(sample)
        buckets = _buckets(_units(units.values(), layout), max_tokens, ranks, layout)
        dealt = _assign(buckets, ranks)
        for share, micro_batches in zip(shares, dealt, strict=True):
            share.append(RankBatches(micro_batches, dict(tokens)))
    return shares


def _by_trajectory(samples: Iterable[Sample]) -> list[list[Sample]]:
    trajectories: dict[int, list[Sample]] = {}
    for sample in samples:
        trajectories.setdefault(sample.trajectory, []).append(sample)
    return list(trajectories.values())


@dataclass(frozen=True, slots=True)
class _Unit:
    """A pair or a sequence, and the tokens that are computed for it."""

    samples: list[Sample]
    alone: int
    """As the first of its micro-batch."""
    after: int
    """After the unit before it."""

    @property
    def longest(self) -> int:
        return max(sample.length for sample in self.samples)


def _units(units: Iterable[list[Sample]], layout: Layout) -> list[_Unit]:
    """Return units in an order in which neighbours go well together."""
    if layout != "shared":
        sized = [(samples, sum(sample.length for sample in samples)) for samples in units]
        return sorted((_Unit(s, n, n) for s, n in sized), key=lambda unit: unit.longest)
    given = list(units)
    ordered, before = list[_Unit](), None
    for number in in_order([samples[0].token_ids_T for samples in given]):
        alone = saved = 0
        for index, sample in enumerate(given[number]):
            common = 0 if before is None else common_length(before, sample.token_ids_T)
            alone += sample.length - (common if index else 0)
            saved += 0 if index else common
            before = sample.token_ids_T
        ordered.append(_Unit(given[number], alone, alone - saved))
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
        return sum(len(unit.samples) for unit in bucket) * max(unit.longest for unit in bucket)
    return bucket[0].alone + sum(unit.after for unit in bucket[1:])


def _assign(buckets: Sequence[list[_Unit]], ranks: int) -> list[list[list[Sample]]]:
    """Assign buckets of similar size to one round; a rank without one gets an empty bucket."""
    ordered = sorted(buckets, key=lambda bucket: -_cost(bucket, "packed"))
    flat = [[sample for unit in bucket for sample in unit.samples] for bucket in ordered]
    rounds = -(-len(flat) // ranks)
    flat += [[] for _ in range(rounds * ranks - len(flat))]
    dealt: list[list[list[Sample]]] = [[] for _ in range(ranks)]
    for number in range(rounds):
        row = flat[number * ranks : (number + 1) * ranks]
        # Every other round in reverse order: no rank always gets the largest.
        for rank, bucket in enumerate(row if number % 2 == 0 else row[::-1]):
            dealt[rank].append(bucket)
    return dealt


@dataclass(slots=True)
class MicroBatch:
    """`B` rows of `T` tokens.

    The mask marks *targets*: a position is scored from the logits before it. When packed, B is 1
    and `position_ids_BT` restarts at each sample. Where samples share columns, `prefixes` has the
    row and its targets, and the mask marks nothing.
    """

    token_ids_BT: torch.Tensor
    mask_BT: torch.Tensor
    position_ids_BT: torch.Tensor | None
    engine_logprobs_N: torch.Tensor
    """The engine's log-probs of the `N` masked tokens, row by row, as in the fields below."""
    staleness_N: torch.Tensor
    """Optimizer steps from the weights that sampled a token to those at the start of the step."""
    advantages_N: torch.Tensor
    turn_N: torch.Tensor
    """Index of each token's turn in its trajectory."""
    sequence_N: torch.Tensor
    trajectory_tokens_N: torch.Tensor
    """Trained tokens of the whole trajectory, in whichever micro-batch its samples are."""
    sequences: int
    tokens: int
    """Tokens without padding."""
    experts_BTR: torch.Tensor | None = None
    """Recorded choice of experts of each token: rows of `Turn.experts`, after a byte that
    is 1 where there is one; None if no token has one."""
    prefixes: SharedPrefixes | None = None
    old_logprobs_N: torch.Tensor | None = None
    reference_logprobs_N: torch.Tensor | None = None
    values_N: torch.Tensor | None = None
    returns_N: torch.Tensor | None = None

    def spans(self) -> Iterable[slice]:
        """Yield the trained tokens of each sequence as a slice."""
        bounds = torch.searchsorted(
            self.sequence_N, torch.arange(self.sequences + 1, device=self.sequence_N.device)
        ).tolist()
        return (slice(a, b) for a, b in pairwise(bounds) if b > a)


def make_micro_batch(
    samples: Sequence[Sample],
    trajectory_tokens: Mapping[int, int],
    version: int,
    layout: Layout,
    device: torch.device,
) -> MicroBatch:
    """Return the tensors of samples; without samples, a batch of one token that is not trained.

    Args:
        trajectory_tokens: Trained tokens of each trajectory, from the rank's share.
        version: Weight version at the start of the step.
    """
    positions, prefixes, packed = None, None, layout != "padded"
    if samples and layout == "shared":
        prefixes = SharedPrefixes.of(samples, device)
        token_ids_BT, positions = prefixes.token_ids_1C, prefixes.position_ids_1C
        mask_BT = torch.zeros_like(token_ids_BT, dtype=torch.bool)
    elif samples:
        token_ids_BT = _joined([s.token_ids_T for s in samples], packed)
        mask_BT = _joined([s.response_mask_T for s in samples], packed)
        if packed:
            positions = _joined([np.arange(s.length) for s in samples], packed).to(device)
    else:
        token_ids_BT, mask_BT = torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 1).bool()
    numbers: dict[int, int] = {}
    for sample in samples:
        numbers.setdefault(sample.sequence, len(numbers))
    repeats = [sample.trained for sample in samples]

    def spread(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        repeated = np.repeat(np.asarray(values, dtype=np.float64), repeats)
        return torch.from_numpy(repeated).to(device, dtype)

    return MicroBatch(
        token_ids_BT.to(device),
        mask_BT.to(device),
        positions,
        _picked([s.logprobs_T for s in samples], samples, np.float32).to(device),
        version - _picked([s.weight_versions_T for s in samples], samples, np.int64).to(device),
        _picked([s.advantages_T for s in samples], samples, np.float32).to(device),
        _picked([s.turns_T for s in samples], samples, np.int64).to(device),
        spread([numbers[s.sequence] for s in samples], torch.long),
        spread([trajectory_tokens[s.trajectory] for s in samples], torch.float32),
        len(numbers),
        sum(s.length for s in samples),
        _experts(samples, packed, device),
        prefixes,
    )


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


def _picked(rows: Sequence[Array], samples: Sequence[Sample], dtype: type) -> torch.Tensor:
    picked = [row[s.response_mask_T] for row, s in zip(rows, samples, strict=True)]
    return torch.from_numpy(np.concatenate([np.zeros(0, dtype), *picked]).astype(dtype))
