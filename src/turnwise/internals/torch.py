"""torch: process groups, storages, the modes that trace a computation, and parts of Muon."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.distributed import distributed_c10d as c10d
from torch.optim import _muon
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves

from turnwise.internals import internal

_FIRST_GROUP = 1_000_000
"""Number of the first group: torch names groups by counting them, and a name may exist only once
in a process."""
_REGISTRIES = (
    "pg_map",
    "pg_names",
    "pg_group_ranks",
    "pg_backend_config",
    "tags_to_pg",
    "pg_to_tag",
)
Groups: TypeAlias = c10d._World  # all process groups of a program


class OwnGroups(c10d._World):
    """Process groups separate from those of the rest of the process, in torch's own registry: a
    trainer and a vLLM worker that share a process each make their group the default one."""

    group_count = _FIRST_GROUP

    def __init__(self) -> None:
        super().__init__()
        for name in _REGISTRIES:
            setattr(self, name, {})


def groups_now() -> Groups:
    """Return the process groups that torch uses now."""
    return c10d._world


def use_groups(groups: Groups) -> None:
    """Make torch use these process groups."""
    c10d._world = groups


@contextmanager
def default_group_apart() -> Iterator[None]:
    """Leave the default process group to the end: ending it ends all groups of the process."""
    default = c10d._world.default_pg
    c10d._world.default_pg = None
    try:
        yield
    finally:
        if default is not None:
            dist.destroy_process_group(default)


def limit_nccl(options: "dist.ProcessGroupNCCL.Options", limit: timedelta) -> None:
    """Set the time limit of an NCCL group that is made outside torch's registry."""
    options._timeout = limit


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return the address of a storage's object, which storages without memory have too."""
    key: int = storage._cdata
    return key


def changes_of(tensor: torch.Tensor) -> int:
    """Return the number of changes in place of a tensor's memory."""
    return tensor._version


def share_gpu_memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the CUDA IPC handle of a tensor's memory, and its fields, which
    `torch.multiprocessing` passes between processes that it has started only."""
    fields: tuple[Any, ...] = tensor.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    return fields


def open_gpu_memory(index: int, fields: list[Any]) -> torch.UntypedStorage:
    """Open memory of a GPU by the fields of its handle but the first."""
    return torch.UntypedStorage._new_shared_cuda(index, *fields)


def orthogonalised(matrix: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """Return a whole matrix with singular values of about 1, in bfloat16, by the Newton-Schulz
    iterations that a group of parameters of torch's Muon names."""
    return _muon._zeropower_via_newtonschulz(
        matrix, group["ns_coefficients"], group["ns_steps"], group["eps"]
    )


def muon_rate(group: dict[str, Any], shape: torch.Size) -> float:
    """Return the rate of a step of torch's Muon for a matrix of this shape."""
    return _muon._adjust_lr(group["lr"], group["adjust_lr_fn"], shape)


for _name in (*_REGISTRIES, "group_count", "default_pg"):
    internal(c10d._World, _name)
for _name in _REGISTRIES:  # properties, which only class attributes can hide
    setattr(OwnGroups, _name, None)
internal(c10d, "_world")
for _name in ("_cdata", "_share_cuda_", "_new_shared_cuda"):
    internal(torch.UntypedStorage, _name)
internal(torch.Tensor, "_version")
internal(_muon, "_zeropower_via_newtonschulz", "grad", "ns_coefficients", "ns_steps", "eps")
internal(_muon, "_adjust_lr", "lr", "adjust_lr_fn", "param_shape")
