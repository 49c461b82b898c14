"""Turns that were sampled under parameters of their own are trained under these."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.plain_scoring import token_logprobs
from turnwise.config import Config, SamplingConfig
from turnwise.rollouts import Group
from turnwise.training import Sample
from turnwise.training.batching import Columns, Layout, RankBatches, plan_micro_batches
from turnwise.training.rank import TrainerRank
from turnwise.training.reports import merge
from turnwise.training.samples import make_samples
from turnwise.training.supervised import supervised_samples
from turnwise.trajectory import Distribution, Outcome, Trajectory, audit

COLD, NARROW = Distribution(temperature=0.5), Distribution(1.3, top_p=0.8, top_k=40, min_p=0.001)
FIRST, SECOND, THIRD = (5, 12), (15, 20), (26, 33)  # sampled positions of three turns
LENGTH = 33


@pytest.fixture
def policy(make_config: Callable[..., Config]) -> TrainerRank:
    return TrainerRank(
        make_config(
            training={"learning_rate": 1e-3, "threads": 1},
            sampling={"temperature": 0.9},
            algorithm={"kl": {"coef": 0.1}},
        )
    )


def expected(model: Any, ids: list[int], part: tuple[int, int], **sampling: Any) -> list[float]:
    mask_1T = torch.zeros(1, len(ids), dtype=torch.bool)
    mask_1T[:, slice(*part)] = True
    with torch.no_grad():
        config = SamplingConfig(**sampling)
        values: list[float] = token_logprobs(model, torch.tensor([ids]), mask_1T, config).tolist()
    return values


def mixed(model: Any, seed: int) -> tuple[Sample, list[float]]:
    """Three turns, of which two have parameters of their own, with the right log-probs."""
    ids = torch.randint(0, 600, (LENGTH,), generator=torch.Generator().manual_seed(seed)).tolist()
    right = [
        *expected(model, ids, FIRST, **COLD._asdict()),
        *expected(model, ids, SECOND, temperature=0.9),
        *expected(model, ids, THIRD, **NARROW._asdict()),
    ]
    turns = [-1] * LENGTH
    for turn, (start, end) in enumerate((FIRST, SECOND, THIRD)):
        turns[start:end] = [turn] * (end - start)
    logprobs, each = [0.0] * LENGTH, iter(right)
    for at, turn in enumerate(turns):
        logprobs[at] = next(each) if turn >= 0 else 0.0
    mask = [int(turn >= 0) for turn in turns]
    versions = [0 if m else -1 for m in mask]
    more: Any = {"calls": turns, "distributions": {0: COLD, 2: NARROW}}
    return Sample.of(ids, mask, logprobs, versions, 1.0 - 2 * (seed % 2), seed, **more), right


@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
def test_each_turn_is_scored_by_what_it_was_drawn_from(policy: TrainerRank, layout: Layout) -> None:
    model = policy._scorer.get_submodule("model")
    made = [mixed(model, seed) for seed in range(3)]
    plain = Sample.of([1, 2, 3, 4], [0, 0, 1, 1], [0.0] * 4, [0] * 4, 1.0, 9)
    samples = [made[0][0], plain, made[1][0], made[2][0]]
    columns = Columns.of(samples, layout, policy.device)
    with torch.no_grad():
        found_N, entropy_N = policy._models.score("policy", columns)
        reference_N, _ = policy._models.score("reference", columns)
    wanted = [
        *made[0][1],
        *expected(model, [1, 2, 3, 4], (2, 4), temperature=0.9),
        *made[1][1],
        *made[2][1],
    ]
    assert found_N.tolist() == pytest.approx(wanted, abs=2e-5)
    # The KL penalty and a teacher compare two models under the same parameters.
    assert reference_N.tolist() == pytest.approx(wanted, abs=2e-5)
    assert (entropy_N >= 0).all()
    assert entropy_N[:7].mean() < entropy_N[7:12].mean()  # colder


def test_a_step_on_mixed_temperatures_has_the_exact_gradient(
    policy: TrainerRank,
) -> None:
    model = policy._scorer.get_submodule("model")
    samples = [mixed(model, seed)[0] for seed in range(4)]
    trained = sum(sample.trained for sample in samples)
    loss: Any = 0.0
    for sample in samples:
        ids_1T = torch.tensor([sample.ids.tolist()])
        for part, sampling in ((FIRST, COLD), (SECOND, None), (THIRD, NARROW)):
            mask_1T = torch.zeros_like(ids_1T, dtype=torch.bool)
            mask_1T[:, slice(*part)] = True
            values = {"temperature": 0.9} if sampling is None else sampling._asdict()
            found = token_logprobs(model, ids_1T, mask_1T, SamplingConfig.model_validate(values))
            loss = loss - sample.advantage * found.sum() / trained
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    wanted = torch.stack([g.norm() for g in gradients]).norm()
    (shares,) = plan_micro_batches(samples, 1, 1, 64, "padded")  # several micro-batches
    assert isinstance(shares[0], RankBatches)
    report = merge([policy.train(shares)])
    assert abs(report["logprob_diff_max"]) < 2e-5
    assert report["grad_norm"] == pytest.approx(float(wanted), rel=2e-3)


def conversation(**second: Any) -> Trajectory:
    trajectory = Trajectory("problem")
    trajectory.add_turn([1, 2], [3, 4], [-0.1, -0.2], [0, 0], "stop", distribution=COLD)
    trajectory.add_turn([1, 2, 3, 4, 5], [6, 7], [-0.3, -0.4], [0, 0], "stop", **second)
    return trajectory


def test_samples_keep_turn_distributions_and_skip_context_turns(
    make_config: Callable[..., Config],
) -> None:
    one, other = conversation(), conversation(untrained="agent_sampling")
    one.outcome, other.outcome = Outcome(1.0), Outcome(0.0)
    batch = make_samples([Group("problem", trajectories=[one, other])], make_config(), 0)
    assert [sample.trained for sample in batch.samples] == [4, 2]
    assert [dict(sample.distributions) for sample in batch.samples] == [{0: COLD}] * 2
    assert batch.report.first_violation is None
    assert batch.report.masked == {"agent_sampling": 2}
    assert (batch.report.tokens_sampled, batch.report.tokens_trained) == (8, 6)


def test_demonstrations_train_without_a_sampling_temperature() -> None:
    batch = supervised_samples([conversation()], 0)
    assert [dict(sample.distributions) for sample in batch.samples] == [{}]


def test_the_audit_finds_a_turn_with_wrong_sampling_parameters() -> None:
    from dataclasses import replace

    trajectory = Trajectory.from_json(conversation(untrained="left_out").to_json())
    assert trajectory == conversation(untrained="left_out")
    assert audit(trajectory).first_violation is None
    trajectory.turns[0] = replace(trajectory.turns[0], distribution=None)
    assert "sampling parameters are not those recorded" in str(audit(trajectory))


def test_the_audit_finds_a_context_turn_that_is_trained() -> None:
    trajectory = conversation(untrained="left_out")
    wrong = conversation().samples()
    assert "and its turn is context: left_out" in str(audit(trajectory, wrong))
