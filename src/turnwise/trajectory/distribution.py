"""The distribution that a token was drawn from: the model's logits, under these parameters."""

import math
from collections.abc import Sequence
from typing import NamedTuple


class Distribution(NamedTuple):
    """Parameters by which logits became the probabilities that tokens were drawn with.

    They have the names and meanings of the configuration's `sampling` keys. Engine and trainer
    apply them in the same order.

    Example:
        >>> Distribution(temperature=0.7, top_p=0.9)
        Distribution(temperature=0.7, top_p=0.9, top_k=0, min_p=0.0)
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float] | None) -> "Distribution | None":
        """Return the distribution of values in the order of the fields, as JSON has them; None for
        None."""
        if values is None:
            return None
        temperature, top_p, top_k, min_p = values
        return cls(float(temperature), float(top_p), int(top_k), float(min_p))

    @property
    def mistake(self) -> str:
        """A sentence about the first value that is out of range; "" if all are in range."""
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            return f"temperature must be a number from 0 on, not {self.temperature}"
        if not 0 < self.top_p <= 1:
            return f"top_p must be above 0 and at most 1, not {self.top_p}"
        if self.top_k < 0:
            return f"top_k must be a whole number from 0 on, not {self.top_k}"
        if not 0 <= self.min_p <= 1:
            return f"min_p must be from 0 to 1, not {self.min_p}"
        return ""
