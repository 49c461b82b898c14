import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from turnwise.training import Sample
from turnwise.training.sample import micro_batches

CPU = torch.device("cpu")


def sample(length: int, advantage: float = 1.0) -> Sample:
    mask = [0] + [1] * (length - 1)
    return Sample(
        [100 + i for i in range(length)], mask, [-0.5 * m for m in mask], [0] * length, advantage
    )


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 100))
def test_batches_keep_every_token_and_the_budget(lengths: list[int], budget: int) -> None:
    samples = [sample(length, float(i)) for i, length in enumerate(lengths)]
    batches = micro_batches(samples, budget, CPU)
    assert sum(int(batch.mask_BT.sum()) for batch in batches) == sum(n - 1 for n in lengths)
    seen: list[float] = []
    for batch in batches:
        rows, width = batch.token_ids_BT.shape
        assert rows == 1 or rows * width <= budget
        for row, advantage in enumerate(batch.advantages_BT[:, 0].tolist()):
            length = lengths[int(advantage)]
            assert batch.token_ids_BT[row, :length].tolist() == samples[int(advantage)].token_ids
            assert batch.mask_BT[row].sum() == length - 1
            seen.append(advantage)
    assert sorted(seen) == [float(i) for i in range(len(lengths))]


def test_like_lengths_share_a_batch() -> None:
    batches = micro_batches([sample(n) for n in (30, 3, 30, 3)], 60, CPU)
    assert [tuple(batch.token_ids_BT.shape) for batch in batches] == [(2, 3), (2, 30)]


def test_a_sample_of_uneven_lengths_is_refused() -> None:
    with pytest.raises(AssertionError, match="lengths differ"):
        Sample([1, 2], [0, 1], [0.0], [0, 0], 1.0)
