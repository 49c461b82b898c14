from collections.abc import Sequence
from statistics import mean, stdev
from typing import Any

import pytest
import torch

from turnwise.compat.chatlearn.outputs import rewarded_groups
from turnwise.config import Config, parse_config
from turnwise.errors import InputError
from turnwise.rollouts import Group
from turnwise.run.checks import check_group_size
from turnwise.training.algorithms import Advantage, make_algorithm
from turnwise.training.batching import make_micro_batch, plan_micro_batches
from turnwise.training.samples import (
    RewardRules,
    SampleBatch,
    add_trajectory,
    gives_signal,
    make_samples,
)
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


def signal(group: Group, config: Config) -> bool:
    return gives_signal(group, RewardRules.of(config), make_algorithm(config.algorithm))


def trajectory(reward: float, versions: list[int], index: int = 0) -> Trajectory:
    """Two turns of three tokens each."""
    made = Trajectory("p", index)
    made.add_turn([1, 2], [3, 4, 5], [-0.1] * 3, versions[:3], "stop", None)
    made.add_turn([1, 2, 3, 4, 5, 6], [7, 8, 9], [-0.2] * 3, versions[3:], "stop", None)
    made.set_outcome(reward=reward)
    return made


def group(*rewards: float, versions: list[int] | None = None) -> Group:
    made = Group("p")
    made.trajectories = [
        trajectory(reward, versions or [5] * 6, index) for index, reward in enumerate(rewards)
    ]
    return made


def test_each_trajectory_becomes_a_sample_with_its_advantage() -> None:
    made = make_samples([group(0.0, 1.0), group(1.0, 1.0)], config(), 5)
    assert [s.advantage for s in made.samples] == pytest.approx([-1, 1, 0, 0], abs=1e-5)
    assert [sample.trained for sample in made.samples] == [6, 6, 6, 6]
    assert made.report.tokens_trained == made.report.tokens_exact == 12
    assert len({sample.pair_id for sample in made.samples}) == 4


@pytest.mark.parametrize("where", ["loss", "reward"])
def test_a_kl_penalty_computes_a_group_without_signal(
    where: str,
) -> None:
    groups = [group(0.0, 1.0), group(1.0, 1.0)]
    counted = make_samples(groups, config(), 5)
    assert [sample.counted_only for sample in counted.samples] == [False, False, True, True]
    assert (counted.groups_without_signal, counted.report.masked) == (1, {"no_signal": 12})
    computed = make_samples(groups, config(algorithm={"kl": {"coef": 0.1, "where": where}}), 5)
    assert [sample.counted_only for sample in computed.samples] == [False] * 4
    assert (computed.groups_without_signal, computed.report.masked) == (1, {})
    assert computed.report.tokens_trained == computed.report.tokens_exact == 24
    for made in (counted, computed):
        assert made.report.tokens_sampled == 24
        ((share,),) = plan_micro_batches(made.samples, 1, 1, 4096, "padded")
        assert (share.total_tokens, share.total_trajectories) == (24, 4)
    replaced = make_samples(groups, config(algorithm={"dynamic_sampling": True}), 5)
    assert len(replaced.samples) == 2
    assert (replaced.groups_without_signal, replaced.report.masked) == (1, {"no_signal": 12})


@pytest.mark.parametrize("key", ["coef", "adaptive", "top_quantile"])
def test_entropies_compute_a_group_without_signal(key: str) -> None:
    """A bonus trains it by itself; a filter only needs its entropies beside another group."""
    values = {"coef": 0.1, "adaptive": True, "top_quantile": 0.2}
    settings = config(algorithm={"entropy": {key: values[key]}})
    mixed = make_samples([group(0.0, 1.0), group(1.0, 1.0)], settings, 5)
    assert [sample.counted_only for sample in mixed.samples] == [False] * 4
    silent = make_samples([group(1.0, 1.0)], settings, 5)
    assert bool(silent.samples) is (key != "top_quantile")


@pytest.mark.parametrize("status", ["length", "context_full"])
def test_a_masked_truncated_trajectory_stays_in_the_baseline(
    status: Any,
) -> None:
    """And in the number of trajectories, as in TRL, but not in the number of tokens."""
    cut_off = group(0.0, 1.0, 1.0, 0.0)
    cut_off.trajectories[3].status = status
    kept = make_samples([cut_off], config(), 5)
    assert (len(kept.samples), kept.truncated) == (4, 0)
    made = make_samples([cut_off], config(algorithm={"mask_truncated": True}), 5)
    assert [sample.trained for sample in made.samples] == [6, 6, 6, 0]
    advantages = [sample.advantage for sample in made.samples]
    assert advantages == pytest.approx([-1, 1, 1, 0], abs=1e-5)
    assert (made.truncated, made.report.masked) == (1, {"truncated": 6})
    assert made.report.violations == 0
    ((share,),) = plan_micro_batches(made.samples, 1, 1, 4096, "padded")
    assert (share.total_tokens, share.total_trajectories) == (18, 4)
    assert sum(len(batch) for batch in share.micro_batches) == 3


def test_nothing_is_trained_where_all_are_truncated() -> None:
    cut_off = group(0.0, 1.0)
    for each in cut_off.trajectories:
        each.status = "length"
    for more in ({}, {"kl": {"coef": 0.1}}):
        made = make_samples([cut_off], config(algorithm={"mask_truncated": True, **more}), 5)
        assert made.samples == []
        assert made.report.masked == {"truncated": 12}


@pytest.mark.parametrize(
    ("algorithm", "key"),
    [
        ({"mask_truncated": True}, "mask_truncated"),
        ({"off_policy_mask_threshold": 0.5}, "off_policy_mask_threshold"),
        ({"entropy": {"top_quantile": 0.2}}, r"entropy\.top_quantile"),
    ],
)
def test_pairs_need_all_of_their_tokens(algorithm: dict[str, Any], key: str) -> None:
    settings = config(algorithm={"loss": {"name": "dpo"}, **algorithm})
    with pytest.raises(InputError, match=rf"dpo .* all of their tokens: remove algorithm\.{key}"):
        make_algorithm(settings.algorithm)


def test_a_pair_with_no_chosen_tokens_on_one_side_is_left_out() -> None:
    pair = group(0.0, 1.0)
    pair.trajectories[1].choose([])
    made = make_samples([pair], config(algorithm={"loss": "dpo"}), 5)
    assert (made.samples, made.stale_groups) == ([], 1)


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("stale", range(7))
def test_a_pair_with_a_stale_token_is_dropped_whole(side: int, stale: int) -> None:
    """A part of an answer is not compared with the whole of another."""
    pair = Group("p")
    for index in (0, 1):
        old = stale if index == side else 0
        pair.trajectories.append(trajectory(float(index), [3] * old + [5] * (6 - old), index))
    settings = config(algorithm={"loss": "dpo"}, training={"max_staleness": 1})
    made = make_samples([pair], settings, 5)
    assert (len(made.samples), made.stale_groups) == ((0, 1) if stale else (2, 0))
    assert made.stale_tokens == 0
    assert made.report.masked == ({"stale_group": 12} if stale else {})


REWARDS = [{"name": "right", "weight": 2.0}, {"name": "short", "function": "a:b", "weight": 0.5}]


@pytest.mark.parametrize("entries", [[], REWARDS[:1], REWARDS])
@pytest.mark.parametrize(
    "advantage",
    [
        *("grpo", "gdpo", "dr_grpo", "rloo", "turn_returns", "mt_grpo", "reinforce_pp"),
        {"name": "gae", "model": {"path": "v"}},
    ],
)
def test_rewards_of_a_program_replace_all_that_was_there(
    advantage: str | dict[str, Any], entries: list[dict[str, Any]]
) -> None:
    """Advantages are those of trajectories that never had another reward."""
    settings = config(algorithm={"advantage": advantage}, rollout={"rewards": entries})
    judged, plain = group(0.0, 0.0, 0.0, 0.0), group(1.0, 0.0, 1.0, 0.0)
    names = [entry["name"] for entry in entries] or ["environment"]
    for index, each in enumerate(judged.trajectories):
        turns = [float(index), -float(index)]
        each.set_outcome(reward=0.0, parts=dict.fromkeys(names, 0.0), turns=turns)
    rewarded_groups({"groups": [judged], "rewards": [1.0, 0.0, 1.0, 0.0]})
    made, expected = (make_samples([each], settings, 5).samples for each in (judged, plain))
    assert len(made) == len(expected) == 4
    assert any(one.advantages_T.any() for one in made)
    for one, other in zip(made, expected, strict=True):
        assert one.advantages_T.tolist() == pytest.approx(other.advantages_T.tolist(), abs=1e-5)


def test_unchanged_rewards_keep_their_parts() -> None:
    judged = rewarded({"a": 1.0, "b": 0.5}, {"a": 0.0, "b": 0.5})
    rewarded_groups({"groups": [judged], "rewards": [1.5, 0.5]})
    assert [each.reward_parts for each in judged.trajectories] == [
        {"a": 1.0, "b": 0.5},
        {"a": 0.0, "b": 0.5},
    ]


def test_a_reference_model_that_nothing_uses_cannot_move() -> None:
    own = "tests.training.test_own_algorithm:Reinforce"
    for loss in ("ppo_clip", own):
        settings = config(algorithm={"kl": {"sync_steps": 8}, "loss": loss})
        with pytest.raises(InputError, match=r"sync_steps .*nothing uses"):
            make_algorithm(settings.algorithm)
    used = config(algorithm={"kl": {"sync_steps": 8}, "loss": "dpo"})
    assert make_algorithm(used.algorithm).loss.needs_reference


def test_a_loss_of_pairs_names_the_advantage_it_cannot_use() -> None:
    """A loss of the user's own: the configuration does not know what it needs."""
    own = "tests.training.test_own_algorithm"
    settings = config(algorithm={"loss": f"{own}:PairHinge", "advantage": f"{own}:RewardToGo"})
    sentence = rf"PairHinge compares .* value model of algorithm\.advantage {own}:RewardToGo$"
    with pytest.raises(InputError, match=sentence):
        make_algorithm(settings.algorithm)


def rewarded(*parts: dict[str, float]) -> Group:
    made = group(*(sum(each.values()) for each in parts))
    for each, own in zip(made.trajectories, parts, strict=True):
        each.set_outcome(parts=dict(own))
    return made


def test_gdpo_compares_each_reward_with_its_weight() -> None:
    rewards = [{"function": "a:right", "weight": 3.0}, {"function": "a:short", "name": "short"}]
    settings = config(algorithm={"advantage": "gdpo"}, rollout={"rewards": rewards})
    both = rewarded({"a:right": 1.0, "short": 0.0}, {"a:right": 0.0, "short": 1.0})
    made = make_samples([both], settings, 5)
    assert [sample.advantage for sample in made.samples] == pytest.approx([1, -1], abs=1e-4)
    assert signal(both, settings)
    assert not signal(both, config())  # their sums are equal
    equal = rewarded({"a:right": 1.0, "short": 0.5}, {"a:right": 1.0, "short": 0.5})
    assert not signal(equal, settings)
    assert make_samples([equal], settings, 5).groups_without_signal == 1


def test_gdpo_compares_the_parts_that_a_single_reward_names() -> None:
    settings = config(algorithm={"advantage": "gdpo"})
    made = rewarded({"environment": 1.0}, {"environment": 1.0}, {"environment": 0.0})
    for each, brevity in zip(made.trajectories, (0.25, 0.75, 0.0), strict=True):
        each.reward_parts["brevity"] = brevity  # the rest of each is 0.75, 0.25 and 0
    advantages = [s.advantage for s in make_samples([made], settings, 5).samples]
    assert advantages[0] == pytest.approx(advantages[1], abs=1e-4)
    assert advantages[2] < advantages[0]


def test_gdpo_counts_a_single_rewards_weight_once() -> None:
    """Weight 2 doubles each part, and GDPO's scaling takes the factor out again."""
    advantages = []
    for weight in (1.0, 2.0):
        rewards = [{"function": "a:right", "weight": weight}]
        settings = config(algorithm={"advantage": "gdpo"}, rollout={"rewards": rewards})
        made = group(weight, weight, 0.0)
        for each, brevity in zip(made.trajectories, (0.25, 0.5, 0.0), strict=True):
            unweighted = (each.reward or 0.0) / weight
            each.set_outcome(parts={"a:right": unweighted, "brevity": brevity})
        batch = make_samples([made], settings, 5)
        advantages.append([sample.advantage for sample in batch.samples])
    assert advantages[0] == pytest.approx(advantages[1], abs=1e-4)


def test_gdpo_has_no_parts_for_the_players_of_a_game() -> None:
    game = group(0.0, 1.0)
    game.trajectories[0].set_outcome(players={"x": 1.0, "o": -1.0})
    game.trajectories[0].turn_players = ["x", "o"]
    with pytest.raises(InputError, match=r"gdpo .*players of a game have one reward each"):
        make_samples([game], config(algorithm={"advantage": "gdpo"}), 5)


def test_nothing_is_trained_where_no_group_has_signal() -> None:
    made = make_samples([group(1.0, 1.0), group(0.0, 0.0)], config(), 5)
    assert made.samples == []
    assert (made.groups_without_signal, made.report.masked) == (2, {"no_signal": 24})


def test_rewards_of_0_are_as_good_as_any_to_a_value_model() -> None:
    made = make_samples([group(0.0, 0.0)], config(algorithm={"advantage": {"name": "gae"}}), 5)
    assert [sample.counted_only for sample in made.samples] == [False, False]
    assert made.groups_without_signal == 0


def test_stale_tokens_of_a_group_without_signal_do_not_count() -> None:
    old = group(1.0, 1.0, versions=[2, 2, 3, 3, 4, 5])
    made = make_samples([group(0.0, 1.0), old], config(training={"max_staleness": 1}), 5)
    assert [sample.trained for sample in made.samples] == [6, 6, 2, 2]
    assert made.report.masked == {"no_signal": 12}


def test_branches_together_weigh_as_much_as_a_single_turn() -> None:
    """Two good trajectories of one turn, two bad ones of four turns that each rewrote history."""
    rewritten = Group("p")
    for index in range(4):
        made = Trajectory("p", index)
        for turn in range(1 if index < 2 else 4):
            made.add_turn([1 + turn, 2], [3, 4, 5], [-0.1] * 3, [5] * 3, "stop", None)
        made.set_outcome(reward=1.0 if index < 2 else 0.0)
        rewritten.trajectories.append(made)
    samples = make_samples([rewritten], config(), 5).samples
    assert len({sample.sequence for sample in samples}) == len(samples) == 10
    ((share,),) = plan_micro_batches(samples, 1, 1, 10, "padded")
    weights = {1.0: 0.0, -1.0: 0.0}
    for own in share.micro_batches:
        batch = make_micro_batch(own, share.trajectory_tokens, 5, False, torch.device("cpu"))
        for advantage, tokens in zip(
            batch.tokens.advantages_N.tolist(),
            batch.tokens.trajectory_tokens_N.tolist(),
            strict=True,
        ):
            weights[round(advantage)] += 1 / (tokens * share.total_trajectories)
    assert weights == pytest.approx({1.0: 0.5, -1.0: 0.5})


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


def test_max_staleness_counts_steps_even_with_fewer_updates() -> None:
    """The step before took 4 updates, the last one 1: version 0 is two steps old, not one."""
    settings = config(training={"max_staleness": 1, "updates_per_step": 4})
    versions = settings.recent_versions()
    assert versions[0] == 0
    versions.append(4)
    assert versions[0] == 0
    versions.append(5)
    assert versions[0] == 4
    mixed = group(0.0, 1.0, versions=[0, 0, 1, 3, 4, 5])
    made = make_samples([mixed], settings, 5, oldest=versions[0])
    assert (made.stale_tokens, made.report.tokens_trained) == (8, 4)
    assert settings.recent_versions(5, list(versions))[0] == 4
    assert settings.recent_versions(5)[0] == 1
    passes = config(training={"max_staleness": 1, "updates_per_step": 2, "epochs_per_step": 2})
    assert passes.recent_versions(5)[0] == 1
    synchronous = config().recent_versions()
    synchronous.append(3)
    assert synchronous[0] == 3


def test_or_their_group_is_dropped() -> None:
    training = {"max_staleness": 1, "stale_policy": "drop"}
    mixed = group(0.0, 1.0, versions=[2, 2, 3, 3, 4, 5])
    made = make_samples([mixed, group(0.0, 1.0)], config(training=training), 5)
    assert (made.stale_groups, made.stale_tokens, len(made.samples)) == (1, 0, 2)
    assert made.report.masked == {"stale_group": 12}


def test_a_pair_is_the_best_and_the_worst_with_the_best_first() -> None:
    made = make_samples(
        [group(0.5, 0.0, 1.0, 0.5), group(1.0, 1.0)], config(algorithm={"loss": {"name": "dpo"}}), 5
    )
    assert [sample.advantage for sample in made.samples] == [1.0, -1.0]
    assert len({sample.pair_id for sample in made.samples}) == 1
    assert len({sample.sequence for sample in made.samples}) == 2
    assert len({sample.trajectory for sample in made.samples}) == 1
    assert made.report.masked == {"unpaired": 12, "no_signal": 12}


def test_a_nearly_full_context_costs_reward() -> None:
    algorithm = {"overlong_tokens": 4, "overlong_penalty": 1.0, "advantage": {"name": "dr_grpo"}}
    short = Trajectory("p", 2)
    short.add_turn([1, 2], [3], [-0.1], [5], "stop", None)
    short.set_outcome(reward=1.0)
    mixed = group(1.0)
    mixed.trajectories.append(short)
    made = make_samples([mixed], config(max_length=11, algorithm=algorithm), 5)
    assert made.overlong == 1
    # 9 of 11 tokens with the last 4 charged: half of the penalty.
    assert [sample.advantage for sample in made.samples] == pytest.approx([-0.25, 0.25])


def test_dynamic_sampling_judges_the_rewards_that_are_trained() -> None:
    algorithm = {"dynamic_sampling": True, "overlong_tokens": 4}
    short = Trajectory("p", 1)
    short.add_turn([1, 2], [3], [-0.1], [5], "stop", None)
    short.set_outcome(reward=1.0)
    mixed = group(1.0)
    mixed.trajectories.append(short)
    penalised = config(max_length=11, algorithm=algorithm)
    assert signal(mixed, penalised)
    assert make_samples([mixed], penalised, 5).groups_without_signal == 0
    assert not signal(mixed, config())
    short.set_outcome(reward=0.5)  # what the penalty leaves of the other's reward
    assert not signal(mixed, penalised)


@pytest.mark.parametrize(
    ("advantage", "first", "second", "expected"),
    [
        ("turn_returns", [1.0, 0.0], [0.0, 1.0], True),  # equal sums, earned at different turns
        ("mt_grpo", [1.0, 0.0], [0.0, 1.0], True),
        ({"name": "turn_returns", "gamma": 1e-9}, [1.0, 0.0], [1.0, 0.0], False),
        ("turn_returns", [1.0, 1.0], [1.0, 1.0], False),
        ("grpo", [1.0, 0.0], [0.0, 1.0], False),
    ],
)
def test_dynamic_sampling_judges_turns_with_advantages(
    advantage: Any, first: list[float], second: list[float], expected: bool
) -> None:
    settings = config(algorithm={"dynamic_sampling": True, "advantage": advantage})
    both = group(sum(first), sum(second))
    for one, rewards in zip(both.trajectories, (first, second), strict=True):
        one.set_outcome(turns=rewards)
    assert signal(both, settings) is expected
    assert bool(make_samples([both], settings, 5).samples) is expected


@pytest.mark.parametrize(
    "algorithm",
    [
        {"advantage": "grpo"},
        {"advantage": "dr_grpo"},
        {"advantage": "rloo"},
        {"advantage": {"name": "grpo", "scale": "batch"}},
        {"advantage": "gdpo"},
        {"advantage": "reinforce_pp"},
        {"advantage": "turn_returns"},
        {"advantage": "mt_grpo"},
        {"loss": "dpo"},
        {"advantage": "gae", "dynamic_sampling": True},
        {"advantage": "tests.training.test_samples:Deviations"},
    ],
)
def test_groups_of_one_are_refused_where_the_algorithm_compares(algorithm: dict[str, Any]) -> None:
    alone = config(algorithm=algorithm, sampling={"n": 1})
    with pytest.raises(
        InputError, match=r"sampling\.n 1 has nothing to compare: raise sampling\.n"
    ):
        check_group_size(alone, make_algorithm(alone.algorithm))
    two = config(algorithm=algorithm, sampling={"n": 2})
    check_group_size(two, make_algorithm(two.algorithm))


class Deviations(Advantage):
    """An advantage that cannot be computed for a group of one."""

    def of_group(self, rewards: Sequence[float]) -> list[float] | None:
        return [(reward - mean(rewards)) / stdev(rewards) for reward in rewards]


@pytest.mark.parametrize("advantage", ["gae", {"name": "reinforce_pp", "baseline": "none"}])
def test_groups_of_one_train_where_nothing_is_compared(advantage: Any) -> None:
    settings = config(algorithm={"advantage": advantage}, sampling={"n": 1})
    check_group_size(settings, make_algorithm(settings.algorithm))
    made = make_samples([group(1.0), group(0.0)], settings, 5)
    assert len(made.samples) == 2


def test_a_group_with_one_trajectory_left_trains_nothing() -> None:
    alone = group(1.0)
    alone.dropped["engine_error"] = 1
    alone.dropped_tokens["engine_error"] = 7
    made = make_samples([alone], config(), 5)
    assert made.samples == []
    assert made.report.masked == {"alone": 6, "dropped_engine_error": 7}
    assert made.report.tokens_sampled == 13


def test_a_trajectory_is_trained_unless_it_is_only_counted() -> None:
    batch = SampleBatch()
    made = trajectory(1.0, [5] * 6, 0)
    add_trajectory(batch, made, [1.0] * len(made.turns), 5)
    assert [sample.counted_only for sample in batch.samples] == [False]


def test_a_trajectory_without_turns_is_not_long() -> None:
    algorithm = {"overlong_tokens": 4, "advantage": {"name": "dr_grpo"}}
    mixed = group(1.0, 0.0)
    mixed.trajectories.append(Trajectory("p", 2))
    assert make_samples([mixed], config(max_length=100, algorithm=algorithm), 5).overlong == 0
