"""Tokens that a grammar restricted are scored among the ids that it allowed."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
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
from turnwise.trajectory import Trajectory, audit, pack_allowed
from turnwise.trajectory.training_trace import from_training_trace, to_training_trace

LENGTH, FIRST = 20, 8
"""Tokens of a sample, and the position of the first sampled one."""


@pytest.fixture
def policy(make_config: Callable[..., Config]) -> TrainerRank:
    more = {"training": {"learning_rate": 1e-3, "threads": 1}, "sampling": {"temperature": 0.9}}
    return TrainerRank(make_config(**more))


def packed(ids: Sequence[int], vocabulary: int = 700) -> bytes:
    bits = np.zeros(vocabulary, np.uint8)
    bits[list(ids)] = 1
    return pack_allowed(np.packbits(bits, bitorder="little").tobytes())


def restricted(model: Any, seed: int) -> Sample:
    """A sample with some sets of ids, and the log-probs that a model has among them."""
    random = np.random.default_rng(seed)
    ids = random.integers(0, 600, LENGTH).tolist()
    sets = {
        at: [ids[at], *random.integers(0, 600, int(random.integers(0, 40))).tolist()]
        for at in range(FIRST, LENGTH)
        if random.random() < 0.7
    }
    with torch.no_grad():
        logits_TV = model(torch.tensor([ids])).logits[0].float() / 0.9
    logprobs = [0.0] * LENGTH
    for at in range(FIRST, LENGTH):
        row_V = logits_TV[at - 1]
        if at in sets:
            inside_V = torch.zeros_like(row_V, dtype=torch.bool)
            inside_V[sets[at]] = True
            row_V = row_V.masked_fill(~inside_V, float("-inf"))
        logprobs[at] = float(row_V.log_softmax(-1)[ids[at]])
    mask = [int(at >= FIRST) for at in range(LENGTH)]
    allowed = {at: packed(chosen) for at, chosen in sets.items()}
    more: Any = {"calls": [0] * LENGTH, "allowed": allowed}
    return Sample.of(ids, mask, logprobs, [0] * LENGTH, 1.0 - 2 * (seed % 2), seed, **more)


@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
def test_targets_are_scored_among_their_allowed_ids(policy: TrainerRank, layout: Layout) -> None:
    model = policy._scorer.get_submodule("model")
    plain = Sample.of([1, 2, 3, 4], [0, 0, 1, 1], [0.0] * 4, [0] * 4, 1.0, 9)
    samples = [restricted(model, 0), plain, restricted(model, 1), restricted(model, 2)]
    columns = Columns.of(samples, layout, policy.device)
    with torch.no_grad():
        found_N, entropy_N = policy._models.score("policy", columns)
    with torch.no_grad():
        mask_1T = torch.tensor([[False, False, True, True]])
        ids_1T = torch.tensor([[1, 2, 3, 4]])
        own = token_logprobs(model, ids_1T, mask_1T, SamplingConfig(temperature=0.9)).tolist()
    wanted = [own if one is plain else one.logprobs_T[FIRST:].tolist() for one in samples]
    assert found_N.tolist() == pytest.approx([*chain(*wanted)], abs=2e-5)
    assert torch.isfinite(entropy_N).all()


def test_a_step_is_on_policy_and_forced_tokens_have_no_gradient(
    policy: TrainerRank,
) -> None:
    model = policy._scorer.get_submodule("model")
    samples = [restricted(model, seed) for seed in range(4)]
    ids = samples[0].token_ids_T.tolist()
    forced = {at: packed([ids[at]]) for at in range(FIRST, LENGTH)}
    mask = [int(at >= FIRST) for at in range(LENGTH)]
    none: Any = {"calls": [0] * LENGTH, "allowed": forced}
    alone = Sample.of(ids, mask, [0.0] * LENGTH, [0] * LENGTH, 1.0, 0, **none)
    for given, moves in (([alone], False), (samples, True)):
        (shares,) = plan_micro_batches(given, 1, 1, 64, "padded")
        assert isinstance(shares[0], RankBatches)
        report = merge([policy.train(shares)])
        assert abs(report["logprob_diff_max"]) < 2e-5
        assert (report["grad_norm"] > 1e-6) == moves


def turn_with_sets() -> Trajectory:
    trajectory = Trajectory("p")
    sets = [packed([3, 5]), b"", packed([3, 5]), packed([9])]
    versions = [0, -1, 0, 0]  # the second was forced by a logits processor
    trajectory.add_turn([1], [3, 4, 5, 9], [-0.5] * 4, versions, "stop", allowed=sets)
    trajectory.set_outcome(reward=1.0)
    return trajectory


def test_sets_stay_with_their_tokens(make_config: Callable[..., Config]) -> None:
    trajectory = turn_with_sets()
    assert Trajectory.from_json(trajectory.to_json()) == trajectory
    assert from_training_trace(to_training_trace(trajectory)).turns == trajectory.turns
    (branch,) = trajectory.samples()
    assert branch.allowed == {1: packed([3, 5]), 3: packed([3, 5]), 4: packed([9])}
    other = turn_with_sets()
    other.set_outcome(reward=0.0)
    batch = make_samples([Group("p", trajectories=[trajectory, other])], make_config(), 0)
    assert [dict(sample.allowed) for sample in batch.samples] == [branch.allowed] * 2


def test_the_audit_finds_sets_that_are_not_those_recorded() -> None:
    trajectory = turn_with_sets()
    assert audit(trajectory).first_violation is None
    trajectory.turns[0] = replace(trajectory.turns[0], allowed=())
    assert "not those recorded" in str(audit(trajectory))
