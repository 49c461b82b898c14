"""An engine in a process of its own: a Ray actor around `VllmEngine`, and the caller's side.

`RemoteEngine` is an `Engine` too. Its waits have deadlines of their own, a little longer than the
engine's, so that a hung or killed actor is named as well.
"""

import asyncio
import os
from collections.abc import Awaitable, Sequence
from typing import Any

import ray

from turnwise.config import EngineConfig, ModelConfig, SamplingConfig
from turnwise.engine.protocol import Completion, PauseMode
from turnwise.errors import EngineError, TurnwiseError
from turnwise.ray_calls import reply_of

_GRACE_SECONDS = 10.0
_MAX_CALLS = 4096


@ray.remote(max_concurrency=_MAX_CALLS)
class EngineActor:
    """Hosts one `VllmEngine`; forwards each call to it."""

    async def start(self, arguments: dict[str, Any]) -> int:
        """Build the engine; returns this process's id."""
        from turnwise.engine.vllm_engine import VllmEngine

        self._engine = VllmEngine(**arguments)
        return os.getpid()

    async def call(self, method: str, *args: Any) -> Any:
        return await getattr(self._engine, method)(*args)


class RemoteEngine:
    """An engine actor's face in another process.

    Raises from every call: `EngineError` when the actor died, `DeadlineError` when it did not
    answer in time, and whatever the engine itself raises.
    """

    def __init__(self, actor: Any, name: str, engine: EngineConfig) -> None:
        self.name = name
        self.pid = 0
        self._actor = actor
        self._timeout = engine.request_timeout + _GRACE_SECONDS

    @classmethod
    async def start(
        cls,
        model: ModelConfig,
        engine: EngineConfig,
        *,
        num_gpus: float = 0,
        name: str = "engine-0",
        **arguments: Any,
    ) -> "RemoteEngine":
        """Start an actor and its engine; `arguments` are `VllmEngine`'s.

        Raises:
            InputError: when vLLM refuses the model or an argument.
            DeadlineError: when the engine is not up after `engine.start_timeout` seconds.
        """
        environment = {
            "OMP_NUM_THREADS": str(engine.threads),
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "TOKENIZERS_PARALLELISM": "false",
        }
        actor = EngineActor.options(  # type: ignore[attr-defined]
            num_cpus=0, num_gpus=num_gpus, runtime_env={"env_vars": environment}
        ).remote()
        remote = cls(actor, name, engine)
        all_arguments = {"model": model, "engine": engine, "name": name, **arguments}
        try:
            remote.pid = await remote._wait(
                actor.start.remote(all_arguments), "start", engine.start_timeout
            )
        except BaseException:
            ray.kill(actor)
            raise
        return remote

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingConfig,
        request_id: str,
        seed: int | None = None,
    ) -> Completion:
        try:
            completion: Completion = await self._call(
                "generate", list(prompt_token_ids), sampling, request_id, seed
            )
            return completion
        except asyncio.CancelledError:
            self._actor.call.remote("abort", request_id)
            raise

    async def abort(self, request_id: str) -> None:
        await self._call("abort", request_id)

    async def pause(self, mode: PauseMode = "keep") -> None:
        await self._call("pause", mode)

    async def resume(self) -> None:
        await self._call("resume")

    async def sleep(self) -> None:
        await self._call("sleep")

    async def wake_up(self) -> None:
        await self._call("wake_up")

    async def update_weights(self, manifest: dict[str, Any]) -> None:
        await self._call("update_weights", manifest)

    async def reset_prefix_cache(self) -> None:
        await self._call("reset_prefix_cache")

    async def check_health(self) -> None:
        await self._call("check_health")

    async def load(self) -> int:
        return int(await self._call("load"))

    async def shutdown(self) -> None:
        """End the engine and its process; an actor that does not answer is killed."""
        try:
            await self._wait(self._actor.call.remote("shutdown"), "shut down", 5.0)
        except TurnwiseError:
            pass  # dead or deaf: what follows ends it
        finally:
            ray.kill(self._actor)

    async def _call(self, method: str, *args: Any) -> Any:
        return await self._wait(self._actor.call.remote(method, *args), method, self._timeout)

    async def _wait(self, reply: Awaitable[Any], what: str, seconds: float) -> Any:
        return await reply_of(reply, self.name, what, seconds, EngineError)
