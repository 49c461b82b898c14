import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.training.algorithms.advantages import has_signal, overlong_penalty


@pytest.mark.parametrize(
    ("length", "expected"),
    [(0, 0), (80, 0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1), (101, -1), (500, -1)],
)
def test_the_penalty_rises_over_the_last_tokens(length: int, expected: float) -> None:
    assert overlong_penalty(length, 100, 20, 1.0) == pytest.approx(expected)
    assert overlong_penalty(length, 100, 20, 0.5) == pytest.approx(expected / 2)


def test_without_a_buffer_length_costs_nothing() -> None:
    assert overlong_penalty(100, 100, 0, 1.0) == 0
    assert overlong_penalty(101, 100, 0, 1.0) == 0


@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 200), st.floats(0.1, 5), st.data())
def test_a_longer_trajectory_never_loses_less(
    length: int, max_length: int, buffer_tokens: int, penalty: float, data: st.DataObject
) -> None:
    longer = data.draw(st.integers(length, 400))
    more = overlong_penalty(longer, max_length, buffer_tokens, penalty)
    assert -penalty <= more <= overlong_penalty(length, max_length, buffer_tokens, penalty) <= 0


def test_a_group_has_signal_where_rewards_differ() -> None:
    assert has_signal([0, 1, 0])
    assert not has_signal([1, 1])
    assert not has_signal([1])
    assert not has_signal([])
