"""The actor's side of a colocated engine: a process that trains and also hosts a vLLM worker.

The actor runs one call at a time, as Ray's actors do by default: it either trains or generates. If
the engine calls while the actor trains, the call waits, up to its deadline, and the engine answers
no requests until then; so pause the engine (`pause`, or `sleep` on a GPU) before a long training
step. The actor itself must never wait for its own engine.

A vLLM worker seeds the random numbers of its process, makes its own process group the default one,
sets the number of threads and replaces `torch.set_num_threads`. The trainer in the same process
must not be affected, and the worker needs its own state again at its next call.
"""

import os
import pickle
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from turnwise.errors import EngineError
from turnwise.internals.torch import OwnGroups, default_group_apart, groups_now, use_groups

if TYPE_CHECKING:
    from turnwise.internals import vllm


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
    "cuda_random": (
        lambda: torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],  # type: ignore[no-untyped-call]
        torch.cuda.set_rng_state_all,  # of no GPU, without an effect
    ),
}
"""The global state that each of the two programs changes: how its parts are read and set."""


def _read() -> dict[str, object]:
    return {name: read() for name, (read, _) in _PARTS.items()}


def _install(state: dict[str, object]) -> None:
    for name, (_, install) in _PARTS.items():
        install(state[name])


def own_state(threads: int) -> dict[str, object]:
    """Return the global state of another program in this process, which is active only `inside`.

    It starts with torch's defaults, with `threads` threads and without process groups.
    """
    return _read() | {
        "threads": threads,
        "dtype": torch.float32,
        "matmul_precision": "highest",
        "deterministic": 0,
        "groups": OwnGroups(),
        "numpy_random": np.random.MT19937(),
    }


@contextmanager
def inside(state: dict[str, object]) -> Iterator[None]:
    """Install a state; at the end of the block, save it and restore the previous one."""
    outside = _read()
    _install(state)
    try:
        yield
    finally:
        state |= _read()
        _install(outside)


class _Hosted(NamedTuple):
    """A vLLM worker in this process."""

    engine: str
    """Identifier of the worker's engine."""
    wrapper: "vllm.WorkerWrapperBase"
    state: dict[str, object]
    thread: int
    """Identifier of the thread that opened the worker, in which all its calls must run."""


class WorkerHost:
    """A mixin for actor classes; `ColocatedExecutor` calls its methods.

    Between two of these calls vLLM has no effect on the process: random numbers, number of
    threads, process groups and torch's defaults are the trainer's. Untested on GPUs, where
    `VllmEngine.sleep` would also free the worker's memory for the trainer.
    """

    _colocated: _Hosted | None = None

    def open_worker(self, engine: str, rank: int, threads: int, environment: dict[str, str]) -> str:
        """Prepare for the worker of `engine`; close one that another engine left behind.

        Returns an address on this machine where the engine's workers can meet.
        """
        if self._colocated is not None:
            self.close_worker(self._colocated.engine)
        os.environ.update(environment)  # before vLLM is imported, which reads it
        state = own_state(threads)
        with inside(state):
            from turnwise.internals import vllm

            wrapper = vllm.WorkerWrapperBase(rpc_rank=rank)
            address: str = vllm.get_distributed_init_method(vllm.get_ip(), vllm.get_open_port())
        self._colocated = _Hosted(engine, wrapper, state, threading.get_ident())
        return address

    def call_worker(self, engine: str, call: bytes) -> bytes:
        """Run a pickled `(method, args, kwargs)` on the worker and return the pickled result."""
        worker = self._colocated
        if worker is None or worker.engine != engine:
            raise EngineError("it no longer hosts a worker of this engine")
        if worker.thread != threading.get_ident():
            raise EngineError("an actor that hosts a worker must run its calls in one thread")
        from turnwise.internals import vllm

        with inside(worker.state):
            method, args, kwargs = pickle.loads(call)
            return pickle.dumps(vllm.run_method(worker.wrapper, method, args, kwargs))

    def close_worker(self, engine: str) -> None:
        """Free the worker's memory; without effect if the worker does not exist."""
        worker = self._colocated
        if worker is None or worker.engine != engine:
            return
        self._colocated = None
        from turnwise.internals import vllm

        state, wrapper = worker.state, worker.wrapper
        with inside(state), default_group_apart():
            if "worker" in vars(wrapper):  # its startup may have failed earlier
                wrapper.shutdown()
            del worker, wrapper
            vllm.cleanup_dist_env_and_memory()
