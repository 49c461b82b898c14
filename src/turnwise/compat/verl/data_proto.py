"""verl's batch: conversations go in, padded tensors of the sampled tokens come out.

A chat scheduler may return its own batch for a conversation; `apply_batch` then trains only the
tokens that this batch selects.
"""

import math
from collections.abc import Collection, Iterable, Sequence, Sized
from dataclasses import dataclass, field
from itertools import compress
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from turnwise.core.optional import Foreign
from turnwise.errors import InputError, TrajectoryError
from turnwise.trajectory import Message, Trajectory

if TYPE_CHECKING:
    import torch


Column = npt.NDArray[Any]
"""An array of N values."""
_IDS = ("prompts", "responses", "input_ids")  # tensors of token ids
_WHOLE = ("input_ids", "attention_mask", "position_ids")  # as wide as prompts + responses
_FILLS = {"weight_versions": -1}  # padding values other than 0


@dataclass(slots=True)
class DataProto:
    """A batch of `N` rows, with the attributes of verl's class of the same name.

    Input conversations are in `non_tensor_batch["raw_prompt"]`.

    Example:
        >>> prompts = DataProto.from_conversations([[{"role": "user", "content": "2 + 2?"}]])
        >>> batch = manager.generate_sequences(prompts)
        >>> batch.batch["responses"].shape
    """

    batch: "dict[str, torch.Tensor] | None" = None
    """Tensors by name (see `from_trajectories`); None for input conversations."""
    non_tensor_batch: dict[str, Column] = field(default_factory=dict)
    """Columns of `N` values."""
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        # Compare with None, because the user's batch may be a TensorDict, which has no truth value.
        tensors: Iterable[Sized] = () if self.batch is None else self.batch.values()
        columns: list[Sized] = [*tensors, *self.non_tensor_batch.values()]
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
    def from_tokens(
        cls,
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        response_mask: Sequence[Sequence[int]],
        pad_token_id: int,
        **columns: Sequence[object],
    ) -> "DataProto":
        """Return a batch of N rows of token ids, padded as in `from_trajectories`.

        Args:
            response_mask: For each response token 1 if it is trained, else 0.
            columns: Further columns of N values.

        Example:
            >>> batch = DataProto.from_tokens([[5, 6]], [[7, 8, 9]], [[1, 1, 0]], 0, turns=[1])
            >>> batch.batch["input_ids"].shape
        """
        import torch  # a second to import

        before, after = _padded(prompts, pad_token_id, left=True), _padded(responses, pad_token_id)
        left, right = ([[1] * len(row) for row in rows] for rows in (prompts, responses))
        attention = torch.cat([_padded(left, 0, left=True), _padded(right, 0)], dim=1)
        batch = {
            "prompts": before,
            "responses": after,
            "input_ids": torch.cat([before, after], dim=1),
            "attention_mask": attention,
            "position_ids": (attention.cumsum(dim=1) - 1) * attention,
            "response_mask": _padded(response_mask, 0),
        }
        return cls(batch, {name: _objects(values) for name, values in columns.items()})

    @classmethod
    def from_trajectories(
        cls, trajectories: Sequence[Trajectory], rows: Sequence[int], pad_token_id: int
    ) -> "DataProto":
        """Return a batch with one row for each branch of each trajectory, in order.

        Args:
            rows: For each trajectory the index of its conversation, for the column `index`.

        Returns:
            A batch of N rows, with a maximum of P prompt tokens and R response tokens: prompts
            [N, P], padded on the left; responses, response_mask (1 for sampled tokens),
            rollout_log_probs and weight_versions [N, R], padded on the right; input_ids,
            attention_mask and position_ids [N, P + R].
        """
        samples = [
            (row, trajectory.messages, sample, sample.response_mask.index(1))
            for row, trajectory in zip(rows, trajectories, strict=True)
            for sample in trajectory.samples()
        ]
        if not samples:
            raise InputError("the batch would be empty: no token was sampled")

        def after(name: str) -> list[list[float]]:
            return [getattr(sample, name)[at:] for *_, sample, at in samples]

        made = cls.from_tokens(
            [sample.token_ids[:at] for *_, sample, at in samples],
            [sample.token_ids[at:] for *_, sample, at in samples],
            [sample.response_mask[at:] for *_, sample, at in samples],
            pad_token_id,
            messages=[messages for _, messages, *_ in samples],
        )
        assert made.batch is not None
        made.batch["rollout_log_probs"] = _padded(after("logprobs"), 0.0)
        made.batch["weight_versions"] = _padded(after("weight_versions"), _FILLS["weight_versions"])
        made.non_tensor_batch["index"] = np.array([row for row, *_ in samples])
        return made

    @classmethod
    def concat(cls, batches: "Sequence[DataProto]", pad_token_id: int = 0) -> "DataProto":
        """Join the rows of several batches; keep the tensors and columns that all of them have.

        Prompts and responses are padded to the largest width among the batches. Tensors that are as
        wide as the responses, or as prompts and responses together, are padded likewise. All other
        tensors must have the same shape in all batches, except for the first dimension.

        Raises:
            InputError: when a batch has no prompts or responses.
        """
        from torch import cat  # a second to import
        from torch.nn.functional import pad

        of_each: list[Foreign] = [each.batch for each in batches]
        if any(t is None or not {"prompts", "responses"} <= {*t.keys()} for t in of_each):
            raise InputError("each of the batches needs the tensors prompts and responses")
        widths = [(t["prompts"].shape[1], t["responses"].shape[1]) for t in of_each]
        widest = [max(sizes) for sizes in zip(*widths, strict=True)]

        def fitted(name: str, tensor: Foreign, before: int, after: int) -> Foreign:
            width = tensor.shape[1] if tensor.dim() > 1 else -1
            left, right = widest[0] - before, widest[1] - after
            if name == "prompts":
                right = 0
            elif name not in _WHOLE and width == after:
                left = 0
            elif width != before + after:
                return tensor
            fill = pad_token_id if name in _IDS else _FILLS.get(name, 0)
            return pad(tensor, [*[0, 0] * (tensor.dim() - 2), left, right], value=fill)

        tensors = {
            name: cat([fitted(name, t[name], *w) for t, w in zip(of_each, widths, strict=True)])
            for name in _common(of_each)
        }
        parts = [each.non_tensor_batch for each in batches]
        columns = {name: np.concatenate([each[name] for each in parts]) for name in _common(parts)}
        return cls(tensors, columns, dict(batches[0].meta_info))


def apply_batch(trajectory: Trajectory, made: "DataProto", given: Collection[str] = ()) -> None:
    """Mark the tokens that a chat scheduler's batch trains, and take over its scores.

    A sampled token is trained where `response_mask` [N, R] is 1. Without that tensor, all sampled
    tokens of the rows are trained; if the rows' ids then differ from the conversation's ids, all
    sampled tokens of the conversation are trained. `rm_scores` [N, R], summed over R and averaged
    over the rows, replace the environment's reward. Columns of finite numbers, except the columns
    `given`, become metrics, averaged over the rows.

    Raises:
        TrajectoryError: when rows with a mask differ from the sampled tokens, or when the batch
            lacks a tensor.
    """
    batch: Foreign = made.batch
    if batch is not None:
        names = ("input_ids", "attention_mask", "responses")
        ids, attention, responses = (batch.get(name, None) for name in names)
        if ids is None or attention is None or responses is None:
            raise TrajectoryError("inexact_rows", f"the batch needs the tensors {', '.join(names)}")
        width, mask = responses.shape[1], batch.get("response_mask", None)
        wanted = attention[:, attention.shape[1] - width :] if mask is None else mask
        rows: list[tuple[list[int], list[int]]] = []
        for row, real, trained in zip(*(t.tolist() for t in (ids, attention, wanted)), strict=True):
            whole = [0] * (len(row) - width) + trained
            rows.append((list(compress(row, real)), list(compress(whole, real))))
        try:
            trajectory.choose(rows)
        except TrajectoryError:
            if mask is not None:
                raise
            trajectory.events["retokenised_rows"] += len(rows)
        if (scores := batch.get("rm_scores", None)) is not None and len(scores):
            trajectory.set_outcome(reward=float(scores.float().sum(dim=-1).mean()))
    for name, column in made.non_tensor_batch.items():
        numbers = [float(v) for v in column if isinstance(v, int | float | np.number | np.bool_)]
        finite = len(numbers) == len(column) and all(map(math.isfinite, numbers))
        if numbers and finite and name not in given:
            own = {name: sum(numbers) / len(numbers)}
            trajectory.set_outcome(metrics={**trajectory.metrics, **own})


def _padded(rows: Sequence[Sequence[float]], fill: float, *, left: bool = False) -> "torch.Tensor":
    """Pad rows with `fill` to one tensor: float32 if `fill` is a float, else int64."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    dtype = torch.float32 if isinstance(fill, float) else torch.int64
    if not rows:
        return torch.zeros((0, 0), dtype=dtype)
    tensors, side = [torch.tensor(row, dtype=dtype) for row in rows], "left" if left else "right"
    return pad_sequence(tensors, batch_first=True, padding_value=fill, padding_side=side)


def _common(mappings: Sequence[Foreign]) -> list[str]:
    """Return the names that all mappings have, in the order of the first mapping."""
    # With keys(), because iteration over a TensorDict yields its rows.
    names = [list(each.keys()) for each in mappings]
    return [name for name in names[0] if all(name in others for others in names)]


def _objects(values: Sequence[object]) -> Column:
    """Return an array of objects; a list is one entry."""
    column = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):
        column[index] = value
    return column
