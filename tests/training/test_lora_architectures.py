"""LoRA in the linear layers of every architecture: the adapter that learns is the one that leaves
the trainer, merged and as a file."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel

from tests.training.architectures import ARCHITECTURES, logprobs_of, tiny
from turnwise.config import LoraConfig
from turnwise.errors import InputError
from turnwise.training import lora

SETTINGS = LoraConfig(rank=4)
IDS = torch.randint(4, 56, (21,), generator=torch.Generator().manual_seed(3))
FEW = (
    "deepseek_v3",  # experts, shared experts and dense layers of the same names
    "falcon",  # linear layers of its own class
    "gpt_oss",  # experts with biases
    "jamba",  # computes with the bias of a layer
    "llama",
    "llama4_text",  # a router that is a linear layer with another answer
    "mamba",  # computes with the weights of layers
    "mixtral",  # a router without a linear layer
    "qwen3_moe",
)
BARE = "gpt2"
"""Its layers are none of torch's linear ones."""


@pytest.mark.parametrize(
    "name",
    [
        name if name in FEW else pytest.param(name, marks=pytest.mark.slow)
        for name in ARCHITECTURES
        if name != BARE
    ],
)
def test_all_linear_learns_what_engines_and_files_get(name: str, tmp_path: Path) -> None:
    model, plain, base = tiny(name), tiny(name), tiny(name)
    lora.add_adapters(model, SETTINGS, ["policy"])
    before = logprobs_of(model, IDS)
    assert torch.equal(before, logprobs_of(plain, IDS)), "a new adapter changes nothing"
    generator = torch.Generator().manual_seed(1)
    factors = {n: p for n, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for factor in factors.values():
            factor.copy_(0.3 * torch.randn(factor.shape, generator=generator))
    ours = logprobs_of(model, IDS)
    assert (ours - before).abs().max() > 0.05

    unknown = plain.load_state_dict(dict(lora.merged_tensors(model)), strict=False).unexpected_keys
    assert unknown == []
    torch.testing.assert_close(logprobs_of(plain, IDS), ours, atol=1e-3, rtol=0)

    lora.write_adapter(
        tmp_path, lora.adapter_config(model, name), dict(lora.adapter_tensors(model))
    )
    read = PeftModel.from_pretrained(base, tmp_path).eval()
    torch.testing.assert_close(logprobs_of(read, IDS), ours, atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("name", "without"),
    [
        ("qwen3_moe", "experts: "),
        ("deepseek_v3", "down_proj, experts, gate_proj, up_proj: "),
        ("llama4_text", "experts, router: "),
        ("mamba", "dt_proj, out_proj, x_proj: "),
        ("llama", ""),
    ],
)
def test_what_all_linear_leaves_out_is_said(name: str, without: str) -> None:
    model = tiny(name)
    lora.add_adapters(model, SETTINGS, ["policy"])
    said = lora.note_without_adapter(model, SETTINGS)
    assert said.partition("no adapter to ")[2].startswith(without)
    assert bool(said) is bool(without)
    chosen = LoraConfig(rank=4, target_modules=["q_proj"])
    assert lora.note_without_adapter(model, chosen) == "", "the user has chosen"


@pytest.mark.parametrize(
    ("name", "targets", "message"),
    [
        ("qwen3_moe", ["q_proj", "gate_proj", "up_proj", "down_proj"], r"\.experts can have no"),
        ("llama4_text", ["q_proj", "router"], r"\.router can have no adapter"),
        ("mamba", ["in_proj", "x_proj"], r"\.x_proj can have no adapter"),
        (BARE, "all-linear", "a gpt2 model has no linear layers that can have an adapter"),
    ],
)
def test_layers_to_which_no_adapter_can_be_added_are_refused(
    name: str, targets: list[str], message: str
) -> None:
    settings = LoraConfig.model_validate({"rank": 4, "target_modules": targets})
    with pytest.raises(InputError, match=rf"model\.lora\.target_modules: .*{message}"):
        lora.add_adapters(tiny(name), settings, ["policy"])
