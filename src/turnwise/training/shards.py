"""Weights of a sharded model: every rank reads its own slices from the safetensors files.

A model is built without memory for its weights (on the meta device) and sharded. Each parameter's
shard is then read from the files, one parameter at a time, so no process ever holds the whole
model. The layout of the files is Transformers' business: its conversions merge the experts of a
checkpoint, for instance.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    convert_and_load_state_dict_in_model,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from turnwise.core.process import environment_variable
from turnwise.internals.transformers import compute_missing, mark_loaded

Slices = dict[str, "_Slice"]
"""Tensors of files by name, which are read where they are indexed."""
_ONE_AT_A_TIME = "HF_DEACTIVATE_ASYNC_LOAD"
"""Transformers reads many tensors at once without it."""
_ADAPTED = ".base_layer."
"""Part of the names of weights in a layer with an adapter."""


def weight_files(path: str) -> list[str]:
    """Return the safetensors files of a model; none if it has weights in another format.

    Args:
        path: Folder or Hugging Face name.
    """
    if single := cached_file(path, SAFE_WEIGHTS_NAME, _raise_exceptions_for_missing_entries=False):
        return [single]
    index = cached_file(path, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False)
    return list(get_checkpoint_shard_files(path, index)[0]) if index else []


def can_be_sliced(model: PreTrainedModel) -> bool:
    """Return whether each rank's shards of a model's parameters are parts of tensors in its files.

    They are not where the files fuse parameters that the model keeps apart, or interleave them.
    """
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
    """Read one whole tensor.

    Raises:
        ValueError: when no file has it.
    """
    with _slices(files) as slices:
        if name not in slices:
            raise ValueError(f"{name} is missing from its files")
        tensor: torch.Tensor = slices[name][:]
    return tensor


def read_shards(module: nn.Module, files: list[str], device: torch.device) -> None:
    """Fill the parameters of a sharded model that are on the meta device, and its buffers.

    Args:
        module: The module that holds the model.
        device: Device of this rank's shards.

    Raises:
        ValueError: when the files lack a parameter, or have one of another shape.
    """
    model = next(part for part in module.modules() if isinstance(part, PreTrainedModel))
    wanted = {name for name, tensor in model.state_dict().items() if tensor.is_meta}
    for name, parameter in model.named_parameters():
        mark_loaded(parameter, name not in wanted)
    plan = LoadStateDictConfig(
        device_map={"": device}, weight_mapping=get_model_conversion_mapping(model)
    )
    with _slices(files) as slices, environment_variable(_ONE_AT_A_TIME, "1"):
        info, _ = convert_and_load_state_dict_in_model(model, _renamed(slices, model), plan)
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


def _renamed(slices: Slices, model: PreTrainedModel) -> Slices:
    """Return slices under the names that layers with an adapter have in the model."""
    inner = {name.replace(_ADAPTED, "."): name for name in model.state_dict() if _ADAPTED in name}
    prefix = model.base_model_prefix
    return {
        inner.get(name) or inner.get(f"{prefix}.{name}") or name: found
        for name, found in slices.items()
    }


class _Slice:
    """A tensor in a file. Parts of it are read into memory of their own, which offloading can
    empty; safetensors' own parts are views of buffers of Python's."""

    def __init__(self, found: Any) -> None:
        self._found = found

    def __getitem__(self, index: Any) -> torch.Tensor:
        part: torch.Tensor = self._found[index]
        return part.clone()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._found, name)


@contextmanager
def _slices(files: list[str]) -> Iterator[Slices]:
    """Open files, and yield their tensors by name, none of them read."""
    with ExitStack() as stack:
        slices: Slices = {}
        for path in files:
            # "pread": pages of a mapped file would count as this process's memory.
            file = stack.enter_context(safe_open(path, "pt", backend="pread"))
            slices |= {name: _Slice(file.get_slice(name)) for name in file.keys()}  # noqa: SIM118
        yield slices
