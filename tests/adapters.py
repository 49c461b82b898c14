"""LoRA adapters in PEFT's format, made by hand: tests of engines need no PEFT."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Tensors = dict[str, torch.Tensor]


def adapter_tensors(
    model_path: str, rank: int = 4, *, seed: int = 0, size: float = 0.5, targets: Any = TARGETS
) -> Tensors:
    """Make random A and B for the linear layers of a model, of a size that changes its answers."""
    generator = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}
    for name, weight in load_file(Path(model_path) / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        if layer.rpartition(".")[2] not in targets:
            continue
        rows, columns = weight.shape
        prefix = f"base_model.model.{layer}"
        a = torch.randn(rank, columns, generator=generator) / columns**0.5
        b = torch.randn(rows, rank, generator=generator) * size / rank
        tensors |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
    return tensors


def adapter_config(model_path: str, rank: int = 4, **keys: Any) -> dict[str, Any]:
    """Return PEFT's description of such an adapter."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model_path,
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(TARGETS),
        "bias": "none",
    } | keys


def write_adapter(folder: Path, tensors: Tensors, config: dict[str, Any]) -> str:
    """Write an adapter as PEFT does, and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def merged(weights: Tensors, tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Return a model's weights with an adapter added to them."""
    weights = dict(weights)
    for name, a in tensors.items():
        layer, part, _ = name.removeprefix("base_model.model.").partition(".lora_A.weight")
        if part:
            b = tensors[name.replace("lora_A", "lora_B")]
            delta = b @ a * (config["lora_alpha"] / config["r"])
            weights[f"{layer}.weight"] = weights[f"{layer}.weight"] + delta
    return weights
