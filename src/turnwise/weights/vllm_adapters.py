"""LoRA adapters in vLLM's worker: made of tensors in memory, checked, and put into a slot.

vLLM loads an adapter from a folder when a request names one that it does not hold, and removes the
one used longest ago when it holds too many. Here adapters are put in and removed only by their
owner, `VllmEngine`, so vLLM never looks for a folder.
"""

from collections.abc import Iterable, Iterator, Mapping

import torch

from turnwise.core.json_types import JsonObject
from turnwise.errors import WeightUpdateError
from turnwise.internals import vllm

Modules = Mapping[str, vllm.BaseLayerWithLoRA]
"""vLLM's layers that may have an adapter, by name."""


def spare_head(manager: vllm.LRUCacheWorkerLoRAManager) -> None:
    """Let no adapter change the output head.

    vLLM 0.32 cannot compute log-probs of a prompt, which the canary needs, in a batch with other
    requests if one may.
    """
    slots = vllm.adapter_slots(manager)
    for name, module in list(slots.model.named_modules()):
        if isinstance(module, vllm.LogitsProcessorWithLoRA):
            parent, _, own = name.rpartition(".")
            setattr(slots.model.get_submodule(parent), own, module.base_layer)
            slots.modules = {n: one for n, one in slots.modules.items() if one is not module}


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
    """
    slots = vllm.adapter_slots(manager)
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
    vllm.check_experts_of(slots, lora)
    most = slots.capacity
    if vllm.current_platform.is_cpu():  # the last slot stays empty: see EngineAdapters.arguments
        most = slots.lora_slots - 1
    if len(slots) >= most:
        raise WeightUpdateError(f"the engine already holds {most} adapters (max_loras)")
    slots.add_adapter(lora)  # packs the layers that vLLM has fused
    try:
        _check_layers(slots.modules, lora)
        slots.activate_adapter(number)
        _check_slot(slots.modules, lora, slots.lora_index_to_id.index(number))
    except BaseException:
        slots.remove_adapter(number)
        raise


def _shards(
    module: vllm.BaseLayerWithLoRA, layer: vllm.LoRALayerWeights
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield this worker's A and B of a layer, each with the slots that hold it: one pair, or one
    for each layer that vLLM has fused. Embeddings and experts have other slots, and yield none."""
    if not isinstance(module.lora_a_stacked, tuple):
        return
    a, b = layer.lora_a, layer.lora_b
    if isinstance(b, list) and len(b) != len(module.lora_b_stacked):
        return
    if module.tp_size > 1:
        a, b = module.slice_lora_a(a), module.slice_lora_b(b)
    pairs = zip(a, b, strict=True) if isinstance(b, list) else [(a, b)]
    slots = zip(module.lora_a_stacked, module.lora_b_stacked, strict=True)
    for (own_a, own_b), (slots_a, slots_b) in zip(pairs, slots, strict=True):
        if own_a is not None and own_b is not None:
            yield own_a, own_b, slots_a, slots_b


def _check_layers(modules: Modules, lora: vllm.LoRAModel) -> None:
    """Check that every layer of the adapter is one of the model, of the same size."""
    for name, layer in lora.loras.items():
        if name not in modules:
            raise WeightUpdateError(f"vLLM applies no adapter to {name} of this model")
        for a, b, slots_a, slots_b in _shards(modules[name], layer):
            own, wanted = (a.shape[1], b.shape[0]), (slots_a.shape[-1], slots_b.shape[-2])
            if own != wanted:
                raise WeightUpdateError(
                    f"{name} is {wanted[0]} -> {wanted[1]} in the model, and {own[0]} -> {own[1]} "
                    "in the adapter"
                )


def _check_slot(modules: Modules, lora: vllm.LoRAModel, slot: int) -> None:
    """Check that a slot contains the adapter, bit for bit."""
    for name, layer in lora.loras.items():
        for a, b, slots_a, slots_b in _shards(modules[name], layer):
            for tensor, slots in ((a, slots_a), (b, slots_b)):
                arrived = slots[slot, 0, : tensor.shape[0], : tensor.shape[1]]
                if not torch.equal(arrived.cpu(), tensor.to(slots.dtype).cpu()):
                    raise WeightUpdateError(f"{name} of the adapter did not arrive in its slot")
