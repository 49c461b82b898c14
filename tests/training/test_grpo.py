import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from turnwise.training import group_advantages
from turnwise.training.grpo import grpo_loss

rewards = st.lists(st.floats(-10, 10).map(lambda x: round(x, 3)), min_size=2, max_size=8)


@given(rewards)
def test_advantages_have_mean_zero_and_deviation_one(values: list[float]) -> None:
    advantages = group_advantages(values)
    if len(set(values)) == 1:
        assert advantages is None
        return
    assert advantages is not None
    assert sum(advantages) == pytest.approx(0, abs=1e-6)
    deviation = math.sqrt(sum(a * a for a in advantages) / len(advantages))
    assert deviation == pytest.approx(1, abs=0.05)
    best = max(range(len(values)), key=values.__getitem__)
    assert advantages[best] == max(advantages)


def test_advantages_of_one_right_in_four() -> None:
    assert group_advantages([1, 0, 0, 0]) == pytest.approx(
        [math.sqrt(3), -1 / math.sqrt(3), -1 / math.sqrt(3), -1 / math.sqrt(3)], rel=1e-4
    )
    assert group_advantages([0.5]) is None


def test_the_loss_is_the_clipped_ratio_times_the_advantage() -> None:
    ratios = torch.tensor([1.0, 1.5, 1.5, 0.5, 0.5, 1.1])
    advantages = torch.tensor([1.0, 1.0, -1.0, 1.0, -1.0, -2.0])
    engine = torch.full_like(ratios, -0.7)
    result = grpo_loss(engine + ratios.log(), engine, advantages, clip_low=0.2, clip_high=0.28)
    assert result.loss_N.tolist() == pytest.approx([-1.0, -1.28, 1.5, -0.5, 0.8, 2.2])
    assert result.clipped_N.tolist() == [False, True, False, False, True, False]
    assert result.ratio_N.tolist() == pytest.approx(ratios.tolist())
    assert result.kl_N is None


def test_a_clipped_token_has_no_gradient() -> None:
    logprobs = torch.tensor([0.5, 0.1], requires_grad=True)
    result = grpo_loss(logprobs, torch.zeros(2), torch.ones(2), clip_low=0.2, clip_high=0.28)
    result.loss_N.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, -math.exp(0.1)])


def test_the_kl_penalty_is_the_k3_estimator() -> None:
    policy, reference = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -2.0])
    result = grpo_loss(
        policy,
        policy,
        torch.zeros(2),
        clip_low=0.2,
        clip_high=0.28,
        kl_coef=0.1,
        reference_logprobs_N=reference,
    )
    kl = math.exp(-0.5) + 0.5 - 1
    assert result.kl_N is not None
    assert result.kl_N.tolist() == pytest.approx([kl, 0.0])
    assert result.loss_N.tolist() == pytest.approx([0.1 * kl, 0.0])
