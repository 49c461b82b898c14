"""The losses that clients name, as sums over tokens.

A loss needs the policy's log-probs of the targets, with gradient, and tensors of the datum by name.
Nothing is averaged: a client scales by its weights and advantages. Formulas are those of Tinker's
pages "Loss functions" (tinker-docs.thinkingmachines.ai/tinker/losses).
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from turnwise.errors import InputError
from turnwise.training.algorithms.interface import importance_ratio

Inputs = Mapping[str, torch.Tensor]
"""Tensors of the `N` tokens, [N], by the names of `loss_fn_inputs`; and `datum`, the index of the
datum that each belongs to."""
Settings = Mapping[str, float | str]
"""The client's `loss_fn_config`."""


class TinkerLoss(NamedTuple):
    """One loss of the protocol."""

    needs: tuple[str, ...]
    """Names of the inputs that it needs beside `target_tokens`."""
    compute: Callable[[torch.Tensor, Inputs], torch.Tensor]
    """Returns the loss of each token, [N], of log-probs [N] and of all inputs."""
    defaults: Mapping[str, float] = {}
    """Values of inputs that a datum may leave out; `loss_fn_config` replaces them."""
    factor: str = "advantages"
    """Name of the input that is 0 where a token has no gradient; "" if there is none."""
    several: bool = False
    """Whether each token may have `K` targets: then all tensors are [N, K]."""


def _cross_entropy(logprobs_N: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """Return -w_t log pi(t)."""
    return -logprobs_N * inputs["weights"]


def _importance_sampling(logprobs_N: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """Return -A_t pi(t) / q(t), where q sampled the tokens."""
    return -importance_ratio(logprobs_N - inputs["logprobs"]) * inputs["advantages"]


def _ppo(logprobs_N: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """Return -min(r_t A_t, clip(r_t, low, high) A_t), where r_t = pi(t) / q(t)."""
    return _clipped(importance_ratio(logprobs_N - inputs["logprobs"]), inputs)


def _clipped(ratio_N: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    return -torch.minimum(
        ratio_N * inputs["advantages"], _clip(ratio_N, inputs) * inputs["advantages"]
    )


def _clip(ratio_N: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    return torch.clamp(ratio_N, inputs["clip_low_threshold"], inputs["clip_high_threshold"])


def _cispo(logprobs_N: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """Return -clip(r_t, low, high) A_t log pi(t), with no gradient of the ratio."""
    ratio_N = importance_ratio(logprobs_N.detach() - inputs["logprobs"])
    return -_clip(ratio_N, inputs) * inputs["advantages"] * logprobs_N


def _dro(logprobs_N: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """Return -A_t log pi(t) + beta / 2 (log pi(t) - log q(t))^2."""
    penalty_N = (logprobs_N - inputs["logprobs"]) ** 2
    return -logprobs_N * inputs["advantages"] + 0.5 * inputs["beta"] * penalty_N


def _gspo(logprobs_N: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """Return PPO's loss with one ratio for all tokens of a datum, the geometric mean of those where
    `sequence_ratio_mask` is not 0; its gradient is that of the token's own log-prob."""
    sampled_N = (inputs["sequence_ratio_mask"] != 0).float()
    log_ratio_N = (logprobs_N.detach() - inputs["logprobs"]) * sampled_N
    sums_2S = torch.zeros(2, int(inputs["datum"][-1]) + 1, device=logprobs_N.device)
    sums_2S.index_add_(1, inputs["datum"], torch.stack([log_ratio_N, sampled_N]))
    ratio_S = importance_ratio(sums_2S[0] / sums_2S[1].clamp(min=1))
    ratio_N = ratio_S[inputs["datum"]] * (logprobs_N - logprobs_N.detach()).exp()
    return _clipped(ratio_N, inputs)


def _range(low: float, high: float) -> Mapping[str, float]:
    return {"clip_low_threshold": low, "clip_high_threshold": high}


_RL = ("logprobs", "advantages")
LOSSES: Mapping[str, TinkerLoss] = {
    "cross_entropy": TinkerLoss((), _cross_entropy, {"weights": 1.0}, "weights", several=True),
    "importance_sampling": TinkerLoss(_RL, _importance_sampling),
    "ppo": TinkerLoss(_RL, _ppo, _range(0.8, 1.2)),
    "cispo": TinkerLoss(_RL, _cispo, _range(0.0, 4.0)),
    "dro": TinkerLoss(_RL, _dro, {"beta": 0.05}, factor=""),
    # The range is that of Zheng et al., "Group Sequence Policy Optimization" (arXiv 2507.18071).
    "gspo": TinkerLoss((*_RL, "sequence_ratio_mask"), _gspo, _range(1 - 3e-4, 1 + 4e-4)),
}
"""Losses that this server computes, by the protocol's names."""


STABLE = "stable_reinforce"
"""A loss of the protocol whose formula is not published."""
STAND_INS = [n for n, each in LOSSES.items() if each.needs == _RL and each.factor]
"""Losses that can be computed in its place, from inputs that its data have."""
NOT_STABLE = (
    "this server does not compute stable_reinforce: choose another loss (the cookbook's programs "
    "take loss_fn=importance_sampling), or start it with --stable-reinforce and the name of one "
    "that it computes instead"
)


def loss_named(name: str, settings: Settings) -> TinkerLoss:
    """Return a loss, with the client's settings for its defaults; InputError when the server has
    none of this name, or it lacks a setting."""
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
