import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.training.algorithms.some_tokens import gradient_N, token_loss, tokens_of
from turnwise.config.algorithm import PpoClip


def reference(log_ratio: float, advantage: float, config: PpoClip) -> tuple[float, float, bool]:
    """Loss, its derivative by the log-prob, and whether a clip decided, from the formulas."""
    ratio = math.exp(log_ratio)
    bounded = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
    objective, slope, clipped = ratio * advantage, ratio * advantage, False
    if bounded * advantage < objective:
        objective, slope, clipped = bounded * advantage, 0.0, True
    if config.dual_clip and advantage < 0 and config.dual_clip * advantage > objective:
        objective, slope, clipped = config.dual_clip * advantage, 0.0, True
    return -objective, -slope, clipped


@given(
    st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3)), min_size=1, max_size=8),
    st.sampled_from([PpoClip(), PpoClip(clip_low=0.1, clip_high=0.5, dual_clip=2.5)]),
)
def test_loss_and_gradient_are_the_papers(
    pairs: list[tuple[float, float]], config: PpoClip
) -> None:
    tokens = tokens_of([[p[0] for p in pairs]], [[p[1] for p in pairs]])
    result = token_loss(config, tokens)
    losses, slopes, clipped = zip(*(reference(*pair, config) for pair in pairs), strict=True)
    assert result.loss_N.tolist() == pytest.approx(losses, abs=1e-9)
    assert gradient_N(result.loss_N.sum(), tokens).tolist() == pytest.approx(slopes, abs=1e-9)
    assert result.clipped_N.tolist() == list(clipped)
    assert result.ratio_N.tolist() == pytest.approx([math.exp(p[0]) for p in pairs])
    assert not result.ratio_N.requires_grad


def test_a_ratio_is_clipped_only_if_it_follows_its_advantage() -> None:
    ratios = [1.0, 1.5, 1.5, 0.5, 0.5, 1.1]
    advantages = [1.0, 1.0, -1.0, 1.0, -1.0, -2.0]
    tokens = tokens_of([[math.log(r) for r in ratios]], [advantages])
    result = token_loss(PpoClip(clip_low=0.2, clip_high=0.28), tokens)
    assert result.loss_N.tolist() == pytest.approx([-1.0, -1.28, 1.5, -0.5, 0.8, 2.2])
    assert result.clipped_N.tolist() == [False, True, False, False, True, False]


def test_the_dual_clip_bounds_what_a_bad_token_costs() -> None:
    tokens = tokens_of([[math.log(10), math.log(10), math.log(2)]], [[-1.0, 1.0, -1.0]])
    result = token_loss(PpoClip(dual_clip=3.0), tokens)
    assert result.loss_N.tolist() == pytest.approx([3.0, -1.28, 2.0])
    assert result.clipped_N.tolist() == [True, True, False]
    gradient = gradient_N(result.loss_N.sum(), tokens)
    torch.testing.assert_close(gradient, torch.tensor([0.0, 0.0, 2.0], dtype=torch.float64))
