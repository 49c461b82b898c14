"""Each sampled token is trained once; tokens that are not trained move nothing."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.training.test_rank import model_of, score, train, weights
from turnwise.config import Config
from turnwise.rollouts import Group
from turnwise.training import Sample
from turnwise.training.rank import TrainerRank
from turnwise.training.samples import make_samples
from turnwise.trajectory import Outcome, Trajectory, audit

PROMPT = list(range(20, 32))
TOOL = list(range(500, 508))
"""Ids of a tool's answer, which the model never samples."""


@pytest.fixture
def make_policy(make_config: Callable[..., Config]) -> Callable[..., TrainerRank]:
    def make(algorithm: dict[str, Any] | None = None, **training: Any) -> TrainerRank:
        values = {"learning_rate": 1e-3, "threads": 1, "max_grad_norm": 1e9, **training}
        return TrainerRank(make_config(training=values, algorithm=algorithm or {}))

    return make


def add(
    trajectory: Trajectory, model: Any, prompt: list[int], seed: int, version: int = 0
) -> list[int]:
    """Add a turn of six ids with the model's own log-probs; return its path."""
    drawn = torch.randint(32, 400, (6,), generator=torch.Generator().manual_seed(seed)).tolist()
    logprobs = score(model, prompt + drawn, len(prompt))
    trajectory.add_turn(prompt, drawn, logprobs, [version] * 6, "stop", fork_reason="retry")
    return prompt + drawn


def forked(model: Any) -> Trajectory:
    """Two turns; three more branches from the second, one of which keeps half of its tokens."""
    trajectory = Trajectory("p", 0)
    first = add(trajectory, model, PROMPT, 1)
    second = add(trajectory, model, first + TOOL, 2)
    for seed, begun in ((3, second), (4, second), (5, second[:-3]), (6, second)):
        add(trajectory, model, [*begun, *TOOL], seed)
    trajectory.status, trajectory.outcome = "completed", Outcome(1.0)
    return trajectory


def group_of(model: Any) -> Group:
    other = Trajectory("p", 1)
    add(other, model, PROMPT, 7)
    other.status, other.outcome = "completed", Outcome(0.0)
    return Group("p", [forked(model), other])


def of_each_turn(group: Group, samples: list[Sample]) -> list[Sample]:
    """A sample for each turn: its tokens after the whole prompt that the engine received."""
    made = []
    for number, trajectory in enumerate(group.trajectories):
        for index, turn in enumerate(trajectory.turns):
            prompt = trajectory.prompt_token_ids(index)
            before, own = [0] * len(prompt), len(turn.completion_token_ids)
            made.append(
                Sample.of(
                    [*prompt, *turn.completion_token_ids],
                    before + [1] * own,
                    [0.0] * len(prompt) + turn.logprobs,
                    [-1] * len(prompt) + turn.weight_versions,
                    samples[-1 if number else 0].advantage,
                    len(made),
                    trajectory=number,
                )
            )
    return made


@pytest.mark.parametrize("packing", ["padded", "packed", "shared"])
def test_tokens_on_several_branches_are_trained_once(
    make_policy: Callable[..., TrainerRank], make_config: Callable[..., Config], packing: str
) -> None:
    """As if each turn were a sample of its own: the same loss, the same size and direction."""
    plain, policy = make_policy(packing="padded"), make_policy(packing=packing)
    group = group_of(model_of(plain))
    made = make_samples([group], make_config(), 0)
    sampled = sum(trajectory.sampled_tokens for trajectory in group.trajectories)
    assert sum(sample.trained for sample in made.samples) == sampled == 42
    assert audit(group.trajectories[0]).violations == 0
    assert len(made.samples) == 5  # four branches, and the other trajectory
    expected = train(plain, of_each_turn(group, made.samples))
    found = train(policy, made.samples)
    for key in ("loss", "grad_norm", "entropy"):
        assert found[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-6), key
    assert (weights(policy) - weights(plain)).abs().mean() < 1e-6


def trajectory_of(model: Any, index: int, reward: float, version: int) -> Trajectory:
    trajectory = Trajectory("p", index)
    add(trajectory, model, [*PROMPT, *TOOL], index, version)
    trajectory.set_outcome(reward=reward)
    return trajectory


def test_a_trajectory_too_old_to_train_stays_in_the_baseline(
    make_policy: Callable[..., TrainerRank], make_config: Callable[..., Config]
) -> None:
    """Its reward says as much about the problem; its tokens are not trained."""
    model = model_of(make_policy())
    rewards = [4.0, 1.0, 1.0]
    group = Group("p", [trajectory_of(model, i, r, int(i > 0)) for i, r in enumerate(rewards)])
    config = make_config(algorithm={"advantage": "dr_grpo"})
    made = make_samples([group], config, version=1)
    assert [sample.advantage for sample in made.samples] == [-1.0, -1.0]
    assert (made.stale_tokens, made.report.masked) == (6, {"stale": 6})
    dropped = make_config(algorithm={"advantage": "dr_grpo"}, training={"stale_policy": "drop"})
    assert make_samples([group], dropped, version=1).samples == []


def test_masked_tokens_count_in_the_mean_but_move_nothing(
    make_policy: Callable[..., TrainerRank],
) -> None:
    """One sample's engine disagrees with the trainer; the others train as they do without it."""
    algorithm = {"correction": {"name": "mask", "low": 0.999, "high": 1.001}}
    policies = [make_policy(algorithm) for _ in range(2)]
    model = model_of(policies[0])
    samples = []
    for index, reward in enumerate((1.0, -0.5, -0.5)):
        turn = trajectory_of(model, index, reward, 0).turns[0]
        ids = [*turn.added_token_ids, *turn.completion_token_ids]
        start = len(turn.added_token_ids)
        logprobs = np.array([0.0] * start + turn.logprobs) - 0.1 * (index == 0)
        mask = [0] * start + [1] * 6
        samples.append(Sample.of(ids, mask, logprobs.tolist(), [0] * len(ids), reward, index))
    rejected, *others = samples
    of_nothing = Sample.of(
        rejected.token_ids_T.tolist(),
        rejected.response_mask_T.tolist(),
        rejected.logprobs_T.tolist(),
        [0] * rejected.length,
        0.0,  # its tokens count as before
        0,
    )
    found, expected = train(policies[0], samples), train(policies[1], [of_nothing, *others])
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-6)
    assert torch.equal(*map(weights, policies))


@pytest.fixture
def banned() -> Iterator[None]:
    """Every output head gives the ids of the tool's answer no probability at all."""

    def ban(module: torch.nn.Module, _: Any, output: Any) -> Any:
        if isinstance(module, torch.nn.Linear) and module.out_features > TOOL[-1]:
            return output.index_fill(-1, torch.tensor(TOOL), -math.inf)
        return None

    handle = torch.nn.modules.module.register_module_forward_hook(ban)
    yield
    handle.remove()


@pytest.mark.parametrize("loss", ["ppo_clip", "gspo", "cispo", "dpo"])
@pytest.mark.parametrize(
    "kl",
    [
        {"estimator": "k1", "where": "reward"},
        {"estimator": "k2"},
        {"estimator": "k3"},
        {"estimator": "k3", "importance_weight": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("packing", ["padded", "shared"])
def test_impossible_context_tokens_leave_losses_finite(
    make_policy: Callable[..., TrainerRank],
    make_config: Callable[..., Config],
    banned: None,
    loss: str,
    kl: dict[str, Any],
    packing: str,
) -> None:
    """Log-probs of -inf between the trained tokens must not come in as 0 * inf."""
    algorithm = {"loss": loss, "kl": {"coef": 0.1, **kl}}
    policy = make_policy(algorithm, packing=packing)
    model = model_of(policy)
    assert score(model, [*PROMPT, *TOOL], len(PROMPT)) == [-math.inf] * len(TOOL)
    group = Group("p", [forked(model), *(trajectory_of(model, i, 0.0, 0) for i in (1, 2))])
    made = make_samples([group], make_config(algorithm=algorithm), 0)
    before = weights(policy)
    for version in (0, 1):
        assert policy.version == version
        metrics = train(policy, made.samples)
        for key in ("loss", "grad_norm", "entropy", "kl"):
            assert math.isfinite(metrics[key]), key
    assert metrics["grad_norm"] > 0
    assert torch.isfinite(weights(policy)).all()
    assert not torch.equal(weights(policy), before)
