"""The losses of the protocol, against their formulas written down again."""

from collections.abc import Mapping

import numpy as np
import pytest
import torch

from turnwise.errors import InputError
from turnwise.tinker.losses import LOSSES, loss_named
from turnwise.training.algorithms import Tokens

NEW = np.array([-0.5, -2.0, -1.0, -0.2, -3.0])
OLD = np.array([-1.0, -1.0, -1.1, -0.9, -0.3])
ADVANTAGES = np.array([1.0, -2.0, 0.5, -1.0, 0.0])
MASK = np.array([0.0, 1.0, 1.0, 1.0, 1.0])
DATUM = np.array([0, 0, 0, 1, 1])
RATIO = np.exp(NEW - OLD)


def computed(name: str, settings: Mapping[str, float] | None = None) -> tuple[float, np.ndarray]:
    """Return the sum of a loss, and its gradient with respect to the log-probs."""
    loss = loss_named(name, settings or {})
    known = {"logprobs": OLD, "advantages": ADVANTAGES, "sequence_ratio_mask": MASK}

    def stream(name: str) -> torch.Tensor:
        values = known.get(name, np.full(5, loss.defaults.get(name, 0.0)))
        return torch.tensor(values, dtype=torch.float32)

    logprobs = torch.tensor(NEW, dtype=torch.float32, requires_grad=True)
    old, advantages = stream("logprobs"), stream(loss.factor)
    datum, none = torch.tensor(DATUM), torch.zeros(5, dtype=torch.long)
    streams = {name: stream(name) for name in loss.streams}
    tokens = Tokens(logprobs, old, old, advantages, datum, 2, none, none, streams=streams)
    made = loss.loss(tokens).loss_N
    total = made.sum()
    total.backward()
    assert logprobs.grad is not None
    if loss.scaled:
        assert (made[advantages == 0] == 0).all()
    return total.item(), logprobs.grad.numpy()


def test_ppo_clips_the_ratio_where_it_would_go_further() -> None:
    total, gradient = computed("ppo")
    clipped = np.clip(RATIO, 0.8, 1.2)
    assert total == pytest.approx(-np.minimum(RATIO * ADVANTAGES, clipped * ADVANTAGES).sum())
    inside = clipped * ADVANTAGES >= RATIO * ADVANTAGES
    np.testing.assert_allclose(gradient, -np.where(inside, RATIO * ADVANTAGES, 0), rtol=1e-5)
    assert gradient[0] == 0  # a better token that is far likelier already
    wide = computed("ppo", {"clip_low_threshold": 0.0, "clip_high_threshold": 1e6})[0]
    assert wide == pytest.approx(computed("importance_sampling")[0])


def test_cispo_weighs_the_log_prob_by_the_clipped_ratio() -> None:
    total, gradient = computed("cispo", {"clip_high_threshold": 1.5})
    weight = np.clip(RATIO, 0.0, 1.5) * ADVANTAGES
    assert total == pytest.approx(-(weight * NEW).sum())
    np.testing.assert_allclose(gradient, -weight, rtol=1e-5)


def test_dro_penalizes_the_squared_log_ratio() -> None:
    total, gradient = computed("dro", {"beta": 0.5})
    assert total == pytest.approx(-(NEW * ADVANTAGES - 0.25 * (NEW - OLD) ** 2).sum())
    np.testing.assert_allclose(gradient, -ADVANTAGES + 0.5 * (NEW - OLD), rtol=1e-5)


def test_gspo_has_one_ratio_for_the_sampled_tokens_of_a_datum() -> None:
    settings = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
    total, gradient = computed("gspo", settings)
    ratio = np.array(
        [
            np.exp((NEW - OLD)[(datum == DATUM) & (MASK != 0)].mean())  # the geometric mean
            for datum in DATUM
        ]
    )
    clipped = np.clip(ratio, 0.9, 1.1)
    assert total == pytest.approx(-np.minimum(ratio * ADVANTAGES, clipped * ADVANTAGES).sum())
    inside = ratio * ADVANTAGES <= clipped * ADVANTAGES
    np.testing.assert_allclose(gradient, -np.where(inside, ratio * ADVANTAGES, 0), rtol=1e-5)


def test_cross_entropy_weighs_every_token_by_1_by_default() -> None:
    total, gradient = computed("cross_entropy")
    assert total == pytest.approx(-NEW.sum())
    np.testing.assert_allclose(gradient, -np.ones(5))


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("ppo", {"beta": 1.0}, "ppo has clip_low_threshold, clip_high_threshold, not 'beta'"),
        ("dro", {"beta": float("nan")}, "beta must be a number, not 'nan'"),
        ("dro", {"beta": "high"}, "beta must be a number, not 'high'"),
        ("importance_sampling", {"beta": 1.0}, "importance_sampling has no settings"),
        ("stable_reinforce", {}, "does not compute stable_reinforce"),
        ("custom", {"loss_id": "1"}, "forward_backward_custom computes any other"),
    ],
)
def test_a_loss_or_a_setting_that_is_not_known_has_a_sentence(
    name: str, settings: Mapping[str, float | str], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        loss_named(name, settings)


def test_settings_of_one_request_are_not_those_of_the_next() -> None:
    loss_named("dro", {"beta": 9.0})
    assert LOSSES["dro"].defaults["beta"] == 0.05
