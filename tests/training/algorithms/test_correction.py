import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.training.algorithms.some_tokens import some_tokens
from turnwise.config.algorithm import CorrectionConfig
from turnwise.training.algorithms import Tokens
from turnwise.training.algorithms.losses import correction_weights


def reference(tokens: Tokens, config: CorrectionConfig) -> list[float]:
    """The weights from the formulas, token by token."""
    engine, old = tokens.engine_logprobs_N.tolist(), tokens.old_logprobs_N.tolist()
    sequence, staleness = tokens.sequence_N.tolist(), tokens.staleness_N.tolist()
    corrected = [s > 0 or not config.stale_only for s in staleness]
    weights = []
    for t in range(len(engine)):
        if config.name == "none" or not corrected[t]:
            weights.append(1.0)
            continue
        ratio = math.exp(old[t] - engine[t])
        if config.name.startswith("sequence"):
            ratio = math.prod(
                math.exp(old[u] - engine[u])
                for u in range(len(engine))
                if sequence[u] == sequence[t] and corrected[u]
            )
        if config.name.endswith("mask"):
            kept = 1.0 if config.name == "mask" else ratio
            weights.append(kept if config.low <= ratio <= config.high else 0.0)
        else:
            weights.append(min(ratio, config.high))
    return weights


NAMES = ["none", "token_tis", "sequence_tis", "mask", "token_mask", "sequence_mask"]


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
    config = CorrectionConfig.model_validate({"name": name, "stale_only": stale_only, "high": 1.5})
    weights = correction_weights(tokens, config)
    assert weights.tolist() == pytest.approx(reference(tokens, config))


@pytest.mark.parametrize("name", NAMES)
def test_engines_that_agree_with_the_trainer_need_no_correction(name: str) -> None:
    tokens = some_tokens([3, 1, 4])
    tokens = replace(tokens, old_logprobs_N=tokens.engine_logprobs_N.clone().requires_grad_())
    weights = correction_weights(tokens, CorrectionConfig.model_validate({"name": name}))
    torch.testing.assert_close(weights, torch.ones(8, dtype=torch.float64))
    assert not weights.requires_grad


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *(("token_tis", [2.0, 0.0]), ("sequence_tis", [2.0, 0.0]), ("mask", [0.0, 0.0])),
        *(("token_mask", [0.0, 0.0]), ("sequence_mask", [0.0, 0.0])),
    ],
)
def test_any_distance_gives_a_finite_weight(name: str, expected: list[float]) -> None:
    tokens = replace(
        some_tokens([1, 1]),
        old_logprobs_N=torch.tensor([-0.0, -5000.0]),
        engine_logprobs_N=torch.tensor([-5000.0, -0.0]),
    )
    weights = correction_weights(tokens, CorrectionConfig.model_validate({"name": name}))
    assert weights.tolist() == expected


def test_newest_tokens_are_left_alone_and_out_of_their_sequences_product() -> None:
    tokens = replace(
        some_tokens([3]),
        old_logprobs_N=torch.log(torch.tensor([0.5, 0.5, 0.9])),
        engine_logprobs_N=torch.log(torch.tensor([0.8, 0.8, 0.1])),
        staleness_N=torch.tensor([1, 2, 0]),
    )
    config = CorrectionConfig(name="sequence_tis", stale_only=True)
    product = (0.5 / 0.8) ** 2
    assert correction_weights(tokens, config).tolist() == pytest.approx([product, product, 1.0])
