"""Advantages of turns: credit goes to the turn that earned it, and from there backwards."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from turnwise.config import Config, parse_config
from turnwise.config.algorithm import Gae, MtGrpo, TurnReturns
from turnwise.errors import InputError, TrajectoryError
from turnwise.rollouts import Group
from turnwise.rollouts.environment import Rewards, read_rewards
from turnwise.run.token_values import columns_of
from turnwise.training.algorithms import make_advantage, make_algorithm
from turnwise.training.algorithms.advantages import (
    GaeAdvantage,
    normalised_by_turn,
    of_time_steps,
    turn_returns,
)
from turnwise.training.reports import RECORDED
from turnwise.training.sample import Sample
from turnwise.training.samples import make_samples
from turnwise.trajectory import Trajectory
from turnwise.trajectory.training_trace import from_training_trace, to_training_trace


def config_of(algorithm: dict[str, Any]) -> Config:
    tree = {"environment": "a:B", "model": {"path": "m"}, "data": {"path": "d"}}
    return parse_config({**tree, "algorithm": algorithm})


def test_a_turn_is_credited_with_what_follows_it() -> None:
    assert turn_returns([1.0, 0.0, 4.0], gamma=1.0) == [5.0, 4.0, 4.0]
    assert turn_returns([1.0, 0.0, 4.0], gamma=0.0) == [1.0, 0.0, 4.0]
    assert turn_returns([], gamma=0.5) == []


def test_turns_are_compared_with_the_same_turn_of_the_group() -> None:
    values = [[1.0, 5.0, 7.0], [3.0, 5.0], [5.0]]
    centred = normalised_by_turn(values, scale=False)
    assert centred == [[-2.0, 0.0, 0.0], [0.0, 0.0], [2.0]]
    scaled = normalised_by_turn(values, scale=True)
    assert scaled[2][0] == pytest.approx(2.0 / math.sqrt(8 / 3), rel=1e-5)


def test_returns_of_turns_by_hand() -> None:
    advantage = make_advantage(TurnReturns(gamma=0.5, scale=False))
    assert advantage.of_turns([[1.0, 2.0], [0.0, 0.0]]) == [[1.0, 1.0], [-1.0, -1.0]]
    assert advantage.of_turns([[1.0, 2.0]]) is None


def test_mt_grpo_by_hand() -> None:
    """Two turns, as in the paper: A_1 = norm(turn) + norm(outcome), A_2 = norm(outcome)."""
    advantage = make_advantage(MtGrpo())
    made = advantage.of_turns([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
    assert made is not None
    assert np.allclose(made, [[0.0, -1.0], [0.0, 1.0], [2.0, 1.0], [-2.0, -1.0]], atol=1e-4)
    half = make_advantage(MtGrpo(outcome_weight=0.5)).of_turns([[1.0, 0.0], [0.0, 1.0]])
    assert half is not None
    assert np.allclose(half, [[0.5, -1.0], [-0.5, 1.0]], atol=1e-4)
    short = advantage.of_turns([[0.0, 0.0, 1.0], [0.0]])  # the outcomes: 1 and 0
    assert short is not None
    assert np.allclose(short[0], [1.0, 1.0, 1.0], atol=1e-4)
    assert np.allclose(short[1], [-1.0], atol=1e-4)


def played(index: int, rewards: list[float], final: float = 0.0) -> Trajectory:
    """Two tokens a turn, and one between turns."""
    trajectory = Trajectory("rows:1", index)
    ids = [1, 2]
    for turn in range(len(rewards)):
        sampled = [10 + turn, 20 + index]
        trajectory.add_turn(ids, sampled, [-0.5, -0.5], [0, 0], "stop")
        ids = [*ids, *sampled, 3]
    trajectory.set_outcome(reward=sum(rewards) + final)
    trajectory.set_outcome(turns=rewards if any(rewards) else [])
    trajectory.status = "completed"
    return trajectory


def test_each_token_has_the_advantage_of_its_turn() -> None:
    config = config_of({"advantage": {"name": "turn_returns", "scale": False}})
    group = Group("rows:1", [played(0, [1.0, 0.0, 2.0], final=1.0), played(1, [0.0, 0.0])])
    first, second = make_samples([group], config, version=0).samples
    assert first.calls_T.tolist() == [-1, -1, 0, 0, -1, 1, 1, -1, 2, 2]
    # Returns 4, 3, 3 and 0, 0; the third turn has nothing to compare with.
    assert first.advantages_T.tolist() == [0, 0, 2, 2, 0, 1.5, 1.5, 0, 0, 0]
    assert second.advantages_T.tolist() == [0, 0, -2, -2, 0, -1.5, -1.5]


def test_without_rewards_of_turns_all_turns_share_the_outcome() -> None:
    config = config_of({"advantage": "turn_returns"})
    group = Group("rows:1", [played(0, [0.0, 0.0], final=1.0), played(1, [0.0, 0.0])])
    first, second = make_samples([group], config, version=0).samples
    assert first.advantages_T[first.response_mask_T] == pytest.approx([1.0] * 4, abs=1e-4)
    assert second.advantages_T[second.response_mask_T] == pytest.approx([-1.0] * 4, abs=1e-4)


def test_rewards_of_turns_reach_the_value_model_at_their_tokens() -> None:
    config = config_of({"advantage": {"name": "gae", "model": {"path": "v"}}})
    group = Group("rows:1", [played(0, [1.0, 0.0, 2.0], final=0.5), played(1, [0.0, 0.0], 3.0)])
    first, second = make_samples([group], config, version=0).samples
    assert first.advantages_T.tolist() == [0, 0, 0, 1.0, 0, 0, 0, 0, 0, 2.5]
    assert second.advantages_T.tolist() == [0, 0, 0, 0, 0, 0, 3.0]


def test_a_loss_on_trajectories_refuses_turn_advantages() -> None:
    for name in ("turn_returns", "mt_grpo", "gae"):
        with pytest.raises(InputError, match=f"compares trajectories and cannot use .*{name}"):
            config_of({"advantage": name, "loss": "dpo"})


def test_gae_over_turns_is_gae_of_their_sums() -> None:
    """Tokens are reduced to turns; here both ends of that are computed by hand."""
    config = config_of({"advantage": {"name": "gae", "level": "turn", "gamma": 0.9, "lam": 0.8}})
    advantage = make_algorithm(config.algorithm).advantage
    rewards_T = torch.tensor([0.0, 1.0, 0.0, 0.0, 2.0])
    values_T = torch.tensor([0.3, 9.0, 0.5, 9.0, 9.0])
    turn_T = torch.tensor([4, 4, 7, 7, 7])
    advantages_T, returns_T = of_time_steps(advantage, rewards_T, values_T, turn_T)
    expected, returns = GaeAdvantage(Gae(gamma=0.9, lam=0.8)).of_tokens(
        torch.tensor([1.0, 2.0]), torch.tensor([0.3, 0.5])
    )
    assert advantages_T.tolist() == [expected[0]] * 2 + [expected[1]] * 3
    assert returns_T.tolist() == [returns[0]] * 2 + [returns[1]] * 3


CALLS = {
    "none": [0, 0, 0, 0, 0],
    "middle": [0, 0, -1, -1, 0],
    "twice": [0, -1, 0, -1, 0],
    "begins": [-1, 0, 0, 0, 0],
    "ends": [0, 0, 0, -1, -1],
}
"""Weight versions of a call's tokens; -1 where a logits processor forced the token."""


def forced(index: int, versions: list[int], rewards: list[float]) -> Trajectory:
    """Two calls, of which the first has forced tokens."""
    trajectory, said = Trajectory("rows:1", index, status="completed"), [10 + index, 11, 12, 13, 14]
    trajectory.add_turn([1, 2], said, [-0.5] * 5, versions, "stop")
    trajectory.add_turn([1, 2, *said, 7], [20 + index, 21], [-0.5] * 2, [0] * 2, "stop")
    trajectory.set_outcome(reward=sum(rewards), turns=rewards)
    return trajectory


@pytest.mark.parametrize("versions", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(
    "advantage",
    [
        {"name": "turn_returns"},
        {"name": "turn_returns", "gamma": 0.5},
        {"name": "mt_grpo"},
        {"name": "grpo"},
        {"name": "gae", "model": {"path": "v"}, "level": "turn"},
    ],
)
def test_forced_tokens_change_the_advantage_of_no_call(
    advantage: dict[str, Any], versions: list[int]
) -> None:
    """Calls of one place are compared, however many turns forced tokens make of one of them."""
    config, rewards = config_of({"advantage": advantage}), [[1.0, 0], [0.0, 1], [1.0, 1], [0.0, 0]]

    def samples_of(first: list[int]) -> list[Sample]:
        made = [forced(i, [0] * 5 if i else first, each) for i, each in enumerate(rewards)]
        return make_samples([Group("rows:1", made)], config, version=0).samples

    plain, cut = samples_of([0] * 5), samples_of(versions)

    def of_calls(samples: list[Sample]) -> list[dict[int, float]]:
        return [
            {
                call: float(sample.advantages_T[sample.calls_T == call].sum())
                if advantage["name"] == "gae"  # a reward is at the last token
                else float(sample.advantages_T[sample.calls_T == call][-1])
                for call in {*sample.calls_T.tolist()} - {-1}
            }
            for sample in samples
        ]

    assert of_calls(cut) == of_calls(plain)
    if advantage["name"] != "gae":
        for sample in cut:
            for call in (0, 1):
                assert len({*sample.advantages_T[sample.calls_T == call].tolist()}) == 1


@pytest.mark.parametrize("versions", CALLS.values(), ids=CALLS)
def test_rewards_of_turns_are_one_for_each_call(versions: list[int]) -> None:
    trajectory = forced(0, versions, [])
    assert len(trajectory.turns) == 2
    assert read_rewards(Rewards(1.0, turns=[0.1, 0.7]), "env", trajectory).turns == [0.1, 0.7]
    with pytest.raises(TrajectoryError, match="gave 3 turn rewards for 2 turns"):
        read_rewards(Rewards(1.0, turns=[0.1, 0.7, 0.2]), "env", trajectory)
    again = Trajectory.from_json(trajectory.to_json())
    assert again == from_training_trace(to_training_trace(trajectory)) == trajectory


@pytest.mark.parametrize("versions", CALLS.values(), ids=CALLS)
def test_trained_token_values_name_their_turn_and_position(
    versions: list[int],
) -> None:
    group = Group("rows:1", [forced(0, versions, [1.0, 0.0]), forced(1, [0] * 5, [0.0, 0.0])])
    batch = make_samples([group], config_of({"advantage": "grpo"}), version=0)
    values = [(s, np.zeros((len(RECORDED), s.trained), np.float32)) for s in batch.samples]
    columns = columns_of(values, batch.origins, group.trajectories, 0)
    for number, turn, at, sample in zip(
        columns["trajectory"].tolist(),
        columns["turn"].tolist(),
        columns["at"].tolist(),
        [t for s in batch.samples for t in s.token_ids_T[s.response_mask_T].tolist()],
        strict=True,
    ):
        assert group.trajectories[number].turns[turn].completion_token_ids[at] == sample
