"""Global state of a process that two programs share: a trainer and a vLLM worker.

A vLLM worker seeds the random numbers of its process, makes its own process group the default
one, sets the number of threads and replaces `torch.set_num_threads`. The trainer in the same
process must not be affected, and the worker needs its own state again at its next call.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

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


def _cuda_random() -> list[torch.Tensor]:
    initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.get_rng_state_all() if initialized else []


_PARTS: dict[str, tuple[Callable[[], object], Callable[..., object]]] = {
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "set_num_threads": (
        lambda: torch.set_num_threads,
        lambda function: setattr(torch, "set_num_threads", function),
    ),
    "dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "matmul_precision": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    "deterministic": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "groups": (lambda: c10d._world, lambda world: setattr(c10d, "_world", world)),
    "python_random": (random.getstate, random.setstate),
    "numpy_random": (np.random.mtrand.get_bit_generator, np.random.mtrand.set_bit_generator),
    "torch_random": (torch.get_rng_state, torch.set_rng_state),
    "cuda_random": (_cuda_random, lambda states: states and torch.cuda.set_rng_state_all(states)),
}
"""The global state that each of the two programs changes: how its parts are read and set."""


def _read() -> dict[str, object]:
    return {name: read() for name, (read, _) in _PARTS.items()}


def _install(state: dict[str, object]) -> None:
    for name, (_, install) in _PARTS.items():
        install(state[name])


class ProcessState:
    """The global state of one program, active only inside `with state.inside():`.

    It starts with torch's defaults, with `threads` threads and without process groups.
    """

    def __init__(self, threads: int) -> None:
        self._state = _read() | {
            "threads": threads,
            "dtype": torch.float32,
            "matmul_precision": "highest",
            "deterministic": 0,
            "groups": _OwnGroups(),
            "numpy_random": np.random.MT19937(),
        }

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Install this state; at the end of the block, save it and restore the previous one."""
        outside = _read()
        _install(self._state)
        try:
            yield
        finally:
            self._state = _read()
            _install(outside)


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
