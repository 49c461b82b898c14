"""Advantages and losses of the user's own, named in the configuration as `package.module:Class`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.training.test_rank import model_of, samples_for, score, train, weights
from tests.training.test_samples import config, group
from turnwise.config import Config, OtherModel
from turnwise.errors import InputError
from turnwise.training.algorithms import Advantage, Loss, TokenLoss, Tokens, ValueModel
from turnwise.training.rank import TrainerRank
from turnwise.training.samples import make_samples

HERE = "tests.training.test_own_algorithm"


class Best(Advantage):
    """The best trajectory of a group, or two, gets a bonus."""

    def __init__(self, bonus: float = 1.0) -> None:
        self.bonus = bonus

    def of_group(self, rewards: Sequence[float]) -> list[float] | None:
        return [self.bonus * (reward == max(rewards)) for reward in rewards]


class Normalised(Best):
    normalise = True


class TooFew(Advantage):
    def of_group(self, rewards: Sequence[float]) -> list[float] | None:
        return list(rewards[1:])


class RewardToGo(Advantage):
    """A critic without GAE: the reward less the estimate before each token."""

    def __init__(self, learning_rate: float = 1e-3) -> None:
        self.value_model = ValueModel(OtherModel(), learning_rate)

    def of_group(self, rewards: Sequence[float]) -> list[float] | None:
        return list(rewards)

    def of_tokens(
        self, rewards_T: torch.Tensor, values_T: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        returns_T = rewards_T.sum().expand_as(rewards_T)
        return returns_T - values_T, returns_T


class Reinforce(Loss):
    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def __call__(self, tokens: Tokens) -> TokenLoss:
        loss_N = -self.scale * tokens.advantages_N * tokens.logprobs_N
        return self.unclipped(tokens, loss_N, surprise=-tokens.logprobs_N)


class PairHinge(Loss):
    """A pair's chosen trajectory is to be likelier than its rejected one by a margin."""

    needs_pairs = True

    def __call__(self, tokens: Tokens) -> TokenLoss:
        mean_S = tokens.means_S(tokens.logprobs_N)
        hinge_P = torch.relu(1.0 - mean_S[0::2] + mean_S[1::2])
        return self.unclipped(tokens, hinge_P[tokens.sequence_N // 2])


class NoLoss:
    pass


@pytest.fixture
def make_policy(make_config: Callable[..., Config]) -> Callable[..., TrainerRank]:
    def make(algorithm: dict[str, Any]) -> TrainerRank:
        training = {"learning_rate": 1e-3, "threads": 1}
        return TrainerRank(make_config(training=training, algorithm=algorithm))

    return make


def test_samples_get_the_advantages_of_a_custom_class() -> None:
    own = {"name": f"{HERE}:Best", "bonus": 3.0}
    made = make_samples([group(0.0, 2.0, 1.0)], config(algorithm={"advantage": own}), 5)
    assert [sample.advantage for sample in made.samples] == [0.0, 3.0, 0.0]


def test_only_advantages_from_values_are_normalised(
    make_policy: Callable[..., TrainerRank],
) -> None:
    """Groups that count only have no advantages here, which a mean over the batch would need."""
    changed = []
    for name in ("Best", "Normalised"):
        policy = make_policy({"advantage": f"{HERE}:{name}"})
        batch = samples_for(model_of(policy))
        train(
            policy, [replace(s, advantages_T=s.advantages_T + 3 * s.response_mask_T) for s in batch]
        )
        changed.append(weights(policy))
    assert torch.equal(*changed)


@pytest.mark.parametrize("loss", [f"{HERE}:Reinforce", {"name": f"{HERE}:Reinforce", "scale": 2}])
def test_a_loss_of_ones_own_trains_a_step(
    make_policy: Callable[..., TrainerRank], loss: Any
) -> None:
    policy = make_policy({"loss": loss})
    batch = samples_for(model_of(policy))
    metrics = train(policy, batch)
    assert policy.version == 1
    surprise = sum(-sample.logprobs_T.sum() for sample in batch) / sum(s.trained for s in batch)
    assert metrics["loss_metrics"] == {"surprise": pytest.approx(float(surprise), rel=1e-4)}
    for sample in batch:
        after = sum(score(model_of(policy), sample.token_ids_T.tolist(), 10))
        assert (after - float(sample.logprobs_T.sum())) * sample.advantage > 0


def test_a_loss_of_ones_own_may_compare_pairs(make_policy: Callable[..., TrainerRank]) -> None:
    algorithm = {"loss": f"{HERE}:PairHinge"}
    made = make_samples([group(0.0, 2.0, 1.0)], config(algorithm=algorithm), 5)
    assert [sample.advantage for sample in made.samples] == [1.0, -1.0]
    assert made.report.masked["unpaired"]
    policy = make_policy(algorithm)
    before = weights(policy)
    metrics = train(policy, samples_for(model_of(policy)))
    assert metrics["loss"] > 0
    assert not torch.equal(weights(policy), before)


def test_an_advantage_of_ones_own_may_have_a_value_model(
    make_policy: Callable[..., TrainerRank],
) -> None:
    policy = make_policy({"advantage": {"name": f"{HERE}:RewardToGo", "learning_rate": 1e-4}})
    batch = samples_for(model_of(policy))
    losses = [train(policy, batch)["value_loss"] for _ in range(4)]
    assert losses[0] > losses[-1], "the value model learns"


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (
            {"loss": f"{HERE}:Missing"},
            rf"^algorithm\.loss\.name: {HERE} has no Missing$",
        ),
        (
            {"advantage": "no_such_module:Best"},
            r"^algorithm\.advantage\.name: no_such_module cannot be imported: ModuleNotFoundError",
        ),
        (
            {"loss": f"{HERE}:NoLoss"},
            r"NoLoss is not a subclass of turnwise\.training\.algorithms\.Loss$",
        ),
        (
            {"loss": {"name": f"{HERE}:Reinforce", "scael": 2}},
            r"^algorithm\.loss: .*Reinforce\(scael=2\) cannot be built: TypeError",
        ),
        (
            {"loss": f"{HERE}:PairHinge", "advantage": f"{HERE}:RewardToGo"},
            r"compares trajectories and cannot use the value model of",
        ),
        (
            {"loss": f"{HERE}:PairHinge", "correction": {"name": "mask"}},
            r"has no importance ratio that algorithm\.correction could correct",
        ),
    ],
)
def test_an_algorithm_that_cannot_be_used_is_one_sentence(
    make_policy: Callable[..., TrainerRank], algorithm: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message) as raised:
        make_policy(algorithm)
    assert "\n" not in str(raised.value)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    known = (
        "grpo, dr_grpo, rloo, reinforce_pp, gdpo, turn_returns, mt_grpo, gae, none, "
        "package.module:Class"
    )
    with pytest.raises(
        InputError, match=rf"algorithm\.advantage\.name must be one of {known}, not 'g'"
    ):
        config(algorithm={"advantage": "g"})


def test_an_advantage_that_does_not_fit_its_groups_is_named() -> None:
    own = config(algorithm={"advantage": f"{HERE}:TooFew"})
    with pytest.raises(InputError, match=r"TooFew returns \[1\] advantages for groups of \[2\]"):
        make_samples([group(0.0, 1.0)], own, 5)
