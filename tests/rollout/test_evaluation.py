"""pass@k and mean@k against all subsets, and the summary of groups."""

from itertools import combinations, permutations

import pytest

from turnwise.rollout import Group
from turnwise.rollout.evaluation import mean_at_k, pass_at_k, summarize
from turnwise.trajectory import Trajectory

CASES = [(n, c, k) for n in range(1, 7) for c in range(n + 1) for k in range(1, n + 1)]


@pytest.mark.parametrize(("n", "c", "k"), CASES)
def test_pass_at_k_is_the_share_of_subsets_with_a_right_attempt(n: int, c: int, k: int) -> None:
    subsets = list(combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize(("n", "c", "k"), [case for case in CASES if case[0] < 6])
def test_mean_at_k_is_unbiased_over_the_order_of_attempts(n: int, c: int, k: int) -> None:
    orders = list(permutations([True] * c + [False] * (n - c)))
    assert sum(mean_at_k(order, k) for order in orders) / len(orders) == pytest.approx(c / n)


def test_pass_at_k_stays_exact_for_many_attempts() -> None:
    assert pass_at_k(2000, 1, 1000) == pytest.approx(0.5)
    assert pass_at_k(2000, 1, 1) == pytest.approx(1 / 2000)


def group(rewards: list[float | None]) -> Group:
    """An attempt that was dropped is None."""
    made = [
        Trajectory("p", index, reward=reward)
        for index, reward in enumerate(rewards)
        if reward is not None
    ]
    return Group("p", made)


def test_a_summary_counts_dropped_attempts_as_wrong_at_their_place() -> None:
    summary = summarize([group([1.0, 0.5, None]), group([None, 1.5, 2.0])], 3, 1.0)
    assert summary == {
        "accuracy": pytest.approx(3 / 6),
        "reward_mean": pytest.approx(5.0 / 4),
        "pass@1": pytest.approx(3 / 6),
        "mean@1": pytest.approx(1 / 2),
        "pass@2": pytest.approx((2 / 3 + 1) / 2),
        "mean@2": pytest.approx((1 / 2 + 1 / 2) / 2),
        "pass@3": pytest.approx(1.0),
        "mean@3": pytest.approx((1 / 3 + 2 / 3) / 2),
    }


@pytest.mark.parametrize(("n", "ks"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_k_runs_over_powers_of_two_and_the_number_of_attempts(n: int, ks: list[int]) -> None:
    summary = summarize([group([0.0] * n)], n, 1.0)
    assert [key for key in summary if key.startswith("pass")] == [f"pass@{k}" for k in ks]
    assert set(summary.values()) == {0.0}


def test_groups_of_which_nothing_came_through_are_wrong() -> None:
    assert set(summarize([group([None, None])], 2, 1.0).values()) == {0.0}


@pytest.mark.parametrize(
    ("success_reward", "accuracy"), [(-5.0, 1.0), (0.0, 0.75), (0.5, 0.5), (1.0, 0.5), (3.0, 0.0)]
)
def test_the_threshold_decides_which_attempts_are_right(
    success_reward: float, accuracy: float
) -> None:
    rewards: list[float | None] = [-1.0, 0.2, 0.7 + 0.2 + 0.1, 2.0]  # the third is just below 1
    assert summarize([group(rewards)], 4, success_reward)["accuracy"] == accuracy
