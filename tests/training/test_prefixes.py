"""Samples that share columns: the same log-probs and gradients as one by one."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.plain_scoring import score
from tests.training.test_attention import KINDS, model_of
from turnwise.config import SamplingConfig
from turnwise.errors import InputError
from turnwise.training import Sample
from turnwise.training.attention import use_packed_attention
from turnwise.training.batching import Columns, make_micro_batch, plan_micro_batches
from turnwise.training.model import score_columns

CPU = torch.device("cpu")


def sample(ids: list[int], start: int, number: int = 0) -> Sample:
    mask = [int(t >= start) for t in range(len(ids))]
    return Sample.of(ids, mask, [-0.5] * len(ids), [0] * len(ids), 1.0, number)


def family() -> list[Sample]:
    """A group of three with a branch, one of them twice, a sample that another begins with, and a
    stranger."""
    generator = torch.Generator().manual_seed(2)

    def ids(count: int) -> list[int]:
        return torch.randint(0, 64, (count,), generator=generator).tolist()

    prompt, answer = ids(20), ids(9)
    rows = [
        (prompt + answer + ids(12), 20),
        (prompt + ids(7), 20),
        (ids(11), 1),
        (prompt + answer + ids(5), 29),
        (prompt + answer, 24),
        (prompt + answer, 20),
    ]
    return [sample(row, start, number) for number, (row, start) in enumerate(rows)]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "soft cap"])
def test_shared_columns_score_and_learn_as_samples_do_alone(kind: str) -> None:
    model: Any = model_of(KINDS[kind])
    samples = family()
    alone = []
    for each in samples:
        ids, mask = (torch.tensor(x)[None] for x in (each.token_ids_T, each.response_mask_T))
        alone.append(score(model, ids, mask, None, SamplingConfig())[0])
    expected = torch.cat(alone)
    weights = torch.linspace(-1, 1, len(expected))
    (expected * weights).sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    use_packed_attention(model)
    columns = Columns.of(samples, "shared", CPU)
    assert columns.token_ids_BT.shape == (1, 20 + 9 + 12 + 7 + 11 + 5)
    found = score_columns(model, columns, SamplingConfig())[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    (found * weights).sum().backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-4)


def test_masks_of_many_queries_are_made_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = model_of(KINDS["llama"])
    use_packed_attention(model)
    columns = Columns.of(family(), "shared", CPU)
    whole = score_columns(model, columns, SamplingConfig())[0]
    monkeypatch.setattr("turnwise.training.attention._MASK_ROWS", 4)
    parts = score_columns(model, columns, SamplingConfig())[0]
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-5)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=12))
def test_samples_read_their_own_tokens_and_share_beginnings(
    rows: list[list[int]],
) -> None:
    samples = [sample(ids, 1, number) for number, ids in enumerate(rows)]
    shared = Columns.of(samples, "shared", CPU)
    assert shared.column_S is not None
    assert shared.lengths is not None
    assert shared.position_ids_BT is not None
    row, positions = shared.token_ids_BT[0], shared.position_ids_BT[0]
    parts = shared.column_S.split(shared.lengths)
    assert sorted(row[columns_T].tolist() for columns_T in parts) == sorted(rows)
    for columns_T in parts:
        assert positions[columns_T].tolist() == list(range(len(columns_T)))
    beginnings = {tuple(ids[: n + 1]) for ids in rows for n in range(len(ids))}
    assert len(row) == len(beginnings)
    assert shared.targets_N.tolist() == [token for ids in rows for token in ids[1:]]
    assert row[shared.before_N].tolist() == [token for ids in rows for token in ids[:-1]]


def test_a_group_shares_a_micro_batch_and_counts_a_prompt_once() -> None:
    generator = np.random.default_rng(0)
    samples = []
    for number in range(24):  # groups of 8, one after another in turn
        prompt = [number % 3] * 40
        samples.append(sample([*prompt, *generator.integers(3, 60, 10).tolist()], 40, number))
    (shares,) = plan_micro_batches(samples, 1, 1, 40 + 8 * 10 + 7 * (50 // 12), "shared")
    (share,) = shares
    assert len(share.micro_batches) == 3
    for batch in share.micro_batches:
        made = make_micro_batch(batch, share.trajectory_tokens, 0, "shared", CPU)
        assert len({int(s.token_ids_T[0]) for s in batch}) == 1
        assert made.columns.token_ids_BT.shape[1] <= 120
        assert made.size == 8 * 50


def test_a_model_with_attention_of_its_own_is_refused(make_config: Any, tmp_path: Any) -> None:
    from turnwise.training.rank import TrainerRank

    model_of(KINDS["soft cap"]).save_pretrained(tmp_path)
    config = make_config(model={"path": str(tmp_path)}, training={"packing": "shared"})
    with pytest.raises(
        InputError, match=r"training\.packing: shared changes the log-probs of a gemma2 model"
    ):
        TrainerRank(config)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("training", "attention", "flex_attention"),
        ("engine", "routing_replay", True),
    ],
)
def test_what_cannot_share_columns_is_refused(
    make_config: Any, section: str, key: str, value: object
) -> None:
    changes: dict[str, dict[str, object]] = {"training": {"packing": "shared"}}
    changes.setdefault(section, {})[key] = value
    with pytest.raises(InputError, match=rf"which {section}\.{key} does not support"):
        make_config(**changes)
