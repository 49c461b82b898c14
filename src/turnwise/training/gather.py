"""Whole tensors of a sharded model, one after the other, under the names in the model's files.

Transformers may hold weights in another form than the files do: the experts of a layer are one
parameter, for instance, and many tensors in the files. Engines and exported models get the form of
the files.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from mmap import mmap

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightTransform, revert_weight_conversion

from turnwise.internals.transformers import conversions_of

NamedTensors = Iterator[tuple[str, torch.Tensor]]


def full_tensors(model: PreTrainedModel) -> NamedTensors:
    """Yield each tensor whole; every rank must iterate over all of them.

    At most one parameter is gathered at a time, or those of one layer if the files have several of
    them in one tensor.

    Args:
        model: A model of Transformers.
    """
    return _tensors(model, whole)


def tensor_shapes(model: PreTrainedModel) -> NamedTensors:
    """Yield what `full_tensors` yields, on the meta device, without gathering anything."""
    return _tensors(model, lambda parameter: torch.empty(parameter.shape, device="meta"))


def saved_buffers(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the buffers that belong into a model's files, such as the bias of some routers.

    Training does not change them, so engines have them already.
    """
    kept = model.state_dict().keys()
    found = {name: buffer for name, buffer in model.named_buffers() if name in kept}
    return revert_weight_conversion(model, found) if found and _transforms(model) else found


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """Return a sharded parameter whole; every rank must call it."""
    tensor = parameter.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.device.type != "cpu":
        return tensor.full_tensor()
    # gloo would gather into a buffer of its own, and copy: the whole tensor twice.
    local, number = tensor.to_local(), dist.get_rank()
    gathered = _mapped(tensor.shape, tensor.dtype)
    for rank, part in enumerate(gathered.chunk(dist.get_world_size())):
        if rank == number:
            part.copy_(local)
        dist.broadcast(part, src=rank)
    return gathered


def _mapped(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return an empty tensor whose memory the process gives back when the tensor is freed.

    The C library would keep it, and take more for the next tensor if that does not fit into it.
    """
    count = shape.numel()
    if not count:
        return torch.empty(shape, dtype=dtype)
    memory = mmap(-1, count * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)


def _tensors(
    model: PreTrainedModel, gathered: Callable[[torch.Tensor], torch.Tensor]
) -> NamedTensors:
    transforms = _transforms(model)
    if not transforms:
        for name, parameter in model.named_parameters():
            yield name, gathered(parameter)
        return
    merged = any(len(transform.target_patterns) > 1 for transform in transforms)
    for _, group in groupby(
        model.named_parameters(), key=lambda n: _layer(n[0]) if merged else n[0]
    ):
        tensors = {name: gathered(parameter) for name, parameter in group}
        yield from _emptied(revert_weight_conversion(model, tensors))


def _emptied(tensors: dict[str, torch.Tensor]) -> NamedTensors:
    """Yield tensors without keeping them."""
    for name in list(tensors):
        yield name, tensors.pop(name)


def _transforms(model: PreTrainedModel) -> Iterable[WeightTransform]:
    """Return the conversions between the model's files and its parameters."""
    if (used := conversions_of(model)) is not None:
        return used
    known = get_model_conversion_mapping(model, add_legacy=False)
    return [transform for transform in known if not isinstance(transform, PrefixChange)]


def _layer(name: str) -> str:
    """Return a parameter's name up to the number of its layer."""
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[: number + 1])
