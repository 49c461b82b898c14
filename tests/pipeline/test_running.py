"""A pipeline's training steps, without engines and trainer: no sample is trained on here."""

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from turnwise.compat.chatlearn import Pipeline
from turnwise.config import Config
from turnwise.rollouts import Group
from turnwise.training.samples import SampleBatch, make_samples
from turnwise.trajectory import Outcome, Trajectory


async def nothing(*arguments: object) -> dict[str, Any]:
    return {}


@pytest.mark.parametrize(("schedule", "warnings"), [("linear", 1), ("constant", 0)])
async def test_training_beyond_a_linear_schedule_warns_once(
    make_config: Callable[..., Config],
    caplog: pytest.LogCaptureFixture,
    schedule: str,
    warnings: int,
) -> None:
    config = make_config(training={"steps": 2, "lr_schedule": schedule})

    async def made(groups: list[Group]) -> SampleBatch:
        return make_samples(groups, config, 0)

    step: Any = SimpleNamespace(make_samples=made, learn=nothing, update_weights=nothing)
    pipeline = Pipeline(config)
    pipeline._thread = SimpleNamespace(opened=(None, None, step))  # type: ignore[assignment]
    group = Group("rows:1", [Trajectory("rows:1", n, outcome=Outcome(1.0)) for n in range(2)])
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            await pipeline._train([group])
    said = [r.getMessage() for r in caplog.records if "the program goes on" in r.getMessage()]
    assert len(said) == warnings
    assert all("linear ended with step 2" in line for line in said)
