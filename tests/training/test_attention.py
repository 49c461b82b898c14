"""Packed rows: each sequence attends to itself alone, without a mask that grows with the square."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
)

from tests.plain_scoring import score
from tests.training.test_gather import SMALL
from turnwise.config import Config, SamplingConfig
from turnwise.errors import InputError
from turnwise.training.attention import use_packed_attention
from turnwise.training.rank import TrainerRank

LENGTHS = (37, 5, 1, 90)
KINDS = {
    "llama": LlamaConfig(**SMALL),
    "qwen3": Qwen3Config(**SMALL),
    "sliding window": MistralConfig(**SMALL, sliding_window=16),
    "soft cap": Gemma2Config(**SMALL, sliding_window=16),
}


def model_of(config: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(copy.deepcopy(config)).float().eval()


class Largest(TorchDispatchMode):
    """The size of the largest tensor that is used, in units of four bytes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, out)):
            if isinstance(leaf, torch.Tensor):
                self.elements = max(self.elements, leaf.untyped_storage().nbytes() // 4)
        return out


def scored(model: Any, ids: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
    mask = torch.ones_like(ids, dtype=torch.bool)
    if positions is None:
        mask[:, 0] = False
    else:
        mask[positions == 0] = False
    return score(model, ids, mask, positions, SamplingConfig())[0]


@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_score_and_learn_as_they_do_alone(kind: str) -> None:
    model = model_of(KINDS[kind])
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 64, (1, length), generator=generator) for length in LENGTHS]
    expected = torch.cat([scored(model, row, None) for row in rows])  # Transformers' own attention
    expected.sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    use_packed_attention(model)
    assert (model.config._attn_implementation == "sdpa") is (kind == "soft cap")
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    found = scored(model, torch.cat(rows, dim=1), positions)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    found.sum().backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows_score_by_flex_attention_as_padded_rows_do(kind: str) -> None:
    model = model_of(KINDS[kind])
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 64, (len(LENGTHS), max(LENGTHS)), generator=generator)
    real = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    mask = real.clone()
    mask[:, 0] = False
    with torch.no_grad():
        expected = score(model, ids, mask, None, SamplingConfig())[0]
        use_packed_attention(model, "flex_attention")
        with torch.compiler.set_stance("force_eager"):  # compilation would take seconds
            found = scored(model, ids[real][None], positions)
    assert model.config._attn_implementation == "flex_attention"
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "why"),
    [("flash_attention_2", "training.attention: .*FlashAttention2.* installed"),
     ("nonsense", 'training.attention: .*"nonsense". is not supported')],
)  # fmt: skip
def test_an_attention_that_is_not_there_is_a_mistake_of_the_user(name: str, why: str) -> None:
    with pytest.raises(InputError, match=why):
        use_packed_attention(model_of(KINDS["llama"]), name)


def test_flex_attention_trains_on_gpus_alone(make_config: Callable[..., Config]) -> None:
    config = make_config(training={"attention": "flex_attention"})
    with pytest.raises(InputError, match="flex_attention has no gradients on a CPU"):
        TrainerRank(config)


@pytest.mark.parametrize("packed", [True, False])
def test_no_tensor_grows_with_the_square_of_a_packed_row(packed: bool) -> None:
    model = model_of(KINDS["qwen3"])
    if packed:
        use_packed_attention(model)
    lengths = [64] * 64
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with Largest() as largest:
        scored(model, torch.zeros_like(positions), positions).sum().backward()
    row = positions.numel()
    assert (largest.elements < row * 512) is packed  # the mask: row ** 2 bytes


def test_exported_models_do_not_name_our_attention(tmp_path: Path) -> None:
    model = model_of(KINDS["llama"])
    use_packed_attention(model)
    model.save_pretrained(tmp_path)
    assert "turnwise" not in (tmp_path / "config.json").read_text()
    assert AutoConfig.from_pretrained(tmp_path)._attn_implementation != "turnwise_packed"
