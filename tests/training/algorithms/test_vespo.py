import math

import pytest
import torch

from tests.training.algorithms.some_tokens import gradient_N, token_loss, tokens_of
from turnwise.config import parse_config
from turnwise.config.algorithm import AlgorithmConfig, CorrectionConfig, Vespo
from turnwise.errors import InputError
from turnwise.training.algorithms import make_loss
from turnwise.training.algorithms.losses import objective

RATIOS = [[0.3, -0.1, 0.2], [-0.4, -0.5]]
ADVANTAGES = [[1.0, 1.0, 1.0], [-2.0, -2.0]]


def phi(log_w: float, k: float, decay: float) -> float:
    return math.exp(decay) * math.exp(log_w) ** k * math.exp(-decay * math.exp(log_w))


def test_each_token_is_weighted_by_its_whole_sequences_ratio() -> None:
    tokens = tokens_of(RATIOS, ADVANTAGES)
    result = token_loss(Vespo(), tokens)
    weights = [phi(0.4, 2, 3)] * 3 + [phi(-0.9, 3, 2)] * 2
    flat = [a for row in ADVANTAGES for a in row]
    slopes = [-w * a for w, a in zip(weights, flat, strict=True)]
    assert gradient_N(result.loss_N.sum(), tokens).tolist() == pytest.approx(slopes)
    logprobs = tokens.logprobs_N.tolist()
    losses = [slope * logprob for slope, logprob in zip(slopes, logprobs, strict=True)]
    assert result.loss_N.tolist() == pytest.approx(losses)
    assert result.metrics_N["phi_seq_mean"].tolist() == pytest.approx(weights)


def test_the_correction_is_part_of_the_ratio_and_not_a_factor() -> None:
    tokens = tokens_of(RATIOS, ADVANTAGES)
    loss = make_loss(Vespo())
    corrected = loss.corrected(tokens, torch.tensor([0.5, 1.0, 2.0, 0.5, 1.0]))
    weights = [phi(0.4, 2, 3)] * 3 + [phi(-0.9 + math.log(0.5), 3, 2)] * 2
    assert corrected.metrics_N["phi_seq_mean"].tolist() == pytest.approx(weights, rel=1e-5)
    masked = loss.corrected(tokens, torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0]))
    assert masked.loss_N[:3].abs().max() < 1e-12
    made = objective(
        AlgorithmConfig(loss=Vespo(), correction=CorrectionConfig(name="token_tis")),
        loss,
        tokens,
        total_tokens=5,
        total_trajectories=2,
        constant=1,
    )
    assert float(made.loss) == pytest.approx(float(token_loss(Vespo(), tokens).loss_N.sum()) / 5)


def test_a_correction_by_sequence_weights_is_refused() -> None:
    algorithm = {"loss": {"name": "vespo"}, "correction": {"name": "sequence_tis"}}
    tree = {"environment": "a:B", "model": {"path": "m"}, "data": {"path": "d"}}
    with pytest.raises(
        InputError, match=r"vespo .*set correction\.name to token_tis, token_mask, mask"
    ):
        parse_config({**tree, "algorithm": algorithm})


SMALLEST = math.log(1e-8)


@pytest.mark.parametrize(
    ("ratios", "correction", "log_w"),
    [
        ([-30.0, 20.0], [1.0, 1.0], 0.0),
        ([30.0, -20.0], [1.0, 1.0], 0.0),
        ([-SMALLEST, 0.0], [0.0, 1.0], 0.0),
        ([-20.0, 0.0], [math.exp(30), 1.0], 0.0),
        ([-15.0, -15.0], [1.0, 1.0], SMALLEST),
        ([15.0, 15.0], [1.0, 1.0], 20.0),
    ],
)
def test_ratios_of_tokens_and_sequences_are_bounded(
    ratios: list[float], correction: list[float], log_w: float
) -> None:
    """Both of a token's factors, and their product over the sequence, in both directions."""
    loss = make_loss(Vespo(k_pos=0.1, lambda_pos=1e-9))
    correction_N = torch.tensor(correction, dtype=torch.float64)
    result = loss.corrected(tokens_of([ratios], [[1.0, 1.0]]), correction_N)
    weights = [phi(log_w, 0.1, 1e-9)] * 2
    assert result.metrics_N["phi_seq_mean"].tolist() == pytest.approx(weights)


def test_only_negative_advantages_take_the_second_weight() -> None:
    result = token_loss(Vespo(), tokens_of([[0.4]] * 3, [[0.0], [0.5], [-0.5]]))
    weights = [phi(0.4, 2, 3), phi(0.4, 2, 3), phi(0.4, 3, 2)]
    assert result.metrics_N["phi_seq_mean"].tolist() == pytest.approx(weights)
