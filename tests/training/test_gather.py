"""Tensors of a model under the names of its files: for engines, and for exported models."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from turnwise.config import Config
from turnwise.training.export import export_model
from turnwise.training.shards import full_tensors, tensor_shapes

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


def moe(folder: Path, **more: Any) -> Path:
    """Save a tiny Qwen3-MoE with 4 experts."""
    torch.manual_seed(0)
    shape = {**SMALL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**shape, **more})).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("origin", ["files", "memory"])
def test_experts_are_named_as_in_the_files(tmp_path: Path, origin: str) -> None:
    moe(tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    if origin == "memory":  # a model that was not loaded from files
        values = model.state_dict()
        model = Qwen3MoeForCausalLM(model.config)
        model.load_state_dict(values)
    in_files = load_file(tmp_path / "model.safetensors")
    tensors = dict(full_tensors(model))
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in tensors
    assert set(tensors) == set(in_files)
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, in_files[name], rtol=0, atol=0)
    shapes = {name: tensor.shape for name, tensor in tensor_shapes(model)}
    assert shapes == {name: tensor.shape for name, tensor in tensors.items()}
    assert list(shapes) == list(tensors)


def test_tensors_of_a_layer_that_its_files_fuse_are_fused_again(tmp_path: Path) -> None:
    from transformers.core_model_loading import Chunk, WeightConverter

    LlamaForCausalLM(LlamaConfig(**SMALL)).save_pretrained(tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    fused = WeightConverter(
        source_patterns="mlp.gate_up_proj.weight",
        target_patterns=["mlp.gate_proj.weight", "mlp.up_proj.weight"],
        operations=[Chunk(dim=0)],
    )
    model._weight_conversions = [fused]
    tensors = dict(full_tensors(model))
    mlp = model.model.layers[1].mlp
    expected = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
    torch.testing.assert_close(tensors["model.layers.1.mlp.gate_up_proj.weight"], expected)
    assert not any("gate_proj" in name for name in tensors)
    assert set(tensors) == {name for name, _ in tensor_shapes(model)}


def test_an_exported_model_keeps_its_buffers_precision(
    make_config: Callable[..., Config], model_path: str, tmp_path: Path
) -> None:
    shape = {**SMALL, "num_key_value_heads": 2, "n_routed_experts": 4, "num_experts_per_tok": 2}
    shape |= {"n_group": 1, "topk_group": 1, "moe_intermediate_size": 12, "v_head_dim": 8}
    shape |= {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
    kind = DeepseekV3Config(**shape | {"first_k_dense_replace": 1})
    model: Any = AutoModelForCausalLM.from_config(kind)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    bias = torch.tensor([1.0, 1 + 2**-12, -3.0, 1e-4])
    model.get_buffer(name).copy_(bias)
    config = make_config(model={"path": model_path, "max_length": 512, "dtype": "bfloat16"})
    export_model(tmp_path, 0, config.model, model)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(again.get_buffer(name), bias)
