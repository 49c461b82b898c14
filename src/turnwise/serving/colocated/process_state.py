"""Global state of a process that two programs share: a trainer and a vLLM worker.

A vLLM worker seeds the random numbers of its process, makes its own process group the default
one, sets the number of threads and replaces `torch.set_num_threads`. The trainer in the same
process must not be affected, and the worker needs its own state again at its next call.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from turnwise.internals.torch import OwnGroups, groups_now, use_groups


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
    "groups": (groups_now, use_groups),
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
            "groups": OwnGroups(),
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
