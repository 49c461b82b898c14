"""Models beside the tests' policy: another reference, a reward model, a mixture of experts."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForSequenceClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)


def perturbed(path: str, folder: Path, scale: float = 0.02) -> str:
    """Save a causal language model near that of `path`; returns its folder."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    return str(folder)


def make_reward_model(
    tokenizer: Any, folder: Path, *, vocabulary: int | None = None, outputs: int = 1
) -> str:
    """Save a tiny sequence classifier with random weights, and the tokenizer; returns a folder."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=vocabulary or len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_labels=outputs,
        pad_token_id=min(tokenizer.pad_token_id, (vocabulary or len(tokenizer)) - 1),
        max_position_embeddings=512,
    )
    LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def make_moe(tokenizer: Any, folder: Path) -> str:
    """Save a tiny Qwen3-MoE with 8 experts of width 32, and the tokenizer; returns a folder."""
    torch.manual_seed(0)
    shape = Qwen3MoeConfig(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=64,
        intermediate_size=24,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen3MoeForCausalLM(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    GenerationConfig(eos_token_id=tokenizer.eos_token_id).save_pretrained(folder)
    return str(folder)
