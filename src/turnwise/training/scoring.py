"""The trainer's log-probs of given tokens, under the distribution that the engine samples from.

Temperature, top-k and top-p are applied as vLLM applies them: a temperature between 0 and 0.01 is
0.01, and temperature 0, greedy, reports plain log-probs without top-k and top-p. Restrictions
by `min_tokens` and custom logits processors are not applied; they show in `logprob_diff_max`.
"""

from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from turnwise.config import SamplingConfig
from turnwise.training.attention import attending
from turnwise.training.context import Columns, ContextGroup

_LOWEST_TEMPERATURE = 0.01
"""Lowest temperature above 0 in vLLM's SamplingParams."""
CHUNK_ELEMENTS = 2**25
"""Maximum number of logits computed at once: 128 MiB in float32."""


class Scores(NamedTuple):
    """Scores of the `N` masked tokens, in row-major order."""

    logprobs_N: torch.Tensor
    entropy_N: torch.Tensor
    """Entropy of the distribution that each was drawn from, in nats, without gradient."""


def score(
    model: Any,
    token_ids_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    position_ids_BT: torch.Tensor | None,
    sampling: SamplingConfig,
    group: ContextGroup | None = None,
) -> Scores:
    """Score the masked tokens; rows are padded on the right, or packed and separated by
    positions that start again at 0.

    The output head runs on the positions before masked tokens alone and, where they are many,
    in chunks whose logits are recomputed for the backward pass, so no [B, T, V] tensor exists.
    Padding needs no attention mask: it is on the right, and attention is causal.

    Args:
        group: Ranks that share the rows; each gets the scores of all tokens.
    """
    return score_columns(model, Columns.of(token_ids_BT, mask_BT, position_ids_BT, group), sampling)


def score_columns(model: PreTrainedModel, columns: Columns, sampling: SamplingConfig) -> Scores:
    """Score the targets of all columns, of which this rank computes some; see `score`."""
    hidden_NH = hidden_before(model.base_model, columns)
    own = score_hidden(model, hidden_NH, columns.targets_N, sampling)
    return Scores(*(columns.whole(values_N) for values_N in own))


def score_hidden(
    model: PreTrainedModel,
    hidden_NH: torch.Tensor,
    targets_N: torch.Tensor,
    sampling: SamplingConfig,
) -> Scores:
    """Score tokens by the last hidden states at the positions before them."""
    head = model.get_output_embeddings()
    cap = getattr(model.config, "final_logit_softcapping", None)
    rows = max(1, CHUNK_ELEMENTS // head.weight.shape[0])
    chunks = []
    for start in range(0, max(1, len(targets_N)), rows):
        inputs = hidden_NH[start : start + rows], targets_N[start : start + rows]
        if len(targets_N) > rows and torch.is_grad_enabled():
            chunks.append(checkpoint(_score, head, *inputs, cap, sampling, use_reentrant=False))
        else:
            chunks.append(_score(head, *inputs, cap, sampling))
    return Scores(*(torch.cat(parts) for parts in zip(*chunks, strict=True)))


def hidden_before(backbone: Any, columns: Columns) -> torch.Tensor:
    """Return the last hidden states at the positions before masked tokens: [N, H]."""
    given: dict[str, Any] = {"input_ids": columns.token_ids_BT, "use_cache": False}
    if columns.position_ids_BT is not None:
        given["position_ids"] = columns.position_ids_BT
    with attending(backbone, columns) as more:
        hidden_BTH = backbone(**given, **more).last_hidden_state
    hidden_NH: torch.Tensor = hidden_BTH.flatten(0, 1)[columns.before_N]
    return hidden_NH


def _score(
    head: Any,
    hidden_NH: torch.Tensor,
    targets_N: torch.Tensor,
    cap: float | None,
    sampling: SamplingConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    logits_NV = head(hidden_NH).float()
    if cap:
        logits_NV = torch.tanh(logits_NV / cap) * cap
    logits_NV = _processed(logits_NV, targets_N, sampling)
    total_N = torch.logsumexp(logits_NV, dim=-1)
    logprobs_N = logits_NV.gather(-1, targets_N[:, None])[:, 0] - total_N
    with torch.no_grad():
        probabilities_NV = (logits_NV - total_N[:, None]).exp_()
        mean_N = probabilities_NV.mul_(logits_NV.clamp(min=-1e9)).sum(dim=-1)
        entropy_N = total_N - mean_N
    return logprobs_N, entropy_N


def _processed(
    logits_NV: torch.Tensor, targets_N: torch.Tensor, sampling: SamplingConfig
) -> torch.Tensor:
    """Apply temperature, top-k and top-p as the engine does.

    A target that has fallen out of the kept set under newer weights stays in, so that its ratio is
    small but not zero.
    """
    if sampling.temperature == 0.0:
        return logits_NV
    if sampling.temperature != 1.0:
        logits_NV = logits_NV / max(sampling.temperature, _LOWEST_TEMPERATURE)
    if not 0 < sampling.top_k < logits_NV.shape[-1] and sampling.top_p >= 1.0:
        return logits_NV
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
