"""Engines whose vLLM workers live inside Ray actors: those that train, or others on many nodes.

Scheduling stays in the engine's own process; what computes is a vLLM worker in each actor, one
per tensor-parallel rank. The weights of a trainer in the same actor reach it through
`InProcessSender`, without a copy between processes. On GPUs, where it never ran, each actor must
see one GPU.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray import cloudpickle
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from turnwise.config import EngineConfig, ModelConfig
from turnwise.engine.vllm_engine import VllmEngine
from turnwise.errors import InputError
from turnwise.serving.worker_host import WorkerHost
from turnwise.weights import BACKEND, WORKER_EXTENSION

EXECUTOR = "turnwise.serving.executor.ColocatedExecutor"


@dataclass(frozen=True, slots=True)
class ActorPlacement:
    """What the executor must know; it travels in vLLM's `additional_config`."""

    address: str
    namespace: str
    names: tuple[str, ...]
    handles: bytes = field(repr=False)
    threads: int
    start_timeout: float
    call_timeout: float

    def compute_hash(self) -> str:
        """For vLLM's cache of compiled models, which do not depend on where workers live."""
        return ""


def on_actors(
    engine: EngineConfig, actors: Mapping[str, Any], call_timeout: float | None = None
) -> EngineConfig:
    """The same engine with its vLLM workers in actors, for `VllmEngine` or `RemoteWorker` to build.

    The engine must live in a process other than the actors', which could not answer it otherwise.

    Args:
        engine: What to change.
        actors: Handles of `WorkerHost`s by the names that errors call them; the first is
            tensor-parallel rank 0. An actor that was given to an engine lives until it is killed,
            whatever becomes of other handles.
        call_timeout: Seconds for an actor to answer one call, while it trains too; unset: the
            engine's `request_timeout`.
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
        update={"extra": engine.extra | arguments, "tensor_parallel_size": len(actors)}
    )


@ray.remote(num_cpus=0)
class _Shard(WorkerHost):
    """An actor that does nothing but host a worker."""


def on_bundles(engine: EngineConfig, bundle_indices: Sequence[int], name: str) -> EngineConfig:
    """The same engine with its vLLM workers in new actors, one in each of these bundles of the
    calling actor's placement group, so that they may be on several nodes. They end with the caller.

    Raises:
        InputError: when the bundles are not as many as the engine's devices.
    """
    if len(bundle_indices) != engine.devices:
        raise InputError(
            f"{name} got {len(bundle_indices)} bundles for {engine.devices} devices "
            "(engine.tensor_parallel_size)"
        )
    group = ray.util.get_current_placement_group()
    gpus = group.bundle_specs[bundle_indices[0]].get("GPU", 0)
    shards = {
        f"{name}, shard {rank}": _Shard.options(  # type: ignore[attr-defined]
            num_gpus=gpus, scheduling_strategy=PlacementGroupSchedulingStrategy(group, index)
        ).remote()
        for rank, index in enumerate(bundle_indices)
    }
    return on_actors(engine, shards)


def colocated_engine(
    model: ModelConfig,
    engine: EngineConfig,
    actors: Mapping[str, Any],
    *,
    call_timeout: float | None = None,
    name: str = "engine",
    **arguments: Any,
) -> VllmEngine:
    """An engine in this process with its vLLM workers in actors, whom its errors name.

    The arguments are those of `on_actors` and, all others, of `VllmEngine`.

    Raises:
        InputError: when vLLM refuses the model or an argument, or an actor fails to start.
    """
    return VllmEngine(
        model,
        on_actors(engine, actors, call_timeout),
        worker_extension=WORKER_EXTENSION,
        weight_backend=BACKEND,
        name=f"{name} in {', '.join(actors)}",
        **arguments,
    )
