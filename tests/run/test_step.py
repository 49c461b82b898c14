"""What a step asks of the trainer and of the engines, and what a failure leaves behind."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from turnwise.config import Config
from turnwise.errors import InputError, WeightUpdateError
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
    version, dtype = 0, "float32"

    async def forward(self, *_: Any) -> list[list[float]]:
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


async def test_weights_are_sent_only_where_something_was_trained(
    make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or where others were loaded, or the last transfer failed."""

    class Learner:
        version, dtype = 0, "float32"

        async def train(self, *_: Any) -> dict[str, Any]:
            self.version += 1
            return {}

    class Engines:
        sent, fails = 0, False
        engines = ("worker-0", "worker-1")

        async def update_weights(self, _: Any) -> list[Any]:
            if self.fails:
                raise WeightUpdateError("they are busy")
            self.sent += 1
            return [SimpleNamespace(mean=0.0, largest=0.0)] * 2

    engines = Engines()
    runtime: Any = SimpleNamespace(manager=engines, policy=Learner(), teachers=None)
    step = TrainingStep(make_config(), runtime)
    published = SimpleNamespace(version=0, sent_bytes=8, changed=1.0)

    async def publish() -> Any:
        published.version = runtime.policy.version
        return published

    monkeypatch.setattr(step._sync, "publish", publish)
    one = Sample.of([1, 2], [0, 1], [0.0, 0.0], [-1, 0], 1.0, 0)
    assert (await step.update_weights())["weight_update_bytes"] == 8, "those of a new run"
    await step.learn(SampleBatch())
    again = await step.update_weights()
    assert (again["engines"], again["weight_version"], again["weight_update_bytes"]) == (2, 0, 0)
    assert engines.sent == 1
    await step.learn(SampleBatch(samples=[one]))
    engines.fails = True
    with pytest.raises(WeightUpdateError):
        await step.update_weights()
    engines.fails = False
    await step.learn(SampleBatch())
    assert (await step.update_weights())["weight_version"] == 1
    assert engines.sent == 2
    step.has_new_weights = True
    await step.update_weights()
    assert engines.sent == 3


async def test_training_without_an_optimizer_step_sends_no_weights(
    make_config: Callable[..., Config],
) -> None:
    """All updates are skipped, or train the value model alone; of a failure nobody knows."""

    class Learner:
        version, dtype, fails = 7, "float32", False
        calls: ClassVar[list[str]] = []

        async def train(self, *_: Any) -> dict[str, Any]:
            if self.fails:
                raise InputError("it stops half-way")
            return {}

        async def publish(self) -> Any:
            self.calls.append("publish")
            return SimpleNamespace(version=7, sent_bytes=8, changed=None)

        async def offload(self) -> int:
            self.calls.append("offload")
            return 2**30

    class Engines(Fleet):
        engines = ("worker-0",)

        async def update_weights(self, _: Any) -> list[Any]:
            return [SimpleNamespace(mean=0.0, largest=0.0)]

    trainer = Learner()
    runtime: Any = SimpleNamespace(manager=Engines(), policy=trainer, teachers=None)
    config = make_config(training={"colocated": True, "offload": ["params"]})
    step = TrainingStep(config, runtime)
    one = Sample.of([1, 2], [0, 1], [0.0, 0.0], [-1, 0], 1.0, 0)
    await step.update_weights()
    await step.learn(SampleBatch(samples=[one]))
    update = await step.update_weights()
    assert (update["weight_update_bytes"], update["weight_version"]) == (0, 7)
    assert update["offloaded_gib"] == 1.0
    assert trainer.calls == ["publish", "offload", "offload"]
    trainer.fails = True
    with pytest.raises(InputError):
        await step.learn(SampleBatch(samples=[one]))
    trainer.fails = False
    await step.learn(SampleBatch(samples=[one]))
    await step.update_weights()
    assert trainer.calls.count("publish") == 2
