"""The ids that grammars allowed at the targets of a micro-batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from turnwise.training.sample import Sample
from turnwise.trajectory import allowed_bits


@dataclass(frozen=True, slots=True)
class Allowed:
    """Sets of allowed ids, and the number of the set for each of `N` targets."""

    sets_MB: torch.Tensor
    """Bits of `M` sets, eight ids to a byte, the lowest id in the lowest bit; at set 0, all ids are
    allowed."""
    number_N: torch.Tensor
    """The number of each target's set."""

    @classmethod
    def of(cls, samples: Sequence[Sample], own_N: np.ndarray, device: torch.device) -> "Allowed":
        """Return the sets for those targets of the samples whose indices are in `own_N`."""
        numbers: dict[bytes, int] = {b"": 0}
        found: list[np.ndarray] = [np.zeros(0, np.int64)]
        for sample in samples:
            set_T = np.zeros(sample.length, np.int64)
            for position, allowed in sample.allowed.items():
                set_T[position] = numbers.setdefault(allowed, len(numbers))
            found.append(set_T[sample.response_mask_T])
        rows = [np.frombuffer(allowed_bits(allowed), np.uint8) for allowed in numbers if allowed]
        sets_MB = np.zeros((len(numbers), max(map(len, rows), default=0)), np.uint8)
        for number, row in enumerate(rows, start=1):
            sets_MB[number, : len(row)] = row
        number_N = np.concatenate(found)[own_N]
        return cls(torch.from_numpy(sets_MB).to(device), torch.from_numpy(number_N).to(device))

    def __getitem__(self, part: slice | torch.Tensor) -> "Allowed":
        return Allowed(self.sets_MB, self.number_N[part])

    def outside_NV(self, targets_NK: torch.Tensor, vocabulary: int) -> torch.Tensor:
        """Return whether each id is outside a target's set; the target itself never is outside."""
        bits_NB = self.sets_MB[self.number_N]
        places_8 = torch.arange(8, dtype=torch.uint8, device=bits_NB.device)
        inside_NV = ((bits_NB[..., None] >> places_8) & 1).flatten(1)[:, :vocabulary].bool()
        outside_NV = ~torch.nn.functional.pad(inside_NV, (0, vocabulary - inside_NV.shape[1]))
        outside_NV &= (self.number_N > 0)[:, None]
        return outside_NV.scatter_(-1, targets_NK, False)
