"""The executor whose workers run in Ray actors; vLLM imports it by its dotted name.

It runs in the engine's process, which joins the Ray cluster as another driver. Each step of the
engine is one call to every actor. Every call has a deadline that names the actor. An actor that
dies, or misses a deadline in the middle of a step, ends the engine; the engine never ends an actor.
"""

import os
import pickle
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any
from uuid import uuid4

import ray
from ray import cloudpickle
from ray.actor import ActorHandle as RayActor

from turnwise.core.actor import get_all_with_deadline
from turnwise.core.ray import join_ray
from turnwise.errors import EngineError, TurnwiseError
from turnwise.internals import vllm
from turnwise.serving.colocated.host import ActorPlacement

_CLOSE_SECONDS = 4.0  # vLLM kills an engine's process that takes more than 5 seconds to end


class ColocatedExecutor(vllm.Executor):  # type: ignore[misc]
    """Runs the calls that vLLM makes to its workers in the actors of an `ActorPlacement`."""

    def _init_executor(self) -> None:
        placement: ActorPlacement = self.vllm_config.additional_config
        join_ray(placement.address, placement.namespace)
        handles = cloudpickle.loads(placement.handles)
        self._actors = dict(zip(placement.names, handles, strict=True))
        self._engine = uuid4().hex
        self._seconds = placement.start_timeout
        self._call_seconds = placement.call_timeout
        self._scheduled: object = None
        try:
            environment = {
                key: value
                for key, value in os.environ.items()
                if key.startswith("VLLM_") and key != "VLLM_HOST_IP"
            }
            addresses = self._ask(
                "open a vLLM worker",
                lambda rank, actor: actor.open_worker.remote(
                    self._engine, rank, placement.threads, environment
                ),
            )
            arguments = [
                {
                    "vllm_config": self.vllm_config,
                    # Each actor sees only its own GPU, as device 0.
                    "local_rank": rank if vllm.current_platform.is_cpu() else 0,
                    "rank": rank,
                    "distributed_init_method": addresses[0],
                    "is_driver_worker": rank == 0,
                }
                for rank in range(len(self._actors))
            ]
            self.collective_rpc("init_worker", args=(arguments,))
            self.collective_rpc("init_device")
            self.collective_rpc("load_model")
            vllm.current_platform.update_block_size_for_backend(self.vllm_config)
        except BaseException:
            self.shutdown()
            raise

    def compile_or_warm_up_model(self) -> None:
        """Finish vLLM's startup; later calls have the shorter deadline."""
        super().compile_or_warm_up_model()
        assert self.supported_tasks  # cached here instead of at the first request
        self._seconds = self._call_seconds

    def collective_rpc(
        self,
        method: str | Callable[..., object],
        timeout: float | None = None,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
        non_block: bool = False,
    ) -> Any:
        if non_block:
            return _done(lambda: self.collective_rpc(method, timeout, args, kwargs))
        call = cloudpickle.dumps((method, args, kwargs or {}))
        replies = self._ask(
            f"run {method if isinstance(method, str) else method.__name__}",
            lambda _, actor: actor.call_worker.remote(self._engine, call),
            timeout,
        )
        return [pickle.loads(reply) for reply in replies]

    def execute_model(self, scheduler_output: object, non_block: bool = False) -> object:
        """Store the step: `sample_tokens`, which vLLM calls next, runs both in one call."""
        self._scheduled = scheduler_output
        return _done(lambda: None) if non_block else None

    def sample_tokens(self, grammar_output: object, non_block: bool = False) -> object:
        if non_block:
            return _done(lambda: self.sample_tokens(grammar_output))
        return self.collective_rpc(_step, args=(self._scheduled, grammar_output))[0]

    def check_health(self) -> None:
        self.collective_rpc("check_health")

    def shutdown(self) -> None:
        """Close the workers and leave the cluster; the actors stay alive."""
        try:
            self._ask(
                "close its vLLM worker",
                lambda _, actor: actor.close_worker.remote(self._engine),
                _CLOSE_SECONDS,
            )
        except TurnwiseError:
            pass  # a dead actor has no worker; a busy actor closes its worker later
        finally:
            ray.shutdown()

    def _ask(
        self,
        what: str,
        ask: Callable[[int, RayActor], ray.ObjectRef],
        seconds: float | None = None,
    ) -> list[Any]:
        """Call all actors; raise `EngineError` that names the actor if one died or failed."""
        replies = {
            name: ask(rank, actor) for rank, (name, actor) in enumerate(self._actors.items())
        }
        return get_all_with_deadline(replies, what, seconds or self._seconds, EngineError)


def _step(
    worker: vllm.WorkerWrapperBase, scheduler_output: object, grammar_output: object
) -> object:
    output = worker.execute_model(scheduler_output)
    return worker.sample_tokens(grammar_output) if output is None else output


def _done(run: Callable[[], object]) -> "Future[object]":
    future: Future[object] = Future()
    try:
        future.set_result(run())
    except Exception as error:
        future.set_exception(error)
    return future
