from dataclasses import replace
from typing import get_args

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.training.test_attention import KINDS, model_of
from turnwise.training import Sample
from turnwise.training.attention import attention_costs, use_packed_attention
from turnwise.training.batching import (
    Costs,
    Layout,
    Layouts,
    RankBatches,
    make_micro_batch,
    plan_micro_batches,
)

CPU = torch.device("cpu")


def sample(length: int, number: int = 0, pair_id: int | None = None) -> Sample:
    ids = [number] * length
    mask = [0] * (length // 3) + [1] * (length - length // 3)
    return Sample.of(ids, mask, [-0.5] * length, [0] * length, 1.0, number, pair_id)


lengths = st.lists(st.integers(1, 60), min_size=1, max_size=40)
layouts = st.sampled_from(get_args(Layout))


@given(lengths, st.integers(1, 4), st.integers(1, 4), st.integers(1, 200), layouts)
def test_samples_are_computed_once_and_ranks_take_equal_steps(
    lengths: list[int], updates: int, ranks: int, budget: int, layout: Layout
) -> None:
    samples = [sample(length, number) for number, length in enumerate(lengths)]
    shares = plan_micro_batches(samples, updates, ranks, budget, layout)
    assert len(shares) == ranks
    assert {len(own) for own in shares} == {min(updates, len(samples))}
    seen = []
    for step in zip(*shares, strict=True):
        assert len({len(share.micro_batches) for share in step}) == 1
        own = [s for share in step for batch in share.micro_batches for s in batch]
        assert {share.total_tokens for share in step} == {sum(s.trained for s in own)}
        assert {share.total_trajectories for share in step} == {len(own)}
        seen += [s.sequence for s in own]
    assert sorted(seen) == list(range(len(samples)))


def cost(batch: list[Sample], layout: Layout) -> int:
    tokens = {s.trajectory: s.trained for s in batch}
    if not batch:
        return 0
    return make_micro_batch(batch, tokens, 0, layout, CPU).columns.token_ids_BT.numel()


@given(lengths, st.integers(60, 200), layouts)
def test_a_micro_batch_keeps_to_its_budget(lengths: list[int], budget: int, layout: Layout) -> None:
    """By `training.micro_batch_tokens`."""
    samples = [sample(length, number // 4) for number, length in enumerate(lengths)]
    samples = [replace(s, sequence=n, pair_id=n, trajectory=n) for n, s in enumerate(samples)]
    for (share,) in plan_micro_batches(samples, 1, 2, budget, layout):
        assert all(cost(batch, layout) <= budget for batch in share.micro_batches)


def test_ranks_compute_batches_of_like_size_at_the_same_time() -> None:
    samples = [sample(10 + number % 50, number) for number in range(400)]
    (one,), (two,) = plan_micro_batches(samples, 1, 2, 512, "padded")
    pairs = zip(one.micro_batches, two.micro_batches, strict=True)
    costs = [(cost(a, False), cost(b, False)) for a, b in pairs]
    assert all(abs(a - b) < 150 for a, b in costs)
    assert abs(sum(a for a, _ in costs) - sum(b for _, b in costs)) < 150


def test_the_samples_of_a_unit_stay_together() -> None:
    samples = [sample(5 + 7 * (n % 5), n, pair_id=n // 2) for n in range(20)]
    homes: dict[int, set[int]] = {}
    number = 0
    for own in plan_micro_batches(samples, 2, 2, 40, "padded"):
        for share in own:
            for batch in share.micro_batches:
                number += 1
                for s in batch:
                    homes.setdefault(s.pair_id, set()).add(number)
    assert all(len(home) == 1 for home in homes.values())
    assert len(homes) == 10


def test_a_trajectory_stays_in_one_update_and_its_branches_part() -> None:
    samples = [
        Sample.of([1] * 9, [0] + [1] * 8, [-0.5] * 9, [0] * 9, 1.0, n, trajectory=n // 4)
        for n in range(24)
    ]
    (updates,) = plan_micro_batches(samples, 3, 1, 18, "padded")
    for share in updates:
        assert [len(batch) for batch in share.micro_batches] == [2] * 4
        homes = {s.trajectory for batch in share.micro_batches for s in batch}
        assert share.trajectory_tokens == {home: 32 for home in sorted(homes)}
        assert (share.total_tokens, share.total_trajectories) == (64, 2)


def test_counted_only_samples_add_only_to_each_updates_totals() -> None:
    samples = [
        Sample.of([1] * 5, [0] + [1] * 4, [-0.5] * 5, [0] * 5, 0.0, n, counted_only=n >= 2)
        for n in range(6)
    ]
    (updates,) = plan_micro_batches(samples, 4, 1, 100, "padded")
    assert [[s.sequence for s in batch] for u in updates for batch in u.micro_batches] == [[0], [1]]
    assert [share.total_tokens for share in updates] == [12, 12]
    assert [share.total_trajectories for share in updates] == [3, 3]


def test_padded_and_packed_rows_hold_the_same_tokens() -> None:
    samples = [sample(7, 3), sample(4, 5), sample(9, 8)]
    tokens = {3: 5, 5: 9, 8: 6}
    padded = make_micro_batch(samples, tokens, 3, "padded", device=CPU)
    packed = make_micro_batch(samples, tokens, 3, "packed", device=CPU)
    assert padded.columns.token_ids_BT.shape == (3, 9)
    assert packed.columns.token_ids_BT.shape == (1, 20)
    positions_BT = packed.columns.position_ids_BT
    assert positions_BT is not None
    assert positions_BT[0].tolist() == [*range(7), *range(4), *range(9)]
    for batch in (padded, packed):
        assert batch.columns.targets_N.tolist() == [3] * 5 + [5] * 3 + [8] * 6
        assert batch.tokens.sequence_N.tolist() == [0] * 5 + [1] * 3 + [2] * 6
        assert batch.tokens.trajectory_tokens_N.tolist() == [5] * 5 + [9] * 3 + [6] * 6
        assert [(s.start, s.stop) for s in batch.spans()] == [(0, 5), (5, 8), (8, 14)]
        assert len(batch.tokens.engine_logprobs_N) == len(batch.tokens.staleness_N) == 14
        assert batch.tokens.staleness_N.unique().tolist() == [3]
        assert (batch.tokens.sequences, batch.size) == (3, 20)


def test_a_rank_without_samples_gets_a_batch_that_trains_nothing() -> None:
    shares = plan_micro_batches([sample(9)], 1, 3, 64, "padded")
    batches = [share.micro_batches for (share,) in shares]
    assert sorted(len(batch) for (batch,) in batches) == [0, 0, 1]
    empty = make_micro_batch([], {}, 0, "padded", device=CPU)
    assert len(empty.columns.targets_N) == 0
    assert len(empty.tokens.advantages_N) == 0
    assert RankBatches([[]], {}).micro_batches == [[]]


def test_the_first_token_is_never_trained() -> None:
    made = Sample.of([1, 2], [1, 1], [-1.0, -1.0], [0, 0], 1.0, 0)
    assert made.response_mask_T.tolist() == [False, True]


@given(lengths, st.integers(60, 2000))
def test_padded_sequences_of_like_length_are_computed_together(
    lengths: list[int], budget: int
) -> None:
    samples = [sample(length, number) for number, length in enumerate(lengths)]
    ((share,),) = plan_micro_batches(samples, 1, 1, budget, "padded")
    computed = sum(cost(batch, "padded") for batch in share.micro_batches)
    full, rows = 0, 0  # as many as fit, in the order of their lengths
    for number, length in enumerate(sorted(lengths)):
        rows += 1
        if number + 1 == len(lengths) or (rows + 1) * sorted(lengths)[number + 1] > budget:
            full, rows = full + rows * length, 0
    assert computed <= full


def test_a_long_sequence_does_not_pad_the_short_ones() -> None:
    samples = [sample(length, number) for number, length in enumerate([30] * 40 + [900] * 2)]
    ((share,),) = plan_micro_batches(samples, 1, 1, 100_000, "padded")
    assert sorted(len(batch) for batch in share.micro_batches) == [2, 40]


def group(prompt: int, ends: list[int], first: int = 0) -> list[Sample]:
    """Samples with one prompt, each with an end of its own."""
    samples = []
    for number, end in enumerate(ends, start=first):
        ids = [first] * prompt + [1000 + number] * end
        mask = [0] * prompt + [1] * end
        zeros = [0] * len(ids)
        samples.append(Sample.of(ids, mask, zeros, zeros, 1.0, number))
    return samples


CPU_COSTS, GPU_COSTS = Costs(1e-4, 1e-4, 2.0), Costs(5e-5, 3e-4, 16.0)
ALL = get_args(Layout)


def chosen(
    samples: list[Sample], costs: Costs, possible: tuple[Layout, ...] = ALL, updates: int = 1
) -> list[Layout]:
    layouts = Layouts(possible, costs=costs)
    (shares,) = plan_micro_batches(samples, updates, 1, 16_384, layouts)
    return [share.layout for share in shares]


def test_an_optimizer_step_takes_the_layout_that_costs_least() -> None:
    like = group(0, [50] * 8)  # padding costs nothing, calls do
    mixed = [s for length in (100, 2000) for s in group(0, [length] * 4, length)]
    prompts, answers = group(2000, [100] * 8), group(200, [2000] * 8)
    for costs in (CPU_COSTS, GPU_COSTS):
        assert chosen(like, costs) == ["padded"]
        assert chosen(prompts, costs) == ["shared"]
        assert chosen(prompts, costs, ("padded",)) == ["padded"]
    # One row of 4 * 100 + 4 * 2000 tokens, or two micro-batches: at most 512 tokens more.
    assert chosen(mixed, CPU_COSTS) == ["packed"]
    # 1,400 tokens less, which a GPU pays for with masks of 7 * 2000 * 2200 pairs.
    assert chosen(answers, CPU_COSTS) == ["shared"]
    assert chosen(answers, GPU_COSTS, ("packed", "shared")) == ["packed"]
    # A model with masks of its own computes the pairs of different sequences too.
    assert chosen(mixed, CPU_COSTS._replace(rows=True), ("padded", "packed")) == ["padded"]


def test_each_optimizer_step_takes_its_own_layout() -> None:
    # Of two updates, the second gets every other trajectory.
    samples = [
        s for pair in zip(group(0, [900] * 8), group(900, [9] * 8, 8), strict=True) for s in pair
    ]
    assert chosen(samples, CPU_COSTS, updates=2) == ["padded", "shared"]
    assert chosen(samples, CPU_COSTS, updates=2) == ["padded", "shared"]


def test_the_time_of_attention_follows_from_the_models_shape() -> None:
    model = model_of(KINDS["llama"])
    text = model.config
    layers = sum(p.numel() for p in model.model.layers.parameters())
    width = text.num_attention_heads * text.head_dim
    pair = 2 * width * text.num_hidden_layers / layers
    use_packed_attention(model)
    assert attention_costs(model, CPU) == Costs(pair, pair, 2.0)
    on_gpu = attention_costs(model, torch.device("cuda"))
    assert (on_gpu.pair, on_gpu.ending) == (pair / 2, 3 * pair)
    assert attention_costs(model_of(KINDS["soft cap"]), CPU).rows


def test_copies_of_keys_and_values_count_in_a_micro_batch() -> None:
    samples = group(1200, [12] * 16)
    (shares,) = plan_micro_batches(samples, 1, 1, 2048, "shared")
    sizes = [len(batch) for batch in shares[0].micro_batches]
    assert max(sizes) == 1 + (2048 - 1212) // (12 + 1212 // 12)
