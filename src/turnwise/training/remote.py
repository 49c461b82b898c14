"""The policy in a process of its own: a Ray actor, and the caller's side with its deadlines."""

import os
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

import ray

from turnwise.config import Config
from turnwise.ray_calls import reply_of
from turnwise.training.sample import Sample


@ray.remote
class PolicyActor:
    """Hosts one `Policy`."""

    def start(self, config: Config) -> tuple[int, int]:
        """Build the policy; returns this process's id and the number of parameters."""
        from turnwise.training.policy import Policy

        self._policy = Policy(config)
        return os.getpid(), self._policy.parameters

    def train(self, samples: Sequence[Sample]) -> tuple[int, dict[str, float]]:
        metrics = self._policy.train(samples)
        return self._policy.version, metrics

    def publish(self) -> tuple[dict[str, Any], list[int], list[float]]:
        return self._policy.publish()

    def save(self, folder: str) -> None:
        self._policy.save(Path(folder))


class RemotePolicy:
    """A policy actor's face in another process; methods are those of `Policy`.

    Raises from every call: `TurnwiseError` when the actor died or failed, `DeadlineError` when
    it did not answer within `training.step_timeout` seconds.
    """

    def __init__(self, actor: Any, config: Config) -> None:
        self.pid = 0
        self.parameters = 0
        self.version = 0
        self._actor = actor
        self._timeout = config.training.step_timeout

    @classmethod
    async def start(cls, config: Config, *, num_gpus: float = 0) -> "RemotePolicy":
        threads = str(config.training.threads or os.cpu_count() or 1)
        environment = {
            "OMP_NUM_THREADS": threads,
            "OMP_WAIT_POLICY": "PASSIVE",  # idle trainer threads must not spin beside the engine
            "TOKENIZERS_PARALLELISM": "false",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # what deterministic algorithms ask for
        }
        actor = PolicyActor.options(  # type: ignore[attr-defined]
            num_cpus=0, num_gpus=num_gpus, runtime_env={"env_vars": environment}
        ).remote()
        remote = cls(actor, config)
        try:
            remote.pid, remote.parameters = await remote._wait(actor.start.remote(config), "start")
        except BaseException:
            ray.kill(actor)
            raise
        return remote

    async def train(self, samples: Sequence[Sample]) -> dict[str, float]:
        metrics: dict[str, float]
        self.version, metrics = await self._wait(self._actor.train.remote(samples), "train")
        return metrics

    async def publish(self) -> tuple[dict[str, Any], list[int], list[float]]:
        published: tuple[dict[str, Any], list[int], list[float]] = await self._wait(
            self._actor.publish.remote(), "publish its weights"
        )
        return published

    async def save(self, folder: Path) -> None:
        await self._wait(self._actor.save.remote(str(folder)), f"save {folder}")

    def kill(self) -> None:
        ray.kill(self._actor)

    async def _wait(self, reply: Awaitable[Any], what: str) -> Any:
        return await reply_of(reply, "the trainer", what, self._timeout)
