"""A trainer of one rank in this process, with the verbs of `TrainerGroup`."""

from collections.abc import Sequence
from typing import Any

from turnwise.config import Config
from turnwise.core.json_types import JsonObject
from turnwise.training.batching import micro_batch_tokens, plan_micro_batches
from turnwise.training.rank import TrainerRank
from turnwise.training.reports import (
    CONFIGURED,
    OptimSettings,
    TrainedSample,
    by_sample,
    merge,
    of_step,
)
from turnwise.training.sample import Sample


class LocalTrainer:
    def __init__(self, config: Config) -> None:
        self.rank = TrainerRank(config)
        self.trained_tokens: list[TrainedSample] = []
        self._most = micro_batch_tokens(config.training, on_gpu=False)

    async def adapter(self, method: str, name: str, *arguments: object) -> None:
        self.rank.adapter(method, name, *arguments)

    async def forward_backward(self, samples: Sequence[Sample], *how: Any) -> JsonObject:
        ((share,),) = plan_micro_batches(samples, 1, 1, self._most, self.rank.layouts)
        report = self.rank.forward_backward(share, *how)
        self.trained_tokens = by_sample([[share]], [report])
        return merge([report])

    async def optim_step(
        self, settings: OptimSettings = CONFIGURED, name: str = "policy"
    ) -> JsonObject:
        return of_step(self.rank.optim_step(settings, name)[1])

    async def drop(self, name: str = "policy") -> None:
        self.rank.drop(name)

    async def begin_adapters(self) -> int:
        self.rank.remove_policy()
        return self.rank.vocabulary()
