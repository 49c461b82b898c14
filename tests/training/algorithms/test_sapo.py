import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.training.algorithms.some_tokens import gradient_N, token_loss, tokens_of
from turnwise.config.algorithm import Sapo


@given(
    st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3)), min_size=1, max_size=8),
    st.sampled_from([Sapo(), Sapo(temperature_pos=2.0, temperature_neg=5.0)]),
)
def test_the_gate_is_a_sigmoid_of_the_ratio(pairs: list[tuple[float, float]], config: Sapo) -> None:
    tokens = tokens_of([[p[0] for p in pairs]], [[p[1] for p in pairs]])
    result = token_loss(config, tokens)
    losses, slopes = [], []
    for log_ratio, advantage in pairs:
        ratio = math.exp(log_ratio)
        tau = config.temperature_pos if advantage > 0 else config.temperature_neg
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        losses.append(-4 / tau * gate * advantage)
        slopes.append(-4 * gate * (1 - gate) * ratio * advantage)
    assert result.loss_N.tolist() == pytest.approx(losses, rel=1e-6)
    assert gradient_N(result.loss_N.sum(), tokens).tolist() == pytest.approx(
        slopes, rel=1e-6, abs=1e-9
    )
    assert not result.clipped_N.any()


def test_a_sequences_ratio_is_that_of_gspo() -> None:
    """The mean log ratio is 0, so the gate is where its slope is largest."""
    tokens = tokens_of([[0.5, -0.5]], [[1.0, 1.0]])
    result = token_loss(Sapo(level="sequence"), tokens)
    assert result.ratio_N.tolist() == pytest.approx([1, 1])
    assert gradient_N(result.loss_N.sum(), tokens).tolist() == pytest.approx([-1, -1])
