"""The trainer's log-probs of given tokens, under the distribution that the engine samples from.

Temperature, top-k and top-p are applied as the engine applies them. What `min_tokens` and custom
logits processors forbid is not: it shows in `logprob_diff_max`.
"""

from typing import Any

import torch

from turnwise.config import SamplingConfig


def token_logprobs(
    model: Any, token_ids_BT: torch.Tensor, mask_BT: torch.Tensor, sampling: SamplingConfig
) -> torch.Tensor:
    """Log-probs of the `N` masked tokens of right-padded sequences, in row-major order: [N].

    The output head runs on the positions before masked tokens alone, so no [B, T, V] tensor is
    made. No attention mask is needed: padding stands on the right, and attention is causal.
    """
    hidden_BTH = model.base_model(input_ids=token_ids_BT, use_cache=False).last_hidden_state
    hidden_NH = hidden_BTH[:, :-1][mask_BT[:, 1:]]
    logits_NV = model.get_output_embeddings()(hidden_NH).float()
    if cap := getattr(model.config, "final_logit_softcapping", None):
        logits_NV = torch.tanh(logits_NV / cap) * cap
    targets_N = token_ids_BT[mask_BT]
    logits_NV = _processed(logits_NV, targets_N, sampling)
    picked_N = logits_NV.gather(-1, targets_N[:, None])[:, 0]
    return picked_N - torch.logsumexp(logits_NV, dim=-1)


def _processed(
    logits_NV: torch.Tensor, targets_N: torch.Tensor, sampling: SamplingConfig
) -> torch.Tensor:
    """Temperature, top-k and top-p as the engine applies them. A target that has fallen out of
    the kept set under newer weights stays in, so that its ratio is small but not zero."""
    if sampling.temperature not in (0.0, 1.0):
        logits_NV = logits_NV / sampling.temperature
    dropped_NV = torch.zeros_like(logits_NV, dtype=torch.bool)
    if 0 < sampling.top_k < logits_NV.shape[-1]:
        lowest_N1 = logits_NV.topk(sampling.top_k, dim=-1).values[:, -1:]
        dropped_NV |= logits_NV < lowest_N1
    if sampling.top_p < 1.0:
        kept_NV = logits_NV.masked_fill(dropped_NV, float("-inf"))
        sorted_NV, order_NV = kept_NV.sort(dim=-1)
        outside_NV = sorted_NV.softmax(dim=-1).cumsum(dim=-1) <= 1 - sampling.top_p
        outside_NV[:, -1] = False
        dropped_NV |= torch.zeros_like(dropped_NV).scatter(-1, order_NV, outside_NV)
    dropped_NV.scatter_(-1, targets_N[:, None], False)
    return logits_NV.masked_fill(dropped_NV, float("-inf"))
