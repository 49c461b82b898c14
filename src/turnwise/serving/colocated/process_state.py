"""Global state of a process that two programs share: a trainer and a vLLM worker.

A vLLM worker seeds the random numbers of its process, makes its own process group the default
one, sets the number of threads and replaces `torch.set_num_threads`. The trainer in the same
process must not be affected, and the worker needs its own state again at its next call.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

_set_num_threads = torch.set_num_threads
_FIRST_GROUP = 1_000_000
"""Number of the first group: torch names groups by counting them, and a name may exist only once
in a process."""


_Registry: TypeAlias = Any  # dictionaries of types that are private to torch


class _OwnGroups(c10d._World):
    """Process groups separate from those of the rest of the process, in torch's own registry."""

    # torch's are properties, which only class attributes can hide.
    pg_map: _Registry = None
    pg_names: _Registry = None
    pg_group_ranks: _Registry = None
    pg_backend_config: _Registry = None
    tags_to_pg: _Registry = None
    pg_to_tag: _Registry = None
    group_count = _FIRST_GROUP

    def __init__(self) -> None:
        super().__init__()
        self.pg_map, self.pg_names, self.pg_group_ranks = {}, {}, {}
        self.pg_backend_config, self.tags_to_pg, self.pg_to_tag = {}, {}, {}


@dataclass(frozen=True, slots=True)
class _State:
    """The global state that each of the two programs changes."""

    threads: int
    set_num_threads: Callable[[int], None]
    dtype: torch.dtype
    matmul_precision: str
    deterministic: int
    groups: c10d._World
    python_random: tuple[object, ...]
    numpy_random: np.random.BitGenerator
    torch_random: torch.Tensor
    cuda_random: list[torch.Tensor]

    @classmethod
    def now(cls) -> "_State":
        return cls(
            torch.get_num_threads(),
            torch.set_num_threads,
            torch.get_default_dtype(),
            torch.get_float32_matmul_precision(),
            torch.get_deterministic_debug_mode(),
            c10d._world,
            random.getstate(),
            np.random.mtrand.get_bit_generator(),
            torch.get_rng_state(),
            torch.cuda.get_rng_state_all() if _has_cuda() else [],
        )

    def install(self) -> None:
        _set_num_threads(self.threads)
        setattr(torch, "set_num_threads", self.set_num_threads)  # noqa: B010 (mypy: a function)
        torch.set_default_dtype(self.dtype)
        torch.set_float32_matmul_precision(self.matmul_precision)
        torch.set_deterministic_debug_mode(self.deterministic)
        c10d._world = self.groups
        random.setstate(self.python_random)
        np.random.mtrand.set_bit_generator(self.numpy_random)
        torch.set_rng_state(self.torch_random)
        if self.cuda_random:
            torch.cuda.set_rng_state_all(self.cuda_random)


def _has_cuda() -> bool:
    return torch.cuda.is_initialized()  # type: ignore[no-untyped-call, no-any-return]


class ProcessState:
    """The global state of one program, active only inside `with state.inside():`.

    It starts with torch's defaults, with `threads` threads and without process groups.

    Example:
        state = ProcessState(threads=4)
        with state.inside():
            torch.manual_seed(0)  # the rest of the process keeps its random numbers
    """

    def __init__(self, threads: int) -> None:
        self._state = replace(
            _State.now(),
            threads=threads,
            dtype=torch.float32,
            matmul_precision="highest",
            deterministic=0,
            groups=_OwnGroups(),
            numpy_random=np.random.MT19937(),
        )

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Install this state; at the end of the block, save it and restore the previous one."""
        outside = _State.now()
        self._state.install()
        try:
            yield
        finally:
            self._state = _State.now()
            outside.install()


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
