"""Samples to micro-batches: within a budget of tokens, balanced over ranks, in one of 3 layouts.

Every rank gets the same number of micro-batches, because ranks that share a model compute
together; micro-batches computed at the same time are of similar size. Which rank computes which
micro-batch does not change any result.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from turnwise.config import TrainingConfig
from turnwise.training.algorithms import Tokens
from turnwise.training.allowed import Allowed
from turnwise.training.context import ContextGroup
from turnwise.training.sample import Array, Sample
from turnwise.trajectory import Distribution, Image
from turnwise.trajectory.prompt import common_length
from turnwise.trajectory.turn import TEACHER

Layout = Literal["padded", "packed", "shared"]
"""Layout of a micro-batch: rows with padding, one row of concatenated samples, or one row in which
a common beginning of several samples is computed once (`_placed`)."""
_Ids = npt.NDArray[np.int64]
_Key = npt.NDArray[np.integer]
"""`Prompt.key`: a number for each position; two samples have the same number at a position if they
have the same token or image there."""


class Costs(NamedTuple):
    """Time that attention takes in a run's micro-batches. The unit is the time that the rest of the
    model takes for one token."""

    pair: float = 0.0  # of a query-key pair, if all tokens of its sequence are computed
    ending: float = 0.0  # of a query-key pair under a mask, if only a sequence's end is computed
    sequence: float = 0.0  # of the calls for one more sequence in a row
    rows: bool = False  # whether masks separate packed sequences, so all pairs of a row cost time


class Layouts(NamedTuple):
    """Layouts that a run's micro-batches may have, and the costs that decide among them."""

    allowed: tuple[Layout, ...] = ("padded",)
    """Each optimizer step takes the cheapest of these layouts; of equally cheap ones, the first."""
    patches: float = 0.0  # number of image patches for each token of an image
    costs: Costs = Costs()


_BEGINS = 512  # fixed cost of a micro-batch: the number of tokens that take as long
_COPIED = 12
"""Copying the keys and values of 12 shared tokens takes as much memory as computing one token."""


class _Unit(NamedTuple):
    """A pair or a sequence, and the number of tokens that it adds to a micro-batch."""

    samples: list[Sample]
    tokens_first: int  # added if the unit is the first in its micro-batch
    tokens_after: int  # added if the unit follows its predecessor in the sorted order
    patches: dict[Image, float]  # patches of each image; a micro-batch reads each image once


@dataclass(frozen=True, slots=True)
class RankBatches:
    """One rank's micro-batches of one optimizer step, and the totals over all ranks."""

    micro_batches: list[list[Sample]]
    trajectory_tokens: dict[int, int]
    """Number of trained tokens of each trajectory on all ranks, including `counted_only` samples; 0
    if the trajectory is left out."""
    layout: Layout = "padded"
    images: bool = False
    """Whether any sample of the optimizer step, on any rank, has an image."""

    @property
    def total_tokens(self) -> int:
        return sum(self.trajectory_tokens.values())

    @property
    def total_trajectories(self) -> int:
        return len(self.trajectory_tokens)


def micro_batch_tokens(training: TrainingConfig, on_gpu: bool) -> int:
    """Return `training.micro_batch_tokens`, or the device's default if it is null."""
    # A few tokens keep a CPU's cores busy, and more tokens would only take memory.
    return training.micro_batch_tokens or (16_384 if on_gpu else 2048)


def threads_of(training: TrainingConfig) -> int:
    """Return a rank's number of threads: `training.threads`, or its share of the cores if null."""
    return training.threads or max(1, (os.cpu_count() or 1) // training.ranks)


def plan_micro_batches(
    samples: Sequence[Sample],
    updates: int,
    ranks: int,
    max_tokens: int,
    layouts: Layouts | Layout,
) -> list[list[RankBatches]]:
    """Return, for each rank, its share of each optimizer step.

    All micro-batches of an optimizer step, on all ranks, have the same layout: the allowed layout
    in which they cost least in total (`_time`).

    Args:
        samples: At least one sample must not be `counted_only`.
        updates: Number of optimizer steps; fewer are planned if there are fewer trajectories.
        max_tokens: Maximum size of a micro-batch in tokens, including padding; a longer pair or
            sequence gets a micro-batch of its own. Patches of images count as tokens.
        layouts: The run's layouts, or its only layout.
    """
    known = Layouts((layouts,)) if isinstance(layouts, str) else layouts
    computed: dict[int, list[Sample]] = {}
    counted: dict[int, list[Sample]] = {}
    for sample in samples:
        trajectories = counted if sample.counted_only else computed
        trajectories.setdefault(sample.trajectory, []).append(sample)
    updates = min(updates, len(computed))
    shares: list[list[RankBatches]] = [[] for _ in range(ranks)]
    for index in range(updates):  # each update gets trajectories from the whole batch
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
        found = [
            (layout, _buckets(list(units.values()), max_tokens, ranks, layout, known.patches))
            for layout in known.allowed
        ]
        layout, buckets = min(found, key=lambda each: _time(each[1], each[0], known.costs))
        # Sort by tokens without padding, in every layout, so that ranks compute similar buckets at
        # the same time.
        buckets.sort(key=lambda bucket: -_cost(bucket, "packed"))
        dealt: list[list[list[Sample]]] = [[] for _ in range(ranks)]
        for number, start in enumerate(range(0, len(buckets), ranks)):  # of similar size
            row = [[s for unit in b for s in unit.samples] for b in buckets[start : start + ranks]]
            row += [[] for _ in range(ranks - len(row))]
            # Every other round is in reverse order, so that no rank always gets the largest bucket.
            for rank, bucket in enumerate(row[::-1] if number % 2 else row):
                dealt[rank].append(bucket)
        for share, micro_batches in zip(shares, dealt, strict=True):
            images = any(sample.images for sample in own)
            share.append(RankBatches(micro_batches, dict(tokens), layout, images))
    return shares


def _buckets(
    members: Sequence[list[Sample]], max_tokens: int, ranks: int, layout: Layout, patches: float
) -> list[list[_Unit]]:
    """Divide pairs and sequences, each given by its samples, into buckets of at most `max_tokens`;
    the number of buckets is a multiple of `ranks` if possible."""

    def read(samples: Sequence[Sample]) -> dict[Image, float]:
        return {one.image: patches * one.length for sample in samples for one in sample.images}

    units = list[_Unit]()  # sorted so that neighbours share tokens or have similar lengths
    if layout == "shared":
        before: _Key | None = None
        keys = [[sample.ids.key for sample in samples] for samples in members]
        for number in _in_order([own[0] for own in keys]):
            first = after = 0
            for index, key_T in enumerate(keys[number]):
                common = 0 if before is None else common_length(before, key_T)
                size = len(key_T) - common + (len(key_T) // _COPIED if common else 0)
                first += size if index else len(key_T)
                after += size
                before = key_T
            units.append(_Unit(members[number], first, after, read(members[number])))
    else:
        for samples in sorted(members, key=lambda samples: max(s.length for s in samples)):
            size = sum(sample.length for sample in samples)
            units.append(_Unit(samples, size, size, read(samples)))
    while True:
        buckets = _divided(units, max_tokens, layout)
        missing = -len(buckets) % ranks
        if not missing or len(units) < len(buckets) + missing:
            return buckets
        # Shrink the buckets until they can be distributed evenly.
        largest = max(_cost(bucket, layout) for bucket in buckets)
        max_tokens = min(max_tokens, largest) * len(buckets) // (len(buckets) + 1)


def _divided(units: Sequence[_Unit], max_tokens: int, layout: Layout) -> list[list[_Unit]]:
    """Divide units into buckets of neighbours so that as few tokens as possible are computed."""
    best = [(0, 0)]  # for the first n units: the lowest cost, and the start of the last bucket
    for end in range(1, len(units) + 1):
        longest = max(sample.length for sample in units[end - 1].samples)  # padded: sorted by it
        found = list[tuple[int, int]]()
        rows = others = 0
        patches: dict[Image, float] = {}
        for start in reversed(range(end)):
            unit = units[start]
            rows += len(unit.samples)
            cost = rows * longest if layout == "padded" else unit.tokens_first + others
            patches |= unit.patches
            cost += round(sum(patches.values()))
            if found and cost > max_tokens:
                break
            others += unit.tokens_after
            found.append((best[start][0] + cost + _BEGINS, start))
        best.append(min(found))
    ends = [len(units)]
    while ends[-1]:
        ends.append(best[ends[-1]][1])
    return [list(units[start:end]) for start, end in pairwise(reversed(ends))]


def _cost(bucket: Sequence[_Unit], layout: Layout) -> int:
    """Return the number of computed tokens, padding included, plus the patches of images."""
    looks = _patches(bucket)
    if layout == "padded":
        lengths = [sample.length for unit in bucket for sample in unit.samples]
        return len(lengths) * max(lengths) + looks
    first, *others = bucket
    return first.tokens_first + sum(unit.tokens_after for unit in others) + looks


def _patches(bucket: Sequence[_Unit]) -> int:
    patches = {image: number for unit in bucket for image, number in unit.patches.items()}
    return round(sum(patches.values()))


def _time(buckets: Sequence[Sequence[_Unit]], layout: Layout, costs: Costs) -> float:
    """Return the cost of micro-batches in tokens: computed tokens with padding, patches of images,
    and the time of attention."""
    total = 0.0
    for bucket in buckets:
        samples = [sample for unit in bucket for sample in unit.samples]
        sizes = own = [sample.length for sample in samples]
        total += _BEGINS + _patches(bucket)
        if layout == "padded":
            total += len(sizes) * max(sizes) * (1 + costs.pair * max(sizes)) + costs.sequence
            continue
        if layout == "shared":
            order, _, own = _placed([sample.ids.key for sample in samples], layout)
            sizes = [sizes[number] for number in order]
        total += sum(own) + costs.sequence * len(sizes)
        if costs.rows:
            total += costs.ending * sum(own) ** 2
            continue
        for size, new in zip(sizes, own, strict=True):
            total += (costs.pair if new == size else costs.ending) * new * size
    return total


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of `B` rows of `T` tokens that this rank computes: all columns, or its share.

    *Targets* are the tokens to score, each from the logits at the position before it. If the layout
    is not padded, B is 1 and `position_ids_BT` restarts at each sample.
    """

    token_ids_BT: torch.Tensor
    position_ids_BT: torch.Tensor | None  # None if the positions of each row are 0, 1, 2, ...
    before_N: torch.Tensor  # positions just before trained tokens, counted row by row
    targets_N: torch.Tensor  # the tokens to score after these positions
    lengths: list[int] | None
    """Number of tokens of each sequence of the whole packed row; None if it is not packed."""
    group: ContextGroup | None
    number_N: torch.Tensor  # index of each target among the targets of all columns
    total: int  # number of targets in all columns
    experts_BTR: torch.Tensor | None = None
    """For each token, a byte that is 1 if the engine recorded the token's experts, then its row of
    `Turn.experts`; None if the engine recorded no experts."""
    column_S: torch.Tensor | None = None
    """Column of each token, sequence by sequence, if sequences share columns; None if they do not,
    so that the columns are in order."""
    own: list[int] | None = None
    """If sequences share columns: the number of tokens at the end of each sequence that it does not
    share with an earlier sequence."""
    images: tuple[Image, ...] = ()
    """Images of all rows, in the order of their columns."""
    image_BT: torch.Tensor | None = None
    """1 + the index of the image at the tokens of an image, 0 at all other tokens; on the CPU. None
    without images."""
    distributions: tuple[tuple[Distribution, torch.Tensor], ...] = ()
    """Distributions that targets of this rank were drawn from, each with the indices of its
    targets; all other targets were drawn under the run's `sampling`."""
    allowed: Allowed | None = None
    """Ids that grammars allowed at the targets of this rank; None without a grammar."""
    learns_N: torch.Tensor | None = None
    """Whether each target of this rank has a gradient; None if all targets have."""
    others_see: bool = False
    """Whether any columns of the same optimizer step, on any rank, have images."""

    @classmethod
    def of(
        cls,
        samples: Sequence[Sample],
        layout: Layout,
        device: torch.device,
        group: ContextGroup | None = None,
        others_see: bool = False,
    ) -> "Columns":
        """Lay samples out and return this rank's columns: all columns if there is no group.

        Without samples, return a row of one token that is not a target.
        """
        order, columns, own = _placed([sample.ids.key for sample in samples], layout)
        padded = layout == "padded" or not samples
        rows = (len(samples) or 1) if padded else 1
        width = max(map(len, columns), default=1) if padded else sum(own)
        lengths = None if padded else [len(columns[number]) for number in order]
        size, rank = (1, 0) if group is None else (group.size, group.number)
        missing = -width % size
        # The padding has position 0: a larger position may exceed the model's maximum.
        positions = np.tile(np.pad(np.arange(width), (0, missing)), rows)
        width += missing
        if lengths is not None:
            lengths[-1] += missing  # padding, which no token reads because attention is causal
        if padded:
            columns = [row * width + column_T for row, column_T in enumerate(columns)]
        ids = np.zeros(rows * width, np.int64)
        for sample, column_T in zip(samples, columns, strict=True):
            ids[column_T] = sample.ids.ids
            positions[column_T] = np.arange(sample.length)
        experts = _experts(samples, columns, rows * width)
        images, image = _images(samples, columns, rows * width)
        before = _concatenated(
            column_T[:-1][sample.response_mask_T[1:]]
            for sample, column_T in zip(samples, columns, strict=True)
        )
        targets = joined_rows(
            (s.ids.ids if s.targets_T is None else s.targets_T)[s.response_mask_T] for s in samples
        )
        share = width // size
        row, column = np.divmod(before, width)
        column -= rank * share
        own_N = np.flatnonzero((column >= 0) & (column < share))
        kinds, kind_N = _distributions(samples, len(targets))

        def tensor(array: Array) -> torch.Tensor:
            return torch.from_numpy(array).to(device)

        def by_row(array: Array) -> torch.Tensor:
            array = array.reshape(rows, size, share, *array.shape[1:])
            return tensor(array[:, rank])

        shared = layout == "shared" and not padded
        return cls(
            by_row(ids),
            by_row(positions) if group is not None or not padded else None,
            tensor(row[own_N] * share + column[own_N]),
            tensor(targets[own_N]),
            lengths,
            group,
            tensor(own_N),
            len(targets),
            None if experts is None else by_row(experts),
            tensor(_concatenated(columns[number] for number in order)) if shared else None,
            own if shared else None,
            images,
            torch.from_numpy(image).view(rows, width) if images else None,
            tuple(
                (kind, tensor(at_K))
                for number, kind in enumerate(kinds, start=1)
                if len(at_K := np.flatnonzero(kind_N[own_N] == number))
            ),
            Allowed.of(samples, own_N, device) if any(s.allowed for s in samples) else None,
            None,
            others_see,
        )

    def sequences(self) -> list[tuple[int, torch.Tensor]]:
        """Return the row of each sequence, padding included, and the columns of its tokens."""
        columns_T = torch.arange(self.token_ids_BT.shape[1])
        if self.lengths is None:
            return [(row, columns_T) for row in range(len(self.token_ids_BT))]
        columns_S = columns_T if self.column_S is None else self.column_S.cpu()
        return [(0, part) for part in torch.split(columns_S, self.lengths)]

    def whole(self, values_N: torch.Tensor) -> torch.Tensor:
        """Return the values of all columns' targets, row by row, given those of this rank."""
        if self.group is None:
            return values_N
        return self.group.union(values_N, self.number_N, self.total)


def _placed(tokens: Sequence[_Key], layout: Layout) -> tuple[list[int], list[_Ids], list[int]]:
    """Return the order of the sequences in the row, the columns of each sequence's tokens, and, in
    the row's order, the number of tokens at each sequence's end that no earlier sequence shares.

    Padded sequences have a row each. In the shared layout, a common prefix is computed once, such
    as a group's prompt or the history of a trajectory's branches. Sequences are sorted by their
    tokens, so that of all earlier sequences the one just before has the longest common prefix. Each
    token attends only to tokens of its own sequence. So log-probs are the same as for sequences
    computed one by one, and the gradients of a common prefix add up.

        tokens of two sequences    1 2 3 4    1 2 5
        the row                    1 2 3 4 5
        their columns              0 1 2 3    0 1 4
    """
    order = _in_order(tokens) if layout == "shared" else list(range(len(tokens)))
    columns: list[_Ids] = [np.zeros(0, np.int64)] * len(tokens)
    own = list[int]()
    before, width = -1, 0
    for number in order:
        common = 0
        if layout == "shared" and before >= 0:
            common = common_length(tokens[before], tokens[number])
        new = len(tokens[number]) - common
        start = 0 if layout == "padded" else width
        columns[number] = np.concatenate([columns[before][:common], np.arange(start, start + new)])
        own.append(new)
        before, width = number, width + new
    return order, columns, own


def _images(
    samples: Sequence[Sample], columns: Sequence[_Ids], count: int
) -> tuple[tuple[Image, ...], _Ids]:
    """Return `Columns.images`, and `Columns.image_BT` of all columns if there are any images."""
    places = {  # by an image's first column, because sequences may share an image
        int(column_T[one.start]): (one.image, column_T[one.start : one.end])
        for sample, column_T in zip(samples, columns, strict=True)
        for one in sample.images
    }
    found = [places[start] for start in sorted(places)]
    numbers = np.zeros(count if found else 0, np.int64)
    for number, (_, column_T) in enumerate(found, start=1):
        numbers[column_T] = number
    return tuple(image for image, _ in found), numbers


def _experts(samples: Sequence[Sample], columns: Sequence[_Ids], count: int) -> Array | None:
    """Return `Columns.experts_BTR` of all columns; a sample's last token has no record."""
    sizes = {len(s.experts) // (s.length - 1) for s in samples if s.experts}
    if not sizes:
        return None
    (size,) = sizes
    rows = np.zeros((count, 1 + size), np.uint8)
    for sample, column_T in zip(samples, columns, strict=True):
        if sample.experts:
            rows_TR = np.frombuffer(sample.experts, np.uint8).reshape(-1, size)
            rows[column_T[:-1]] = np.pad(rows_TR, ((0, 0), (1, 0)), constant_values=1)
    return rows


def _distributions(samples: Sequence[Sample], targets: int) -> tuple[list[Distribution], _Ids]:
    """Return the distributions of the targets, and for each target 1 + the index of its
    distribution, or 0 if the target was drawn under the run's `sampling`."""
    numbers: dict[Distribution, int] = {}
    kind_N = np.zeros(targets, np.int64)
    start = 0
    for sample in samples:
        call_K = sample.calls_T[sample.response_mask_T]
        for call, distribution in sample.distributions.items():
            if (drawn_K := call_K == call).any():
                number = numbers.setdefault(distribution, len(numbers) + 1)
                kind_N[start : start + len(call_K)][drawn_K] = number
        start += len(call_K)
    return list(numbers), kind_N


def _none(sample: Sample) -> npt.NDArray[np.float32]:
    """Return zeros: the values of a stream that a sample does not have."""
    return np.zeros_like(sample.advantages_T)


def joined_rows(parts: Iterable[Array]) -> Array:
    """Concatenate parts: [N], or [N, K] if any part has columns; narrower rows are padded with
    0."""
    listed = list(parts)
    wide = max((part.shape[1] for part in listed if part.ndim > 1), default=0)
    if wide:
        rows = [part.reshape(len(part), -1) for part in listed]
        listed = [np.pad(row, ((0, 0), (0, wide - row.shape[1]))) for row in rows]
    return np.concatenate([np.zeros((0, wide) if wide else 0, np.int64), *listed])


def _concatenated(parts: Iterable[_Ids]) -> _Ids:
    return np.concatenate([np.zeros(0, np.int64), *parts])


def _in_order(tokens: Sequence[_Key]) -> list[int]:
    """Return the indices of the sequences, sorted by their tokens. Images sort after all token ids,
    in the order of their first occurrence."""
    numbers, keys = dict[int, int](), list[bytes]()
    for key_T in tokens:
        order_T = key_T.astype(np.int64)
        if (shown_T := order_T < 0).any():
            found = (numbers.setdefault(key, len(numbers)) for key in order_T[shown_T].tolist())
            order_T[shown_T] = [(1 << 31) + number for number in found]
        keys.append(order_T.astype(">u4").tobytes())
    return sorted(range(len(tokens)), key=keys.__getitem__)


@dataclass(slots=True)
class MicroBatch:
    """The columns of some samples, and their `N` trained tokens, in order."""

    columns: Columns
    tokens: Tokens
    """The input of the loss. All log-probs are the engine's until the policy has scored the tokens.
    With a value model, `advantages_N` are rewards until advantages are computed from them."""
    call_N: torch.Tensor  # index of the engine call that sampled each token
    size: int  # number of tokens without padding, trained or not
    old_logprobs_N: torch.Tensor | None = None
    """The policy's log-probs from before the step; None if neither the KL penalty nor a correction
    needs them."""
    values_N: torch.Tensor | None = None
    returns_N: torch.Tensor | None = None
    low_entropy_N: torch.Tensor | None = None
    """True at tokens that `algorithm.entropy.top_quantile` leaves out of the current update."""

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
    others_see: bool = False,
) -> MicroBatch:
    """Return the tensors of samples; with a group, return this rank's share of the columns.

    `trajectory_tokens` is `RankBatches.trajectory_tokens`, and `version` is the weight version at
    the start of the step.
    """
    numbers: dict[int, int] = {}
    for sample in samples:
        numbers.setdefault(sample.sequence, len(numbers))
    masks, repeats = [s.response_mask_T for s in samples], [s.trained for s in samples]

    def picked(rows: Iterable[Array], dtype: type) -> torch.Tensor:
        joined = joined_rows(row[mask] for row, mask in zip(rows, masks, strict=True))
        return torch.from_numpy(joined.astype(dtype)).to(device)

    def spread(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        repeated = np.repeat(np.asarray(values, dtype=np.float64), repeats)
        return torch.from_numpy(repeated).to(device, dtype)

    engine_N = picked((s.logprobs_T for s in samples), np.float32)
    streams = defaultdict[str, torch.Tensor](lambda: engine_N)  # empty if there are no samples
    for name in sorted({name for sample in samples for name in sample.streams}):
        streams[name] = picked((s.streams.get(name, _none(s)) for s in samples), np.float32)
    tokens = Tokens(
        engine_N,
        engine_N,
        engine_N,
        picked((s.advantages_T for s in samples), np.float32),
        spread([numbers[s.sequence] for s in samples], torch.long),
        len(numbers),
        spread([trajectory_tokens[s.trajectory] for s in samples], torch.float32),
        version - picked((s.weight_versions_T for s in samples), np.int64),
        streams=streams,
    )
    if any(any(s.teacher_weights) for s in samples):
        rows = (  # NaN also where a teacher in the ranks will score
            s.streams.get(TEACHER, np.full(s.length, np.nan, np.float32)) for s in samples
        )
        parts = zip(*(s.teacher_weights for s in samples), strict=True)
        tokens = replace(
            tokens,
            teacher_logprobs_N=picked(rows, np.float32),
            teacher_weights_2N=torch.stack([spread(part, torch.float32) for part in parts]),
        )
    return MicroBatch(
        Columns.of(samples, layout, device, group, others_see),
        tokens,
        picked((s.calls_T for s in samples), np.int64),
        sum(s.length for s in samples),
    )
