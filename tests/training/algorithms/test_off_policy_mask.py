"""Off-policy sequence masking, by the formula of DeepSeek-V3.2."""

from dataclasses import replace

import torch

from tests.training.algorithms.some_tokens import gradient_N, some_tokens, tokens_of
from turnwise.config.algorithm import AlgorithmConfig, KlConfig, PpoClip
from turnwise.training.algorithms import Tokens, make_loss
from turnwise.training.algorithms.losses import Objective, far_off_policy, objective


def made(tokens: Tokens, threshold: float | None, coef: float = 0.0) -> Objective:
    return objective(
        AlgorithmConfig(off_policy_mask_threshold=threshold, kl=KlConfig(coef=coef)),
        make_loss(PpoClip()),
        tokens,
        total_tokens=len(tokens.logprobs_N),
        total_trajectories=tokens.sequences,
        constant=1,
    )


def test_only_what_is_bad_and_far_is_left_out() -> None:
    """The engine's log-probs are the old ones: a log ratio of -1 is a drift of 1. By
    `off_policy_mask_threshold`."""
    tokens = tokens_of(
        [[-1.0, -0.2], [-1.0, -0.2], [-0.4, -0.4], [0.9, 0.9], [-1.0]],
        [[-1.0, -1.0], [1.0, 1.0], [-1.0, -1.0], [-1.0, -1.0], [0.0]],
    )
    left_out = far_off_policy(tokens, 0.5)
    assert left_out.tolist() == [True, True] + [False] * 7
    assert not left_out.requires_grad


def test_a_token_of_its_own_advantage_is_judged_by_it() -> None:
    tokens = tokens_of([[-1.0, -1.0]], [[-1.0, 1.0]])
    assert far_off_policy(tokens, 0.5).tolist() == [True, False]


def test_the_rest_of_the_loss_stays_as_it_is() -> None:
    """Every other sequence is one nat away from the engine on average."""
    tokens = some_tokens([4, 3, 5, 2])
    drift_N = torch.where(tokens.sequence_N % 2 == 0, 1.0, -1.0)
    tokens = replace(tokens, engine_logprobs_N=tokens.logprobs_N.detach() + drift_N)
    far_N = far_off_policy(tokens, 0.5)
    assert torch.equal(far_N, (tokens.advantages_N < 0) & (drift_N > 0))
    assert 0 < int(far_N.sum()) < 9
    masked, plain = made(tokens, 0.5), made(tokens, None)
    expected = gradient_N(plain.loss, tokens) * ~far_N
    torch.testing.assert_close(gradient_N(masked.loss, tokens), expected)
    assert torch.equal(masked.left_out_N["off_policy_masked"], far_N)
    assert plain.left_out_N == {}


def test_the_penalty_of_what_is_left_out_stays() -> None:
    tokens = tokens_of([[-1.0]], [[-1.0]])
    assert gradient_N(made(tokens, 0.5).loss, tokens).tolist() == [0.0]
    penalised = gradient_N(made(tokens, 0.5, coef=0.3).loss, tokens)
    assert penalised.abs().item() > 0.1


def test_a_drift_of_exactly_the_threshold_is_kept() -> None:
    tokens = tokens_of([[-0.5, -0.5]], [[-1.0, -1.0]])
    drift = float(tokens.engine_logprobs_N[0] - tokens.logprobs_N[0])
    assert not far_off_policy(tokens, drift).any()
    assert far_off_policy(tokens, drift - 0.01).all()


def test_an_objective_has_the_divergence_of_its_penalty() -> None:
    tokens = some_tokens([2])
    tokens = replace(tokens, reference_logprobs_N=tokens.logprobs_N.detach() - 0.5)
    penalised, plain = made(tokens, None, coef=0.1), made(tokens, None)
    assert penalised.divergence_N is not None
    assert plain.divergence_N is None
