"""Context parallelism: ranks that share sequences compute what one rank computes alone."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from benchmarks.loading import in_processes
from tests.plain_scoring import columns_of, score
from tests.training.test_gather import SMALL
from tests.training.test_rank import samples_for
from tests.training.test_trainer_group import EXACT, HARD, TERMS, make_policy
from turnwise.config import Config, SamplingConfig
from turnwise.errors import InputError
from turnwise.training.attention import check_divisible, use_packed_attention
from turnwise.training.context import ContextGroup

__all__ = ["make_policy"]

FOUR = SMALL | {"num_attention_heads": 4}
LENGTHS = (37, 5, 1, 90)
KINDS = {
    "one head of keys for all": Qwen3Config(**FOUR),
    "a head of keys each": LlamaConfig(**FOUR | {"num_key_value_heads": 4}),
    "sliding window": MistralConfig(**FOUR | {"num_key_value_heads": 2}, sliding_window=16),
    "experts": Qwen3MoeConfig(
        **FOUR, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12
    ),
}


def model_of(config: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).float().eval()


def rows(packed: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Token ids, the mask of targets, and positions."""
    generator = torch.Generator().manual_seed(1)
    if packed:
        positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
        ids = torch.randint(0, 64, positions.shape, generator=generator)
        return ids, (positions > 0) & (positions % 7 != 3), positions
    ids = torch.randint(0, 64, (3, 61), generator=generator)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[0, 1:20] = mask[2, 40:] = True  # no rank's columns have targets in all rows
    return ids, mask, None


def computed(
    kind: str, packed: bool, group: ContextGroup | None = None
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Return log-probs, entropies, and the weights' gradients of a loss that is not linear."""
    model = model_of(KINDS[kind])
    assert use_packed_attention(model)
    check_divisible(model, group.size if group else 1, True)
    logprobs_N, entropy_N = score(model, *rows(packed), SamplingConfig(), group)
    (logprobs_N.square().sum() + logprobs_N.sum() ** 2).backward()
    gradients = [p.grad if p.grad is not None else p * 0 for p in model.parameters()]
    return logprobs_N.detach(), entropy_N, [gradient.detach() for gradient in gradients]


def be_rank(rank: int, ranks: int, store: Path, reply: Any) -> None:
    torch.set_num_threads(1)
    meeting = dist.FileStore(str(store), ranks)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=ranks)
    group = ContextGroup.of_this_rank(ranks, timedelta(seconds=120))
    found = {}
    for kind in KINDS:
        for packed in (False, True):
            logprobs_N, entropy_N, gradients = computed(kind, packed, group)
            for gradient in gradients:  # as FSDP does, but for its factor
                dist.all_reduce(gradient)
            found[kind, packed] = [t.numpy() for t in (logprobs_N, entropy_N, *gradients)]
    reply.send(found)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_log_probs_and_gradients_are_those_of_one_rank(tmp_path: Path, ranks: int) -> None:
    """By `training.context_parallel`."""
    replies = in_processes([(be_rank, rank, ranks, tmp_path / "store") for rank in range(ranks)])
    for kind in KINDS:
        for packed in (False, True):
            logprobs_N, entropy_N, gradients = computed(kind, packed)
            for [found] in replies:
                own = [torch.from_numpy(values) for values in found[kind, packed]]
                torch.testing.assert_close(own[0], logprobs_N, rtol=0, atol=1e-5)
                torch.testing.assert_close(own[1], entropy_N, rtol=0, atol=1e-5)
                for ours, theirs in zip(own[2:], gradients, strict=True):
                    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("algorithm", "packing"), [({}, "packed"), (HARD, "padded"), (TERMS, "packed")], ids=str
)
async def test_a_run_with_shared_sequences_is_one_of_a_single_rank(
    make_policy: Callable[..., Any], build: Path, algorithm: Any, packing: str, ranks: int
) -> None:
    model = AutoModelForCausalLM.from_pretrained(build / "model", dtype=torch.float32).eval()
    batch = samples_for(model, 11)
    metrics: list[Any] = []
    scored: list[Any] = []
    canaries: list[Any] = []
    for own in ({"ranks": 1}, {"ranks": ranks, "context_parallel": 2}):
        options = {"micro_batch_tokens": 150, "packing": packing, **own}
        async with make_policy(algorithm, **options) as policy:
            names = ("policy", "reference", "value") if algorithm is HARD else ("policy",)
            scored.append([await policy.forward(name, batch) for name in names])
            metrics.append([await policy.train(batch) for _ in range(3)])
            canaries.append((await policy.publish()).logprobs)
            trained = sum(values.shape[1] for _, values in policy.trained_tokens)
            assert trained == sum(sample.trained for sample in batch)
    for one, shared in zip(*metrics, strict=True):
        for key in (*EXACT, "logprob_diff_max", "clip_fraction"):
            assert shared.get(key, 0) == pytest.approx(one.get(key, 0), abs=1e-4, rel=1e-4), key
        assert shared["trained_tokens"] == one["trained_tokens"]
    for one, shared in zip(*scored, strict=True):
        for ours, theirs in zip(one, shared, strict=True):
            assert theirs == pytest.approx(ours, abs=1e-5)
    assert canaries[1] == pytest.approx(canaries[0], abs=1e-3)


def test_a_rank_alone_has_all_columns() -> None:
    ids, mask, positions = rows(packed=True)
    columns = columns_of(ids, mask, positions)
    assert columns.lengths == list(LENGTHS)
    assert torch.equal(columns.targets_N, ids[mask])
    assert torch.equal(columns.number_N, torch.arange(columns.total))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_ranks_of_a_group_have_each_target_once(packed: bool, size: int) -> None:
    ids, mask, positions = rows(packed)
    nothing: Any = None
    parts = [
        columns_of(ids, mask, positions, ContextGroup(nothing, size, number))
        for number in range(size)
    ]
    whole = torch.full((int(mask.sum()),), -1)
    for part in parts:
        assert (whole[part.number_N] == -1).all()
        whole[part.number_N] = part.targets_N
    assert torch.equal(whole, ids[mask])
    joined = torch.cat([part.token_ids_BT for part in parts], dim=1)
    assert torch.equal(joined[:, : ids.shape[1]], ids)
    assert len({part.token_ids_BT.shape for part in parts}) == 1
    if packed:
        assert parts[0].lengths is not None
        assert sum(parts[0].lengths) == joined.shape[1]


@pytest.mark.parametrize(
    ("shape", "size", "message"),
    [
        (FOUR, 3, r"3 ranks cannot share 4 attention heads.*one of \[1, 2, 4\]"),
        (FOUR | {"num_attention_heads": 6, "num_key_value_heads": 3}, 2, r"one of \[1, 3, 6\]"),
    ],
)
def test_heads_that_cannot_be_shared_are_refused(
    shape: dict[str, Any], size: int, message: str
) -> None:
    model = model_of(Qwen3Config(**shape))
    with pytest.raises(InputError, match=f"training.context_parallel: .*{message}"):
        check_divisible(model, size, use_packed_attention(model))


@pytest.mark.parametrize(
    "config", [MambaConfig(**SMALL), Gemma2Config(**SMALL)], ids=["mamba", "soft cap"]
)
def test_layers_that_combine_tokens_otherwise_are_refused(config: Any) -> None:
    model = model_of(config)
    with pytest.raises(InputError, match=r"a (mamba|gemma2) model combines tokens in another"):
        check_divisible(model, 2, use_packed_attention(model))
    check_divisible(model, 1, False)


def test_ranks_are_divided_into_equal_groups(make_config: Callable[..., Config]) -> None:
    message = "training.context_parallel 2 does not divide training.ranks 3"
    with pytest.raises(InputError, match=message):
        make_config(training={"ranks": 3, "context_parallel": 2})


def test_an_attention_that_computes_whole_rows_is_not_divided(
    make_config: Callable[..., Config],
) -> None:
    message = "training.attention: flash_attention_2 computes whole rows"
    training = {"ranks": 2, "context_parallel": 2, "attention": "flash_attention_2"}
    with pytest.raises(InputError, match=message):
        make_config(training=training)
