"""Weights kept in bfloat16: small steps count in the mean, and runs go on from checkpoints."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.test_rank import model_of, rewarded_at_the_end, samples_for, train, weights
from turnwise.config import Config, parse_config
from turnwise.errors import InputError
from turnwise.training import checkpoint
from turnwise.training.optimizer import PART, RoundingAdamW, rounded
from turnwise.training.rank import TrainerRank
from turnwise.training.trainer_group import TrainerGroup

HALF = 2.0**-8
"""Half of the distance of bfloat16's values just above 1."""


@pytest.fixture
def make_half(make_config: Callable[..., Config]) -> Callable[..., TrainerRank]:
    def make(algorithm: dict[str, Any] | None = None, **training: Any) -> TrainerRank:
        model = make_config().model.model_copy(update={"dtype": "bfloat16"})
        values = {"threads": 1, "weights_dtype": "bfloat16", "learning_rate": 1e-4, **training}
        return TrainerRank(make_config(model=model, training=values, algorithm=algorithm or {}))

    return make


def test_rounding_is_unbiased_and_exact_for_bfloat16_values() -> None:
    generator = torch.Generator().manual_seed(0)
    exact = torch.tensor([0.0, -0.0, 1.0, -3.5, 2.0**-130, float("inf")])
    assert torch.equal(rounded(exact, generator).float(), exact)
    for value in (1 + HALF / 5, -(1 + HALF / 5), 1e-3 / 3, -1234.5):
        found = rounded(torch.full((100_000,), value), generator).float()
        low, high = found.min().item(), found.max().item()
        assert low < value < high
        assert len(found.unique()) == 2  # the two values beside it
        assert found.mean().item() == pytest.approx(value, abs=0.02 * (high - low))


def test_steps_below_half_of_a_distance_move_weights_in_the_mean() -> None:
    size, rate, steps = PART + 4, HALF / 50, 5  # several parts
    moved = []
    for kind in (RoundingAdamW, torch.optim.AdamW):
        weight = torch.nn.Parameter(torch.ones(size, dtype=torch.bfloat16))
        optimizer = kind([weight], lr=rate, weight_decay=0.0, betas=(0.9, 0.95))
        for _ in range(steps):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        moved.append(1 - weight.detach().float().mean().item())
    by_chance, to_nearest = moved
    assert to_nearest == 0
    assert by_chance == pytest.approx(steps * rate, rel=0.05)


def test_a_step_is_that_of_torchs_adamw() -> None:
    torch.manual_seed(0)
    start = torch.randn(40, 30)
    gradients = [torch.randn(40, 30) for _ in range(4)]
    results = []
    for kind in (RoundingAdamW, torch.optim.AdamW):
        weight = torch.nn.Parameter(start.clone())
        optimizer = kind([weight], lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95))
        for gradient in gradients:
            weight.grad = gradient.t().contiguous().t()
            optimizer.step()
        results.append(weight.detach())
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def test_a_policy_in_bfloat16_learns_what_one_in_float32_learns(
    make_config: Callable[..., Config], make_half: Callable[..., TrainerRank]
) -> None:
    """The distance of two policies after the same step is small beside that step."""
    half = make_half(learning_rate=1e-3)
    assert {p.dtype for p in half._scorer.parameters()} == {torch.bfloat16}
    assert {t.dtype for t in half._moments()} <= {torch.bfloat16, torch.float32}
    whole = TrainerRank(make_config(training={"learning_rate": 1e-3, "threads": 1}))
    batch = samples_for(model_of(whole))
    before = weights(whole).clone()
    (found, expected) = (train(policy, batch) for policy in (half, whole))
    assert found["logprob_diff_max"] < 0.5
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.05)
    step, other = weights(whole) - before, weights(half).float() - before
    assert torch.cosine_similarity(step, other, dim=0) > 0.5


@pytest.mark.parametrize("algorithm", [{}, {"advantage": {"name": "gae"}}], ids=str)
def test_a_bfloat16_policy_resumes_bit_for_bit(
    make_half: Callable[..., TrainerRank], tmp_path: Path, algorithm: dict[str, Any]
) -> None:
    one = make_half(algorithm, updates_per_step=2)
    batch = rewarded_at_the_end(samples_for(model_of(one)))
    train(one, batch)
    folder = tmp_path / "step-0001"
    one.save(checkpoint.begin(folder))
    checkpoint.commit(folder)
    two = make_half(algorithm, updates_per_step=2)
    assert two.load(folder) == one.version == 2
    assert torch.equal(weights(one), weights(two))
    for policy in (one, two):
        train(policy, batch)
    assert torch.equal(weights(one), weights(two))
    assert all(torch.equal(a, b) for a, b in zip(one._moments(), two._moments(), strict=True))


def test_a_reference_in_bfloat16_computes_what_the_policy_does(
    make_half: Callable[..., TrainerRank],
) -> None:
    """At the start the KL penalty is 0, as it is in float32."""
    policy = make_half({"kl": {"coef": 0.1}})
    reference = policy._models.reference
    assert reference is not None
    assert {p.dtype for p in reference.parameters()} == {torch.bfloat16}
    assert train(policy, samples_for(model_of(policy)))["kl"] == 0


@pytest.mark.slow
async def test_two_bfloat16_ranks_match_one_and_load_its_checkpoint(
    ray_started: None, make_config: Callable[..., Config], model_path: str, tmp_path: Path
) -> None:
    whole = TrainerRank(make_config(training={"threads": 1}))
    batch = samples_for(model_of(whole), 11)
    folder = tmp_path / "step-0001"
    values = {"threads": 1, "weights_dtype": "bfloat16", "learning_rate": 1e-3}
    norms: dict[int, list[float]] = {}
    for ranks in (1, 2):
        config = make_config(
            model={"path": model_path, "max_length": 512, "dtype": "bfloat16"},
            training={**values, "ranks": ranks, "micro_batch_tokens": 150},
        )
        policy = await TrainerGroup.start(config, tmp_path / str(ranks))
        try:
            first = await policy.train(batch)
            if ranks == 1:
                await policy.save(checkpoint.begin(folder))
                checkpoint.commit(folder)
            else:
                assert await policy.load(folder) == 1
            again = await policy.train(batch)
            norms[ranks] = [first["grad_norm"], again["grad_norm"]]
            assert again["logprob_diff_max"] > first["logprob_diff_max"]
        finally:
            policy.kill()
    assert norms[2] == pytest.approx(norms[1], rel=0.1)


@pytest.mark.parametrize(
    ("model", "why"),
    [({}, "set model.dtype to bfloat16"), ({"lora": {"rank": 4}}, "set model.dtype to bfloat16"),
     ({"dtype": "bfloat16", "lora": {"rank": 4}}, "adapters are float32")],
)  # fmt: skip
def test_bfloat16_weights_are_refused_where_they_make_no_sense(
    model: dict[str, Any], why: str
) -> None:
    tree = {"model": {"path": "m", **model}, "training": {"weights_dtype": "bfloat16"}}
    with pytest.raises(InputError, match=why):
        parse_config(tree, optional=("environment", "data.path"))
