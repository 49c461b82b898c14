"""One row in which samples with a common beginning compute it once: a group's prompt, the history
of a trajectory's branches.

The samples are sorted by their tokens, so that each begins like the one before it as far as any
does. A sample's own columns are those of its tokens after that beginning; its other tokens have
their columns in the samples before. Each token attends to its own sample's tokens alone, so
log-probs are those of samples computed one by one, and gradients of a common beginning add up.

    tokens of two samples    1 2 3 4    1 2 5
    the row                  1 2 3 4 5
    their columns            0 1 2 3    0 1 4
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

_Tokens = npt.NDArray[np.int64]


class _Sample(Protocol):
    @property
    def token_ids_T(self) -> _Tokens: ...

    @property
    def response_mask_T(self) -> npt.NDArray[np.bool_]: ...


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """The columns of samples in one row of `C` tokens.

    Example:
        prefixes = SharedPrefixes.of(samples, torch.device("cpu"))
    """

    token_ids_1C: torch.Tensor
    position_ids_1C: torch.Tensor
    columns_S: torch.Tensor
    """The column of each token of each sample, in the samples' order in the row."""
    lengths: list[int]
    """Number of tokens of each."""
    own: list[int]
    """Number of tokens at the end of each that are computed for it."""
    before_N: torch.Tensor
    """The column before each trained token, sample by sample in the order given."""
    targets_N: torch.Tensor
    """These trained tokens."""

    @classmethod
    def of(cls, samples: Sequence[_Sample], device: torch.device) -> "SharedPrefixes":
        """Lay out at least one sample."""
        tokens = [sample.token_ids_T for sample in samples]
        numbers = in_order(tokens)
        ids, positions, width = list[_Tokens](), list[_Tokens](), 0
        columns: dict[int, _Tokens] = {}
        own = []
        before = None
        for number in numbers:
            current = tokens[number]
            common = 0 if before is None else common_length(tokens[before], current)
            new = len(current) - common
            shared = columns[before][:common] if before is not None else np.zeros(0, np.int64)
            columns[number] = np.concatenate([shared, np.arange(width, width + new)])
            ids.append(current[common:])
            positions.append(np.arange(common, len(current)))
            own.append(new)
            width += new
            before = number
        masks = [sample.response_mask_T for sample in samples]
        preceding = [columns[i][:-1][mask[1:]] for i, mask in enumerate(masks)]
        targets = [t[mask] for t, mask in zip(tokens, masks, strict=True)]

        def tensor(arrays: Sequence[_Tokens]) -> torch.Tensor:
            return torch.from_numpy(np.concatenate(arrays)).to(device)

        return cls(
            tensor(ids)[None],
            tensor(positions)[None],
            tensor([columns[number] for number in numbers]),
            [len(columns[number]) for number in numbers],
            own,
            tensor(preceding),
            tensor(targets),
        )


def in_order(tokens: Sequence[_Tokens]) -> list[int]:
    """Return the numbers of token sequences, sorted by their tokens."""
    keys = [ids.astype(">u4").tobytes() for ids in tokens]
    return sorted(range(len(tokens)), key=keys.__getitem__)


def common_length(one: _Tokens, other: _Tokens) -> int:
    """Return the number of tokens with which both begin."""
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length
