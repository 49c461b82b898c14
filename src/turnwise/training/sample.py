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
    """Samples of one sequence count as one in losses over sequences."""
    unit: int
    """Samples of one unit stay in one micro-batch: the two sides of a pair."""

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
    ) -> "Sample":
        """From plain lists of one length; a sample is its own unit unless told."""
        lengths = {len(x) for x in (token_ids, response_mask, logprobs, weight_versions)}
        assert len(lengths) == 1, f"a sample's lengths differ: {sorted(lengths)}"
        mask = np.asarray(response_mask, dtype=bool)
        mask[:1] = False
        return cls(
            np.asarray(token_ids, dtype=np.int64),
            mask,
            np.asarray(logprobs, dtype=np.float32),
            np.asarray(weight_versions, dtype=np.int64),
            advantage,
            sequence,
            sequence if unit is None else unit,
        )

    @property
    def length(self) -> int:
        return len(self.token_ids_T)

    @property
    def trained(self) -> int:
        """Tokens that are trained."""
        return int(self.response_mask_T.sum())
