"""Transformers and PEFT: loading of shards, and parts of a model."""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import WeightTransform

from turnwise.internals import internal


def mark_loaded(parameter: Any, loaded: bool) -> None:
    """Let Transformers leave a parameter as it is (if `loaded`), or else load it, because a rank
    holds only some of the parameters."""
    parameter._is_hf_initialized = loaded


def compute_missing(
    model: PreTrainedModel, buffers: set[str], device_map: dict[str, torch.device]
) -> None:
    """Allocate the buffers that are missing from the model's files, each on its device, and
    initialize them."""
    model._move_missing_keys_from_meta_to_device(buffers, device_map, None, None)
    model._initialize_missing_keys(False)


def conversions_of(model: PreTrainedModel) -> "list[WeightTransform] | None":
    """Return the conversions with which a model was loaded; None if it was not loaded from
    files."""
    used: list[WeightTransform] | None = getattr(model, "_weight_conversions", None)
    return used


def layer_classes(model: nn.Module) -> set[str]:
    """Return the names of the classes of a model's decoder layers."""
    names: set[str] = set()
    for part in model.modules():
        names |= set(getattr(part, "_no_split_modules", None) or ())
    return names


def attention_of(model: PreTrainedModel) -> str:
    """Return the name of the attention implementation of a model's text layers."""
    return str(model.config.get_text_config()._attn_implementation)


def set_text_attention(model: PreTrainedModel, name: str) -> None:
    """Set the attention implementation of a model's text layers; the part of the model that reads
    images keeps its own implementation."""
    shape = model.config
    text = shape.get_text_config()
    own = [key for key in shape.sub_configs if getattr(shape, key, None) is text]
    model.set_attn_implementation({"": name, own[0]: name} if own else name)


def activate(layers: Iterable[Any], adapters: list[str]) -> None:
    """Make adapters the active ones of PEFT's layers. PEFT's own setter would freeze all other
    adapters."""
    for layer in layers:
        internal(layer, "_active_adapter")
        layer._active_adapter = adapters


def kept_as_layers(settings: Any, model: PreTrainedModel) -> set[str]:
    """Return the names in a LoRA's `target_modules` that PEFT keeps as layers. In a model whose
    experts Transformers has fused, PEFT treats some names as names of experts, even in files that
    it loads."""
    from peft.utils import transformers_weight_conversion as conversion

    convert = internal(
        conversion, "convert_peft_config_for_transformers", "peft_config", "model", "conversions"
    )
    copied = copy.deepcopy(settings)
    convert(copied, model, None)
    return set(copied.target_modules)


_parameters = ("self", "missing_keys", "device_map", "device_mesh", "hf_quantizer")
internal(PreTrainedModel, "_move_missing_keys_from_meta_to_device", *_parameters)
internal(PreTrainedModel, "_initialize_missing_keys", "self", "is_quantized")
internal(PreTrainedModel, "_no_split_modules")
internal(PreTrainedConfig, "_attn_implementation")
