"""The entropy bonus, its adaptive weight, and the filter of tokens by entropy."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.training.algorithms.some_tokens import gradient_N, some_tokens
from turnwise.config.algorithm import AlgorithmConfig, EntropyConfig, PpoClip
from turnwise.training.algorithms import make_loss
from turnwise.training.algorithms.entropy import EntropyControl, entropy_floor, mean_part
from turnwise.training.algorithms.losses import Objective, objective


def made(lengths: list[int], bonus: torch.Tensor | None, **algorithm: Any) -> Objective:
    tokens = some_tokens(lengths)
    return objective(
        AlgorithmConfig(**algorithm),
        make_loss(PpoClip()),
        tokens,
        total_tokens=sum(lengths),
        total_trajectories=len(lengths),
        constant=10,
        bonus=bonus,
    )


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "sequence_sum", "constant"])
def test_the_bonus_is_the_mean_entropy_whatever_the_reduction_is(reduction: Any) -> None:
    entropy_N = torch.tensor([0.5, 1.0, 2.0, 4.0], requires_grad=True)
    plain = made([3, 1], None, reduction=reduction)
    lower = made([3, 1], 0.1 * mean_part(entropy_N, None, 4), reduction=reduction)
    assert float((plain.loss - lower.loss).detach()) == pytest.approx(0.1 * 7.5 / 4, rel=1e-5)
    (gradient,) = torch.autograd.grad(lower.loss, entropy_N)
    assert gradient.tolist() == pytest.approx([-0.1 / 4] * 4)


def test_low_entropy_tokens_are_in_neither_loss_nor_bonus() -> None:
    low_N = torch.tensor([True, False, True, False])
    tokens = some_tokens([3, 1])

    def of(low_entropy_N: torch.Tensor | None) -> Objective:
        return objective(
            AlgorithmConfig(),
            make_loss(PpoClip()),
            tokens,
            total_tokens=4,
            total_trajectories=2,
            constant=1,
            low_entropy_N=low_entropy_N,
        )

    filtered, plain = of(low_N), of(None)
    expected = gradient_N(plain.loss, tokens) * ~low_N
    assert torch.equal(gradient_N(filtered.loss, tokens), expected)
    assert filtered.weights_N.tolist() == [1 / 4] * 4
    assert filtered.left_out_N["low_entropy_masked"].tolist() == low_N.tolist()
    assert filtered.factors_N.tolist() == (0.25 * ~low_N).tolist()
    mean = mean_part(torch.tensor([0.5, 1.0, 2.0, 4.0]), low_N, 2)
    assert float(mean) == pytest.approx((1.0 + 4.0) / 2)


@given(st.lists(st.floats(0, 5, width=32), min_size=1, max_size=50), st.floats(0, 1))
def test_the_floor_is_a_quantile(entropies: list[float], top: float) -> None:
    values = torch.tensor(entropies)
    floor = entropy_floor(values, top)
    assert floor == pytest.approx(float(torch.quantile(values, 1 - top)), abs=1e-5)
    assert float(values.min()) - 1e-5 <= floor <= float(values.max()) + 1e-5


def test_the_whole_share_keeps_all_and_none_keeps_the_highest() -> None:
    values = torch.tensor([0.3, 0.1, 0.7, 0.2, 0.5])
    assert (values >= entropy_floor(values, 1.0)).all()
    assert (values >= entropy_floor(values, 0.0)).tolist() == [False, False, True, False, False]
    assert (values >= entropy_floor(values, 0.4)).sum() == 2
    assert entropy_floor(values[:0], 0.5) == math.inf


def test_an_adaptive_weight_rises_below_target_and_falls_above() -> None:
    config = EntropyConfig(
        coef=0.1, adaptive=True, target=1.0, coef_delta=0.04, coef_min=0.05, coef_max=0.15
    )
    control = EntropyControl(config)
    seen = []
    for mean in (0.9, 0.8, 1.0, 1.1, 2.0, 3.0, 0.5):
        seen.append((round(control.applied, 9), round(control.coef, 9)))
        control.adapt(mean)
    assert seen == [
        (0.0, 0.1),  # nothing was measured yet
        (0.14, 0.14),
        (0.15, 0.15),
        (0.15, 0.15),
        (0.0, 0.11),  # the entropy was above the target
        (0.0, 0.07),
        (0.0, 0.05),
    ]
    again = EntropyControl(config)
    again.resume(control.state)
    assert (again.coef, again.applied) == (control.coef, control.applied) == (0.09, 0.09)
    fixed = EntropyControl(EntropyConfig(coef=0.2))
    fixed.adapt(0.0)
    fixed.resume(control.state)
    assert (fixed.coef, fixed.applied) == (0.2, 0.2)
