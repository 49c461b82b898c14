"""LoRA with PEFT: low-rank adapters in a model's linear layers; only the adapters are trained.

One backbone plays all roles: the policy and PPO's value model are the backbone with an adapter
each, and the reference model is the backbone without an adapter. Engines get the adapters
themselves, or weights into which the policy's adapter is merged, layer by layer. Only PEFT's layers
and file formats are used, not its model class.
"""

import inspect
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.modules.conv import _ConvNd

from turnwise.config import LoraConfig
from turnwise.config.data import ADAPTER_CONFIG
from turnwise.core.optional import Foreign, optional
from turnwise.engine.adapters import POLICY, name_of_tensor, peft_settings
from turnwise.errors import InputError
from turnwise.internals.transformers import activate, kept_as_layers
from turnwise.training.shards import whole
from turnwise.training.vision import sees
from turnwise.weights.manifest import NamedTensors

ModelName = Literal["policy", "reference", "value"]
"""The models of the trainer, by the role that they play in training."""
_POLICY = "default"
"""PEFT's name of the policy's adapter. The value model's adapter, the adapters of several policies,
and adapters that are added later have names of their own. The reference model has no adapter."""
PREFIX = "base_model.model."  # beginning of the names of tensors in PEFT's files
ADAPTER_TENSORS = "adapter_model.safetensors"
"""PEFT's file of an adapter's tensors, next to `ADAPTER_CONFIG`."""
POLICIES = "policies"
"""Folder in a checkpoint of several policies, with a subfolder for each policy."""


def add_adapters(model: Foreign, lora: LoraConfig, roles: Sequence[str]) -> None:
    """Freeze a model, and give its layers that read text an adapter for each role, in float32.

    An adapter changes nothing before its first update, because its second factor starts at 0.
    """
    targets: Foreign = lora.target_modules
    if targets == "all-linear":
        targets = _all_linear(model, lora)
    names = [_adapter_of(role) for role in roles if role != "reference"]
    state = torch.get_rng_state()  # the number of draws depends on the model's device
    for name in names:
        targets = _inject(model, lora, name, targets)
    torch.set_rng_state(state)
    layers = adapted_layers(model)
    for name in names:
        _draw(layers, name)
    parents = dict(model.named_modules())
    for name, layer in layers.items():
        parent = parents[name.rpartition(".")[0]]
        head = layer is model.get_output_embeddings()
        if head or not _can_adapt(layer.base_layer, parent, name):
            raise InputError(
                f"model.lora.target_modules: {name} can have no adapter; only linear layers "
                "other than the output head can, and no experts or routers"
            )
    _train_adapters(model)


def _all_linear(model: Foreign, lora: LoraConfig) -> list[str]:
    """Return the names of the layers that `all-linear` selects."""
    peft = optional("peft", "lora", "model.lora")
    able = [name for name, parent, layer in _parts(model) if _can_adapt(layer, parent, name)]
    settings = peft.LoraConfig(**peft_settings(lora), target_modules=able, task_type="CAUSAL_LM")
    kept = kept_as_layers(settings, model)
    if not kept:
        raise InputError(
            f"model.lora.target_modules: a {model.config.model_type} model has no linear layers "
            "that can have an adapter"
        )
    return [name for name in able if name in kept]


def note_without_adapter(model: Foreign, lora: LoraConfig) -> str:
    """Return a sentence about the linear layers and experts to which all-linear gives no adapter;
    "" if it gives all of them an adapter."""
    if not lora.rank or lora.target_modules != "all-linear":
        return ""
    adapted = adapted_layers(model)
    without = {
        name.rpartition(".")[2]
        for name, _, layer in _parts(model)
        if not any(name == other or name.startswith(f"{other}.") for other in adapted)
        and (isinstance(layer, nn.Linear) or _is_stack(layer))
    }
    if not without:
        return ""
    return (
        f"model.lora.target_modules: all-linear gives no adapter to {', '.join(sorted(without))}: "
        "these are stacks of experts, or layers that the model does not call as linear ones"
    )


def _parts(model: Foreign) -> Iterator[tuple[str, nn.Module, Foreign]]:
    """Yield (name, parent, module) of the part that reads text, except the output head."""
    modules, head, text = dict(model.named_modules()), model.get_output_embeddings(), ""
    if sees(model.config):
        text = f"{_text_part(model)}."
    for name, module in modules.items():
        if module is not head and name.startswith(text):
            yield name, modules[name.rpartition(".")[0]], module


def _is_stack(module: nn.Module) -> bool:
    """Return whether a module holds the weights of several layers as one tensor."""
    own = module.parameters(recurse=False)
    return not isinstance(module, _ConvNd) and any(one.dim() == 3 for one in own)


def _can_adapt(layer: Foreign, parent: nn.Module, name: str) -> bool:
    """Return whether a model calls a layer as a plain linear layer, so that PEFT's layer can add
    its product to the output."""
    if not isinstance(layer, nn.Linear):
        return False
    if type(layer).forward is not nn.Linear.forward and not _is_plain(layer):
        return False  # such as a router that returns choices, or layers in groups
    # The layer's parent may compute with the weights directly, as fused kernels of state-space
    # models do.
    kind: Foreign = type(parent)
    uses = rf"\bself\.{re.escape(name.rpartition('.')[2])}\.(weight|bias)\b(?!\.dtype|\.device|\[)"
    return re.search(uses, _source_of(kind)) is None


@cache
def _source_of(kind: type) -> str:
    """Return the source of a class, or "" if it has none; Python parses a whole file for it."""
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return ""


@torch.no_grad()
def _is_plain(layer: nn.Linear) -> bool:
    """Return whether a subclass with its own forward pass computes the same as `nn.Linear`."""
    state = torch.Generator().manual_seed(0)
    made = {n: torch.randn(p.shape, generator=state) for n, p in layer.named_parameters()}
    given_1I = torch.randn((1, layer.in_features), generator=state)
    try:
        found = torch.func.functional_call(layer, made, (given_1I,))
        expected = nn.functional.linear(given_1I, made["weight"], made.get("bias"))
        return bool(torch.allclose(found, expected, atol=1e-3))
    except Exception:
        return False


def _text_part(model: Foreign) -> str:
    """Return the name of the part of a model that reads text; "" if no other part reads images."""
    if not sees(model.config):
        return ""
    decoder = model.get_decoder()
    return next(str(name) for name, part in model.named_modules() if part is decoder)


def add_adapter(
    model: Foreign, lora: LoraConfig, name: str, targets: Sequence[str], seed: int
) -> None:
    """Add an adapter, with its own rank and scaling, to some of the layers that PEFT has wrapped.

    Args:
        name: PEFT's name of the new adapter, without dots.
        targets: Names of the layers in the model.
        seed: Seed of the adapter's initial values.
    """
    with torch.random.fork_rng():
        _inject(model, lora, name, list(targets))
        torch.manual_seed(seed)
        _draw(adapted_layers(model), name)
    _train_adapters(model)


def remove_adapter(model: Foreign, name: str) -> None:
    """Remove an adapter; its layers then have no active adapter. All remaining adapters keep their
    values."""
    for layer in adapted_layers(model).values():
        if name in layer.lora_A:
            activate([layer], [])
            layer.delete_adapter(name)
    model.peft_config.pop(name, None)
    _train_adapters(model)


def _inject(model: Foreign, lora: LoraConfig, name: str, targets: Foreign) -> Foreign:
    """Add an adapter's factors to the target layers; return the names of these layers."""
    peft = optional("peft", "lora", "model.lora")
    beside = None
    if text := _text_part(model):  # the part that reads images may use the same layer names
        beside = rf"(?!{re.escape(text)}\.).*"
    where: Foreign = {"target_modules": targets, "exclude_modules": beside}
    settings = peft.LoraConfig(**peft_settings(lora), **where, task_type="CAUSAL_LM")
    try:
        with warnings.catch_warnings(action="ignore"):  # PEFT's warnings about a second adapter
            peft.inject_adapter_in_model(settings, model, name)
    except ValueError as error:
        raise InputError(f"model.lora.target_modules: {error}") from error
    return settings.target_modules


def _draw(layers: Mapping[str, Foreign], name: str) -> None:
    """Draw an adapter's initial values, which are the same if the model is on the meta device."""
    for layer in layers.values():
        factors = [f[name] for f in (layer.lora_A, layer.lora_B) if name in f]
        if any(factor.weight.is_meta for factor in factors):
            for factor in factors:
                factor.to_empty(device="cpu")
        if factors:
            layer.reset_lora_parameters(name, True)


def _train_adapters(model: nn.Module) -> None:
    """Freeze everything except the adapters, which are kept in float32."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def adapted_layers(model: nn.Module) -> dict[str, Foreign]:
    """Return PEFT's layers by their names in the model."""
    kind = optional("peft.tuners.lora", "lora", "model.lora").LoraLayer
    return {name: module for name, module in model.named_modules() if isinstance(module, kind)}


def take_role(model: nn.Module, role: str) -> None:
    """Activate the adapter of a role, or the adapter with this name in PEFT, for the next forward
    and backward pass; "reference" deactivates all adapters."""
    activate(adapted_layers(model).values(), [] if role == "reference" else [_adapter_of(role)])


def _adapter_of(role: str) -> str:
    return _POLICY if role == "policy" else role


def _adapter_in(parameter: str) -> str:
    """Return PEFT's name of the adapter that a parameter, given by its name, belongs to; "" if the
    parameter does not belong to an adapter."""
    _, _, factor = parameter.partition(".lora_")
    return factor.split(".")[1] if factor else ""


def trained_part(module: nn.Module, role: str) -> nn.Module:
    """Return a module of the parameters to train for a role, or for the adapter with this name in
    PEFT: the adapter's parameters and, in the role of the value model, the head's parameters. Their
    names have slashes in place of dots."""
    part = nn.Module()
    for name, parameter in module.named_parameters():
        own = _adapter_in(name) == _adapter_of(role)
        if parameter.requires_grad and (own or (role == "value" and ".lora_" not in name)):
            part.register_parameter(name.replace(".", "/"), parameter)
    return part


def changed_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Foreign]]:
    """Yield the parameters that an update of the engines must contain: for each, its name in the
    plain model, the parameter, and PEFT's layer if it has an adapter, else None."""
    # This includes linear layers next to an adapted layer, because an engine may have fused them
    # into one layer (query, key and value), and can only load the fused layer as a whole.
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
    """Yield the whole tensors of `changed_parameters`, with the policy's adapter added; every rank
    must iterate over all tensors."""
    for name, parameter, layer in changed_parameters(model):
        tensor = parameter.detach()
        if layer is not None:
            first, second = layer.lora_A[_POLICY].weight, layer.lora_B[_POLICY].weight
            if isinstance(first, DTensor):  # each rank adds the product to its own rows
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
        if _adapter_in(name) == adapter:
            layer, mark, factor = name.partition(".lora_")
            yield PREFIX + layer + mark + factor.replace(f".{adapter}", "", 1), parameter


def adapter_tensors(model: nn.Module, policies: Sequence[str] = ("policy",)) -> NamedTensors:
    """Yield the whole tensors of policies' adapters under PEFT's names; `name_of_tensor` adds the
    policy's name if there are several policies. Every rank must iterate over all tensors."""
    for policy in policies:
        for name, parameter in adapter_parameters(model, _adapter_of(policy)):
            yield name_of_tensor(POLICY if policy == "policy" else policy, name), whole(parameter)


def adapter_config(model: Foreign, base: str, adapter: str = "policy") -> dict[str, object]:
    """Return the contents of PEFT's `adapter_config.json` for an adapter."""
    settings = model.peft_config[_adapter_of(adapter)].to_dict()
    return {
        # JSON has no sets: PEFT makes a set of the names that it did not find among experts.
        **{key: sorted(v) or None if isinstance(v, set) else v for key, v in settings.items()},
        "base_model_name_or_path": base,
        "inference_mode": True,
        "target_modules": sorted(settings["target_modules"]),
    }


def write_adapter(
    folder: Path, config: dict[str, object], tensors: dict[str, torch.Tensor]
) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, folder / ADAPTER_TENSORS, metadata={"format": "pt"})
