"""LoRA adapters in vLLM's worker: made of tensors in memory, checked, and put into a slot.

vLLM loads an adapter from a folder when a request names one that it does not hold, and removes the
one used longest ago when it holds too many. Here adapters are put in and removed only by their
owner, `VllmEngine`, so vLLM never looks for a folder.
"""

from collections.abc import Iterable

import torch
from safetensors.torch import load_file

from turnwise.core.json_types import JsonObject
from turnwise.engine import vllm_api as vllm
from turnwise.engine.adapters import WEIGHTS, read_adapter
from turnwise.errors import InputError, WeightUpdateError


def put_folder(manager: vllm.LRUCacheWorkerLoRAManager, number: int, path: str, key: str) -> None:
    """Read an adapter's folder, and put it into a slot under `number`.

    Raises:
        InputError: naming `key`, when it cannot be read or does not fit the model.
    """
    adapter = read_adapter(path, key)
    tensors = load_file(adapter.folder / WEIGHTS)
    try:
        put(manager, number, tensors.items(), adapter.config)
    except (WeightUpdateError, ValueError, RuntimeError) as error:
        raise InputError(f"{key}: {path} does not fit the model: {error}") from error


def put(
    manager: vllm.LRUCacheWorkerLoRAManager,
    number: int,
    tensors: Iterable[tuple[str, torch.Tensor]],
    config: JsonObject,
) -> None:
    """Put an adapter into a slot under `number`; requests name it by that.

    Args:
        tensors: Tensors by their names in PEFT's format; they are copied.
        config: PEFT's configuration: r, lora_alpha, target_modules ...

    Raises:
        WeightUpdateError: when a tensor belongs to no layer of the model, has another size than its
            layer, or did not arrive in the slot.
    """
    slots = manager._adapter_manager
    helper = vllm.PEFTHelper.from_dict(config)
    helper.validate_legal(manager.lora_config)
    mapper = getattr(slots.model, "hf_to_vllm_mapper", None)
    lora = vllm.LoRAModel.from_lora_tensors(
        number,
        # vLLM scales B in place, and a sender may reuse its memory.
        {name: tensor.detach().clone() for name, tensor in tensors},
        helper,
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        model_vocab_size=manager.vocab_size,
        weights_mapper=mapper.get_rename_mapper() if mapper is not None else None,
        skip_prefixes=getattr(slots.model, "lora_skip_prefixes", None),
    )
    slots._validate_moe_lora_format(lora)
    most = slots.capacity
    if vllm.current_platform.is_cpu():  # the last slot stays empty: see EngineAdapters.arguments
        most = slots.lora_slots - 1
    if len(slots) >= most:
        raise WeightUpdateError(f"the engine already holds {most} adapters (max_loras)")
    slots.add_adapter(lora)  # packs the layers that vLLM has fused
    try:
        _check_layers(slots, lora)
        slots.activate_adapter(number)
        _check_slot(slots, lora)
    except BaseException:
        slots.remove_adapter(number)
        raise


def remove(manager: vllm.LRUCacheWorkerLoRAManager, number: int) -> None:
    """Remove an adapter that no request uses any more."""
    manager.remove_adapter(number)


def _parts(lora: object) -> list[tuple[torch.Tensor | None, torch.Tensor | None]]:
    """Return A and B of each part of a layer: one, or one for each layer that vLLM has fused."""
    a, b = lora.lora_a, lora.lora_b  # type: ignore[attr-defined]
    return list(zip(a, b, strict=True)) if isinstance(a, list) else [(a, b)]


def _is_whole_linear(module: object) -> bool:
    """Return whether a layer is linear and not sharded; embeddings, experts and shards have slots
    of another layout."""
    stacked = module.lora_a_stacked  # type: ignore[attr-defined]
    return isinstance(stacked, tuple) and getattr(module, "tp_size", 1) == 1


def _check_layers(slots: object, lora: vllm.LoRAModel) -> None:
    """Check that every layer of the adapter is one of the model, of the same size."""
    modules = slots.modules  # type: ignore[attr-defined]
    for name, layer in lora.loras.items():
        module = modules.get(name)
        if module is None:
            raise WeightUpdateError(f"vLLM applies no adapter to {name} of this model")
        if not _is_whole_linear(module):
            continue
        for index, (a, b) in enumerate(_parts(layer)):
            if a is None or b is None:
                continue
            own = a.shape[1], b.shape[0]
            stacked = module.lora_a_stacked[index], module.lora_b_stacked[index]
            wanted = stacked[0].shape[-1], stacked[1].shape[-2]
            if own != wanted:
                raise WeightUpdateError(
                    f"{name} is {wanted[0]} -> {wanted[1]} in the model, and {own[0]} -> {own[1]} "
                    "in the adapter"
                )


def _check_slot(slots: object, lora: vllm.LoRAModel) -> None:
    """Check that the slot contains the adapter, bit for bit."""
    number = slots.lora_index_to_id.index(lora.id)  # type: ignore[attr-defined]
    modules = slots.modules  # type: ignore[attr-defined]
    for name, layer in lora.loras.items():
        module = modules[name]
        if not _is_whole_linear(module):
            continue
        for index, (a, b) in enumerate(_parts(layer)):
            for tensor, stacked in ((a, module.lora_a_stacked), (b, module.lora_b_stacked)):
                if tensor is None:
                    continue
                slot = stacked[index][number, 0, : tensor.shape[0], : tensor.shape[1]]
                if not torch.equal(slot.cpu(), tensor.to(slot.dtype).cpu()):
                    raise WeightUpdateError(f"{name} of the adapter did not arrive in its slot")
