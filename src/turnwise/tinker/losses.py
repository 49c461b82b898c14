"""The losses that clients name, as sums over tokens.

A loss needs the policy's log-probs of the targets, with gradient, and tensors of the datum by name.
Nothing is averaged: a client scales by its weights and advantages. Formulas are those of Tinker's
page "Loss functions" (tinker-docs.thinkingmachines.ai/losses).
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from turnwise.errors import InputError
from turnwise.training.algorithms.interface import importance_ratio

Inputs = Mapping[str, torch.Tensor]
"""Tensors of the `N` tokens, by the names of `loss_fn_inputs`."""
Settings = Mapping[str, float | str]
"""The client's `loss_fn_config`."""


class TinkerLoss(NamedTuple):
    """One loss of the protocol."""

    needs: tuple[str, ...]
    """Names of the inputs that it needs beside `target_tokens`."""
    compute: Callable[[torch.Tensor, Inputs, Settings], torch.Tensor]
    """Returns the loss of each token, [N], of log-probs [N]."""
    settings: tuple[str, ...] = ()
    """Keys of `loss_fn_config` that it knows."""


def _cross_entropy(logprobs_N: torch.Tensor, inputs: Inputs, settings: Settings) -> torch.Tensor:
    """Return -w_t log pi(t)."""
    return -logprobs_N * inputs["weights"]


def _importance_sampling(
    logprobs_N: torch.Tensor, inputs: Inputs, settings: Settings
) -> torch.Tensor:
    """Return -A_t pi(t) / q(t), where q sampled the tokens."""
    return -importance_ratio(logprobs_N - inputs["logprobs"]) * inputs["advantages"]


LOSSES: Mapping[str, TinkerLoss] = {
    "cross_entropy": TinkerLoss(("weights",), _cross_entropy),
    "importance_sampling": TinkerLoss(("logprobs", "advantages"), _importance_sampling),
}
"""Losses that this server computes, by the protocol's names."""


NOT_STABLE = (
    "this server does not compute stable_reinforce: choose another loss (the cookbook's programs "
    "take loss_fn=importance_sampling)"
)


def loss_named(name: str, settings: Settings) -> TinkerLoss:
    """Return a loss; InputError when the server has none of this name, or it lacks a setting."""
    if name == "stable_reinforce":
        raise InputError(f"loss_fn: {NOT_STABLE}")
    if (loss := LOSSES.get(name)) is None:
        raise InputError(
            f"loss_fn {name[:80]!r}: this server computes {', '.join(LOSSES)}; "
            "forward_backward_custom computes any other from the log-probs"
        )
    if unknown := settings.keys() - set(loss.settings):
        known = ", ".join(loss.settings) or "no settings"
        raise InputError(f"loss_fn_config: {name} has {known}, not {min(unknown)[:80]!r}")
    return loss
