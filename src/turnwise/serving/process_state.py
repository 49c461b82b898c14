"""Two tenants of one process: what one would change for the other, and the switch between them.

A vLLM worker seeds the random numbers of its process, makes its own process group the default
one, sets the number of threads and replaces `torch.set_num_threads`. A trainer in the same process
must see none of it, and the worker must find its own again at its next call.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

_set_num_threads = torch.set_num_threads
_FIRST_GROUP = 1_000_000
"""torch names groups by counting them, and a name may exist only once in a process."""


class _OwnGroups(c10d._World):
    """Process groups beside those of the rest of the process: torch's way to override them."""

    # torch's are properties, which only class attributes hide.
    pg_map: Any = None
    pg_names: Any = None
    pg_group_ranks: Any = None
    pg_backend_config: Any = None
    tags_to_pg: Any = None
    pg_to_tag: Any = None
    group_count = _FIRST_GROUP

    def __init__(self) -> None:
        super().__init__()
        self.pg_map, self.pg_names, self.pg_group_ranks = {}, {}, {}
        self.pg_backend_config, self.tags_to_pg, self.pg_to_tag = {}, {}, {}


@dataclass(frozen=True, slots=True)
class _State:
    threads: int
    set_num_threads: Any
    dtype: torch.dtype
    matmul_precision: str
    deterministic: int
    groups: Any
    python_random: Any
    numpy_random: Any
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
        torch.set_num_threads = self.set_num_threads
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


class Guest:
    """A tenant with `threads` threads that is in the process only inside `with guest.inside():`.

    It starts with torch's defaults and without process groups.
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
        host = _State.now()
        self._state.install()
        try:
            yield
        finally:
            self._state = _State.now()
            host.install()


@contextmanager
def default_group_apart() -> Iterator[None]:
    """End this tenant's groups one by one: to end the default group ends all of the process."""
    default = c10d._world.default_pg
    c10d._world.default_pg = None
    try:
        yield
    finally:
        if default is not None:
            dist.destroy_process_group(default)
