"""Losses of tokens, and the batch's loss from them. Each part is a function or a class, with its
formula, its paper and the differences from the paper.

    loss of the batch = sum_N weight_N * (kept_N * correction_N * (loss_N + taught_N) + coef * kl_N)
                        - entropy coef * mean entropy

    r_t = pi(t) / pi_old(t)        sg: stop gradient

A loss gives `loss_N`. The other terms come from `kl_N`, `teach`, `far_off_policy`, `token_weights`
(the reduction) and the modules `correction` and `entropy`. Log ratios are bounded everywhere (see
`importance_ratio`), which no paper does.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from turnwise.config import algorithm as sections
from turnwise.config.algorithm import AlgorithmConfig
from turnwise.errors import InputError
from turnwise.training.algorithms.advantages import has_signal
from turnwise.training.algorithms.correction import Correction, correct
from turnwise.training.algorithms.interface import (
    MAX_LOG_RATIO,
    Loss,
    TokenLoss,
    Tokens,
    importance_ratio,
)

_DPPO_MAX_RATIO = 20.0
_DELTAS = {"tv": 0.2, "kl": 0.05}  # SkyRL's


class Formula(Loss):
    """A loss computed by a function of the tokens, such as `ppo_clip`; see `Loss.scaled`."""

    def __init__(self, formula: Callable[[Tokens], TokenLoss], *, scaled: bool = False) -> None:
        self._formula = formula
        self.scaled = scaled

    def __call__(self, tokens: Tokens) -> TokenLoss:
        return self._formula(tokens)


def ppo_clip(config: sections.PpoClip, tokens: Tokens) -> TokenLoss:
    """The clipped policy-gradient loss of PPO and GRPO, with DAPO's two bounds and the dual clip.

        loss_t = -min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t)
        dual clip c > 1, where A_t < 0:  loss_t = min(loss_t, -c A_t)

    Schulman et al., "Proximal Policy Optimization Algorithms" (arXiv 1707.06347), eq. 7; two
    bounds: Yu et al., "DAPO" (arXiv 2503.14476), eq. 10; dual clip: Ye et al., "Mastering Complex
    Control in MOBA Games" (arXiv 1912.09729), eq. 5.
    """
    ratio_N = _ratios(tokens, "token")
    bounds = 1 - config.clip_low, 1 + config.clip_high
    return clipped(ratio_N, tokens.advantages_N, *bounds, config.dual_clip)


def _ratios(tokens: Tokens, level: Literal["token", "sequence"]) -> torch.Tensor:
    """Return each token's importance ratio, or the ratio of its sequence (`gspo`), with gradient:
    [N]."""
    logprobs_N = tokens.logprobs_N
    if level == "token":
        return importance_ratio(logprobs_N - tokens.old_logprobs_N)
    log_ratio_S = tokens.means_S(logprobs_N.detach() - tokens.old_logprobs_N)
    value_N = importance_ratio(log_ratio_S)[tokens.sequence_N]
    return value_N * (logprobs_N - logprobs_N.detach()).exp()


def clipped(
    ratio_N: torch.Tensor,
    advantages_N: torch.Tensor,
    low: float | torch.Tensor,
    high: float | torch.Tensor,
    dual_clip: float | None = None,
) -> TokenLoss:
    """Return -min(r A, clip(r, low, high) A), with the dual clip, for given ratios r."""
    plain_N = ratio_N * advantages_N
    bounded_N = torch.clamp(ratio_N, low, high) * advantages_N  # type: ignore[arg-type]
    loss_N, clipped_N = -torch.minimum(plain_N, bounded_N), bounded_N < plain_N
    if dual_clip is not None:
        bound_N = -dual_clip * advantages_N
        dual_N = (advantages_N < 0) & (loss_N > bound_N)
        loss_N, clipped_N = torch.where(dual_N, bound_N, loss_N), clipped_N | dual_N
    return TokenLoss(loss_N, ratio_N.detach(), clipped_N)


def gspo(config: sections.Gspo, tokens: Tokens) -> TokenLoss:
    """GSPO: one clipped ratio for a whole sequence.

        s_i    = exp(mean over the sequence's tokens of (log pi(t) - log pi_old(t)))
        s_t    = sg(s_i) * pi(t) / sg(pi(t))
        loss_t = -min(s_t A_t, clip(s_t, 1 - low, 1 + high) A_t)
        dual clip c > 1, where A_t < 0:  loss_t = min(loss_t, -c A_t)

    Zheng et al., "Group Sequence Policy Optimization" (arXiv 2507.18071), eq. 5 to 7 and, for s_t,
    the paper's GSPO-token. Each s_t has the value of its sequence's ratio and the gradient of the
    token's own log-prob. If all tokens of a sequence have the same advantage, their gradients add
    up to exactly GSPO's gradient; token-level advantages or correction weights still apply to their
    own tokens. The paper's reduction is `sequence_mean`. With `sequence_sum`, which multiplies a
    sequence's loss by its length, this loss is LUSPO (Liu et al., "Length-Unbiased Sequence Policy
    Optimization", arXiv 2602.05261). Differences: each branch of a trajectory has its own ratio,
    over its trained tokens, while the reduction weights the branches together as one trajectory;
    the paper has no dual clip.
    """
    ratio_N = _ratios(tokens, "sequence")
    bounds = 1 - config.clip_low, 1 + config.clip_high
    return clipped(ratio_N, tokens.advantages_N, *bounds, config.dual_clip)


def cispo(config: sections.Cispo, tokens: Tokens) -> TokenLoss:
    """CISPO: the clip bounds the weight of a token's gradient and never removes the gradient.

        loss_t = -sg(clip(r_t, 1 - low, 1 + high)) * A_t * log pi(t)

    MiniMax, "MiniMax-M1" (arXiv 2506.13585), eq. 4 and 5. The paper has only the upper bound, which
    corresponds to a `clip_low` of 1. It has ratios of tokens, not of sequences, and averages over
    tokens.
    """
    ratio_N = _ratios(tokens, config.level).detach()
    weight_N = ratio_N.clamp(1 - config.clip_low, 1 + config.clip_high)
    return TokenLoss(
        loss_N=-weight_N * tokens.advantages_N * tokens.logprobs_N,
        ratio_N=ratio_N,
        clipped_N=weight_N != ratio_N,
    )


def sapo(config: sections.Sapo, tokens: Tokens) -> TokenLoss:
    """SAPO: a smooth gate reduces a token's gradient more if its ratio is further from 1.

        loss_t = -(4 / tau_t) * sigmoid(tau_t * (r_t - 1)) * A_t
        tau_t  = temperature_pos where A_t > 0, else temperature_neg

    If r_t is 1, loss_t has the gradient of -r_t A_t. Gao et al., "Soft Adaptive Policy
    Optimization" (arXiv 2511.20347). The paper uses ratios of tokens and `sequence_mean`.
    """
    ratio_N, good_N = _ratios(tokens, config.level), tokens.advantages_N > 0
    tau_N = torch.where(good_N, config.temperature_pos, config.temperature_neg)
    gate_N = torch.sigmoid(tau_N * (ratio_N - 1)) * 4 / tau_N
    return TokenLoss(-gate_N * tokens.advantages_N, ratio_N.detach(), torch.zeros_like(good_N))


def dppo(config: sections.Dppo, tokens: Tokens) -> TokenLoss:
    """DPPO: a mask by the divergence from the engine's policy, in place of a clip of the ratio.

        loss_t = -M_t * sg(min(r_t, 20)) * A_t * log pi(t)
        M_t    = 0 where D_t > delta and pi(t) has moved further in the direction of A_t:
                 A_t > 0 and pi(t) > mu(t), or A_t < 0 and pi(t) < mu(t); else 1
        tv:  D_t = |mu(t) - pi(t)|
        kl:  D_t = mu(t) log(mu(t) / pi(t)) + (1 - mu(t)) log((1 - mu(t)) / (1 - pi(t)))

    mu is the engine's policy, which sampled the tokens. D is the divergence over two outcomes: the
    sampled token, and all other tokens. Qi et al., "Rethinking the Trust Region in LLM
    Reinforcement Learning" (arXiv 2602.04879), eq. 12, with the paper's binary approximations. The
    bound of r_t is verl's. Without a correction r_t is pi(t) / mu(t), as in the paper. With a
    correction, r_t is relative to the trainer's policy before the step, and the correction's weight
    covers the difference between that policy and mu.
    """
    logprobs_N = tokens.logprobs_N.detach()
    engine_N = tokens.engine_logprobs_N
    if config.divergence == "tv":
        divergence_N = (engine_N.exp() - logprobs_N.exp()).abs()
    else:
        rest_N, other_N = (-torch.expm1(x_N) for x_N in (engine_N, logprobs_N))
        smallest = torch.finfo(rest_N.dtype).eps
        logs_N = rest_N.clamp(min=smallest).log() - other_N.clamp(min=smallest).log()
        divergence_N = engine_N.exp() * (engine_N - logprobs_N) + rest_N * logs_N
    moved_N = (logprobs_N - engine_N) * tokens.advantages_N > 0
    masked_N = moved_N & (divergence_N > (config.delta or _DELTAS[config.divergence]))
    ratio_N = importance_ratio(logprobs_N - tokens.old_logprobs_N)
    weight_N = ratio_N.clamp(max=_DPPO_MAX_RATIO).masked_fill(masked_N, 0.0)
    loss_N = -weight_N * tokens.advantages_N * tokens.logprobs_N
    return TokenLoss(loss_N, ratio_N, masked_N, {"divergence": divergence_N})


class VespoLoss(Loss):
    """VESPO: a smooth weight that depends on the sequence's ratio, from a variational argument.

        w      = product over the sequence's tokens of r_t * correction_t
        phi    = exp(lambda) * w^k * exp(-lambda * w)        so that phi is 1 where w is 1
        loss_t = -sg(phi) * A_t * log pi(t)

    k and lambda are k_pos and lambda_pos where A_t >= 0, else k_neg and lambda_neg. As the weight
    contains the correction, the losses are not multiplied by the correction again. Shen et al.,
    "VESPO: Variational Sequence-Level Soft Policy Optimization" (arXiv 2602.10693), section 3.4.
    log w and the log of each token's correction are bounded to [log 1e-8, 20], as in the authors'
    implementation. Difference: the trained tokens of each branch of a trajectory are a sequence of
    their own.
    """

    def __init__(self, config: sections.Vespo) -> None:
        self._config = config

    def __call__(self, tokens: Tokens) -> TokenLoss:
        return self.corrected(tokens, torch.ones_like(tokens.advantages_N))

    def corrected(self, tokens: Tokens, correction_N: torch.Tensor) -> TokenLoss:
        config, smallest = self._config, math.log(1e-8)
        log_ratio_N = (tokens.logprobs_N - tokens.old_logprobs_N).detach()
        log_ratio_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        log_w_S = tokens.sums_S(log_ratio_N + correction_N.log().clamp(smallest, MAX_LOG_RATIO))
        log_w_N = log_w_S.clamp(smallest, MAX_LOG_RATIO)[tokens.sequence_N]
        good_N = tokens.advantages_N >= 0
        k_N = torch.where(good_N, config.k_pos, config.k_neg)
        lambda_N = torch.where(good_N, config.lambda_pos, config.lambda_neg)
        phi_N = (lambda_N + k_N * log_w_N - lambda_N * log_w_N.exp()).exp()
        loss_N = -phi_N * tokens.advantages_N * tokens.logprobs_N
        return self.unclipped(tokens, loss_N, phi_seq_mean=phi_N)


class DpoLoss(Loss):
    """Online DPO: a group's best trajectory is preferred to the group's worst.

        h(y) = sum over y's trained tokens of (log pi(t) - log pi_ref(t))
        loss of a pair = -log sigmoid(beta * (h(chosen) - h(rejected)))

    Every token of both sequences has its pair's loss; `sequence_mean` is the mean over pairs.
    Rafailov et al., "Direct Preference Optimization" (arXiv 2305.18290), eq. 7; online: Guo et al.,
    "Direct Language Model Alignment from Online AI Feedback" (arXiv 2402.04792). Differences: pairs
    are ranked by reward, where the paper asks a language model to compare two answers, and a pair
    is the best and worst of a group, where the paper samples two.
    """

    needs_reference = True
    needs_pairs = True

    def __init__(self, config: sections.Dpo) -> None:
        self._config = config

    def __call__(self, tokens: Tokens) -> TokenLoss:
        assert tokens.sequences % 2 == 0, f"{tokens.sequences} sequences are not pairs"
        assert tokens.reference_logprobs_N is not None, "DPO needs the reference model's log-probs"
        gain_S = tokens.sums_S(tokens.logprobs_N - tokens.reference_logprobs_N)
        margin_P = gain_S[0::2] - gain_S[1::2]
        pair_loss_P = -torch.nn.functional.logsigmoid(self._config.beta * margin_P)
        return self.unclipped(tokens, pair_loss_P[tokens.sequence_N // 2])


class FunctionLoss(Loss):
    """A loss given by a function of the tokens that returns the losses, [N], or a `TokenLoss`."""

    def __init__(self, function: Callable[[Tokens], torch.Tensor | TokenLoss]) -> None:
        self._function = function

    def __call__(self, tokens: Tokens) -> TokenLoss:
        given = self._function(tokens)
        if isinstance(given, TokenLoss):
            return given
        if not isinstance(given, torch.Tensor) or given.shape != tokens.logprobs_N.shape:
            name = getattr(self._function, "__qualname__", "the loss")
            found = f"{type(given).__name__}{list(getattr(given, 'shape', ()))}"
            raise InputError(
                f"{name} must return a tensor of {len(tokens.logprobs_N)} losses, one for each "
                f"token, not {found}"
            )
        return self.unclipped(tokens, given)


class CrossEntropyLoss(Loss):
    """Cross-entropy of the trained tokens: supervised training.

        loss_t = -A_t * log pi(t)

    In `turnwise sft` each advantage is 1, so that `token_mean` is the mean negative log-likelihood
    of the step's tokens. In reinforcement learning this loss is REINFORCE without an importance
    ratio (Williams, "Simple Statistical Gradient-Following Algorithms", 1992), which is right only
    for samples of the current weights.
    """

    on_policy = True

    def __call__(self, tokens: Tokens) -> TokenLoss:
        return self.unclipped(tokens, -tokens.advantages_N * tokens.logprobs_N)


def choose_pairs(rewards: Sequence[float]) -> tuple[int, int] | None:
    """Return the indices of a group's best and worst reward, of tied rewards the first; None if all
    rewards are equal or there are fewer than two."""
    if not has_signal(rewards):
        return None
    indices = range(len(rewards))
    return max(indices, key=rewards.__getitem__), min(indices, key=rewards.__getitem__)


LeftOut = Literal["off_policy_masked", "low_entropy_masked"]
"""Metrics: the shares of trained tokens whose loss is left out, by the reason."""


@dataclass(frozen=True, slots=True)
class Objective:
    """A micro-batch's part of the loss, and its components."""

    loss: torch.Tensor
    """Scalar with gradient; the sum over all micro-batches and ranks is the batch's loss."""
    result: TokenLoss
    """Per-token losses before penalty and reduction, including tokens that are left out."""
    weights_N: torch.Tensor
    """Weight of each token in the batch's loss, from `algorithm.reduction`."""
    correction: Correction
    """Weights that correct the mismatch between engine and trainer."""
    divergence_N: torch.Tensor | None
    """Divergence from the reference model, without gradient; None without a KL penalty."""
    left_out_N: Mapping[LeftOut, torch.Tensor]
    """True where a token's loss, without its KL penalty, is left out, by the metric of the reason;
    reasons that are not configured are missing."""

    @property
    def factors_N(self) -> torch.Tensor:
        """Factor of each token's loss in the batch's loss; 0 where the loss is left out."""
        factors_N = self.weights_N * self.correction.weights_N
        for left_out_N in self.left_out_N.values():
            factors_N = factors_N.masked_fill(left_out_N, 0.0)
        return factors_N


def objective(
    config: AlgorithmConfig,
    loss: Loss,
    tokens: Tokens,
    *,
    total_tokens: int,
    total_trajectories: int,
    constant: int,
    low_entropy_N: torch.Tensor | None = None,
    bonus: torch.Tensor | None = None,
    taught_N: torch.Tensor | None = None,
) -> Objective:
    """Return the loss of a micro-batch.

    With `kl.importance_weight` a token's KL penalty is multiplied by the token's own ratio
    pi(t) / pi_old(t), including the ratio's gradient, and by its correction, regardless of the
    ratio in the loss. The product of both factors is pi(t) / pi_engine(t) if the correction is
    pi_old(t) / pi_engine(t).

    Args:
        loss: The loss that `config.loss` names.
        total_tokens: Number of trained tokens in the whole batch.
        total_trajectories: Number of trajectories in the whole batch.
        constant: Length that `reduction: constant` divides by.
        low_entropy_N: True at tokens that `config.entropy.top_quantile` leaves out.
        bonus: This micro-batch's part of the entropy bonus, which is subtracted from the loss.
        taught_N: A teacher's part of the tokens' losses, from `teach`.
    """
    correction = correct(tokens, config.correction)
    result = loss.corrected(tokens, correction.weights_N)
    left_out_N: dict[LeftOut, torch.Tensor] = {}
    if config.off_policy_mask_threshold is not None:
        left_out_N["off_policy_masked"] = far_off_policy(tokens, config.off_policy_mask_threshold)
    if low_entropy_N is not None:
        left_out_N["low_entropy_masked"] = low_entropy_N
    loss_N, divergence_N = result.loss_N, None
    if taught_N is not None:
        loss_N = loss_N + taught_N * correction.weights_N
    for out_N in left_out_N.values():
        loss_N = loss_N.masked_fill(out_N, 0.0)
    if config.kl.coef:
        assert tokens.reference_logprobs_N is not None, "a KL penalty needs a reference model"
        divergence_N = kl_N(tokens.logprobs_N, tokens.reference_logprobs_N, config.kl.estimator)
        if config.kl.where == "loss":
            penalty_N = divergence_N
            if config.kl.importance_weight:
                ratio_N = importance_ratio(tokens.logprobs_N - tokens.old_logprobs_N)
                penalty_N = penalty_N * ratio_N * correction.weights_N
            loss_N = loss_N + config.kl.coef * penalty_N
        divergence_N = divergence_N.detach()
    weights_N = token_weights(
        "sequence_mean" if loss.needs_pairs else config.reduction,
        tokens,
        total_tokens=total_tokens,
        total_trajectories=total_trajectories,
        constant=constant,
    )
    total = (weights_N * loss_N).sum()
    if bonus is not None:
        total = total - bonus
    return Objective(total, result, weights_N, correction, divergence_N, left_out_N)


def far_off_policy(tokens: Tokens, threshold: float) -> torch.Tensor:
    """Return whether each token is left out because its sequence is too far off-policy: [N].

        A_t < 0 and mean over the sequence's tokens of (log pi_engine - log pi) > threshold

    Off-policy sequence masking: DeepSeek-AI, "DeepSeek-V3.2" (arXiv 2512.02556), eq. 9: a sequence
    that the policy would hardly sample any more is not worth unlearning. The mean contains both the
    drift since the tokens were sampled and the mismatch between engine and trainer. Differences:
    the trained tokens of each branch of a trajectory are a sequence of their own, and the tokens of
    a sequence may have different advantages. Left-out tokens count in the totals that a reduction
    divides by.
    """
    drift_S = tokens.means_S(tokens.engine_logprobs_N - tokens.logprobs_N.detach())
    return (tokens.advantages_N < 0) & (drift_S > threshold)[tokens.sequence_N]


def token_weights(
    reduction: Literal["token_mean", "sequence_mean", "sequence_sum", "constant", "sum"],
    tokens: Tokens,
    *,
    total_tokens: int,
    total_trajectories: int,
    constant: int,
) -> torch.Tensor:
    """Return the weight of each token of a micro-batch in the batch's loss: [N].

        token_mean      1 / tokens of the batch                        (DAPO, 2503.14476, eq. 8)
        sequence_mean   1 / (tokens of the trajectory * trajectories)  (GRPO, 2402.03300, eq. 3)
        sequence_sum    1 / trajectories                               (LUSPO, 2602.05261)
        constant        1 / (trajectories * constant)                  (Dr. GRPO, 2503.20783)
        sum             1

    Numbers of papers are arXiv's. An output in the papers is a whole trajectory here: its branches
    together count as one output, regardless of their number. The totals are over the whole batch.
    They include trajectories with advantage 0 and trajectories that `mask_truncated` leaves out,
    but no other trajectories without trained tokens.
    """
    ones_N = torch.ones_like(tokens.logprobs_N, requires_grad=False)
    match reduction:
        case "token_mean":
            return ones_N / total_tokens
        case "sequence_mean":
            return ones_N / (tokens.trajectory_tokens_N * total_trajectories)
        case "sequence_sum":
            return ones_N / total_trajectories
        case "constant":
            return ones_N / (total_trajectories * constant)
        case "sum":
            return ones_N


def kl_N(
    logprobs_N: torch.Tensor,
    reference_logprobs_N: torch.Tensor,
    estimator: Literal["k1", "k2", "k3"],
) -> torch.Tensor:
    """Return an estimate, at each token, of the KL divergence from the reference model: [N].

        d = log pi_ref(t) - log pi(t)
        k1 = -d      k2 = d^2 / 2      k3 = exp(d) - d - 1

    The gradient of the estimate flows into `logprobs_N`. Schulman, "Approximating KL divergence"
    (joschu.net/blog/kl-approx.html, 2020). k1 and k3 are unbiased estimates of the divergence, and
    k3 is never negative. As a loss, k2 has the divergence's gradient on average, while the gradient
    of k1 is 0 on average. Difference: in k3, d is at most 20, and has no gradient beyond 20.

    The averages are over tokens that the policy itself sampled. By default, a penalty in the loss
    is not reweighted for tokens of an older policy. `kl.importance_weight` multiplies the penalty
    by pi(t) / pi_old(t) and the correction (DeepSeek-AI, "DeepSeek-V3.2", arXiv 2512.02556, section
    3.1, and TRL's default); with k3, the product also has the divergence's gradient on average.
    Difference: the factor of DeepSeek and TRL is only pi(t) / pi_old(t).
    """
    difference_N = reference_logprobs_N - logprobs_N
    match estimator:
        case "k1":
            return -difference_N
        case "k2":
            return difference_N.square() / 2
        case "k3":
            difference_N = difference_N.clamp(max=MAX_LOG_RATIO)
            return difference_N.expm1() - difference_N


def teach(tokens: Tokens) -> tuple[Tokens, torch.Tensor, torch.Tensor] | None:
    """Return the tokens with the teachers' part added to their advantages, the teachers' part of
    the losses, and the divergences d: [N] each, 0 at tokens without a teacher. Return None if no
    token has a teacher.

        d_t         = log pi(t) - log pi_teacher(t)
        advantage:    A_t - weight * sg(d_t)
        loss:         loss_t + weight * sg(r_t) * d_t^2 / 2       both times the correction

    On-policy distillation: Lu and Thinking Machines Lab, "On-Policy Distillation" (2025), after
    Agarwal et al., "On-Policy Distillation of Language Models" (arXiv 2306.13649). The mean of d
    over the policy's own tokens is the reverse KL divergence KL(pi || pi_teacher). Both forms have
    its gradient on average, for each token given the context before it: the first form through the
    loss and its clip, the second in addition to the loss. Both are multiplied by the correction,
    because r_t alone may be relative to the trainer's policy, which did not sample the tokens.
    Differences: Thinking Machines take the log-probs of pi from sampling; here pi is the policy of
    the current update, so that the gradient is also right for tokens of an older policy. There is
    no discounted sum over later tokens, which Thinking Machines also leave out by default. d is
    bounded to +-20.
    """
    if tokens.teacher_logprobs_N is None or tokens.teacher_weights_2N is None:
        return None
    logprobs_N, own_N = tokens.logprobs_N, tokens.logprobs_N.detach()
    d_N = (own_N - tokens.teacher_logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    d_N = d_N.masked_fill(~tokens.teacher_weights_2N.bool().any(0), 0.0)
    in_advantage_N, in_loss_N = tokens.teacher_weights_2N
    taught = replace(tokens, advantages_N=tokens.advantages_N - in_advantage_N * d_N)
    ratio_N = importance_ratio(own_N - tokens.old_logprobs_N)
    # The gradient of d^2 / 2, also where d is bounded.
    return taught, in_loss_N * ratio_N * (d_N.square() / 2 + d_N * (logprobs_N - own_N)), d_N


def reward_penalty(kl_T: Sequence[float] | torch.Tensor, coef: float) -> torch.Tensor:
    """Return the penalty on the advantage of each trained token of a sequence, in order: [T].

        A_t = A - coef * sum_{i >= t} kl_i        (REINFORCE++, Hu et al., arXiv 2501.03262)

    The penalty has no gradient. It is for trajectory-level advantages, while GAE subtracts
    `coef * kl` from each token's reward. The penalty is subtracted after the advantages are
    computed, so it is never part of a baseline; TRL's RLOO subtracts it from the rewards before.
    """
    later_T = torch.as_tensor(kl_T).detach().flip(0).cumsum(0).flip(0)
    return coef * later_T
