"""A training sample: one branch of a trajectory, with what the loss needs of its tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Sample:
    """`T` tokens; the masked ones are trained."""

    token_ids_T: Array
    """int64."""
    response_mask_T: Array
    """bool; the first token, before which nothing stands, is never trained."""
    logprobs_T: Array
    """float32: the engine's, 0.0 where the mask is 0."""
    weight_versions_T: Array
    """int64; -1 where the mask is 0."""
    advantage: float
    sequence: int
    """Samples of one sequence have one ratio and one correction where those are a sequence's."""
    unit: int
    """Samples of one unit stay in one micro-batch: the two sides of a pair."""
    trajectory: int
    """Samples of one trajectory count as one in the batch's mean and stay in one update; the two
    sides of a pair are one. A sequence is part of a unit, a unit is part of a trajectory."""
    counted_only: bool
    """Whether nothing is learned from it: it counts in the batch's totals and is not computed."""

    @classmethod
    def of(
        cls,
        token_ids: Sequence[int],
        response_mask: Sequence[int],
        logprobs: Sequence[float],
        weight_versions: Sequence[int],
        advantage: float,
        sequence: int,
        unit: int | None = None,
        trajectory: int | None = None,
        counted_only: bool = False,
    ) -> "Sample":
        """From plain lists of one length; by default a sequence is a unit, and a unit is a
        trajectory."""
        lengths = {len(x) for x in (token_ids, response_mask, logprobs, weight_versions)}
        assert len(lengths) == 1, f"a sample's lengths differ: {sorted(lengths)}"
        mask = np.asarray(response_mask, dtype=bool)
        mask[:1] = False
        unit = sequence if unit is None else unit
        return cls(
            np.asarray(token_ids, dtype=np.int64),
            mask,
            np.asarray(logprobs, dtype=np.float32),
            np.asarray(weight_versions, dtype=np.int64),
            advantage,
            sequence,
            unit,
            unit if trajectory is None else trajectory,
            counted_only,
        )

    @property
    def length(self) -> int:
        return len(self.token_ids_T)

    @property
    def trained(self) -> int:
        """Tokens that are trained."""
        return int(self.response_mask_T.sum())
