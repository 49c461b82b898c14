"""The losses that clients name, as functions of the trainer's tokens.

Losses are never averaged: the client scales them with its weights and advantages. The formulas are
from Tinker's pages "Loss functions" (tinker-docs.thinkingmachines.ai/tinker/losses).

To add a loss of Tinker's protocol: write its formula of `Tokens` and its inputs in `LOSSES`.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from turnwise.errors import InputError
from turnwise.training.algorithms import Loss, TokenLoss, Tokens
from turnwise.training.algorithms.interface import importance_ratio
from turnwise.training.algorithms.losses import Formula, clipped

Settings = Mapping[str, float | str]
"""The client's `loss_fn_config`."""


class TinkerLoss(NamedTuple):
    """One loss of the protocol."""

    needs: tuple[str, ...]
    """Names of the inputs that it needs in addition to `target_tokens`."""
    formula: Callable[[Tokens], TokenLoss]
    """Function that returns the tokens' losses; `Tokens.streams` has the inputs in `streams`."""
    defaults: Mapping[str, float] = {}
    """Values of inputs that a datum may leave out; `loss_fn_config` replaces them."""
    factor: str = "advantages"
    """Name of the input that becomes the tokens' advantages."""
    scaled: bool = True
    """Whether a token whose `factor` is 0 has no gradient."""
    several: bool = False
    """Whether each token may have `K` targets; if so, all tensors are [N, K]."""

    @property
    def loss(self) -> Loss:
        """The trainer's loss."""
        return Formula(self.formula, scaled=self.scaled)

    @property
    def streams(self) -> list[str]:
        """Names of the inputs in `Tokens.streams`: all except `logprobs` and `factor`."""
        return [n for n in (*self.needs, *self.defaults) if n not in ("logprobs", self.factor)]


def _ratio(tokens: Tokens) -> torch.Tensor:
    return importance_ratio(tokens.logprobs_N - tokens.engine_logprobs_N)


def _bounds(tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
    return tokens.streams["clip_low_threshold"], tokens.streams["clip_high_threshold"]


def _cross_entropy(tokens: Tokens) -> TokenLoss:
    """Return -w_t log pi(t)."""
    return Loss.unclipped(tokens, -tokens.logprobs_N * tokens.advantages_N)


def _importance_sampling(tokens: Tokens) -> TokenLoss:
    """Return -A_t pi(t) / q(t), where q sampled the tokens."""
    return Loss.unclipped(tokens, -_ratio(tokens) * tokens.advantages_N)


def _ppo(tokens: Tokens) -> TokenLoss:
    """Return -min(r_t A_t, clip(r_t, low, high) A_t), where r_t = pi(t) / q(t)."""
    return clipped(_ratio(tokens), tokens.advantages_N, *_bounds(tokens))


def _cispo(tokens: Tokens) -> TokenLoss:
    """Return -clip(r_t, low, high) A_t log pi(t), with no gradient of the ratio."""
    weight_N = torch.clamp(_ratio(tokens).detach(), *_bounds(tokens))
    return Loss.unclipped(tokens, -weight_N * tokens.advantages_N * tokens.logprobs_N)


def _dro(tokens: Tokens) -> TokenLoss:
    """Return -A_t log pi(t) + beta / 2 (log pi(t) - log q(t))^2."""
    penalty_N = (tokens.logprobs_N - tokens.engine_logprobs_N) ** 2
    loss_N = -tokens.logprobs_N * tokens.advantages_N + 0.5 * tokens.streams["beta"] * penalty_N
    return Loss.unclipped(tokens, loss_N)


def _gspo(tokens: Tokens) -> TokenLoss:
    """Return PPO's loss with one ratio for all tokens of a datum: the geometric mean of the token
    ratios where `sequence_ratio_mask` is not 0. Each token has the gradient of its own log-prob."""
    sampled_N, own_N = (tokens.streams["sequence_ratio_mask"] != 0).float(), tokens.logprobs_N
    log_ratio_N = (own_N.detach() - tokens.engine_logprobs_N) * sampled_N
    mean_S = tokens.sums_S(log_ratio_N) / tokens.sums_S(sampled_N).clamp(min=1)
    ratio_N = importance_ratio(mean_S)[tokens.sequence_N] * (own_N - own_N.detach()).exp()
    return clipped(ratio_N, tokens.advantages_N, *_bounds(tokens))


def _range(low: float, high: float) -> Mapping[str, float]:
    return {"clip_low_threshold": low, "clip_high_threshold": high}


_RL = ("logprobs", "advantages")
LOSSES: Mapping[str, TinkerLoss] = {
    "cross_entropy": TinkerLoss((), _cross_entropy, {"weights": 1.0}, "weights", several=True),
    "importance_sampling": TinkerLoss(_RL, _importance_sampling),
    "ppo": TinkerLoss(_RL, _ppo, _range(0.8, 1.2)),
    "cispo": TinkerLoss(_RL, _cispo, _range(0.0, 4.0)),
    "dro": TinkerLoss(_RL, _dro, {"beta": 0.05}, scaled=False),
    # The range is from Zheng et al., "Group Sequence Policy Optimization" (arXiv 2507.18071).
    "gspo": TinkerLoss((*_RL, "sequence_ratio_mask"), _gspo, _range(1 - 3e-4, 1 + 4e-4)),
}
"""Losses that this server computes, by the protocol's names."""


STABLE = "stable_reinforce"
"""A loss of the protocol whose formula is not published."""
STAND_INS = [n for n, each in LOSSES.items() if each.needs == _RL and each.scaled]
"""Losses that can replace stable_reinforce, because its data have all inputs of these losses."""
NOT_STABLE = (
    "this server does not compute stable_reinforce: choose another loss (the cookbook's programs "
    "take loss_fn=importance_sampling), or start it with --stable-reinforce and the name of one "
    "that it computes instead"
)


def loss_named(name: str, settings: Settings) -> TinkerLoss:
    """Return a loss with the client's settings as its defaults; InputError when the server has no
    loss of this name, or the loss has no such setting."""
    if name == STABLE:
        raise InputError(f"loss_fn: {NOT_STABLE}")
    if (loss := LOSSES.get(name)) is None:
        raise InputError(
            f"loss_fn {name[:80]!r}: this server computes {', '.join(LOSSES)}; "
            "forward_backward_custom computes any other from the log-probs"
        )
    values = dict(loss.defaults)
    for key, value in settings.items():
        if key not in values:
            known = ", ".join(values) or "no settings"
            raise InputError(f"loss_fn_config: {name} has {known}, not {key[:80]!r}")
        if isinstance(value, str) or math.isnan(value):
            raise InputError(f"loss_fn_config: {key} must be a number, not {str(value)[:80]!r}")
        values[key] = value
    return loss._replace(defaults=values)
