"""LoRA with PEFT: adapters of low rank in a model's linear layers, which alone are trained.

One backbone plays all roles: the policy and PPO's value model are the backbone with an adapter of
their own, the reference model is the backbone without one. Weights reach engines added up, layer by
layer; only PEFT's layers and its file formats are used, not its own model class.
"""

import json
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from turnwise.config import LoraConfig
from turnwise.config.data import ADAPTER_CONFIG
from turnwise.core.optional import optional
from turnwise.engine.adapters import peft_settings
from turnwise.errors import InputError
from turnwise.internals.transformers import activate
from turnwise.training.gather import whole

Untyped = Any
"""Objects of PEFT and Transformers."""
Role = Literal["policy", "reference", "value"]
"""The roles of a model in training."""
ADAPTERS: dict[Role, tuple[str, ...]] = {
    "policy": ("default",),
    "reference": (),
    "value": ("value",),
}
"""PEFT's names of the adapters that are active in each role."""
_PREFIX = "base_model.model."
"""Beginning of the names of tensors in PEFT's files."""
ADAPTER_TENSORS = "adapter_model.safetensors"
"""PEFT's file of an adapter's tensors, beside `ADAPTER_CONFIG`."""


def add_adapters(model: Untyped, lora: LoraConfig, roles: Sequence[Role]) -> None:
    """Freeze a model and give its layers an adapter for each role, in float32.

    An adapter changes nothing before its first update: its second factor starts at 0.

    Raises:
        InputError: when PEFT is missing, or no such layer can have an adapter.
    """
    peft = optional("peft", "lora", "model.lora")
    targets: Untyped = lora.target_modules
    state = torch.get_rng_state()  # what is drawn until then depends on where the model is
    for role in roles:
        for name in ADAPTERS[role]:
            settings = _peft_config(lora, targets)
            try:
                with warnings.catch_warnings(action="ignore"):  # of a second adapter
                    peft.inject_adapter_in_model(settings, model, name)
            except ValueError as error:
                raise InputError(f"model.lora.target_modules: {error}") from error
            targets = settings.target_modules  # the names that all-linear stands for
    torch.set_rng_state(state)
    for role in roles:
        for name in ADAPTERS[role]:
            _draw_values(model, name)
    for name, layer in adapted_layers(model).items():
        if not isinstance(layer.base_layer, nn.Linear) or layer is model.get_output_embeddings():
            raise InputError(
                f"model.lora.target_modules: {name} can have no adapter; only linear layers "
                "other than the output head can"
            )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def _draw_values(model: nn.Module, adapter: str) -> None:
    """Draw an adapter's first values, the same ones with weights and without."""
    for layer in adapted_layers(model).values():
        factors = [f[adapter] for f in (layer.lora_A, layer.lora_B) if adapter in f]
        if any(factor.weight.is_meta for factor in factors):
            for factor in factors:
                factor.to_empty(device="cpu")
        if factors:
            layer.reset_lora_parameters(adapter, True)


def _peft_config(lora: LoraConfig, targets: object) -> Untyped:
    return optional("peft", "lora", "model.lora").LoraConfig(
        **peft_settings(lora), target_modules=targets, task_type="CAUSAL_LM"
    )


def adapted_layers(model: nn.Module) -> dict[str, Untyped]:
    """Return PEFT's layers by their names in the model."""
    kind = optional("peft.tuners.lora", "lora", "model.lora").LoraLayer
    return {name: module for name, module in model.named_modules() if isinstance(module, kind)}


def take_role(model: nn.Module, role: Role) -> None:
    """Make the adapter of a role the active one, for the next forward and backward pass."""
    activate(adapted_layers(model).values(), list(ADAPTERS[role]))


class TrainedPart(nn.Module):
    """The parameters that one role trains: its adapter, and the value model's head.

    Example:
        TrainableModule(TrainedPart(scorer, "policy"), training, rate, total_steps)
    """

    def __init__(self, module: nn.Module, role: Role) -> None:
        super().__init__()
        for name, parameter in module.named_parameters():
            own = any(f".{adapter}." in name for adapter in ADAPTERS[role])
            if parameter.requires_grad and (own or (role == "value" and ".lora_" not in name)):
                self.register_parameter(name.replace(".", "/"), parameter)


def changed_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Untyped]]:
    """Yield the parameters that an update of the engines must contain.

    These are the parameters of adapted layers, and of the linear layers beside them: an engine may
    have fused these into one (query, key and value), which it can only load whole.

    Yields:
        The name in the plain model, the parameter, and PEFT's layer if it has an adapter.
    """
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
def merged_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each of these parameters whole, with the policy's adapter added.

    Every rank must iterate over all of them.
    """
    for name, parameter, layer in changed_parameters(model):
        tensor = parameter.detach()
        if layer is not None:
            tensor = _merged(tensor, layer).to(tensor.dtype)
        yield name, whole(tensor)


def _merged(weight: torch.Tensor, layer: Untyped) -> torch.Tensor:
    (adapter,) = ADAPTERS["policy"]
    first, second = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
    if isinstance(first, DTensor):  # each rank adds up its own rows
        first = first.redistribute(placements=[Replicate()] * first.device_mesh.ndim)
    return add_product(weight, first, second, layer.scaling[adapter])


def add_product(
    weight: torch.Tensor, first: torch.Tensor, second: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return a layer's weight with an adapter added, in float32.

    Args:
        weight: [out, in].
        first: The adapter's factor A: [rank, in].
        second: The adapter's factor B: [out, rank].
    """
    return torch.addmm(weight.float(), second.float(), first.float(), alpha=scale)


@torch.no_grad()
def adapter_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the policy's adapter, each tensor whole, under PEFT's names.

    Every rank must iterate over all of them.
    """
    (adapter,) = ADAPTERS["policy"]
    for name, parameter in model.named_parameters():
        if f".{adapter}." in name and ".lora_" in name:
            yield _PREFIX + name.replace(f".{adapter}.", "."), whole(parameter)


def adapter_config(model: Untyped, base: str) -> dict[str, object]:
    """Return the contents of PEFT's `adapter_config.json` for the policy's adapter.

    Args:
        base: Folder or name of the model that the adapter belongs to.
    """
    (adapter,) = ADAPTERS["policy"]
    settings: dict[str, object] = model.peft_config[adapter].to_dict()
    return {
        **settings,
        "base_model_name_or_path": base,
        "inference_mode": True,
        "target_modules": sorted(model.peft_config[adapter].target_modules),
    }


def split_name(name: str) -> tuple[str, str]:
    """Return the layer's name and the factor's, lora_A or lora_B, of a tensor of PEFT's files."""
    layer, _, rest = name.removeprefix(_PREFIX).rpartition(".lora_")
    return layer, f"lora_{rest.partition('.')[0]}"


def write_adapter(
    folder: Path, config: dict[str, object], tensors: dict[str, torch.Tensor]
) -> None:
    """Write an adapter in PEFT's format."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, folder / ADAPTER_TENSORS, metadata={"format": "pt"})
