"""The example's language model: Qwen3's architecture, small, with random weights."""

import torch
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerBase,
    Qwen3Config,
    Qwen3ForCausalLM,
)


def build_model(
    tokenizer: PreTrainedTokenizerBase, seed: int, *, hidden_size: int = 128, layers: int = 3
) -> Qwen3ForCausalLM:
    """Make a float32 model for the tokenizer; the same seed gives the same weights."""
    torch.manual_seed(seed)
    stop = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=hidden_size // 64,
        head_dim=32,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        dtype="float32",
        **stop,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(**stop)
    return model
