from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.training.algorithms.some_tokens import some_tokens
from turnwise.training.algorithms.losses import token_weights

Reduction = Literal["token_mean", "sequence_mean", "sequence_sum", "constant"]
CONSTANT = 7
lengths = st.lists(st.integers(0, 5), min_size=2, max_size=8).filter(any)


def weights_of(reduction: Reduction, batch: Sequence[int], cut: int) -> list[torch.Tensor]:
    """Loss of a batch of sequences of these lengths in two micro-batches, the first up to `cut`."""
    return [
        token_weights(
            reduction,
            some_tokens(part),
            total_tokens=sum(batch),
            total_trajectories=sum(length > 0 for length in batch),
            constant=CONSTANT,
        )
        for part in (batch[:cut], batch[cut:])
    ]


@given(lengths, st.integers(0, 8))
def test_losses_are_reduced_over_the_whole_batch(batch: list[int], cut: int) -> None:
    losses = [[float(i + 10 * t) for t in range(length)] for i, length in enumerate(batch)]
    flat = torch.tensor([x for row in losses for x in row], dtype=torch.float64)
    trained = [row for row in losses if row]
    expected: dict[Reduction, float] = {
        "token_mean": sum(map(sum, trained)) / sum(map(len, trained)),
        "sequence_mean": sum(sum(row) / len(row) for row in trained) / len(trained),
        "sequence_sum": sum(map(sum, trained)) / len(trained),
        "constant": sum(map(sum, trained)) / (len(trained) * CONSTANT),
    }
    for reduction, value in expected.items():
        weights = torch.cat(weights_of(reduction, batch, cut))
        assert (weights * flat).sum().item() == pytest.approx(value)


@given(lengths, st.integers(0, 8))
def test_the_weights_of_a_mean_sum_to_one(batch: list[int], cut: int) -> None:
    for reduction in ("token_mean", "sequence_mean"):
        assert torch.cat(weights_of(reduction, batch, cut)).sum().item() == pytest.approx(1)


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ("token_mean", [1 / 10] * 10),
        ("sequence_mean", [1 / 4] * 2 + [1 / 16] * 8),
        ("sequence_sum", [1 / 2] * 10),
        ("constant", [1 / (2 * CONSTANT)] * 10),
    ],
)
def test_branches_share_the_weight_of_their_trajectory(
    reduction: Reduction, expected: list[float]
) -> None:
    """A trajectory of one branch of two tokens, and one of four branches of two tokens."""
    tokens = replace(some_tokens([2] * 5), trajectory_tokens_N=torch.tensor([2.0] * 2 + [8.0] * 8))
    weights = token_weights(
        reduction, tokens, total_tokens=10, total_trajectories=2, constant=CONSTANT
    )
    assert weights.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "sequence_sum", "constant"])
def test_weights_carry_no_gradient_and_may_be_empty(reduction: Reduction) -> None:
    full, empty = weights_of(reduction, [2, 3, 0], 2)
    assert full.shape == (5,)
    assert empty.shape == (0,)
    assert not full.requires_grad
