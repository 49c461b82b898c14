import math
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from turnwise.training.algorithms.losses import kl_N, reward_penalty

Estimator = Literal["k1", "k2", "k3"]
logprobs = st.lists(
    st.tuples(st.floats(-8, 0, width=32), st.floats(-8, 0, width=32)), min_size=1, max_size=8
)


@given(logprobs)
def test_estimates_and_their_slopes_are_schulmans(pairs: list[tuple[float, float]]) -> None:
    policy = torch.tensor([p for p, _ in pairs], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([q for _, q in pairs], dtype=torch.float64)
    differences = [p - q for p, q in pairs]
    expected: dict[Estimator, list[tuple[float, float]]] = {
        "k1": [(d, 1.0) for d in differences],
        "k2": [(d * d / 2, d) for d in differences],
        "k3": [(math.exp(-d) - 1 + d, 1 - math.exp(-d)) for d in differences],
    }
    for estimator, points in expected.items():
        estimate = kl_N(policy, reference, estimator)
        (slope,) = torch.autograd.grad(estimate.sum(), policy)
        assert estimate.tolist() == pytest.approx([value for value, _ in points], abs=1e-9)
        assert slope.tolist() == pytest.approx([s for _, s in points], abs=1e-9)


@given(st.floats(-30, 0, width=32), st.floats(-30, 0, width=32))
def test_k3_is_never_negative_in_float32(policy: float, reference: float) -> None:
    estimate = kl_N(torch.tensor([policy]), torch.tensor([reference]), "k3")
    assert estimate.item() >= 0
    assert estimate.isfinite().all()


def distributions() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A policy's logits with gradient, its log-probs, and the reference's, over 5 tokens."""
    random = torch.Generator().manual_seed(3)
    logits = torch.randn(5, generator=random, dtype=torch.float64).requires_grad_()
    reference = torch.randn(5, generator=random, dtype=torch.float64)
    return logits, logits.log_softmax(0), reference.log_softmax(0)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_mean_estimate_over_samples_is_the_divergence(estimator: Estimator) -> None:
    _, policy, reference = distributions()
    divergence = (policy.exp() * (policy - reference)).sum()
    mean = (policy.exp() * kl_N(policy, reference, estimator)).sum()
    torch.testing.assert_close(mean, divergence)


@pytest.mark.parametrize(("estimator", "share"), [("k1", 0.0), ("k2", 1.0)])
def test_the_mean_gradient_over_samples(estimator: Estimator, share: float) -> None:
    logits, policy, reference = distributions()
    divergence = (policy.exp() * (policy - reference)).sum()
    sampled = (policy.exp().detach() * kl_N(policy, reference, estimator)).sum()
    (expected,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    (gradient,) = torch.autograd.grad(sampled, logits)
    torch.testing.assert_close(gradient, share * expected)


def test_k3_stays_finite_where_the_policy_excludes_a_token() -> None:
    policy = torch.tensor([-200.0, -1.0], requires_grad=True)
    estimate = kl_N(policy, torch.tensor([-1.0, -200.0]), "k3")
    (0 * estimate).sum().backward()
    assert estimate.tolist() == pytest.approx([math.exp(20) - 21, 198.0])
    assert policy.grad is not None
    assert policy.grad.isfinite().all()


@given(st.lists(st.floats(-2, 2), max_size=10), st.floats(0, 1))
def test_a_token_pays_for_itself_and_all_later_ones(kl: list[float], coef: float) -> None:
    expected = [coef * sum(kl[t:]) for t in range(len(kl))]
    assert reward_penalty(kl, coef).tolist() == pytest.approx(expected, abs=1e-4)
    exact = torch.tensor(kl, dtype=torch.float64, requires_grad=True)
    penalty = reward_penalty(exact, coef)
    assert penalty.tolist() == pytest.approx(expected, abs=1e-9)
    assert not penalty.requires_grad


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_no_token_has_no_divergence(estimator: Estimator) -> None:
    assert kl_N(torch.zeros(0), torch.zeros(0), estimator).shape == (0,)
