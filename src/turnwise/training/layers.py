"""The parts of a model: its backbone, and decoder layers, which are sharded and recomputed one by
one."""

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from turnwise.internals.transformers import layer_classes


def backbone_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the part of a model that computes the last hidden states, below its head."""
    parts = (model.base_model, *model.children())
    return next((p for p in parts if p is not model and isinstance(p, PreTrainedModel)), model)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return a model's decoder layers, as Transformers' models declare them, in their order."""
    names = layer_classes(model)
    return [module for module in model.modules() if type(module).__name__ in names]


def recompute(model: nn.Module, every: bool | int) -> list[nn.Module]:
    """Make layers keep only their input, and compute their activations again in backward passes.

    Args:
        every: `training.activation_checkpointing`: all layers, none, or every N-th.

    Returns:
        Those layers.
    """
    chosen = decoder_layers(model)[:: int(every)] if every else []
    for layer in chosen:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    return chosen
