"""Log-probs as tests compare them: those of a model's masked tokens, row by row."""

import torch
from transformers import PreTrainedModel

from turnwise.config import SamplingConfig
from turnwise.training.scoring import score


def token_logprobs(
    model: PreTrainedModel,
    token_ids_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    sampling: SamplingConfig,
) -> torch.Tensor:
    """Return the log-probs of the masked tokens of right-padded sequences: [N]."""
    return score(model, token_ids_BT, mask_BT, None, sampling).logprobs_N
