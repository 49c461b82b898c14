"""What a failure of the trainer leaves behind."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from turnwise.config import Config
from turnwise.errors import InputError
from turnwise.run.runtime import TrainingStep
from turnwise.training import Sample
from turnwise.training.samples import SampleBatch


class Fleet:
    def __init__(self) -> None:
        self.calls: list[str] = []

    async def sleep(self) -> None:
        self.calls.append("sleep")

    async def wake_up(self) -> None:
        self.calls.append("wake_up")


class Trainer:
    async def score(self, *_: Any) -> list[list[float]]:
        raise InputError("there is no value model")

    async def train(self, *_: Any) -> dict[str, Any]:
        raise InputError("it cannot be trained")


@pytest.mark.parametrize("method", ["score", "learn"])
async def test_engines_wake_up_after_a_failure_of_the_trainer(
    make_config: Callable[..., Config], method: str
) -> None:
    config = make_config(training={"colocated": True})
    runtime: Any = SimpleNamespace(manager=Fleet(), policy=Trainer(), teachers=None)
    step = TrainingStep(config, runtime)
    one = Sample.of([1, 2], [0, 1], [0.0, 0.0], [-1, 0], 1.0, 0)
    arguments = {"score": ("value", [[1]], [[0]]), "learn": (SampleBatch(samples=[one]),)}
    with pytest.raises(InputError):
        await getattr(step, method)(*arguments[method])
    assert runtime.manager.calls == ["sleep", "wake_up"]
