"""Local models and rows in place of those that TRL's own tests load from the Hugging Face Hub.

They have the same names, and architectures of the same kinds, but shapes that vLLM can compute on a
CPU, random weights, and the tokenizer of the tests.
"""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
)

from tests.models import make_moe

HUB = "trl-internal-testing"
_HEADS = {"head_dim": 32}
_LANGUAGE: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny-Qwen2ForCausalLM-2.5": ("qwen2", {}),
    "tiny-Qwen3ForCausalLM": ("qwen3", _HEADS),
    "tiny-Cohere2ForCausalLM": ("cohere2", {"sliding_window": 64}),
    "tiny-Gemma2ForCausalLM": ("gemma2", {**_HEADS, "sliding_window": 64}),
    "tiny-Glm4MoeForCausalLM": (
        "glm4_moe",
        {
            **_HEADS,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
        },
    ),
}
_REWARD = {
    "tiny-Qwen2ForSequenceClassification-2.5": ("qwen2", {}),
    "tiny-Qwen3ForSequenceClassification": ("qwen3", _HEADS),
    "tiny-LlamaForSequenceClassification-3.2": ("llama", {}),
}
_REMOTE = """from transformers import Qwen2Config, Qwen2ForCausalLM


class RemoteConfig(Qwen2Config):
    model_type = "remote_model"


class RemoteForCausalLM(Qwen2ForCausalLM):
    config_class = RemoteConfig
"""
_PADDING = "<|finetune_right_pad_id|>"  # of Llama's tokenizer; a test sets it
_LINES = [
    "Beautiful is better than", "Explicit is", "Simple is better", "Complex",
    "Flat is better than", "Sparse is better", "Readability", "Special cases aren't special",
    "Although practicality beats", "Errors should never", "Unless explicitly",
    "In the face of ambiguity, refuse", "There should be one", "Although that way", "Now is better",
    "Although never is often", "If the implementation is hard", "If it is easy", "Namespaces are",
]  # fmt: skip


def _shape(tokenizer: Any) -> dict[str, Any]:
    return {
        "vocab_size": -(-len(tokenizer) // 64) * 64,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }


def make_models(tokenizer: Any, folder: Path) -> None:
    """Save all models in folders of their names."""
    torch.manual_seed(0)
    stops = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    for name, (kind, more) in _LANGUAGE.items():
        shape = AutoConfig.for_model(kind, **_shape(tokenizer), **more)
        AutoModelForCausalLM.from_config(shape, dtype=torch.float32).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        stops.save_pretrained(folder / name)
    make_moe(tokenizer, folder / "tiny-Qwen3MoeForCausalLM")
    for name, (kind, more) in _REWARD.items():
        own = copy.deepcopy(tokenizer)
        if kind == "llama":
            own.add_tokens([_PADDING], special_tokens=True)
        shape = AutoConfig.for_model(kind, **_shape(own), num_labels=1, **more)
        shape.max_position_embeddings = 4096  # it reads whole conversations
        judge = AutoModelForSequenceClassification.from_config(shape, dtype=torch.float32)
        judge.save_pretrained(folder / name)
        own.save_pretrained(folder / name)
    _make_remote(folder / "tiny-RemoteForCausalLM", folder / "tiny-Qwen2ForCausalLM-2.5")


def _make_remote(folder: Path, plain: Path) -> None:
    """Save a model whose code comes with it."""
    folder.mkdir()
    for file in plain.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "modeling_remote.py").write_text(_REMOTE)
    config = json.loads((plain / "config.json").read_text())
    config |= {"model_type": "remote_model", "architectures": ["RemoteForCausalLM"]}
    config["auto_map"] = {
        "AutoConfig": "modeling_remote.RemoteConfig",
        "AutoModelForCausalLM": "modeling_remote.RemoteForCausalLM",
    }
    (folder / "config.json").write_text(json.dumps(config))


def make_rows(folder: Path) -> None:
    """Write a dataset whose configurations and splits have the names of TRL's `zen`."""
    forms = {
        "standard_prompt_only": lambda line: line,
        "conversational_prompt_only": lambda line: [{"role": "user", "content": line}],
    }
    head = ["---", "configs:"]
    for name, form in forms.items():
        (folder / name).mkdir(parents=True)
        head += [f"- config_name: {name}", "  data_files:"]
        for split, lines in (("train", _LINES[:17]), ("test", _LINES[17:])):
            rows = [json.dumps({"prompt": form(line)}) for line in lines]
            (folder / name / f"{split}.jsonl").write_text("\n".join(rows) + "\n")
            head += [f"  - split: {split}", f"    path: {name}/{split}.jsonl"]
    (folder / "README.md").write_text("\n".join([*head, "---", ""]))
