import math
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.training.algorithms.some_tokens import some_tokens
from turnwise.config.algorithm import CorrectionConfig
from turnwise.training.algorithms import Tokens
from turnwise.training.algorithms.correction import bounds_of, correct


def reference(tokens: Tokens, config: CorrectionConfig) -> list[float]:
    """The weights from the formulas, token by token."""
    engine, old = tokens.engine_logprobs_N.tolist(), tokens.old_logprobs_N.tolist()
    sequence, staleness = tokens.sequence_N.tolist(), tokens.staleness_N.tolist()
    corrected = [s > 0 or not config.stale_only for s in staleness]
    low, high = bounds_of(config)
    weights = []
    for t in range(len(engine)):
        if config.name == "none" or not corrected[t]:
            weights.append(1.0)
            continue
        own = math.exp(old[t] - engine[t])
        ratios = [
            math.exp(old[u] - engine[u])
            for u in range(len(engine))
            if sequence[u] == sequence[t] and corrected[u]
        ]
        product, mean = math.prod(ratios), math.prod(ratios) ** (1 / len(ratios))
        compared, kept = {
            "token_tis": (own, own),
            "sequence_tis": (product, product),
            "geometric_tis": (mean, mean),
            "mask": (own, 1.0),
            "token_mask": (own, own),
            "icepop": (own, own),
            "sequence_mask": (product, product),
            "geometric_mask": (mean, 1.0),
        }[config.name]
        if config.name in ("token_tis", "sequence_tis", "geometric_tis"):
            weights.append(min(kept, high))
        else:
            weights.append(kept if low <= compared <= high else 0.0)
    return weights


TIS = ["token_tis", "sequence_tis", "geometric_tis"]
MASKS = ["mask", "token_mask", "icepop", "sequence_mask", "geometric_mask"]
NAMES = ["none", *TIS, *MASKS]


def test_all_corrections_of_the_configuration_are_here() -> None:
    assert list(get_args(CorrectionConfig.model_fields["name"].annotation)) == [
        *("none", *TIS, *MASKS),
    ]


@given(
    st.sampled_from(NAMES),
    st.booleans(),
    st.lists(st.integers(0, 5), max_size=5),
    st.integers(0, 100),
)
def test_weights_are_those_of_the_formulas(
    name: str, stale_only: bool, lengths: list[int], seed: int
) -> None:
    """By `algorithm.correction`."""
    tokens = some_tokens(lengths, seed=seed, spread=0.6)
    bounds = {"low": 0.6, "high": 1.5} if name != "none" else {}
    config = CorrectionConfig.model_validate({"name": name, "stale_only": stale_only, **bounds})
    found = correct(tokens, config)
    expected = reference(tokens, config)
    assert found.weights_N.tolist() == pytest.approx(expected)
    outside_N = sum(found.outside_N.values(), torch.zeros(len(expected), dtype=torch.bool))
    if name in MASKS:
        assert outside_N.tolist() == [weight == 0 for weight in expected]
    elif name in TIS:
        truncated = [weight == pytest.approx(1.5) for weight in expected]
        assert outside_N.tolist() == truncated
    else:
        assert found.outside_N == {}


@pytest.mark.parametrize("name", NAMES)
def test_engines_that_agree_with_the_trainer_need_no_correction(name: str) -> None:
    tokens = some_tokens([3, 1, 4])
    tokens = replace(tokens, old_logprobs_N=tokens.engine_logprobs_N.clone().requires_grad_())
    weights = correct(tokens, CorrectionConfig.model_validate({"name": name})).weights_N
    torch.testing.assert_close(weights, torch.ones(8, dtype=torch.float64))
    assert not weights.requires_grad


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *(("token_tis", [2.0, 0.0]), ("sequence_tis", [2.0, 0.0]), ("mask", [0.0, 0.0])),
        *(("token_mask", [0.0, 0.0]), ("sequence_mask", [0.0, 0.0]), ("icepop", [0.0, 0.0])),
        *(("geometric_tis", [2.0, 0.0]), ("geometric_mask", [0.0, 0.0])),
    ],
)
def test_any_distance_gives_a_finite_weight(name: str, expected: list[float]) -> None:
    tokens = replace(
        some_tokens([1, 1]),
        old_logprobs_N=torch.tensor([-0.0, -5000.0]),
        engine_logprobs_N=torch.tensor([-5000.0, -0.0]),
    )
    weights = correct(tokens, CorrectionConfig.model_validate({"name": name})).weights_N
    assert weights.tolist() == expected


def test_newest_tokens_are_uncorrected_and_not_in_the_product() -> None:
    tokens = replace(
        some_tokens([3]),
        old_logprobs_N=torch.log(torch.tensor([0.5, 0.5, 0.9])),
        engine_logprobs_N=torch.log(torch.tensor([0.8, 0.8, 0.1])),
        staleness_N=torch.tensor([1, 2, 0]),
    )
    config = CorrectionConfig(name="sequence_tis", stale_only=True)
    product = (0.5 / 0.8) ** 2
    assert correct(tokens, config).weights_N.tolist() == pytest.approx([product, product, 1.0])


@pytest.mark.parametrize(
    ("section", "bounds"),
    [
        ({"name": "token_mask"}, (0.5, 2.0)),
        ({"name": "icepop"}, (0.5, 5.0)),
        ({"name": "geometric_mask"}, (0.99, 1.01)),
        ({"name": "geometric_mask", "high": 1.001}, (0.99, 1.001)),
    ],
)
def test_each_correction_has_bounds_of_its_own(
    section: dict[str, Any], bounds: tuple[float, float]
) -> None:
    assert bounds_of(CorrectionConfig.model_validate(section)) == bounds


def test_the_geometric_mean_ignores_sequence_length() -> None:
    """Ratios of 1.005 in a sequence of 4 and in one of 400: the product masks the longer one."""
    tokens = some_tokens([4, 400])
    tokens = replace(tokens, old_logprobs_N=tokens.engine_logprobs_N + math.log(1.005))
    kept = {
        name: correct(tokens, CorrectionConfig.model_validate({"name": name})).weights_N > 0
        for name in ("geometric_mask", "sequence_mask")
    }
    assert kept["geometric_mask"].all()
    assert kept["sequence_mask"].tolist() == [True] * 4 + [False] * 400


def test_what_is_below_and_above_the_bounds_is_counted_apart() -> None:
    tokens = replace(
        some_tokens([3]),
        old_logprobs_N=torch.log(torch.tensor([0.1, 0.5, 0.9])),
        engine_logprobs_N=torch.log(torch.tensor([0.5, 0.5, 0.3])),
    )
    found = correct(tokens, CorrectionConfig(name="icepop", high=2.0))
    below_N, above_N = found.outside_N["correction_below"], found.outside_N["correction_above"]
    assert below_N.tolist() == [True, False, False]
    assert above_N.tolist() == [False, False, True]
    assert set(correct(tokens, CorrectionConfig(name="token_tis")).outside_N) == {
        "correction_above"
    }
