"""The trainer's log-probs of given tokens, under the distribution that the engine samples from.

Temperature, top-k and top-p are applied as vLLM applies them: a temperature between 0 and 0.01 is
0.01, and temperature 0, greedy, reports plain log-probs without top-k and top-p. Restrictions
by `min_tokens` and custom logits processors are not applied; they show in `logprob_diff_max`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from turnwise.config import SamplingConfig
from turnwise.errors import InputError
from turnwise.training.attention import attending
from turnwise.training.batching import Columns
from turnwise.training.loading import backbone_of

_LOWEST_TEMPERATURE = 0.01  # lowest temperature above 0 in vLLM's SamplingParams
CHUNK_ELEMENTS = 2**25
"""Maximum number of logits computed at once: 128 MiB in float32."""


Scores = tuple[torch.Tensor, torch.Tensor]
"""Log-probs of targets, and the entropy of the distribution that each was drawn from, in nats and
without gradient: [N] each."""


def score_columns(model: PreTrainedModel, columns: Columns, sampling: SamplingConfig) -> Scores:
    """Score the targets of all columns, of which this rank computes some.

    The output head runs on the positions before masked tokens alone and, where they are many,
    in chunks whose logits are recomputed for the backward pass, so no [B, T, V] tensor exists.
    Padding needs no attention mask: it is on the right, and attention is causal.
    """
    hidden_NH = hidden_before(backbone_of(model), columns)
    logprobs_N, entropy_N = score_hidden(model, hidden_NH, columns.targets_N, sampling)
    return columns.whole(logprobs_N), columns.whole(entropy_N)


def score_hidden(
    model: PreTrainedModel,
    hidden_NH: torch.Tensor,
    targets_N: torch.Tensor,
    sampling: SamplingConfig,
) -> Scores:
    """Score tokens by the last hidden states at the positions before them."""
    rows = max(1, CHUNK_ELEMENTS // model.config.get_text_config().vocab_size)
    compute: Callable[..., Scores] = _score
    if len(targets_N) > rows and torch.is_grad_enabled():
        compute = partial(checkpoint, _score, use_reentrant=False)
    chunks = [
        compute(model, hidden_NH[start : start + rows], targets_N[start : start + rows], sampling)
        for start in range(0, max(1, len(targets_N)), rows)
    ]
    logprobs, entropies = zip(*chunks, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def hidden_before(backbone: PreTrainedModel, columns: Columns) -> torch.Tensor:
    """Return the last hidden states at the positions before masked tokens: [N, H]."""
    given: dict[str, Any] = {"input_ids": columns.token_ids_BT, "use_cache": False}
    if columns.position_ids_BT is not None:
        given["position_ids"] = columns.position_ids_BT
    with attending(backbone, columns) as more:
        hidden_BTH = backbone(**given, **more).last_hidden_state
    hidden_NH: torch.Tensor = hidden_BTH.flatten(0, 1)[columns.before_N]
    return hidden_NH


@dataclass
class _Output(BaseModelOutput):  # type: ignore[misc]
    """A backbone's output of nothing but the last hidden states."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def logits_of(model: PreTrainedModel, hidden_NH: torch.Tensor) -> torch.Tensor:
    """Return the logits that a model makes of last hidden states, in float32: [N, V].

    The model's own forward pass makes them, with these states in the place of its backbone's:
    models scale or cap logits after the head, each in its way.
    """
    given: list[bool] = []

    def give(*_: object, **__: object) -> BaseModelOutput:
        given.append(True)
        return _Output(last_hidden_state=hidden_NH[None])

    backbone = backbone_of(model)
    replaced = [backbone]
    if (inner := backbone.get_decoder()) is not backbone:
        replaced.append(inner)  # some models' forward passes call it directly
    before = [module.__dict__.get("forward") for module in replaced]
    for module in replaced:
        module.forward = give
    try:
        ids_1N = torch.zeros(1, len(hidden_NH), dtype=torch.long, device=hidden_NH.device)
        logits_NV: torch.Tensor = model(input_ids=ids_1N, use_cache=False).logits[0]
    finally:
        for module, own in zip(replaced, before, strict=True):
            if own is None:
                del module.forward
            else:
                module.forward = own
    if not given:
        raise InputError(
            f"a {model.config.model_type} model computes logits in a way that is not known"
        )
    return logits_NV.float()


def _score(
    model: PreTrainedModel,
    hidden_NH: torch.Tensor,
    targets_N: torch.Tensor,
    sampling: SamplingConfig,
) -> Scores:
    logits_NV = _processed(logits_of(model, hidden_NH), targets_N, sampling)
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
