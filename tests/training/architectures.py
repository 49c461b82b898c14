"""Tiny models of random weights, of many architectures in Transformers, and the check of each.

python -m tests.training.architectures             write the table of the documentation
python -m tests.training.architectures NAME ...    print what is measured
"""

import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from turnwise.config import SamplingConfig, TrainingConfig
from turnwise.errors import InputError
from turnwise.training import Sample
from turnwise.training.attention import is_packed, use_packed_attention
from turnwise.training.batching import Layout, make_micro_batch
from turnwise.training.layout_check import Difference, ModelCheck, agreed_layouts
from turnwise.training.model import Models, Scorer

BASE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Keys that most architectures have."""
HEADS = {"head_dim": 8}
WINDOW = {"sliding_window": 4}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL = {"num_local_experts": 2, "num_experts_per_tok": 1}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
INDEXED = {"index_topk": 4, "index_head_dim": 8, "index_n_heads": 16}
"""So many heads that scores of tokens, which end at 0, are seldom equal."""
DELTA = {
    **HEADS,
    "num_hidden_layers": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
GEMMA = {**HEADS, **WINDOW, "num_kv_shared_layers": 0, "vocab_size_per_layer_input": 64}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "afmoe": {**HEADS, **WINDOW, **MOE, "num_shared_experts": 1, "num_dense_layers": 1},
    "apertus": {},
    "arcee": HEADS,
    "bamba": {**MAMBA, "attn_layer_indices": [1], "mamba_expand": 2},
    "biogpt": {},
    "bitnet": {},
    "bloom": {"n_layer": 2, "n_head": 4},
    "codegen": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 256},
    "cohere": {},
    "cohere2": WINDOW,
    "cohere2_moe": {**WINDOW, **MOE},
    "cwm": {**HEADS, **WINDOW},
    "dbrx": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 256,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 2, "moe_top_k": 1},
    },
    "deepseek_v2": {**LATENT, **ROUTED, "topk_method": "greedy"},
    "deepseek_v3": {**LATENT, **ROUTED},
    "deepseek_v32": {**LATENT, **ROUTED, **INDEXED},
    "deepseek_v4": {
        **HEADS,
        "q_lora_rank": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "sliding_window": 8,
        "o_groups": 2,
        "o_lora_rank": 8,
        "index_n_heads": 16,
        "index_head_dim": 8,
        "index_topk": 4,
    },
    "diffllama": HEADS,
    "doge": {},
    "dots1": {**ROUTED, **HEADS, **WINDOW},
    "ernie4_5": HEADS,
    "ernie4_5_moe": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 16,
        "moe_layer_start_index": 1,
        "moe_num_shared_experts": 1,
    },
    "exaone4": {"sliding_window": 4, "sliding_window_pattern": 2},
    "exaone_moe": {**WINDOW, **MOE, "first_k_dense_replace": 1},
    "falcon": {"alibi": False, "new_decoder_architecture": False, "multi_query": False},
    "falcon, ALiBi": {"alibi": True, "new_decoder_architecture": False, "multi_query": False},
    "falcon_h1": {**MAMBA, **HEADS, "mamba_d_ssm": 64, "lm_head_multiplier": 0.25},
    "falcon_mamba": {"state_size": 8, "use_mambapy": False},
    "flex_olmo": MOE,
    "gemma": HEADS,
    "gemma2": {**HEADS, **WINDOW},
    "gemma3_text": {**HEADS, **WINDOW},
    "gemma3": {
        "text_config": {**BASE, **HEADS, **WINDOW},
        "vision_config": VISION,
        "image_token_id": 60,
        "boi_token_id": 61,
        "eoi_token_id": 62,
        "mm_tokens_per_image": 4,
    },
    "gemma3n_text": {
        **GEMMA,
        "num_hidden_layers": 4,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_text": {
        **GEMMA,
        "global_head_dim": 8,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 5.0,
    },
    "gemma4": {
        "text_config": {
            **BASE,
            **GEMMA,
            "global_head_dim": 8,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 5.0,
        },
        "vision_config": None,
        "audio_config": None,
        "image_token_id": 60,
        "video_token_id": 59,
        "audio_token_id": 61,
    },
    "glm": HEADS,
    "glm4": HEADS,
    "glm4_moe": {**ROUTED, **HEADS},
    "glm4_moe_lite": {**LATENT, **ROUTED},
    "glm_moe_dsa": {**LATENT, **ROUTED, **INDEXED},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "gpt_bigcode": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "gpt_neo": {
        "num_layers": 2,
        "num_heads": 4,
        "window_size": 4,
        "attention_types": [[["global", "local"], 1]],
    },
    "gpt_neox": {},
    "gpt_oss": {**LOCAL, **HEADS, **WINDOW},
    "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 256},
    "granite": {"logits_scaling": 8.0},
    "granitemoe": {**LOCAL, "logits_scaling": 8.0},
    "granitemoehybrid": {
        **MAMBA,
        **LOCAL,
        "layer_types": ["mamba", "attention"],
        "mamba_expand": 2,
        "shared_intermediate_size": 16,
        "logits_scaling": 4.0,
    },
    "granitemoeshared": {**LOCAL, "shared_intermediate_size": 16, "logits_scaling": 4.0},
    "helium": HEADS,
    "hunyuan_v1_dense": HEADS,
    "hunyuan_v1_moe": {**HEADS, "num_experts": 4, "moe_topk": 2},
    "jamba": {
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 8,
        "use_mamba_kernels": False,
    },
    "jetmoe": {"kv_channels": 8, "num_local_experts": 2, "num_experts_per_tok": 2},
    "kimi_linear": {
        **LATENT,
        **LOCAL,
        "q_lora_rank": None,
        "n_shared_experts": 1,
        "moe_intermediate_size": 16,
        "linear_head_dim": 8,
        "linear_num_heads": 2,
    },
    "lfm2": {
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "block_ff_dim": 48,
        "block_multiple_of": 8,
    },
    "lfm2_moe": {
        **MOE,
        "num_hidden_layers": 3,
        "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention", "conv"],
    },
    "llama": HEADS,
    "llama4": {
        "text_config": {
            **BASE,
            **HEADS,
            "attention_chunk_size": 4,
            "num_local_experts": 2,
            "intermediate_size_mlp": 48,
        },
        "vision_config": VISION,
    },
    "llama4_text": {
        **HEADS,
        "attention_chunk_size": 4,
        "num_local_experts": 2,
        "intermediate_size_mlp": 48,
    },
    "longcat_flash": {
        **LATENT,
        "num_layers": 1,
        "head_dim": 4,
        "ffn_hidden_size": 48,
        "moe_topk": 2,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "expert_ffn_hidden_size": 16,
    },
    "mamba": {"state_size": 8, "use_mambapy": False},
    "mamba2": {
        "num_heads": 8,
        "head_dim": 8,
        "state_size": 8,
        "n_groups": 1,
        "chunk_size": 8,
        "expand": 2,
    },
    "minicpm3": {**LATENT, "head_dim": 8},
    "minimax": {
        **LOCAL,
        **HEADS,
        "layer_types": ["linear_attention", "full_attention"],
        "block_size": 8,
    },
    "minimax_m2": {**LOCAL, **HEADS},
    "ministral": {**HEADS, **WINDOW},
    "mistral": WINDOW,
    "mixtral": {**LOCAL, **WINDOW},
    "modernbert-decoder": {},
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4},
    "nanochat": {},
    "nemotron": {},
    "nemotron_h": {
        **HEADS,
        "hybrid_override_pattern": "M*",
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 1,
        "chunk_size": 8,
    },
    "olmo": {},
    "olmo2": {},
    "olmo3": WINDOW,
    "olmo_hybrid": {"num_hidden_layers": 4},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "persimmon": {},
    "phi": {},
    "phi3": WINDOW,
    "phimoe": {**LOCAL, "num_experts_per_tok": 2},
    "qwen2": {},
    "qwen2_moe": {**MOE, "shared_expert_intermediate_size": 16},
    "qwen3": HEADS,
    "qwen3_5": {"text_config": {**BASE, **DELTA}},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**DELTA, **MOE, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {**MOE, **HEADS},
    "qwen3_next": {**DELTA, **MOE, "shared_expert_intermediate_size": 16},
    "recurrent_gemma": {
        **HEADS,
        "num_hidden_layers": 3,
        "lru_width": 32,
        "attention_window_size": 8,
    },
    "rwkv": {"attention_hidden_size": 32, "context_length": 256},
    "seed_oss": HEADS,
    "smollm3": {},
    "solar_open": {**ROUTED, **HEADS},
    "stablelm": {},
    "starcoder2": WINDOW,
    "vaultgemma": {**HEADS, **WINDOW},
    "xglm": {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48},
    "youtu": LATENT,
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"],
        "mamba_d_state": 8,
        "n_mamba_heads": 4,
        "chunk_size": 8,
        "adapter_rank": 4,
        "use_mamba_kernels": False,
    },
}

"""Keys of tiny models by `model_type`, beside `BASE` where there is no text configuration; the part
of a name after a comma tells models of one type apart."""
PAGE = Path(__file__).parents[2] / "docs/reference/architectures.md"
LAYOUTS: tuple[Layout, ...] = ("padded", "packed", "shared")
EXACT = 1e-3
"""Nats below which log-probs in float32 are the same: rounding is about 1e-6, what is wrong 0.1."""


def tiny(name: str) -> PreTrainedModel:
    """Return a model whose weights are so large that each token counts."""
    torch.manual_seed(0)
    keys = ARCHITECTURES[name]
    shape = AutoConfig.for_model(
        name.partition(",")[0], **keys if "text_config" in keys else BASE | keys
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(shape, dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def check_of(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> ModelCheck:
    """Return the check of a model as a run would begin it."""
    use_packed_attention(model)
    scorer = Scorer(model, SamplingConfig(), dtype)
    models = Models(scorer, None, None, torch.device("cpu"))
    return ModelCheck(models, scorer, 256)


@dataclass(frozen=True)
class Row:
    """A line of the documentation's table."""

    name: str
    chosen: str
    """The last of the layouts that `training.packing: auto` may take: "shared" where all are
    exact; "refused" if there is none."""
    attention: str
    """Log-probs in this layout: the trainer's, or the model's own."""
    own: Difference
    layouts: dict[Layout, Difference]

    def __str__(self) -> str:
        cells = (self.name, self.chosen, self.attention, self.own, *self.layouts.values())
        return f"| {' | '.join(_cell(cell) for cell in cells)} |"


def _cell(value: object) -> str:
    if not isinstance(value, Difference):
        return str(value)
    if value.error:
        return "not computed"
    return "exact" if value.nats < EXACT else f"{value.nats:.1g}"


def row_of(name: str) -> tuple[Row, float]:
    """Return an architecture's line, and how far the log-probs in the layout of its run are from
    Transformers' own: the largest difference of a token, in nats."""
    model = tiny(name)
    check = check_of(model)
    chosen, attention, worst = "refused", "", 0.0
    with suppress(InputError):
        agreed, _ = agreed_layouts([check], TrainingConfig(), LAYOUTS)
        chosen, attention = agreed[-1], "the trainer's" if is_packed(model) else "its own"
        worst = max(farthest(model, layout, tiny(name)) for layout in agreed)
    compared = {
        layout: check_of(tiny(name)).compare_and_choose_attention(layout) for layout in LAYOUTS
    }
    return Row(name, chosen, attention, check.own, compared), worst


@torch.no_grad()
def farthest(model: PreTrainedModel, layout: Layout, plain: PreTrainedModel) -> float:
    """Return the largest difference of a token's log-prob, in nats.

    Args:
        plain: The same model, as Transformers makes it.
    """
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(4, 56, (length,), generator=generator) for length in (21, 17, 9)]
    rows[1][:7] = rows[0][:7]
    samples = [
        Sample.of(row.tolist(), [1] * len(row), [0.0] * len(row), [0] * len(row), 0.0, number)
        for number, row in enumerate(rows)
    ]
    tokens = {sample.trajectory: sample.trained for sample in samples}
    batch = make_micro_batch(samples, tokens, 0, layout, torch.device("cpu"))
    ours_N = Scorer(model, SamplingConfig(), torch.float32)(batch.columns)[0]
    theirs_N = torch.cat([logprobs_of(plain, row) for row in rows])
    return float((ours_N - theirs_N).abs().max())


@torch.no_grad()
def logprobs_of(model: PreTrainedModel, ids_T: torch.Tensor) -> torch.Tensor:
    """Return the log-probs of all tokens but the first, by a model's own logits: [T - 1]."""
    logits_TV = model(input_ids=ids_T[None], use_cache=False).logits[0, :-1].float()
    logprobs_T: torch.Tensor = logits_TV.log_softmax(-1).gather(-1, ids_T[1:, None])[:, 0]
    return logprobs_T


def table(rows: Iterable[Row]) -> str:
    """Return the documentation's table."""
    head = ("architecture", "`auto`", "attention", "own logits", *LAYOUTS)
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *map(str, rows)]) + "\n"


def main(names: Sequence[str]) -> None:
    """Write the documentation's table, or print the lines of some architectures."""
    rows = []
    for name in names or ARCHITECTURES:
        row, worst = row_of(name)
        measured = " ".join(f"{layout} {found}" for layout, found in row.layouts.items())
        said = f"{name}: {row.chosen}, own {row.own}, {measured}, in this layout {worst:.2g}"
        sys.stdout.write(f"{said}\n")
        rows.append(row)
    if not names:
        text = PAGE.read_text()
        PAGE.write_text(text[: text.index("| architecture")] + table(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
