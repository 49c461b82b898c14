"""Log-probs as tests compare them: those of a model's masked tokens, row by row."""

import torch
from transformers import PreTrainedModel

from turnwise.config import SamplingConfig
from turnwise.training import Sample
from turnwise.training.batching import Columns, Layout
from turnwise.training.context import ContextGroup
from turnwise.training.model import Scores, score_columns


def columns_of(
    token_ids_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    position_ids_BT: torch.Tensor | None,
    group: ContextGroup | None = None,
) -> Columns:
    """Return the columns of rows that are padded on the right, or packed and separated by positions
    that start again at 0."""
    layout: Layout = "padded"
    ids, masks = list(token_ids_BT), list(mask_BT)
    if position_ids_BT is not None:
        layout = "packed"
        starts = (position_ids_BT[0] == 0).nonzero()[:, 0].tolist()[1:]
        ids, masks = (list(x[0].tensor_split(starts)) for x in (token_ids_BT, mask_BT))
    samples = [
        Sample.to_score(ids_T.tolist(), mask_T.tolist(), number)
        for number, (ids_T, mask_T) in enumerate(zip(ids, masks, strict=True))
    ]
    return Columns.of(samples, layout, token_ids_BT.device, group)


def score(
    model: PreTrainedModel,
    token_ids_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    position_ids_BT: torch.Tensor | None,
    sampling: SamplingConfig,
    group: ContextGroup | None = None,
) -> Scores:
    """Score the masked tokens."""
    return score_columns(model, columns_of(token_ids_BT, mask_BT, position_ids_BT, group), sampling)


def token_logprobs(
    model: PreTrainedModel,
    token_ids_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    sampling: SamplingConfig,
) -> torch.Tensor:
    """Return the log-probs of the masked tokens of right-padded sequences: [N]."""
    return score(model, token_ids_BT, mask_BT, None, sampling)[0]
