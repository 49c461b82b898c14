"""What holds for every loss."""

from dataclasses import replace

import pytest
import torch

from tests.training.algorithms.some_tokens import gradient_N, some_tokens, token_loss, tokens_of
from turnwise.config.algorithm import (
    AlgorithmConfig,
    Cispo,
    Dpo,
    Gspo,
    KlConfig,
    PpoClip,
    Sapo,
    Vespo,
)
from turnwise.errors import InputError
from turnwise.training.algorithms import (
    Tokens,
    make_advantage,
    make_loss,
    weighted_logprobs,
    with_loss,
)
from turnwise.training.algorithms.interface import Loss as LossClass
from turnwise.training.algorithms.interface import TokenLoss, importance_ratio
from turnwise.training.algorithms.losses import token_weights

POLICY_GRADIENTS = [
    *(PpoClip(), PpoClip(dual_clip=3.0), Gspo(), Gspo(dual_clip=3.0), Cispo()),
    *(Cispo(level="sequence"), Sapo(), Sapo(level="sequence"), Vespo()),
]
LOSSES = [*POLICY_GRADIENTS, Dpo()]
Loss = PpoClip | Gspo | Cispo | Sapo | Vespo | Dpo


def name(config: Loss) -> str:
    return config.name


@pytest.mark.parametrize("config", LOSSES, ids=name)
@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_no_trained_token_gives_an_empty_differentiable_loss(
    config: Loss, lengths: list[int]
) -> None:
    tokens = some_tokens(lengths)
    result = token_loss(config, tokens)
    assert result.loss_N.shape == result.ratio_N.shape == result.clipped_N.shape == (0,)
    assert result.loss_N.sum().item() == 0
    assert gradient_N(result.loss_N.sum(), tokens).shape == (0,)


@pytest.mark.parametrize("config", LOSSES, ids=name)
def test_sequences_without_tokens_change_nothing_for_the_others(config: Loss) -> None:
    full = some_tokens([3, 2])
    among_empty = replace(full, sequence_N=full.sequence_N + 2, sequences=6)
    expected, result = token_loss(config, full), token_loss(config, among_empty)
    torch.testing.assert_close(result.loss_N, expected.loss_N)
    torch.testing.assert_close(
        gradient_N(result.loss_N.sum(), among_empty), gradient_N(expected.loss_N.sum(), full)
    )


@pytest.mark.parametrize("config", POLICY_GRADIENTS, ids=name)
@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "sequence_sum", "constant"])
def test_the_on_policy_gradient_is_advantage_times_weight(config: Loss, reduction: str) -> None:
    tokens = some_tokens([3, 1, 4], spread=0.0)
    weights_N = token_weights(
        reduction,  # type: ignore[arg-type]
        tokens,
        total_tokens=8,
        total_trajectories=3,
        constant=5,
    )
    result = token_loss(config, tokens)
    gradient = gradient_N((weights_N * result.loss_N).sum(), tokens)
    torch.testing.assert_close(gradient, -tokens.advantages_N * weights_N)
    torch.testing.assert_close(result.ratio_N, torch.ones_like(result.ratio_N))
    assert not result.clipped_N.any()


def test_of_sequences_of_one_token_gspo_is_ppo_clip() -> None:
    tokens = some_tokens([1, 1, 1, 1], spread=0.5)
    gspo = token_loss(Gspo(clip_low=0.2, clip_high=0.28), tokens)
    ppo = token_loss(PpoClip(clip_low=0.2, clip_high=0.28), tokens)
    torch.testing.assert_close(gspo.loss_N, ppo.loss_N)
    torch.testing.assert_close(
        gradient_N(gspo.loss_N.sum(), tokens), gradient_N(ppo.loss_N.sum(), tokens)
    )


@pytest.mark.parametrize("config", LOSSES, ids=name)
@pytest.mark.parametrize("distance", [90.0, -90.0, 1e4, -1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_distant_policies_give_finite_losses_and_gradients(
    config: Loss, distance: float, dtype: torch.dtype
) -> None:
    far = [distance, distance, distance]
    wide = tokens_of([far, far], [[1.0, 0.0, -1.0], [-2.0, 0.0, 2.0]])
    tokens = replace(
        wide,
        logprobs_N=wide.logprobs_N.detach().to(dtype).requires_grad_(),
        old_logprobs_N=wide.old_logprobs_N.to(dtype),
        advantages_N=wide.advantages_N.to(dtype),
        reference_logprobs_N=wide.old_logprobs_N.to(dtype),
    )
    result = token_loss(config, tokens)
    assert result.loss_N.isfinite().all()
    assert result.ratio_N.isfinite().all()
    assert gradient_N((0 * result.loss_N).sum(), tokens).isfinite().all()
    assert gradient_N(token_loss(config, tokens).loss_N.sum(), tokens).isfinite().all()


def test_a_ratio_beyond_the_bound_is_cut_and_has_no_gradient() -> None:
    log_ratio = torch.tensor([19.0, 21.0, -21.0], requires_grad=True)
    ratio = importance_ratio(log_ratio)
    ratio.sum().backward()
    bounds = torch.tensor([19.0, 20.0, -20.0]).exp()
    torch.testing.assert_close(ratio.detach(), bounds)
    assert log_ratio.grad is not None
    torch.testing.assert_close(log_ratio.grad, bounds * torch.tensor([1.0, 0.0, 0.0]))


def halved(tokens: Tokens) -> torch.Tensor:
    return -tokens.advantages_N * tokens.logprobs_N / 2


class Halved(LossClass):
    def __call__(self, tokens: Tokens) -> TokenLoss:
        return self.unclipped(tokens, halved(tokens))


@pytest.mark.parametrize(
    "given", [halved, Halved, Halved(), f"{__name__}:halved", f"{__name__}:Halved"]
)
def test_a_loss_of_a_call_may_have_many_forms(given: object) -> None:
    config, loss = with_loss(AlgorithmConfig(), given, "sum")
    assert loss is not None
    assert config.reduction == "sum"
    tokens = some_tokens([3, 2])
    assert torch.equal(loss(tokens).loss_N, halved(tokens))


def test_a_loss_by_name_replaces_the_configured_one() -> None:
    for given in ("gspo", {"name": "gspo"}):
        config, loss = with_loss(AlgorithmConfig(), given)
        assert isinstance(config.loss, Gspo)
        assert loss is not None
        assert type(loss) is type(make_loss(Gspo()))
    before = AlgorithmConfig()
    assert with_loss(before, None) == (before, None)
    with pytest.raises(InputError, match="neither the name of a loss nor a function"):
        with_loss(before, 5)
    with pytest.raises(InputError, match=r"loss is not .*nothing.*, but one of .*gspo"):
        with_loss(before, "nothing")


def test_a_function_must_return_a_loss_for_each_token() -> None:
    _, loss = with_loss(AlgorithmConfig(), lambda tokens: tokens.logprobs_N[:2])
    assert loss is not None
    with pytest.raises(InputError, match=r"5 losses, one for each token, not Tensor\[2\]"):
        loss(some_tokens([3, 2]))


def test_weighted_log_probs_have_no_penalty() -> None:
    config = weighted_logprobs(AlgorithmConfig(kl=KlConfig(coef=0.5, estimator="k2")))
    assert (config.kl.coef, config.kl.estimator, config.reduction) == (0.0, "k2", "sum")


def test_a_value_models_loss_is_half_the_squared_error() -> None:
    values_N, returns_N = torch.tensor([1.0, 2.0]), torch.tensor([4.0, 2.0])
    estimator = make_advantage(AlgorithmConfig().advantage)
    assert estimator.value_loss(values_N, values_N, returns_N).tolist() == [4.5, 0.0]
    with pytest.raises(NotImplementedError, match="defines no of_objectives"):
        estimator.of_objectives([], {})
