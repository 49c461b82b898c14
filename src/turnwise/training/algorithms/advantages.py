"""Advantage estimators, each with its formula, its paper and the differences from the paper.

This module also has DAPO's rules about rewards: which groups have a signal, and the overlong
penalty.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from turnwise.config.algorithm import Gae, MtGrpo, ReinforcePP, TurnReturns
from turnwise.training.algorithms.interface import Advantage, ValueModel

_EPSILON = 1e-6


def has_signal(rewards: Sequence[float]) -> bool:
    """Return whether the rewards are not all equal. DAPO's dynamic sampling (arXiv 2503.14476,
    eq. 11) keeps only such groups. DAPO's rewards are right or wrong; here they may be any
    numbers."""
    return len(set(rewards)) > 1


def overlong_penalty(length: int, max_length: int, buffer_tokens: int, penalty: float) -> float:
    """Return the term, between -penalty and 0, to add to the reward of `length` tokens.

        0                               up to L - buffer, or if there is no buffer
        (L - buffer - length) / buffer  in the buffer: the last tokens before the longest length L
        -1                              beyond L

    Soft overlong punishment: Yu et al., "DAPO" (arXiv 2503.14476), eq. 13. Difference: it is
    multiplied by a weight, `penalty`.
    """
    if not buffer_tokens:
        return 0.0
    room = min(0, max_length - buffer_tokens - length)
    return penalty * max(-1.0, room / buffer_tokens)


def _centred(values: Sequence[float], *, scale: bool, mean: float | None = None) -> list[float]:
    """Return values minus their mean, all 0 if they are equal.

    Args:
        scale: Also divide by the population standard deviation (divided by n).
        mean: Mean of the values, if it is known exactly.
    """
    if not has_signal(values):
        return [0.0] * len(values)
    mean = sum(values) / len(values) if mean is None else mean
    if not scale:
        return [value - mean for value in values]
    std = _std(values, mean)
    return [(value - mean) / (std + _EPSILON) for value in values]


def _std(values: Sequence[float], mean: float) -> float:
    return math.sqrt(sum((value - mean) ** 2 for value in values) / max(1, len(values)))


class WithinGroup(Advantage):
    """Advantages by a formula of a group's rewards, such as `grpo`; 0 if the rewards are equal."""

    def __init__(self, formula: Callable[[Sequence[float]], list[float]]) -> None:
        self._formula = formula

    def of_group(self, rewards: Sequence[float]) -> list[float] | None:
        """Return all 0 if the rewards are equal, None if there are fewer than two."""
        if len(rewards) < 2:
            return None
        return self._formula(rewards) if has_signal(rewards) else [0.0] * len(rewards)


def grpo(rewards: Sequence[float]) -> list[float]:
    """GRPO: rewards normalised within the group.

        A_i = (r_i - mean(r)) / (std(r) + 1e-6)

    Group Relative Policy Optimization: Shao et al., "DeepSeekMath" (arXiv 2402.03300), section
    4.1.2. Differences: the standard deviation is that of the population (divided by n; TRL divides
    by n - 1), which the paper leaves open, and 1e-6 avoids amplifying rewards that differ only by
    rounding.
    """
    return _centred(rewards, scale=True)


class ZeroAdvantage(Advantage):
    """Advantage 0 for every trajectory, also in a group of one, for training by a teacher or by
    penalties only."""

    def of_group(self, rewards: Sequence[float]) -> list[float] | None:
        return [0.0] * len(rewards)


class BatchScaled(Advantage):
    """GRPO with the standard deviation of the whole batch's rewards.

        A_i = (r_i - mean(r of its group)) / (std(r over the batch) + 1e-6)

    Liu et al., "Part I: Tricks or Traps? A Deep Dive into RL for LLM Reasoning" (arXiv 2508.08221,
    Lite PPO): groups whose rewards hardly differ are not amplified. Differences: the differences of
    `grpo`; also, groups of one trajectory, which are not trained, do not count in the batch.
    """

    def of_groups(self, rewards: Sequence[Sequence[float]]) -> list[list[float] | None]:
        batch = [reward for group in rewards if len(group) > 1 for reward in group]
        scale = 1 / (_std(batch, sum(batch) / max(1, len(batch))) + _EPSILON)
        return [
            None if len(group) < 2 else [scale * a for a in _centred(group, scale=False)]
            for group in rewards
        ]


def dr_grpo(rewards: Sequence[float]) -> list[float]:
    """Dr. GRPO: rewards minus their group's mean.

        A_i = r_i - mean(r)

    Liu et al., "Understanding R1-Zero-Like Training" (arXiv 2503.20783), section 3.2: there is no
    division by the standard deviation, which in GRPO favours very easy and very hard problems. The
    paper's other change, a constant instead of each answer's length, is `algorithm.reduction:
    constant`.
    """
    return _centred(rewards, scale=False)


def rloo(rewards: Sequence[float]) -> list[float]:
    """RLOO: rewards minus the mean of the other rewards in the group (leave one out).

        A_i = r_i - sum_{j != i} r_j / (n - 1)

    Ahmadian et al., "Back to Basics" (arXiv 2402.14740). Differences: the paper's policy gradient
    treats the whole answer as one action; here the loss is chosen independently of the advantage. A
    KL penalty in the reward is subtracted from the advantage, and not from the rewards in the
    baseline (see `reward_penalty`).
    """
    total = sum(rewards)
    return [r - (total - r) / (len(rewards) - 1) for r in rewards]


class ReinforcePPAdvantage(Advantage):
    """REINFORCE++: rewards normalised over the whole batch instead of within each group.

        baseline none:   a_i = r_i
        baseline group:  a_i = r_i - mean(r of its group)
        A_i = (a_i - mean(a over the batch)) / (std(a over the batch) + 1e-6)

    Hu et al., "REINFORCE++" (arXiv 2501.03262). Differences: the batch's mean and standard
    deviation are over trajectories, not tokens, so that a long answer counts once; and the paper
    subtracts the KL penalty before it normalises, while here it is subtracted from the normalised
    advantage (`reward_penalty`), so that `kl.coef` does not depend on the scale of the rewards.
    """

    def __init__(self, config: ReinforcePP) -> None:
        self._config = config

    def of_groups(self, rewards: Sequence[Sequence[float]]) -> list[list[float] | None]:
        """Return all 0 if all rewards, minus their baselines, are equal; with baseline `group`,
        None for a group of fewer than two."""
        shifted: list[list[float] | None] = [list(group) for group in rewards]
        mean = None
        if self._config.baseline == "group":
            shifted = [None if len(r) < 2 else _centred(r, scale=False) for r in rewards]
            mean = 0.0  # the mean of differences from group means, except for rounding
        return _over_batch(shifted, mean)


def _over_batch(
    groups: Sequence[list[float] | None], mean: float | None
) -> list[list[float] | None]:
    """Return values normalised over all groups; their mean is given if it is known exactly."""
    batch = [value for group in groups if group is not None for value in group]
    scores = iter(_centred(batch, scale=True, mean=mean))
    return [None if group is None else [next(scores) for _ in group] for group in groups]


class GdpoAdvantage(Advantage):
    """GDPO: each part of the reward is normalised separately, so that none dominates the others.

        a_i = sum_k w_k * (r_{i,k} - mean(r_k)) / (std(r_k) + 1e-6)     r_k: part k in the group
        A_i = a_i / (std(a over the batch) + 1e-6)

    Liu et al., "GDPO: Group reward-Decoupled Normalization Policy Optimization for Multi-reward RL
    Optimization" (arXiv 2601.05242). The mean of a over the batch, which the paper subtracts, is 0,
    because the mean over each group is 0. Differences: standard deviations are those of the
    population; the mean and deviation of a part are over the trajectories that have this part, and
    the part adds nothing to other trajectories; the overlong penalty is a part of its own, with
    weight 1.
    """

    multi_objective = True

    def of_groups(self, rewards: Sequence[Sequence[float]]) -> list[list[float] | None]:
        return self.of_objectives([[{"reward": r} for r in group] for group in rewards], {})

    def of_objectives(
        self, rewards: Sequence[Sequence[Mapping[str, float]]], weights: Mapping[str, float]
    ) -> list[list[float] | None]:
        sums = [None if len(group) < 2 else _weighted(group, weights) for group in rewards]
        return _over_batch(sums, mean=0.0)


def _weighted(group: Sequence[Mapping[str, float]], weights: Mapping[str, float]) -> list[float]:
    """Return the weighted sums of a group's parts, each normalised where it is present."""
    totals = [0.0] * len(group)
    for name in dict.fromkeys(name for parts in group for name in parts):
        present = [index for index, parts in enumerate(group) if name in parts]
        scores = _centred([group[index][name] for index in present], scale=True)
        for index, score in zip(present, scores, strict=True):
            totals[index] += weights.get(name, 1.0) * score
    return totals


class PerTurn(Advantage):
    """Advantages of turns by a formula of the rewards of a group's turns, such as `mt_grpo`."""

    per_turn = True

    def __init__(self, formula: Callable[[Sequence[Sequence[float]]], list[list[float]]]) -> None:
        self._formula = formula

    def of_turns(self, rewards: Sequence[Sequence[float]]) -> list[list[float]] | None:
        return self._formula(rewards) if len(rewards) > 1 else None


def returns_of_turns(config: TurnReturns, rewards: Sequence[Sequence[float]]) -> list[list[float]]:
    """Returns of turns: each turn is credited with its own reward and all later rewards.

        G_{i,k} = sum_{j >= k} gamma^(j - k) r_{i,j}
        A_{i,k} = (G_{i,k} - mean_i(G_{i,k})) / (std_i(G_{i,k}) + 1e-6)

    `i` counts the trajectories of a group that have a turn `k`; `r_{i,k}` is the reward of turn
    `k`. The last turn's reward includes the reward of the whole trajectory.

    REINFORCE with the reward-to-go and a baseline per time step: Sutton and Barto, "Reinforcement
    Learning" (2nd edition), section 13.4. The baseline and the scale are GRPO's, over the turns
    with the same index in the group. If only one trajectory of the group has a turn `k`, the
    turn's advantage is 0.
    """
    returns = [turn_returns(turns, config.gamma) for turns in rewards]
    return normalised_by_turn(returns, scale=config.scale)


def turn_returns(rewards: Sequence[float], gamma: float) -> list[float]:
    """Return, for each turn, the discounted sum of its own and all later rewards: for [1, 0, 4] and
    0.5, [2, 2, 4]."""
    returns, following = [0.0] * len(rewards), 0.0
    for turn in reversed(range(len(rewards))):
        following = returns[turn] = rewards[turn] + gamma * following
    return returns


def normalised_by_turn(values: Sequence[Sequence[float]], *, scale: bool) -> list[list[float]]:
    """Return each turn's values minus their mean over the trajectories that have this turn, or 0 if
    only one trajectory has it; with `scale`, also divide by their standard deviation."""
    normalised = [[0.0] * len(turns) for turns in values]
    for turn in range(max(map(len, values), default=0)):
        present = [index for index, turns in enumerate(values) if turn < len(turns)]
        column = _centred([values[index][turn] for index in present], scale=scale)
        for index, value in zip(present, column, strict=True):
            normalised[index][turn] = value
    return normalised


def mt_grpo(config: MtGrpo, rewards: Sequence[Sequence[float]]) -> list[list[float]]:
    """MT-GRPO: GRPO's outcome advantage, plus, before the last turn, one for the turn's own reward.

        A_{i,k} = norm_i(r_{i,k}) + outcome_weight * norm_i(outcome_i)     before the last turn
        A_{i,K} = norm_i(outcome_i)                                        at the last turn K

    `norm_i` subtracts the mean over the group and divides by the standard deviation plus 1e-6. For
    turn `k`, the group has only the trajectories that continue after this turn. The outcome is the
    rest of the reward: the rewards of the last turn and of the whole trajectory.

    Zeng et al., "Reinforcing Multi-Turn Reasoning in LLM Agents via Turn-Level Credit Assignment"
    (arXiv 2505.11821v1). Differences: the paper has two turns, of which the first has a reward;
    here any number of turns may have rewards, and trajectories may differ in their number of turns.
    """
    outcomes = normalised_by_turn([turns[-1:] for turns in rewards], scale=True)
    earlier = normalised_by_turn([turns[:-1] for turns in rewards], scale=True)
    return [
        [advantage + config.outcome_weight * outcome[0] for advantage in turns] + outcome
        for turns, outcome in zip(earlier, outcomes, strict=True)
    ]


class GaeAdvantage(Advantage):
    """GAE and the value model's loss: PPO with a critic.

        delta_t = r_t + gamma * V_{t+1} - V_t,     V = 0 after the last token
        A_t     = delta_t + gamma * lambda * A_{t+1}
        R_t     = A_t + V_t                        (target of the value model)

        value loss_t = max((V_t - R_t)^2, (clip(V_t, Vold_t - c, Vold_t + c) - R_t)^2) / 2

    Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation"
    (arXiv 1506.02438), eq. 16; "Proximal Policy Optimization Algorithms" (arXiv 1707.06347), eq. 11
    and 12. The clipped value loss is not in the papers but in their authors' implementation.
    Differences: only the trained tokens of a branch are time steps, so tool results between them
    add no discount. With `level: turn`, the branch's turns are time steps, as in turn-level PPO
    (Zeng et al., arXiv 2505.11821v2): the value of a turn is the value at its first token, and all
    tokens of the turn get its advantage and its return. Advantages are normalised by the population
    standard deviation (divided by the number of tokens, not by one less).
    """

    normalise = True

    def __init__(self, config: Gae) -> None:
        self._config = config
        self.level = config.level
        self.value_model = ValueModel(config.model, config.learning_rate, config.warmup_steps)

    def of_group(self, rewards: Sequence[float]) -> list[float]:
        """Return the rewards themselves, from which `of_tokens` computes advantages."""
        return list(rewards)

    def of_tokens(
        self, rewards_T: torch.Tensor, values_T: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return advantages, not yet normalised, and returns, [T] each and without gradient."""
        rewards, values = rewards_T.tolist(), values_T.tolist()
        assert len(rewards) == len(values), f"{len(rewards)} rewards for {len(values)} values"
        gamma, lam = self._config.gamma, self._config.lam
        advantages = [0.0] * len(values)
        advantage = next_value = 0.0
        for t in reversed(range(len(values))):
            delta = rewards[t] + gamma * next_value - values[t]
            advantages[t] = advantage = delta + gamma * lam * advantage
            next_value = values[t]
        advantages_T = values_T.new_tensor(advantages)
        return advantages_T, advantages_T + values_T.detach()

    def value_loss(
        self, values_N: torch.Tensor, old_values_N: torch.Tensor, returns_N: torch.Tensor
    ) -> torch.Tensor:
        clip = self._config.clip
        near_N = old_values_N + (values_N - old_values_N).clamp(-clip, clip)
        error_N = torch.maximum((values_N - returns_N).square(), (near_N - returns_N).square())
        return error_N / 2


def of_time_steps(
    advantage: Advantage, rewards_T: torch.Tensor, values_T: torch.Tensor, call_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the advantages and returns of one sequence's tokens; `call_T` has the index of the
    engine call that sampled each token."""
    if advantage.level == "token":
        return advantage.of_tokens(rewards_T, values_T)
    _, step_T, lengths_K = torch.unique_consecutive(call_T, return_inverse=True, return_counts=True)
    rewards_K = rewards_T.new_zeros(len(lengths_K)).index_add(0, step_T, rewards_T)
    values_K = values_T[lengths_K.cumsum(0) - lengths_K]
    advantages_K, returns_K = advantage.of_tokens(rewards_K, values_K)
    return advantages_K[step_T], returns_K[step_T]


def moments(advantages_N: torch.Tensor) -> torch.Tensor:
    """Return count, sum and sum of squares, [3] in float64, for `normalised`; add the moments of
    all micro-batches and ranks."""
    wide_N = advantages_N.double()
    return torch.stack([torch.ones_like(wide_N).sum(), wide_N.sum(), wide_N.square().sum()])


def normalised(advantages_N: torch.Tensor, moments_3: torch.Tensor) -> torch.Tensor:
    """Return (A - mean) / (std + 1e-6), with the mean and standard deviation from the moments."""
    count, total, squares = (float(moment) for moment in moments_3)
    mean = total / max(1.0, count)
    std = math.sqrt(max(0.0, squares / max(1.0, count) - mean**2))
    return (advantages_N - mean) / (std + _EPSILON)
