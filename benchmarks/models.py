"""Material of the benchmarks: random models of given sizes, the demo's, and tools' latencies."""

import os
import random
from contextlib import suppress
from pathlib import Path

import psutil
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from examples.calculator.prepare import BUILD, prepare
from examples.calculator.tokenizer import build_tokenizer

SHAPES = {
    "0.7 M": {"hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 256},
    "3.3 M": {"hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 768},
    "5 M": {"hidden_size": 256, "num_hidden_layers": 6, "intermediate_size": 768},
    "100 M": {"hidden_size": 768, "num_hidden_layers": 13, "intermediate_size": 2560},
}
"""Model shapes by their approximate parameters, without the embeddings for the smallest."""
PAUSES = {"instant": ((1.0, 0.0),), "long-tailed": ((0.8, 0.01), (0.15, 0.2), (0.05, 2.0))}
"""Kinds of tools: each has shares of its calls, with the seconds that such calls take."""


def pause(tools: str) -> float:
    """Draw the seconds of one call of a tool of this kind."""
    shares, seconds = zip(*PAUSES[tools], strict=True)
    return float(random.choices(seconds, shares)[0])


def as_in_a_worker() -> None:
    """Give engines that this process starts the environment variables of Turnwise's workers."""
    os.environ.update(
        OMP_NUM_THREADS="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_NO_USAGE_STATS="1",
        TOKENIZERS_PARALLELISM="false",
    )


def cpu_seconds(pid: int) -> dict[str, float]:
    """Return the processor time so far of a process and its descendants, in seconds: of vLLM's
    engine processes, and of all others."""
    spent = {"engine": 0.0, "others": 0.0}
    process = psutil.Process(pid)
    for each in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times = each.cpu_times()
            kind = "engine" if "EngineCor" in each.name() else "others"
            spent[kind] += times.user + times.system
    return spent


def make_model(size: str, folder: Path) -> Path:
    """Save a random Qwen3 and a tokenizer; returns their folder."""
    tokenizer = build_tokenizer(0)
    shape = SHAPES[size]
    stop = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=shape["hidden_size"] // 4,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        dtype="float32",
        **shape,
        **stop,
    )
    torch.manual_seed(0)
    path = folder / size.replace(" ", "")
    Qwen3ForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def demo_files() -> Path:
    """Return the demo's folder of model and problems; make it if it is missing."""
    if not (BUILD / "model" / "config.json").exists():
        prepare(BUILD)
    return BUILD
