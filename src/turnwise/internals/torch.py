"""torch: process groups, storages, tracing modes, Muon, and oneDNN."""

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.distributed import distributed_c10d as c10d
from torch.optim import _muon
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves

from turnwise.internals import internal

_FIRST_GROUP = 1_000_000
"""Number of the first group, far above the numbers of torch's own groups, because torch names
groups by counting them, and a name may exist only once in a process."""
_REGISTRIES = (
    "pg_map",
    "pg_names",
    "pg_group_ranks",
    "pg_backend_config",
    "tags_to_pg",
    "pg_to_tag",
)
Groups: TypeAlias = c10d._World  # all process groups of a program
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""Environment variable with the network interfaces that gloo uses."""
_ORTHOGONALISED = "_zeropower_via_newtonschulz"
HAS_ONEDNN: bool = platform.machine() == "x86_64" and torch._C._has_mkldnn
"""Whether `multiply` works. On processors other than x86-64, torch itself uses the fastest matrix
products."""


class OwnGroups(c10d._World):
    """A registry of process groups, separate from the process's own registry. A trainer and a vLLM
    worker in one process need two registries, because each makes its group the default group."""

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
    """Hide the default process group in a `with` block, and destroy it afterwards. If it were
    destroyed before the block, torch would destroy all groups of the process."""
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


def gloo_options(address: str, limit: timedelta) -> Any:
    """Return options of a gloo group that is made outside torch's registry.

    The group listens on `address`, an address of this node, or on the interfaces in
    `GLOO_SOCKET_IFNAME`. torch would use the address of the machine's name, often a loopback
    address.
    """
    options, make = _GlooOptions(), dist.ProcessGroupGloo.create_device
    chosen = os.environ.get(GLOO_INTERFACE)
    options._devices = (
        [make(interface=name) for name in chosen.split(",")] if chosen else [make(hostname=address)]
    )
    options._threads, options._timeout = 2 * len(options._devices), limit
    return options


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return the address of a storage's object, which is a unique key even for storages without
    memory."""
    key: int = storage._cdata
    return key


def changes_of(tensor: torch.Tensor) -> int:
    """Return the number of in-place changes of a tensor's memory."""
    return tensor._version


def share_gpu_memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the fields of a CUDA IPC handle of a tensor's memory. `torch.multiprocessing` passes
    such handles only between processes that it has started."""
    fields: tuple[Any, ...] = tensor.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    return fields


def open_gpu_memory(index: int, fields: list[Any]) -> torch.UntypedStorage:
    """Open GPU memory by the fields of its handle, without the first field; `index` is the GPU's
    index in this process."""
    return torch.UntypedStorage._new_shared_cuda(index, *fields)


def multiply(
    inputs: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `inputs @ matrix.T + bias`, computed by oneDNN and without a gradient. torch itself
    multiplies float32 matrices with MKL, except in compiled models."""
    made: torch.Tensor = torch.ops.mkldnn._linear_pointwise(inputs, matrix, bias, "none", [], "")
    return made


@contextmanager
def whole_matrices() -> Iterator[None]:
    """Let torch's Muon orthogonalise whole matrices, although each rank holds only some of the rows
    (FSDP2).

    torch itself would multiply the shards and add up the products in bfloat16, so that a step would
    depend on the number of ranks.
    """
    from torch.distributed.tensor import DTensor, distribute_tensor  # engines do not need them

    of_shards = vars(_muon)[_ORTHOGONALISED]

    def of_whole(update: torch.Tensor, *options: Any) -> torch.Tensor:
        if not isinstance(update, DTensor):
            return cast("torch.Tensor", of_shards(update, *options))
        whole = of_shards(update.full_tensor(), *options)
        mesh, places = update.device_mesh, update.placements
        return distribute_tensor(whole, mesh, places, src_data_rank=None)  # without communication

    vars(_muon)[_ORTHOGONALISED] = of_whole
    try:
        yield
    finally:
        vars(_muon)[_ORTHOGONALISED] = of_shards


for _name in (*_REGISTRIES, "group_count", "default_pg"):
    internal(c10d._World, _name)
for _name in _REGISTRIES:  # they are properties, which only class attributes can hide
    setattr(OwnGroups, _name, None)
internal(c10d, "_world")
for _name in ("_cdata", "_share_cuda_", "_new_shared_cuda"):
    internal(torch.UntypedStorage, _name)
internal(torch.Tensor, "_version")
_GlooOptions = internal(dist.ProcessGroupGloo, "_Options")
for _name in ("_devices", "_threads", "_timeout"):
    internal(_GlooOptions, _name)
internal(dist.ProcessGroupGloo, "create_device")
internal(_muon, _ORTHOGONALISED, "grad", "ns_coefficients", "ns_steps", "eps")
internal(torch._C, "_has_mkldnn")
if HAS_ONEDNN:
    internal(torch.ops.mkldnn, "_linear_pointwise")
