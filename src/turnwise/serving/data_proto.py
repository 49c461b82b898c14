"""verl's batch: conversations go in, padded tensors of the sampled tokens come out."""

from collections.abc import Sequence, Sized
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from turnwise.errors import InputError
from turnwise.trajectory import Message, Trajectory

if TYPE_CHECKING:
    import torch


Column = npt.NDArray[Any]
"""An array of N values."""


@dataclass(slots=True)
class DataProto:
    """A batch of `N` rows, with the attributes of verl's class of that name.

    Input conversations are in `non_tensor_batch["raw_prompt"]`.

    Example:
        >>> prompts = DataProto.from_conversations([[{"role": "user", "content": "2 + 2?"}]])
        >>> batch = manager.generate_sequences(prompts)
        >>> batch.batch["responses"].shape
    """

    batch: "dict[str, torch.Tensor] | None" = None
    """Tensors by name, see `from_trajectories`; None for input conversations."""
    non_tensor_batch: dict[str, Column] = field(default_factory=dict)
    """Columns of `N` values."""
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        columns: list[Sized] = [*(self.batch or {}).values(), *self.non_tensor_batch.values()]
        return len(columns[0]) if columns else 0

    def row(self, index: int) -> "DataProto":
        """Return one row's columns, as a batch of one."""
        columns = {name: each[index : index + 1] for name, each in self.non_tensor_batch.items()}
        return DataProto(None, columns, dict(self.meta_info))

    @classmethod
    def from_conversations(
        cls,
        conversations: Sequence[Sequence[Message]],
        columns: dict[str, Sequence[object]] | None = None,
        **meta_info: object,
    ) -> "DataProto":
        """Return a batch of conversations with additional columns."""
        prompts = _objects([_objects(messages) for messages in conversations])
        more = {name: _objects(values) for name, values in (columns or {}).items()}
        return cls(None, {**more, "raw_prompt": prompts}, meta_info)

    @classmethod
    def from_trajectories(
        cls, trajectories: Sequence[Trajectory], rows: Sequence[int], pad_token_id: int
    ) -> "DataProto":
        """Return a row for each branch of each trajectory, in their order.

        Args:
            rows: The row of each trajectory's conversation, which becomes the column `index`.

        Returns:
            A batch of N rows with at most P prompt tokens and R tokens after them: prompts [N, P],
            padded on the left; responses, response_mask (1 on sampled tokens), rollout_log_probs
            and weight_versions [N, R], padded on the right; input_ids, attention_mask and
            position_ids [N, P + R].
        """
        import torch  # a second to import
        from torch.nn.utils.rnn import pad_sequence

        samples = [
            (row, trajectory.messages, sample, sample.response_mask.index(1))
            for row, trajectory in zip(rows, trajectories, strict=True)
            for sample in trajectory.samples()
        ]
        if not samples:
            raise InputError("the batch would be empty: no token was sampled")

        def padded(lists: list[list[Any]], fill: float, *, left: bool = False) -> torch.Tensor:
            rows, side = list(map(torch.tensor, lists)), "left" if left else "right"
            return pad_sequence(rows, batch_first=True, padding_value=fill, padding_side=side)

        def right(name: str, fill: float) -> torch.Tensor:
            return padded([getattr(sample, name)[at:] for *_, sample, at in samples], fill)

        before = [sample.token_ids[:at] for *_, sample, at in samples]
        prompts = padded(before, pad_token_id, left=True)
        responses = right("token_ids", pad_token_id)
        ones = [[1] * len(ids) for ids in before]
        after = [[1] * (len(sample.token_ids) - at) for *_, sample, at in samples]
        attention = torch.cat([padded(ones, 0, left=True), padded(after, 0)], dim=1)
        batch = {
            "prompts": prompts,
            "responses": responses,
            "input_ids": torch.cat([prompts, responses], dim=1),
            "attention_mask": attention,
            "position_ids": (attention.cumsum(dim=1) - 1) * attention,
            "response_mask": right("response_mask", 0),
            "rollout_log_probs": right("logprobs", 0.0),
            "weight_versions": right("weight_versions", -1),
        }
        columns = {
            "index": np.array([row for row, *_ in samples]),
            "messages": _objects([messages for _, messages, *_ in samples]),
        }
        return cls(batch, columns)


def _objects(values: Sequence[object]) -> Column:
    """Return an array with one entry for each value, lists included."""
    column = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):
        column[index] = value
    return column
