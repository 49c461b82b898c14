"""Trained models and adapters as files that other programs load.

A checkpoint contains the model in Hugging Face's format, or the adapter in PEFT's; `merge_adapter`
makes a plain model from an adapter and its base model.
"""

import json
import math
import shutil
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import (
    GENERATION_CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    cached_file,
)

from turnwise.chat.template import read_tokenizer
from turnwise.config import ModelConfig, TrainingConfig
from turnwise.config.data import ADAPTER_CONFIG
from turnwise.core.process import trim_memory
from turnwise.engine.adapters import by_policy
from turnwise.errors import InputError
from turnwise.training.checkpoint import translate_disk_full
from turnwise.training.loading import dtype_of, language_model_class, load_model, path_of
from turnwise.training.lora import (
    ADAPTER_TENSORS,
    POLICIES,
    PREFIX,
    adapter_config,
    adapter_tensors,
    add_product,
    write_adapter,
)
from turnwise.training.shards import full_tensors, saved_buffers, tensor_shapes
from turnwise.weights.disk import write_shard
from turnwise.weights.manifest import chunk_bytes, drained, plan_chunks

FILE_BYTES = 4 * 2**30
"""Maximum size of a file, unless a tensor is larger."""

_OF_IMAGES = ("preprocessor_config", "processor_config", "video_preprocessor_config")
"""Names of the settings files of a model's image processor; a model may lack any of them."""


def export_model(
    folder: Path,
    rank: int,
    settings: ModelConfig,
    model: PreTrainedModel,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write the model and its tokenizer in Hugging Face's format, in `model.dtype`.

    All ranks gather the tensors one by one. Only rank 0 writes them, and it keeps no tensor after
    writing it.
    """
    buffers = saved_buffers(model)
    with drained(chain(full_tensors(model), buffers.items())) as source:
        if rank:
            return
        dtype, trust = dtype_of(settings), settings.trust_remote_code
        typed = ((name, tensor.to("meta", dtype)) for name, tensor in tensor_shapes(model))
        files = plan_chunks(chain(typed, buffers.items()), None, file_bytes, alignment=1)
        with translate_disk_full(folder):
            with torch.device("meta"):
                empty = language_model_class(model.config).from_config(
                    model.config, dtype=dtype, trust_remote_code=trust
                )
            empty.save_pretrained(folder, state_dict={})  # everything except the weights
            del empty
            trim_memory()
            names: dict[str, str] = {}
            for number, entries in enumerate(files, start=1):
                name = f"model-{number:05}-of-{len(files):05}.safetensors"
                name = SAFE_WEIGHTS_NAME if len(files) == 1 else name
                write_shard(folder / name, entries, source)
                names |= {entry.name: name for entry in entries}
            if len(files) > 1:
                index = {
                    "metadata": {"total_size": sum(map(chunk_bytes, files))},
                    "weight_map": names,
                }
                (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=1) + "\n")
            _save_rest(folder, settings)


def export_adapters(
    folder: Path,
    rank: int,
    settings: ModelConfig,
    policies: Sequence[str],
    model: PreTrainedModel,
) -> None:
    """Write the policy's adapter in PEFT's format, in float32, with the tokenizer, on rank 0. If
    there are several policies, each has its own folder in `POLICIES`, named after the policy."""
    sent = adapter_tensors(model, policies)
    whole = by_policy((name, tensor.cpu().contiguous()) for name, tensor in sent)
    if rank:
        return
    with translate_disk_full(folder):
        for policy, tensors in whole.items():
            own = folder / POLICIES / policy if policy else folder
            form = adapter_config(model, path_of(settings), policy or "policy")
            write_adapter(own, form, tensors)
            read_tokenizer(settings).save_pretrained(own)


def _save_rest(folder: Path, settings: ModelConfig) -> None:
    """Add the tokenizer, the generation settings, such as stop ids, and the settings of the model's
    image processor."""
    read_tokenizer(settings).save_pretrained(folder)
    path = path_of(settings)
    for name in (GENERATION_CONFIG_NAME, *(f"{name}.json" for name in _OF_IMAGES)):
        file = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
        if file is not None:
            shutil.copyfile(file, folder / name)


@torch.no_grad()
def merge_adapter(adapter: Path, folder: Path, settings: ModelConfig) -> None:
    """Write the model of `model.path` with an adapter merged in, which gives the same outputs as
    engines that apply the adapter."""
    form = json.loads((adapter / ADAPTER_CONFIG).read_text())
    rank = form["r"]
    scale = form["lora_alpha"] / (math.sqrt(rank) if form["use_rslora"] else rank)
    # Load it with the default training settings, which need no GPU.
    model = load_model(settings, TrainingConfig(), dtype=dtype_of(settings))
    weights = dict(model.named_parameters())
    factors = load_file(adapter / ADAPTER_TENSORS)
    for name, first in factors.items():
        layer, is_first, _ = name.removeprefix(PREFIX).partition(".lora_A.")
        if not is_first:
            continue
        weight = weights.get(f"{layer}.weight")
        second = factors[name.replace("lora_A", "lora_B")]
        if weight is None or weight.shape != (len(second), first.shape[1]):
            raise InputError(f"{adapter}: {settings.path} has no layer {layer} of this shape")
        weight.copy_(add_product(weight, first, second, scale))
    # `_save_rest` copies the model's own generation settings, because Transformers refuses to write
    # some of them.
    model.generation_config = GenerationConfig.from_model_config(model.config)
    with translate_disk_full(folder):
        model.save_pretrained(folder)
        _save_rest(folder, settings)
