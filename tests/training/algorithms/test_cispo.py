import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.training.algorithms.some_tokens import gradient_N, token_loss, tokens_of
from turnwise.config.algorithm import Cispo


@given(
    st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3)), min_size=1, max_size=8),
    st.sampled_from([Cispo(), Cispo(clip_low=0.3, clip_high=2.0)]),
)
def test_each_token_is_weighted_by_its_bounded_ratio(
    pairs: list[tuple[float, float]], config: Cispo
) -> None:
    tokens = tokens_of([[p[0] for p in pairs]], [[p[1] for p in pairs]])
    result = token_loss(config, tokens)
    weights = [
        min(max(math.exp(log_ratio), 1 - config.clip_low), 1 + config.clip_high)
        for log_ratio, _ in pairs
    ]
    slopes = [-w * a for w, (_, a) in zip(weights, pairs, strict=True)]
    losses = [slope * (r - 1) for slope, (r, _) in zip(slopes, pairs, strict=True)]
    assert result.loss_N.tolist() == pytest.approx(losses, abs=1e-9)
    assert gradient_N(result.loss_N.sum(), tokens).tolist() == pytest.approx(slopes, abs=1e-9)
    low, high = 1 - config.clip_low, 1 + config.clip_high
    outside = [not low <= math.exp(log_ratio) <= high for log_ratio, _ in pairs]
    assert result.clipped_N.tolist() == outside


def test_a_token_far_above_the_bound_keeps_its_gradient() -> None:
    tokens = tokens_of([[2.0]], [[1.0]])
    result = token_loss(Cispo(clip_high=0.28), tokens)
    assert result.clipped_N.tolist() == [True]
    assert gradient_N(result.loss_N.sum(), tokens).tolist() == pytest.approx([-1.28])
