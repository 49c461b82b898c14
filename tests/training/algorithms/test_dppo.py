import math
from dataclasses import replace
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.training.algorithms.some_tokens import gradient_N, token_loss, tokens_of
from turnwise.config.algorithm import Dppo
from turnwise.training.algorithms import TokenLoss

PROBS = st.floats(0.001, 0.999)
_Kind = Literal["tv", "kl"]


def loss_of(
    config: Dppo, engine: list[float], policy: list[float], advantages: list[float]
) -> tuple[TokenLoss, list[float]]:
    """The loss of one sequence with these probabilities, and its gradient."""
    tokens = tokens_of([[0.0] * len(engine)], [advantages])
    engine_N = torch.tensor(engine, dtype=torch.float64).log()
    tokens = replace(
        tokens,
        logprobs_N=torch.tensor(policy, dtype=torch.float64).log().requires_grad_(),
        engine_logprobs_N=engine_N,
        old_logprobs_N=engine_N,
    )
    result = token_loss(config, tokens)
    return result, gradient_N(result.loss_N.sum(), tokens).tolist()


@given(
    st.lists(st.tuples(PROBS, PROBS, st.floats(-3, 3)), min_size=1, max_size=8),
    st.sampled_from(["tv", "kl"]),
    st.sampled_from([None, 0.01, 0.4]),
)
def test_the_mask_is_that_of_the_paper(
    rows: list[tuple[float, float, float]], kind: _Kind, delta: float | None
) -> None:
    engine, policy, advantages = map(list, zip(*rows, strict=True))
    config = Dppo(divergence=kind, delta=delta)
    bound = delta or {"tv": 0.2, "kl": 0.05}[kind]
    result, gradient = loss_of(config, engine, policy, advantages)
    for i, (mu, pi, advantage) in enumerate(rows):
        distance = abs(mu - pi)
        if kind == "kl":
            distance = mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))
        assert float(result.metrics_N["divergence"][i]) == pytest.approx(distance, abs=1e-9)
        if abs(distance - bound) < 1e-9 or abs(mu - pi) < 1e-9:
            continue  # decided by rounding
        away = (advantage > 0 and pi > mu) or (advantage < 0 and pi < mu)
        masked = away and distance > bound
        assert bool(result.clipped_N[i]) == masked
        slope = 0.0 if masked else -min(pi / mu, 20.0) * advantage
        assert gradient[i] == pytest.approx(slope, abs=1e-9)


def test_a_rare_token_may_change_freely_and_a_frequent_one_not() -> None:
    """The paper's example, which clips of the ratio treat the other way round."""
    rare, _ = loss_of(Dppo(delta=0.15), [1e-4], [1e-2], [1.0])
    frequent, _ = loss_of(Dppo(delta=0.15), [0.99], [0.80], [-1.0])
    assert rare.clipped_N.tolist() == [False]
    assert frequent.clipped_N.tolist() == [True]


@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_certain_and_impossible_tokens_have_finite_losses(kind: _Kind) -> None:
    tokens = tokens_of([[0.0, 0.0, 0.0]], [[1.0, -1.0, 1.0]])
    tokens = replace(
        tokens,
        logprobs_N=torch.tensor([0.0, -1e4, 0.0]).requires_grad_(),
        engine_logprobs_N=torch.tensor([-1e4, 0.0, 0.0]),
        old_logprobs_N=torch.tensor([-1e4, 0.0, 0.0]),
    )
    result = token_loss(Dppo(divergence=kind), tokens)
    assert result.loss_N.isfinite().all()
    assert result.metrics_N["divergence"].isfinite().all()
    assert gradient_N(result.loss_N.sum(), tokens).isfinite().all()
