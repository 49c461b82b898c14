"""Weights of a sharded model: ranks read their shards from the files, and gather whole tensors.

A model is built without memory for its weights (on the meta device) and sharded. Each shard is then
read from the files, one parameter at a time, so no process ever holds the whole model. The experts
of a layer may be one parameter in the model but many tensors in the files. Engines and exports get
the tensors in the form that they have in the files.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import groupby
from mmap import mmap
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    PrefixChange,
    WeightConverter,
    WeightTransform,
    convert_and_load_state_dict_in_model,
    revert_weight_conversion,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from turnwise.core.process import environment_variable
from turnwise.internals.transformers import compute_missing, conversions_of, mark_loaded
from turnwise.weights.delta import layer_of
from turnwise.weights.manifest import NamedTensors

Slices = dict[str, "_Slice"]
"""Tensors in files by name; indexing a tensor reads only the indexed part."""
_ONE_AT_A_TIME = "HF_DEACTIVATE_ASYNC_LOAD"  # without it, Transformers reads many tensors at once
_ADAPTED = ".base_layer."  # part of the names of weights in a layer with an adapter


def weight_files(path: str) -> list[str]:
    """Return the safetensors files of a model; [] if its weights are in a different format."""
    if single := cached_file(path, SAFE_WEIGHTS_NAME, _raise_exceptions_for_missing_entries=False):
        return [single]
    index = cached_file(path, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False)
    return list(get_checkpoint_shard_files(path, index)[0]) if index else []


def can_be_sliced(model: PreTrainedModel) -> bool:
    """Return whether each rank's shards of a model's parameters are parts of tensors in its files;
    False if the files fuse or interleave parameters that are separate in the model."""
    converters = [c for c in get_model_conversion_mapping(model) if isinstance(c, WeightConverter)]
    return all(
        len(converter.target_patterns) == 1
        and all(
            isinstance(step, MergeModulelist | Concatenate)
            and step.dim == (0 if isinstance(step, MergeModulelist) else 1)
            for step in converter.operations
        )
        for converter in converters
    )


def read_tensor(files: list[str], name: str) -> torch.Tensor:
    """Read one whole tensor; raises `ValueError` when no file has it."""
    with _slices(files) as slices:
        if name not in slices:
            raise ValueError(f"{name} is missing from its files")
        tensor: torch.Tensor = slices[name][:]
    return tensor


def read_shards(module: nn.Module, files: list[str], device: torch.device) -> None:
    """Fill a sharded model's buffers, and its parameters that are on the meta device."""
    model = next(part for part in module.modules() if isinstance(part, PreTrainedModel))
    wanted = {name for name, tensor in model.state_dict().items() if tensor.is_meta}
    for name, parameter in model.named_parameters():
        mark_loaded(parameter, name not in wanted)
    plan = LoadStateDictConfig(
        device_map={"": device}, weight_mapping=get_model_conversion_mapping(model)
    )
    # Layers with an adapter have other names in the model.
    inner = {name.replace(_ADAPTED, "."): name for name in model.state_dict() if _ADAPTED in name}
    prefix = model.base_model_prefix
    with _slices(files) as slices, environment_variable(_ONE_AT_A_TIME, "1"):
        renamed = {
            inner.get(name) or inner.get(f"{prefix}.{name}") or name: found
            for name, found in slices.items()
        }
        info, _ = convert_and_load_state_dict_in_model(model, renamed, plan)
    model.mark_tied_weights_as_initialized(info)
    missing = (info.missing_keys & wanted) - set(model.all_tied_weights_keys)
    buffers = missing & {name for name, _ in model.named_buffers()}  # the model computes them
    problems = [
        *(f"{name} is missing from its files" for name in sorted(missing - buffers)),
        *(f"{name} has shape {tuple(found)}" for name, found, _ in info.mismatched_keys),
        *(f"{name}: {error}" for name, error in info.conversion_errors.items()),
    ]
    if problems:
        raise ValueError(problems[0])
    compute_missing(model, buffers, plan.device_map)
    model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)


class _Slice:
    """A tensor in a file. Its parts are copied into memory that offloading can empty, because
    safetensors itself returns views of Python's buffers."""

    def __init__(self, found: Any) -> None:
        self._found = found

    def __getitem__(self, index: Any) -> torch.Tensor:
        part: torch.Tensor = self._found[index]
        return part.clone()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._found, name)


@contextmanager
def _slices(files: list[str]) -> Iterator[Slices]:
    """Open files, and yield their tensors by name without reading them."""
    with ExitStack() as stack:
        slices: Slices = {}
        for path in files:
            # "pread", because pages of a mapped file would count as this process's memory.
            file = stack.enter_context(safe_open(path, "pt", backend="pread"))
            slices |= {name: _Slice(file.get_slice(name)) for name in file.keys()}  # noqa: SIM118
        yield slices


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor of a sharded parameter; every rank must call this."""
    tensor = parameter.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.device.type != "cpu":
        return tensor.full_tensor()
    # gloo would gather into its own buffer and copy, which needs memory for two whole tensors. The
    # mapped pages go back to the system when the tensor is freed; the C library would keep them.
    local, number, count = tensor.to_local(), dist.get_rank(), tensor.shape.numel()
    if count:
        memory = mmap(-1, count * tensor.dtype.itemsize)
        gathered = torch.frombuffer(memory, dtype=tensor.dtype, count=count).view(tensor.shape)
    else:
        gathered = torch.empty(tensor.shape, dtype=tensor.dtype)
    for rank, part in enumerate(gathered.chunk(dist.get_world_size())):
        if rank == number:
            part.copy_(local)
        dist.broadcast(part, src=rank)
    return gathered


def full_tensors(
    model: PreTrainedModel, gathered: Callable[[torch.Tensor], torch.Tensor] = whole
) -> NamedTensors:
    """Yield each whole tensor, under its name in the files; every rank must iterate over them all.

    One parameter is gathered at a time, or all parameters of a layer if the files fuse several
    parameters in one tensor.
    """
    transforms = _transforms(model)
    if not transforms:
        for name, parameter in model.named_parameters():
            yield name, gathered(parameter)
        return
    merged = any(len(transform.target_patterns) > 1 for transform in transforms)

    def unit(named: tuple[str, torch.Tensor]) -> str:
        """Return the name of the group in which a parameter is gathered: its layer's name if the
        files merge parameters, else the parameter's name."""
        return (layer_of(named[0]) if merged else "") or named[0]

    for _, group in groupby(model.named_parameters(), key=unit):
        tensors = {name: gathered(parameter) for name, parameter in group}
        tensors = revert_weight_conversion(model, tensors)
        for name in list(tensors):  # keep no tensor once it is yielded
            yield name, tensors.pop(name)


def tensor_shapes(model: PreTrainedModel) -> NamedTensors:
    """Yield what `full_tensors` yields, on the meta device, without gathering anything."""
    return full_tensors(model, lambda parameter: torch.empty(parameter.shape, device="meta"))


def saved_buffers(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the buffers that belong in a model's files, such as the bias of some routers."""
    kept = model.state_dict().keys()
    found = {name: buffer for name, buffer in model.named_buffers() if name in kept}
    return revert_weight_conversion(model, found) if found and _transforms(model) else found


def _transforms(model: PreTrainedModel) -> Iterable[WeightTransform]:
    """Return the conversions between the model's files and its parameters."""
    used = conversions_of(model)
    if used is not None:
        return used
    known = get_model_conversion_mapping(model, add_legacy=False)
    return [transform for transform in known if not isinstance(transform, PrefixChange)]
