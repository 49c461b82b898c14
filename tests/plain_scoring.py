"""Log-probs as tests compare them: those of a model's masked tokens, row by row."""

import torch
from transformers import PreTrainedModel

from turnwise.config import SamplingConfig
from turnwise.training.batching import Columns
from turnwise.training.context import ContextGroup
from turnwise.training.scoring import Scores, score_columns


def score(
    model: PreTrainedModel,
    token_ids_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    position_ids_BT: torch.Tensor | None,
    sampling: SamplingConfig,
    group: ContextGroup | None = None,
) -> Scores:
    """Score the masked tokens; rows are padded on the right, or packed and separated by positions
    that start again at 0."""
    return score_columns(model, Columns.of(token_ids_BT, mask_BT, position_ids_BT, group), sampling)


def token_logprobs(
    model: PreTrainedModel,
    token_ids_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    sampling: SamplingConfig,
) -> torch.Tensor:
    """Return the log-probs of the masked tokens of right-padded sequences: [N]."""
    return score(model, token_ids_BT, mask_BT, None, sampling)[0]
