"""LoRA with PEFT: adapters of low rank in a model's linear layers, which alone are trained.

One backbone plays all roles: the policy and PPO's value model are the backbone with an adapter of
their own, the reference model is the backbone without one. Weights reach engines added up, layer by
layer; only PEFT's layers and its file formats are used, not its own model class.
"""

import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from turnwise.config import LoraConfig
from turnwise.config.data import ADAPTER_CONFIG
from turnwise.core.optional import Foreign, optional
from turnwise.engine.adapters import peft_settings
from turnwise.errors import InputError
from turnwise.internals.transformers import activate
from turnwise.training.shards import whole
from turnwise.training.vision import sees
from turnwise.weights.transport import NamedTensors

ModelName = Literal["policy", "reference", "value"]
"""The models of the trainer, by the role that they play in training."""
_ADAPTERS: dict[ModelName, str] = {"policy": "default", "value": "value"}
"""PEFT's name of the adapter that is active in each role; the reference model has none."""
_POLICY = _ADAPTERS["policy"]
PREFIX = "base_model.model."  # beginning of the names of tensors in PEFT's files
ADAPTER_TENSORS = "adapter_model.safetensors"
"""PEFT's file of an adapter's tensors, beside `ADAPTER_CONFIG`."""


def add_adapters(model: Foreign, lora: LoraConfig, roles: Sequence[ModelName]) -> None:
    """Freeze a model and give its layers of text an adapter for each role, in float32.

    An adapter changes nothing before its first update: its second factor starts at 0.
    """
    targets: Foreign = lora.target_modules
    names = [_ADAPTERS[role] for role in roles if role in _ADAPTERS]
    state = torch.get_rng_state()  # what is drawn until then depends on where the model is
    for name in names:
        targets = _inject(model, lora, name, targets)  # the names that all-linear stands for
    torch.set_rng_state(state)
    layers = adapted_layers(model)
    for name in names:
        _draw(layers, name)
    for name, layer in layers.items():
        if not isinstance(layer.base_layer, nn.Linear) or layer is model.get_output_embeddings():
            raise InputError(
                f"model.lora.target_modules: {name} can have no adapter; only linear layers "
                "other than the output head can"
            )
    _train_adapters(model)


def add_adapter(
    model: Foreign, lora: LoraConfig, name: str, targets: Sequence[str], seed: int
) -> None:
    """Give some of the layers that have adapters one more, of its own rank and scaling.

    Args:
        name: PEFT's name of it, without dots.
        targets: Names of the layers in the model.
        seed: Seed of its first factor.
    """
    with torch.random.fork_rng():
        _inject(model, lora, name, list(targets))
        torch.manual_seed(seed)
        _draw(adapted_layers(model), name)
    _train_adapters(model)


def remove_adapter(model: Foreign, name: str) -> None:
    """Remove an adapter, and activate no other; the others stay as they are."""
    for layer in adapted_layers(model).values():
        if name in layer.lora_A:
            activate([layer], [])
            layer.delete_adapter(name)
    model.peft_config.pop(name, None)
    _train_adapters(model)


def _inject(model: Foreign, lora: LoraConfig, name: str, targets: Foreign) -> Foreign:
    """Add an adapter's factors to the layers; return the names of these layers."""
    peft = optional("peft", "lora", "model.lora")
    beside = None
    if sees(model.config):  # the part that reads images may have layers of the same names
        decoder = model.get_decoder()
        text = next(name for name, part in model.named_modules() if part is decoder)
        beside = rf"(?!{re.escape(text)}\.).*"
    where: Foreign = {"target_modules": targets, "exclude_modules": beside}
    settings = peft.LoraConfig(**peft_settings(lora), **where, task_type="CAUSAL_LM")
    try:
        with warnings.catch_warnings(action="ignore"):  # of a second adapter
            peft.inject_adapter_in_model(settings, model, name)
    except ValueError as error:
        raise InputError(f"model.lora.target_modules: {error}") from error
    return settings.target_modules


def _draw(layers: Mapping[str, Foreign], name: str) -> None:
    """Draw an adapter's first values, the same with the model's weights and without."""
    for layer in layers.values():
        factors = [f[name] for f in (layer.lora_A, layer.lora_B) if name in f]
        if any(factor.weight.is_meta for factor in factors):
            for factor in factors:
                factor.to_empty(device="cpu")
        if factors:
            layer.reset_lora_parameters(name, True)


def _train_adapters(model: nn.Module) -> None:
    """Freeze everything but the adapters, which are kept in float32."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def adapted_layers(model: nn.Module) -> dict[str, Foreign]:
    """Return PEFT's layers by their names in the model."""
    kind = optional("peft.tuners.lora", "lora", "model.lora").LoraLayer
    return {name: module for name, module in model.named_modules() if isinstance(module, kind)}


def take_role(model: nn.Module, role: ModelName) -> None:
    """Make the adapter of a role the active one, for the next forward and backward pass."""
    active = [_ADAPTERS[role]] if role in _ADAPTERS else []
    activate(adapted_layers(model).values(), active)


def trained_part(module: nn.Module, role: ModelName) -> nn.Module:
    """Return a module of the parameters that one role trains: its adapter, and the value model's
    head. Their names have slashes for dots."""
    part = nn.Module()
    for name, parameter in module.named_parameters():
        own = f".{_ADAPTERS[role]}." in name
        if parameter.requires_grad and (own or (role == "value" and ".lora_" not in name)):
            part.register_parameter(name.replace(".", "/"), parameter)
    return part


def changed_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Foreign]]:
    """Yield the parameters that an update of the engines must contain: their names in the plain
    model, and PEFT's layers of those with an adapter."""
    # Linear layers beside an adapted one, too: an engine may have fused these into one (query, key
    # and value), which it can only load whole.
    adapted = adapted_layers(model)
    blocks = {name.rpartition(".")[0] for name in adapted}
    for block, module in model.named_modules():
        if block not in blocks:
            continue
        for child, layer in module.named_children():
            lora = adapted.get(f"{block}.{child}")
            base = layer if lora is None else lora.base_layer
            if isinstance(base, nn.Linear):
                for name, parameter in base.named_parameters():
                    yield f"{block}.{child}.{name}", parameter, lora if name == "weight" else None


@torch.no_grad()
def merged_tensors(model: nn.Module) -> NamedTensors:
    """Yield each of these whole, with the policy's adapter added; every rank iterates over all."""
    for name, parameter, layer in changed_parameters(model):
        tensor = parameter.detach()
        if layer is not None:
            first, second = layer.lora_A[_POLICY].weight, layer.lora_B[_POLICY].weight
            if isinstance(first, DTensor):  # each rank adds up its own rows
                first = first.redistribute(placements=[Replicate()] * first.device_mesh.ndim)
            merged = add_product(tensor, first, second, layer.scaling[_POLICY])
            tensor = merged.to(tensor.dtype)
        yield name, whole(tensor)


def add_product(
    weight: torch.Tensor, first: torch.Tensor, second: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return a layer's weight [out, in] with its adapter's factors A [rank, in] and B [out, rank]
    added, in float32."""
    return torch.addmm(weight.float(), second.float(), first.float(), alpha=scale)


@torch.no_grad()
def adapter_parameters(
    model: nn.Module, adapter: str = _POLICY
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of an adapter, by default the policy's, under PEFT's names."""
    for name, parameter in model.named_parameters():
        if f".{adapter}." in name and ".lora_" in name:
            yield PREFIX + name.replace(f".{adapter}.", "."), parameter


def adapter_tensors(model: nn.Module) -> NamedTensors:
    """Yield the policy's adapter whole, under PEFT's names; every rank must iterate over all."""
    for name, parameter in adapter_parameters(model):
        yield name, whole(parameter)


def adapter_config(model: Foreign, base: str, adapter: str = _POLICY) -> dict[str, object]:
    """Return the contents of PEFT's `adapter_config.json` for an adapter."""
    settings = model.peft_config[adapter]
    return {
        **settings.to_dict(),
        "base_model_name_or_path": base,
        "inference_mode": True,
        "target_modules": sorted(settings.target_modules),
    }


def write_adapter(
    folder: Path, config: dict[str, object], tensors: dict[str, torch.Tensor]
) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, folder / ADAPTER_TENSORS, metadata={"format": "pt"})
