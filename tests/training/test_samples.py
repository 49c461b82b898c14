from typing import Any

import pytest

from turnwise.config import Config, parse_config
from turnwise.rollout import Group
from turnwise.training.samples import make_samples
from turnwise.trajectory import Trajectory


def config(max_length: int = 4096, **sections: Any) -> Config:
    return parse_config(
        {
            "environment": "a:B",
            "model": {"path": "m", "max_length": max_length},
            "data": {"path": "d"},
            **sections,
        }
    )


def trajectory(reward: float, versions: list[int], index: int = 0) -> Trajectory:
    """Two turns of three tokens each."""
    made = Trajectory("p", index)
    made.add_turn([1, 2], [3, 4, 5], [-0.1] * 3, versions[:3], "stop", None)
    made.add_turn([1, 2, 3, 4, 5, 6], [7, 8, 9], [-0.2] * 3, versions[3:], "stop", None)
    made.reward = reward
    return made


def group(*rewards: float, versions: list[int] | None = None) -> Group:
    made = Group("p")
    made.trajectories = [
        trajectory(reward, versions or [5] * 6, index) for index, reward in enumerate(rewards)
    ]
    return made


def test_each_trajectory_becomes_a_sample_with_its_advantage() -> None:
    made = make_samples([group(0.0, 1.0), group(1.0, 1.0)], config(), 5)
    assert [sample.advantage for sample in made.samples] == pytest.approx([-1, 1], abs=1e-5)
    assert [sample.trained for sample in made.samples] == [6, 6]
    assert made.groups_without_signal == 1
    assert made.report.tokens_trained == made.report.tokens_exact == 12
    assert made.report.masked == {"no_signal": 12}
    assert len({sample.unit for sample in made.samples}) == 2


def test_tokens_older_than_the_bound_are_context_only() -> None:
    training = {"max_staleness": 1, "updates_per_step": 2}
    mixed = group(0.0, 1.0, versions=[2, 2, 3, 3, 4, 5])
    made = make_samples([mixed], config(training=training), 5)
    for sample in made.samples:
        assert sample.response_mask_T.tolist() == [0, 0, 0, 0, 1, 0, 1, 1, 1]
    assert made.stale_tokens == 4
    assert made.report.masked == {"stale": 4}
    assert made.report.violations == 0
    assert made.report.tokens_trained == 8


def test_or_their_group_is_dropped() -> None:
    training = {"max_staleness": 1, "stale": "drop"}
    mixed = group(0.0, 1.0, versions=[2, 2, 3, 3, 4, 5])
    made = make_samples([mixed, group(0.0, 1.0)], config(training=training), 5)
    assert (made.stale_groups, made.stale_tokens, len(made.samples)) == (1, 0, 2)
    assert made.report.masked == {"stale_group": 12}


def test_a_pair_is_the_best_and_the_worst_in_one_unit_the_chosen_first() -> None:
    made = make_samples(
        [group(0.5, 0.0, 1.0, 0.5), group(1.0, 1.0)], config(algorithm={"loss": {"name": "dpo"}}), 5
    )
    assert [sample.advantage for sample in made.samples] == [1.0, -1.0]
    assert len({sample.unit for sample in made.samples}) == 1
    assert len({sample.sequence for sample in made.samples}) == 2
    assert made.report.masked == {"unpaired": 12, "no_signal": 12}


def test_a_nearly_full_context_costs_reward() -> None:
    algorithm = {"overlong_tokens": 4, "overlong_penalty": 1.0, "advantage": {"name": "dr_grpo"}}
    short = Trajectory("p", 2)
    short.add_turn([1, 2], [3], [-0.1], [5], "stop", None)
    short.reward = 1.0
    mixed = group(1.0)
    mixed.trajectories.append(short)
    made = make_samples([mixed], config(max_length=11, algorithm=algorithm), 5)
    assert made.overlong == 1
    # 9 of 11 tokens with the last 4 charged: half of the penalty.
    assert [sample.advantage for sample in made.samples] == pytest.approx([-0.25, 0.25])


def test_a_group_with_one_trajectory_left_trains_nothing() -> None:
    alone = group(1.0)
    alone.dropped["engine_error"] = 1
    alone.dropped_tokens["engine_error"] = 7
    made = make_samples([alone], config(), 5)
    assert made.samples == []
    assert made.report.masked == {"alone": 6, "dropped_engine_error": 7}
    assert made.report.tokens_sampled == 13
