import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.training.algorithms.some_tokens import group_advantages
from turnwise.config.algorithm import DrGrpo, Gae, Gdpo, Grpo, ReinforcePP, Rloo
from turnwise.training.algorithms import make_advantage

Rewards = list[list[float]]

group = st.lists(st.floats(-10, 10).map(lambda x: round(x, 3)), min_size=2, max_size=8)
varied_group = group.filter(lambda g: len(set(g)) > 1)
GROUPWISE = [
    *(Grpo(), Grpo(scale="batch"), DrGrpo(), Rloo(), ReinforcePP(baseline="group"), Gdpo()),
]


@given(varied_group)
def test_grpo_is_the_standard_score_within_the_group(rewards: list[float]) -> None:
    mean, deviation = statistics.fmean(rewards), statistics.pstdev(rewards)
    expected = [(r - mean) / (deviation + 1e-6) for r in rewards]
    assert group_advantages(Grpo(), [rewards])[0] == pytest.approx(expected, abs=1e-9)


def test_grpo_of_one_right_in_four() -> None:
    root = 3**0.5
    (advantages,) = group_advantages(Grpo(), [[1, 0, 0, 0]])
    assert advantages == pytest.approx([root, -1 / root, -1 / root, -1 / root], rel=1e-4)


def test_grpo_does_not_blow_up_a_difference_of_rounding() -> None:
    (advantages,) = group_advantages(Grpo(), [[0.1 + 0.2, 0.3]])
    assert advantages == pytest.approx([0, 0], abs=1e-9)


@given(st.lists(group, min_size=1, max_size=5))
def test_batch_scale_divides_group_differences_by_one_deviation(
    rewards: Rewards,
) -> None:
    deviation = statistics.pstdev([r for rows in rewards for r in rows])
    for rows, result in zip(rewards, group_advantages(Grpo(scale="batch"), rewards), strict=True):
        mean = statistics.fmean(rows)
        expected = [(r - mean) / (deviation + 1e-6) for r in rows]
        assert result == pytest.approx(expected, abs=1e-6)


def gdpo(
    rewards: list[list[dict[str, float]]], weights: dict[str, float]
) -> list[list[float] | None]:
    return make_advantage(Gdpo()).of_objectives(rewards, weights)


def score_of(values: list[float]) -> list[float]:
    mean, deviation = statistics.fmean(values), statistics.pstdev(values)
    return [(value - mean) / (deviation + 1e-6) for value in values]


def test_gdpo_normalises_each_part_before_it_sums_them() -> None:
    right, short = [[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0]], [[3.0, 9.0, 1.0, 1.0], [2.0] * 4]
    groups = [
        [{"right": r, "short": s} for r, s in zip(*parts, strict=True)]
        for parts in zip(right, short, strict=True)
    ]
    sums = [
        [2 * a + 0.5 * b for a, b in zip(score_of(r), score_of(s), strict=True)]
        for r, s in zip(right, short, strict=True)
    ]
    deviation = statistics.pstdev([a for row in sums for a in row])
    found = gdpo(groups, {"right": 2.0, "short": 0.5})
    for row, result in zip(sums, found, strict=True):
        assert result == pytest.approx([a / (deviation + 1e-6) for a in row], abs=1e-6)


def test_gdpo_keeps_apart_what_equal_sums_hide() -> None:
    """Both trajectories have 1 in all, and GRPO could not tell them apart."""
    (advantages,) = gdpo(
        [[{"right": 1.0, "short": 0.0}, {"right": 0.0, "short": 1.0}]], {"right": 1.0, "short": 3.0}
    )
    assert advantages == pytest.approx([-1, 1], abs=1e-5)


def test_a_part_that_is_missing_adds_nothing() -> None:
    (advantages,) = gdpo([[{"a": 1.0}, {"a": 0.0}, {"b": 1.0}]], {})
    assert advantages is not None
    assert advantages[2] == 0
    assert advantages[0] == -advantages[1] > 0


@given(varied_group)
def test_dr_grpo_is_the_difference_to_the_groups_mean(rewards: list[float]) -> None:
    mean = statistics.fmean(rewards)
    assert group_advantages(DrGrpo(), [rewards])[0] == pytest.approx([r - mean for r in rewards])


@given(varied_group)
def test_rloo_is_the_difference_to_the_mean_of_the_others(rewards: list[float]) -> None:
    expected = [r - statistics.fmean(rewards[:i] + rewards[i + 1 :]) for i, r in enumerate(rewards)]
    assert group_advantages(Rloo(), [rewards])[0] == pytest.approx(expected, abs=1e-9)


@given(varied_group)
def test_rloo_is_dr_grpo_times_n_over_n_minus_1(rewards: list[float]) -> None:
    (rloo,), (dr_grpo,) = (group_advantages(c, [rewards]) for c in (Rloo(), DrGrpo()))
    assert rloo is not None
    assert dr_grpo is not None
    factor = len(rewards) / (len(rewards) - 1)
    assert rloo == pytest.approx([factor * a for a in dr_grpo], abs=1e-9)


@given(st.lists(group, min_size=1, max_size=5))
def test_reinforce_pp_is_the_standard_score_within_the_batch(rewards: Rewards) -> None:
    flat = [r for rows in rewards for r in rows]
    mean, deviation = statistics.fmean(flat), statistics.pstdev(flat)
    advantages = group_advantages(ReinforcePP(baseline="none"), rewards)
    for rows, result in zip(rewards, advantages, strict=True):
        expected = [(r - mean) / (deviation + 1e-6) for r in rows]
        assert result == pytest.approx(expected, abs=1e-9)


def test_reinforce_pp_scales_groups_by_one_common_deviation() -> None:
    rewards = [[0.0, 1.0], [5.0, 5.0], [10.0, 16.0]]
    deviation = statistics.pstdev([-0.5, 0.5, 0, 0, -3, 3])
    first, second, third = group_advantages(ReinforcePP(baseline="group"), rewards)
    assert first == pytest.approx([-0.5 / deviation, 0.5 / deviation], rel=1e-5)
    assert second == [0, 0]
    assert third == pytest.approx([-3 / deviation, 3 / deviation], rel=1e-5)


def test_reinforce_pp_without_a_baseline_trains_groups_of_one() -> None:
    advantages = group_advantages(ReinforcePP(baseline="none"), [[1.0], [0.0]])
    assert advantages == [pytest.approx([1], rel=1e-4), pytest.approx([-1], rel=1e-4)]


@pytest.mark.parametrize("config", GROUPWISE, ids=lambda c: c.name)
def test_an_equal_group_gets_0_and_a_lone_trajectory_nothing(config: Grpo) -> None:
    advantages = group_advantages(config, [[0.1, 0.1, 0.1], [0.5], [], [0, 1]])
    assert advantages[:3] == [[0, 0, 0], None, None]
    assert advantages[3] is not None
    assert all(advantages[3])


def test_a_batch_without_spread_is_worth_0() -> None:
    assert group_advantages(ReinforcePP(baseline="none"), [[0.1] * 3, [0.1]]) == [[0] * 3, [0]]


@pytest.mark.parametrize("config", GROUPWISE, ids=lambda c: c.name)
@given(varied_group)
def test_advantages_sum_to_zero_and_keep_the_order(config: Grpo, rewards: list[float]) -> None:
    (advantages,) = group_advantages(config, [rewards])
    assert advantages is not None
    assert sum(advantages) == pytest.approx(0, abs=1e-6)
    best = max(range(len(rewards)), key=rewards.__getitem__)
    assert advantages[best] == max(advantages) > 0


def test_gae_takes_the_rewards_as_they_are() -> None:
    assert group_advantages(Gae(), [[1, 1], [0.5]]) == [[1, 1], [0.5]]
