"""What follows the rollouts of a step: train on samples, bring the new weights to the engines.

The training loop and pipelines share it; where groups come from, and what is written, is theirs.
"""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from turnwise.config import Config
from turnwise.errors import ExactnessError
from turnwise.machinery import Machinery
from turnwise.training.sample import Sample
from turnwise.training.samples import Made
from turnwise.trajectory import ExactnessReport
from turnwise.watchdog import waiting
from turnwise.weights.canary import check_canary
from turnwise.weights.delivery import Delivery

if TYPE_CHECKING:
    from turnwise.training.policy import ModelName

_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2}

UNTRAINED: dict[str, Any] = {
    "logprob_diff_mean": None,
    "logprob_diff_max": None,
    "staleness_max": 0,
    "train_tokens_per_s": 0.0,
    "trained_tokens": 0,
}
"""The trainer's metrics of a step that has nothing to train on."""


def check_exactness(report: ExactnessReport, config: Config) -> None:
    """Let only what is exact be trained, unless `exactness` is `warn`.

    Raises:
        ExactnessError: naming the first token that is not as it was sampled.
    """
    if report.first_violation is not None and config.exactness == "stop":
        raise ExactnessError(
            f"{report.violations} violations of exactness; the first: "
            f"{report.first_violation}; exactness=warn trains all the same"
        )


def describe(made: Made) -> dict[str, Any]:
    """A step's metrics of what its samples were made of."""
    return {
        "groups_without_signal": made.groups_without_signal,
        "stale_groups": made.stale_groups,
        "stale_tokens": made.stale_tokens,
        "overlong": made.overlong,
        "exact_percent": made.report.percent,
        "forked": dict(sorted(made.report.forked.items())),
    }


class TrainingStep:
    """Trains the policy of a machinery, and keeps its engines at the trainer's weights.

    Args:
        machinery: With a policy.
    """

    def __init__(self, config: Config, machinery: Machinery) -> None:
        assert machinery.policy is not None
        self._config = config
        self._manager = machinery.manager
        self._policy = machinery.policy
        self._delivery = Delivery(
            self._policy, config.weights.update_timeout, config.engine.start_timeout
        )

    async def train(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Train on samples, at least one; returns the trainer's metrics.

        Raises:
            TrainerError, DeadlineError: naming the rank that did not do its part.
        """
        with waiting("the trainer to train"):
            async with self._trainers_turn():
                return await self._policy.train(samples)

    async def score(
        self, name: "ModelName", token_ids: Sequence[Sequence[int]], masks: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        """What one of the policy's models says of sequences; see `RemotePolicy.score`."""
        with waiting(f"the {name} model"):
            async with self._trainers_turn():
                scored = await self._policy.score(name, token_ids, masks)
                if self._config.training.offload:
                    await self._policy.offload()
                return scored

    @asynccontextmanager
    async def _trainers_turn(self) -> AsyncIterator[None]:
        """Where engines live in the trainer's processes, one of the two may compute."""
        colocated = self._config.training.colocated
        if colocated:
            await self._manager.sleep()
        try:
            yield
        except Exception:  # a program may go on after it, and its requests would wait for ever
            if colocated:
                await self._manager.wake_up()
            raise
        if colocated:
            await self._manager.wake_up()

    async def update_weights(self) -> dict[str, Any]:
        """Hand the trainer's weights to the engines and prove that they arrived.

        Raises:
            WeightUpdateError, DeadlineError: when they did not.
        """
        weights, started = self._config.weights, time.perf_counter()
        tolerance = weights.canary_tolerance or _TOLERANCE[self._config.model.dtype]
        with waiting("the engines to take up new weights"):
            version = (await self._delivery.publish())["version"]
            prompt, expected = self._policy.canary
            canaries = await self._manager.update_weights(
                self._delivery,
                lambda engine: check_canary(engine, prompt, expected, tolerance, version),
            )
        lent: dict[str, Any] = {}
        if self._config.training.offload:
            lent["offloaded_gib"] = await self._policy.offload() / 2**30
        return {
            **lent,
            "weight_version": version,
            "weight_update_seconds": time.perf_counter() - started,
            "canary_diff_mean": max((mean for mean, _ in canaries), default=0.0),
            "canary_diff_max": max((largest for _, largest in canaries), default=0.0),
        }
