import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from turnwise.config.algorithm import Gae
from turnwise.training.algorithms.advantages import (
    GaeAdvantage,
    moments,
    normalised,
    of_time_steps,
)

number = st.floats(-3, 3)
steps = st.lists(st.tuples(number, number), min_size=1, max_size=12)


def gae(
    rewards_T: torch.Tensor, values_T: torch.Tensor, config: Gae
) -> tuple[torch.Tensor, torch.Tensor]:
    return GaeAdvantage(config).of_tokens(rewards_T, values_T)


def tensors(*rows: list[float]) -> list[torch.Tensor]:
    return [torch.tensor(row, dtype=torch.float64) for row in rows]


@given(steps, st.floats(0.1, 1), st.floats(0, 1))
def test_advantages_are_the_discounted_sum_of_later_errors(
    pairs: list[tuple[float, float]], gamma: float, lam: float
) -> None:
    rewards, values = [p[0] for p in pairs], [p[1] for p in pairs]
    following = [*values[1:], 0.0]
    errors = [r + gamma * n - v for r, n, v in zip(rewards, following, values, strict=True)]
    expected = [
        sum((gamma * lam) ** (later - t) * errors[later] for later in range(t, len(errors)))
        for t in range(len(errors))
    ]
    advantages, returns = gae(*tensors(rewards, values), Gae(gamma=gamma, lam=lam))
    assert advantages.tolist() == pytest.approx(expected, abs=1e-9)
    assert returns.tolist() == pytest.approx(
        [a + v for a, v in zip(expected, values, strict=True)], abs=1e-9
    )


@given(steps)
def test_with_lambda_1_returns_are_the_rewards_to_come(pairs: list[tuple[float, float]]) -> None:
    rewards, values = [p[0] for p in pairs], [p[1] for p in pairs]
    _, returns = gae(*tensors(rewards, values), Gae(gamma=1, lam=1))
    expected = [sum(rewards[t:]) for t in range(len(rewards))]
    assert returns.tolist() == pytest.approx(expected, abs=1e-9)


def test_with_lambda_0_returns_trust_the_next_value() -> None:
    _, returns = gae(*tensors([0.0, 0.0, 1.0], [0.2, 0.5, 0.7]), Gae(gamma=0.9, lam=0))
    assert returns.tolist() == pytest.approx([0.45, 0.63, 1.0])


def test_a_branch_of_one_token_gains_its_reward_less_its_value() -> None:
    advantages, returns = gae(*tensors([1.0], [0.25]), Gae())
    assert (advantages.tolist(), returns.tolist()) == ([0.75], [1.0])


def test_no_token_gives_no_advantage() -> None:
    advantages, returns = gae(torch.zeros(0), torch.zeros(0), Gae())
    assert advantages.shape == returns.shape == (0,)


def test_neither_advantages_nor_returns_carry_gradient() -> None:
    values = torch.tensor([0.5, 0.1], requires_grad=True)
    advantages, returns = gae(torch.ones(2), values, Gae())
    assert not advantages.requires_grad
    assert not returns.requires_grad


@given(st.lists(number, min_size=2, max_size=20), st.integers(0, 20))
def test_advantages_are_normalised_by_the_summed_moments(values: list[float], cut: int) -> None:
    mean, deviation = statistics.fmean(values), statistics.pstdev(values)
    here, there = tensors(values[:cut], values[cut:])
    total = moments(here) + moments(there)
    result = torch.cat([normalised(here, total), normalised(there, total)])
    expected = [(v - mean) / (deviation + 1e-6) for v in values]
    assert result.tolist() == pytest.approx(expected, rel=1e-2, abs=1e-2)
    if deviation > 0.01:
        assert result.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_no_advantages_at_all_are_normalised_to_none() -> None:
    nothing = torch.zeros(0)
    assert normalised(nothing, moments(nothing)).shape == (0,)


@given(number, number, number, st.floats(0.05, 1))
def test_the_value_loss_is_the_worse_of_free_and_bounded_error(
    value: float, old: float, target: float, clip: float
) -> None:
    bounded = min(max(value, old - clip), old + clip)
    expected = 0.5 * max((value - target) ** 2, (bounded - target) ** 2)
    loss = GaeAdvantage(Gae(clip=clip)).value_loss(*tensors([value], [old], [target]))
    assert loss.tolist() == pytest.approx([expected], abs=1e-9)


def test_a_value_that_moved_far_to_its_return_has_no_gradient() -> None:
    values = torch.tensor([0.9, 0.1, -0.9], requires_grad=True)
    loss = GaeAdvantage(Gae(clip=0.2)).value_loss(values, torch.zeros(3), torch.ones(3))
    loss.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([0.0, -0.9, -1.9])


def test_time_steps_are_tokens_by_default() -> None:
    rewards_T, values_T = tensors([0.0, 1.0], [0.5, 0.25])
    calls_T = torch.zeros(2, dtype=torch.int64)
    found = of_time_steps(GaeAdvantage(Gae()), rewards_T, values_T, calls_T)
    for ours, expected in zip(found, gae(rewards_T, values_T, Gae()), strict=True):
        assert torch.equal(ours, expected)
