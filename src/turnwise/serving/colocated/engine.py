"""Engines whose vLLM workers run in Ray actors: the trainer's, or new ones on several nodes.

The engine schedules in its own process; each actor runs one vLLM worker, one per tensor-parallel
rank. The weights of a trainer in the same actor reach it through
`InProcessSender`, without a copy between processes. On GPUs, which is untested, each actor must
see exactly one GPU.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import ray
from ray import cloudpickle
from ray.actor import ActorHandle as RayActor
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from turnwise.config import EngineConfig
from turnwise.errors import InputError
from turnwise.serving.colocated.host import WorkerHost

EXECUTOR = "turnwise.serving.colocated.executor.ColocatedExecutor"


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

    def compute_hash(self) -> str:
        """Return "": vLLM's cached compiled models do not depend on the actors."""
        return ""


def on_actors(
    engine: EngineConfig, actors: Mapping[str, RayActor], call_timeout: float | None = None
) -> EngineConfig:
    """Return the engine's configuration with its vLLM workers in actors.

    Build the engine with `VllmEngine` or `WorkerHandle` in another process than the actors', which
    could not answer it otherwise.

    Args:
        actors: Handles of `WorkerHost`s by their names in errors; the first is tensor-parallel
            rank 0. An actor that is given to an engine lives until it is killed, even without
            other handles.
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
    workers can be on several nodes. They end with the caller.

    Raises:
        InputError: when the number of bundles is not the number of the engine's devices.
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
