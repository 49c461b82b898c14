"""Engines whose vLLM workers run in Ray actors: the trainer's, or new ones on several nodes.

The engine schedules in its own process; each actor runs the vLLM worker of one tensor-parallel
rank. An actor runs one call at a time, so it either trains or generates. A call waits, up to its
deadline, while the actor trains, so pause the engine (`pause`, or `sleep` on a GPU) before a long
training step. The actor itself must never wait for its own engine. On GPUs, which is untested, each
actor must see exactly one GPU.
"""

import os
import pickle
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import ray
import torch
from ray import cloudpickle
from ray.actor import ActorHandle as RayActor
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from turnwise.config import EngineConfig
from turnwise.errors import EngineError, InputError
from turnwise.internals.torch import OwnGroups, default_group_apart, groups_now, use_groups
from turnwise.weights.in_process import InProcessSender
from turnwise.weights.manifest import Manifest, NamedTensors

if TYPE_CHECKING:
    from turnwise.internals import vllm

EXECUTOR = "turnwise.serving.colocated.executor.ColocatedExecutor"
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
        torch.cuda.set_rng_state_all,  # without a GPU it has no effect
    ),
}
"""Functions that read and set each part of the global state that a trainer and a vLLM worker in its
process both change."""


def _read() -> dict[str, object]:
    return {name: read() for name, (read, _) in _PARTS.items()}


def _install(state: dict[str, object]) -> None:
    for name, (_, install) in _PARTS.items():
        install(state[name])


def own_state(threads: int) -> dict[str, object]:
    """Return a separate global state for a vLLM worker in this process; it is active only within
    `inside`.

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
    """A mixin for your own actors: engines run their workers inside them.

    `LLMServerManager(config, workers=...)` takes the actors' handles. An actor runs one call at a
    time: it either trains or generates, and never waits for its own engine. Between two calls of
    its engine, vLLM has no effect on the process: the random states, the number of threads, the
    process groups and torch's defaults stay as your code has set them. This is untested on GPUs.
    There, each actor must see exactly one GPU, and `LLMServerManager.sleep` would also free the
    worker's memory for you.

    Example:
        @ray.remote(num_cpus=0)
        class Trainer(turnwise.WorkerHost):
            def publish(self):
                return self.publish_weights(self.version, self.model.named_parameters())

        trainers = [Trainer.remote() for _ in range(2)]
        with LLMServerManager("config.yaml", workers=trainers) as manager:
            manager.update_weights(lambda: ray.get([t.publish.remote() for t in trainers])[0])
    """

    _colocated: _Hosted | None = None

    def publish_weights(self, version: int, tensors: NamedTensors) -> Manifest:
        """Offer weights to the worker in this process, without a copy; they must not change until
        `LLMServerManager.update_weights` returns.

        Args:
            version: Version number of the weights, which is recorded for every sampled token; it
                never decreases.
            tensors: Pairs of a name, as in a Hugging Face checkpoint, and a whole tensor.
        """
        return InProcessSender().publish(version, tensors)

    def open_worker(self, engine: str, rank: int, threads: int, environment: dict[str, str]) -> str:
        """Prepare for the worker of `engine`; close a worker that another engine left behind.

        Returns an address on this machine where the engine's workers can meet.
        """
        if self._colocated is not None:
            self.close_worker(self._colocated.engine)
        os.environ.update(environment)  # vLLM reads it when it is imported
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
        """Free the worker's memory; do nothing if the worker does not exist."""
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


@dataclass(frozen=True, slots=True)
class ActorPlacement:
    """The actors of an engine, passed to its executor in vLLM's `additional_config`."""

    address: str
    """Address of the Ray cluster, host:port."""
    namespace: str
    """Ray namespace of the actors."""
    names: tuple[str, ...]
    """Names of the actors in errors, in the order of their ranks."""
    handles: bytes = field(repr=False)
    """Ray's handles of the actors, pickled."""
    threads: int
    """Threads of each worker."""
    start_timeout: float
    """Seconds for a call while the engine starts."""
    call_timeout: float
    """Seconds for a call afterwards."""
    more: Mapping[str, object] = field(default_factory=dict)
    """Further entries of `additional_config`, such as the entries of logits processors."""

    def __or__(self, more: Mapping[str, object]) -> "ActorPlacement":
        """Return a copy with more entries, like `|` of the dictionaries that other engines use."""
        return replace(self, more={**self.more, **more})

    def __getitem__(self, name: str) -> object:
        return self.more[name]

    def compute_hash(self) -> str:
        """Return "", because vLLM's cached compiled models do not depend on the actors."""
        return ""


def on_actors(
    engine: EngineConfig, actors: Mapping[str, RayActor], call_timeout: float | None = None
) -> EngineConfig:
    """Return the engine's configuration with its vLLM workers in actors.

    Build the engine with `VllmEngine` or `WorkerHandle` in a process that is not one of the actors,
    because an actor that waits for its own engine cannot answer the engine's calls.

    Args:
        actors: Handles of `WorkerHost`s by their names in errors; the first is tensor-parallel
            rank 0. An actor that is given to an engine lives until it is killed, even if no other
            handle of it exists.
        call_timeout: Seconds for an actor to answer one call, also while it trains; None means
            the engine's `request_timeout`.
    """
    context = ray.get_runtime_context()
    placement = ActorPlacement(
        address=context.gcs_address,
        namespace=context.namespace,
        names=tuple(actors),
        handles=cloudpickle.dumps(list(actors.values())),
        threads=engine.threads,
        start_timeout=engine.start_timeout,
        call_timeout=call_timeout or engine.request_timeout,
    )
    arguments = {
        "distributed_executor_backend": EXECUTOR,
        "additional_config": placement,
        "disable_custom_all_reduce": True,  # it needs to see the other actors' GPUs
    }
    return engine.model_copy(
        update={"vllm_args": engine.vllm_args | arguments, "tensor_parallel_size": len(actors)}
    )


def on_bundles(engine: EngineConfig, bundle_indices: Sequence[int], name: str) -> EngineConfig:
    """Return the engine's configuration with its vLLM workers in new actors.

    One actor starts in each of the given bundles of the calling actor's placement group, so the
    workers can be on several nodes. The new actors end with the caller.

    Raises:
        InputError: when the number of bundles differs from the number of the engine's devices.
    """
    if len(bundle_indices) != engine.devices:
        raise InputError(
            f"{name} got {len(bundle_indices)} bundles for {engine.devices} devices "
            "(engine.tensor_parallel_size)"
        )
    group = ray.util.get_current_placement_group()
    gpus = group.bundle_specs[bundle_indices[0]].get("GPU", 0)
    shard = ray.remote(num_cpus=0, num_gpus=gpus)(WorkerHost)
    shards = {
        f"{name}, shard {rank}": shard.options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, index)
        ).remote()
        for rank, index in enumerate(bundle_indices)
    }
    return on_actors(engine, shards)
