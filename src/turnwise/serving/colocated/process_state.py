"""Global state of a process that two programs share: a trainer and a vLLM worker.

A vLLM worker seeds the random numbers of its process, makes its own process group the default
one, sets the number of threads and replaces `torch.set_num_threads`. The trainer in the same
process must not be affected, and the worker needs its own state again at its next call.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch

from turnwise.internals.torch import Groups, OwnGroups, groups_now, use_groups

_set_num_threads = torch.set_num_threads


@dataclass(frozen=True, slots=True)
class _State:
    """The global state that each of the two programs changes."""

    threads: int
    set_num_threads: Callable[[int], None]
    dtype: torch.dtype
    matmul_precision: str
    deterministic: int
    groups: Groups
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
            groups_now(),
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
        use_groups(self.groups)
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
            groups=OwnGroups(),
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
