"""On-policy distillation: a teacher's part of the advantages and of the loss, against the exact
reverse KL divergence."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.training.algorithms.some_tokens import gradient_N, some_tokens, tokens_of
from turnwise.config import AlgorithmConfig
from turnwise.training.algorithms import Tokens, make_loss
from turnwise.training.algorithms.losses import Objective, objective, teach

CONFIG = AlgorithmConfig.model_validate({"advantage": "none"})


def taught(tokens: Tokens, teacher_N: torch.Tensor, weights: tuple[float, float]) -> Tokens:
    weights_2N = torch.stack([torch.full_like(teacher_N, weight) for weight in weights])
    return replace(tokens, teacher_logprobs_N=teacher_N, teacher_weights_2N=weights_2N)


def loss_of(tokens: Tokens, config: AlgorithmConfig = CONFIG) -> Objective:
    taught_N = None
    if (teaching := teach(tokens)) is not None:
        tokens, taught_N, _ = teaching
    totals: Any = {"total_tokens": 1, "total_trajectories": 1, "constant": 1}
    return objective(config, make_loss(config.loss), tokens, taught_N=taught_N, **totals)


def test_a_tokens_divergence_is_subtracted_from_its_advantage() -> None:
    tokens = some_tokens([3, 4])
    teacher_N = tokens.logprobs_N.detach() - 0.5
    made, _, divergence_N = must_teach(taught(tokens, teacher_N, (2.0, 0.0)))
    expected_N = tokens.advantages_N - 2.0 * 0.5
    torch.testing.assert_close(made.advantages_N, expected_N)
    assert not made.advantages_N.requires_grad
    torch.testing.assert_close(divergence_N, torch.full_like(divergence_N, 0.5))
    assert teach(tokens) is None


def test_tokens_without_a_teacher_are_left_alone() -> None:
    tokens = tokens_of([[0.0, 0.0]], [[0.0, 0.0]])
    weights_2N = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    teacher_N = torch.tensor([-2.0, float("nan")])
    mixed = replace(tokens, teacher_logprobs_N=teacher_N, teacher_weights_2N=weights_2N)
    made, taught_N, divergence_N = must_teach(mixed)
    assert made.advantages_N.tolist() == [-1.0, 0.0]
    assert divergence_N.tolist() == [1.0, 0.0]
    assert taught_N.tolist() == [0.0, 0.0]
    assert gradient_N(taught_N.sum(), tokens).tolist() == [0.0, 0.0]


def must_teach(tokens: Tokens) -> tuple[Tokens, torch.Tensor, torch.Tensor]:
    made = teach(tokens)
    assert made is not None
    return made


@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 1.0)])
@pytest.mark.parametrize("off_policy", [False, True])
def test_the_gradient_is_on_average_that_of_the_reverse_kl(
    weights: tuple[float, float], off_policy: bool
) -> None:
    """Over a vocabulary of six: the mean over sampled tokens is the exact divergence's gradient,
    also of tokens that another policy sampled."""
    random = torch.Generator().manual_seed(0)
    logits_V, teacher_V, other_V = torch.randn(3, 6, generator=random, dtype=torch.float64)
    logits_V.requires_grad_()
    policy_V, teacher_V = logits_V.log_softmax(-1), teacher_V.log_softmax(-1)
    exact = (policy_V.exp() * (policy_V - teacher_V)).sum()
    (expected_V,) = torch.autograd.grad(exact, logits_V, retain_graph=True)
    sampler_V = (0.3 * other_V).log_softmax(-1) if off_policy else policy_V.detach()
    tokens = replace(
        tokens_of([[0.0] * 6], [[0.0] * 6]), logprobs_N=policy_V, old_logprobs_N=sampler_V
    )
    config = CONFIG.model_copy(  # a clip wide enough for every ratio
        update={"loss": CONFIG.loss.model_copy(update={"clip_low": 100.0, "clip_high": 100.0})}
    )
    made = loss_of(taught(tokens, teacher_V, weights), config)
    loss_V = made.result.loss_N if weights[0] else made.weights_N * 0 + _taught_N(tokens, teacher_V)
    (found_V,) = torch.autograd.grad((sampler_V.exp() * loss_V).sum(), logits_V)
    torch.testing.assert_close(found_V, expected_V)


def _taught_N(tokens: Tokens, teacher_N: torch.Tensor) -> torch.Tensor:
    return must_teach(taught(tokens, teacher_N, (0.0, 1.0)))[1]


def test_a_token_the_teacher_excludes_has_a_bounded_gradient() -> None:
    tokens = tokens_of([[0.0, 0.0]], [[0.0, 0.0]])
    teacher_N = torch.tensor([float("-inf"), -1.0], dtype=torch.float64)
    made, _, _ = must_teach(taught(tokens, teacher_N, (1.0, 0.0)))
    assert made.advantages_N.tolist() == [-20.0, 0.0]
    loss = loss_of(taught(tokens, teacher_N, (0.0, 1.0))).loss
    assert float(loss.detach()) == pytest.approx(200.0)
    assert gradient_N(loss, tokens).tolist() == pytest.approx([20.0, 0.0])


def test_both_forms_add_to_a_reward() -> None:
    """The advantage form goes through the loss, the other is beside it."""
    tokens = some_tokens([3, 4], spread=0.0)
    teacher_N = tokens.logprobs_N.detach() + 0.25
    plain = gradient_N(loss_of(tokens).loss, tokens)
    for weights in ((1.0, 0.0), (0.0, 1.0)):
        found = gradient_N(loss_of(taught(tokens, teacher_N, weights)).loss, tokens)
        torch.testing.assert_close(found, plain - 0.25)


CORRECTIONS: list[dict[str, Any]] = [
    {"name": "none"},
    *({"name": f"{level}_tis", "high": 1e6} for level in ("token", "sequence", "geometric")),
    *(
        {"name": name, "low": 1e-6, "high": 1e6}
        for name in ("token_mask", "icepop", "sequence_mask")
    ),
]
MASKS: list[dict[str, Any]] = [
    {"name": name, "low": 0.7, "high": 1.5} for name in ("mask", "token_mask", "geometric_mask")
]
"""Corrections that leave some tokens of the vocabulary out."""
V = 6


def expected_gradient(where: str, correction: dict[str, Any], **more: Any) -> list[float]:
    """The exact mean gradient over a vocabulary of which the engine, with older weights, samples:
    of a teacher's divergence, or of a KL penalty against the same model."""
    torch.manual_seed(0)
    logits_V = torch.randn(V, dtype=torch.float64)
    engine_V = (logits_V + 0.8 * torch.randn(V, dtype=torch.float64)).log_softmax(0)
    other_V = torch.randn(V, dtype=torch.float64).log_softmax(0)
    moved_V = 0.2 * torch.randn(V, dtype=torch.float64)  # by the earlier updates of the step
    before_V, leaf_V = logits_V.log_softmax(0), (logits_V + moved_V).requires_grad_()
    logprobs_V = leaf_V.log_softmax(0)
    if where == "exact":
        divergence = (logprobs_V.exp() * (logprobs_V - other_V)).sum()
        return torch.autograd.grad(divergence, leaf_V)[0].tolist()
    loss = {"name": "ppo_clip", "clip_low": 0.999999, "clip_high": 1e6}
    tree: dict[str, Any] = {"loss": loss, "advantage": "none", "correction": correction, **more}
    if where == "kl":
        tree["kl"] = {"coef": 1.0, "estimator": "k3", "importance_weight": True}
    config = AlgorithmConfig.model_validate(tree)
    gradient_V = torch.zeros(V, dtype=torch.float64)
    for token in range(V):
        one = slice(token, token + 1)
        old_N = engine_V[one] if correction["name"] == "none" else before_V[one]
        zero_N = torch.zeros(1, dtype=torch.float64)
        tokens = Tokens(
            logprobs_V[one],
            old_N,
            engine_V[one],
            zero_N,
            torch.zeros(1, dtype=torch.long),
            1,
            zero_N + 1,
            torch.ones(1, dtype=torch.long),
            reference_logprobs_N=other_V[one],
        )
        if where != "kl":
            weights = (1.0, 0.0) if where == "advantage" else (0.0, 1.0)
            tokens = taught(tokens, other_V[one], weights)
        made = loss_of(tokens, config)
        (own_V,) = torch.autograd.grad(made.loss, leaf_V, retain_graph=True)
        gradient_V += engine_V[token].exp() * own_V
    return gradient_V.tolist()


@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda one: one["name"])
@pytest.mark.parametrize("where", ["advantage", "loss", "kl"])
def test_whole_corrections_give_stale_tokens_the_exact_gradient(
    where: str, correction: dict[str, Any]
) -> None:
    made = expected_gradient(where, correction)
    assert made == pytest.approx(expected_gradient("exact", correction), abs=1e-9)


@pytest.mark.parametrize("correction", MASKS, ids=lambda one: one["name"])
def test_a_token_a_correction_refuses_learns_from_no_teacher(
    correction: dict[str, Any],
) -> None:
    """In the loss it is as in the advantage."""
    in_advantage, in_loss = (
        expected_gradient(where, correction) for where in ("advantage", "loss")
    )
    assert in_loss == pytest.approx(in_advantage, abs=1e-9)
    assert in_loss != pytest.approx(expected_gradient("exact", correction), abs=1e-3)


@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 1.0)])
def test_a_masked_token_does_not_learn_from_a_teacher(
    weights: tuple[float, float],
) -> None:
    tokens = some_tokens([4])
    tokens = taught(tokens, tokens.logprobs_N.detach() - 1.0, weights)
    out_N = torch.tensor([True, False, True, False])
    totals: Any = {"total_tokens": 1, "total_trajectories": 1, "constant": 1}
    made, taught_N, _ = must_teach(tokens)
    loss = objective(
        CONFIG, make_loss(CONFIG.loss), made, taught_N=taught_N, low_entropy_N=out_N, **totals
    ).loss
    (gradient,) = torch.autograd.grad(loss, tokens.logprobs_N, retain_graph=True)
    assert gradient[out_N].tolist() == [0.0, 0.0]
    far = CONFIG.model_copy(update={"off_policy_mask_threshold": -1e9})
    bad = replace(made, advantages_N=-torch.ones_like(made.advantages_N))
    assert not gradient_N(
        objective(far, make_loss(far.loss), bad, taught_N=taught_N, **totals).loss, tokens
    ).any()
