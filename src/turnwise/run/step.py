"""The trainer's half of a step: samples of groups, the loss on them, and the engines' new weights.

The training loop and pipelines share it; each decides where groups come from and what to write.
"""

import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

from turnwise.config import Config
from turnwise.core.aio import run_in_thread
from turnwise.core.json_types import JsonObject
from turnwise.core.user_code import call_user_code
from turnwise.core.watchdog import waiting
from turnwise.errors import ExactnessError
from turnwise.rollouts import Group
from turnwise.run.runtime import Runtime
from turnwise.training.algorithms import make_algorithm
from turnwise.training.samples import SampleBatch, make_samples, recent_versions
from turnwise.weights.sync import WeightSync

if TYPE_CHECKING:
    from turnwise.training.model import ModelName

_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2}
_T = TypeVar("_T")


class TrainingStep:
    """Trains the policy of a runtime, and keeps its engines on the trainer's weights."""

    def __init__(self, config: Config, runtime: Runtime) -> None:
        assert runtime.policy is not None
        self.versions = recent_versions(config)
        self.algorithm = make_algorithm(config.algorithm)
        self._config = config
        self._manager = runtime.manager
        self._policy = runtime.policy
        self._sync = WeightSync(
            self._policy,
            config.weights.update_timeout,
            config.engine.start_timeout,
            self._policy.offload if config.training.offload else None,
            config.weights.canary_tolerance or _TOLERANCE[config.model.dtype],
        )

    async def make_samples(
        self, groups: Sequence[Group], discarded: Iterable[tuple[str, Group]] = ()
    ) -> SampleBatch:
        """Return a step's samples; discarded groups, each after its reason, are only accounted
        for."""
        version, oldest = self._policy.version, self.versions[0]
        batch = await self.by_algorithm(
            make_samples, groups, self._config, version, self.algorithm, oldest
        )
        for reason, group in discarded:
            await run_in_thread(batch.drop, group.trajectories, reason)
        return batch

    async def by_algorithm(self, function: Callable[..., _T], *arguments: object) -> _T:
        """Call a function that calls the algorithm, which may be the user's own class."""
        seconds, key = self._config.training.step_timeout, "training.step_timeout"
        name = f"the advantage {self._config.algorithm.advantage.name}"
        value: _T = await call_user_code(function, *arguments, name=name, seconds=seconds, key=key)
        return value

    async def learn(self, batch: SampleBatch) -> JsonObject:
        """Train on a step's samples, if there are any, which ends the step; return the trainer's
        metrics.

        Raises:
            ExactnessError: naming the first token that differs from the sampled one, unless
                `exactness` is `warn`; nothing is trained then.
            TrainerError, DeadlineError: naming the rank that failed.
        """
        report = batch.report
        if report.first_violation is not None and self._config.exactness == "stop":
            raise ExactnessError(
                f"{report.violations} violations of exactness; the first: "
                f"{report.first_violation}; set exactness=warn to train anyway"
            )
        metrics: JsonObject = {}
        if batch.samples:
            with waiting("the trainer to train"):
                async with self._trainers_turn():
                    metrics = await self._policy.train(batch.samples)
        self.versions.append(self._policy.version)
        return metrics

    async def score(
        self, name: "ModelName", token_ids: Sequence[Sequence[int]], masks: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        """Score sequences with one of the trainer's models; see `TrainerGroup.score`."""
        with waiting(f"the {name} model"):
            async with self._trainers_turn():
                scored = await self._policy.score(name, token_ids, masks)
                if self._config.training.offload:
                    await self._policy.offload()
                return scored

    @asynccontextmanager
    async def _trainers_turn(self) -> AsyncIterator[None]:
        """Put engines that share the trainer's processes to sleep while it computes."""
        if not self._config.training.colocated:
            yield
            return
        await self._manager.sleep()
        try:
            yield
        except Exception:  # the caller may continue, and its requests would wait forever
            await self._manager.wake_up()
            raise
        await self._manager.wake_up()

    async def update_weights(self) -> JsonObject:
        """Transfer the trainer's weights to the engines and check that they arrived."""
        started = time.perf_counter()
        with waiting("the engines to load new weights"):
            published = await self._sync.publish()
            updated = await self._manager.update_weights(self._sync)
        lent: JsonObject = {}
        if self._config.training.offload:
            lent["offloaded_gib"] = await self._policy.offload() / 2**30
        return {
            **lent,
            "weight_version": published.version,
            "weight_update_seconds": time.perf_counter() - started,
            "canary_diff_mean": max((one.mean for one in updated), default=0.0),
            "canary_diff_max": max((one.largest for one in updated), default=0.0),
        }
