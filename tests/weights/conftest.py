"""The engine of the session for tests that change its weights."""

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest

from tests.weights.links import state_dict_info
from tests.weights.trainer import Model
from turnwise.weights.shm import ShmSender

if TYPE_CHECKING:
    from turnwise.serving.worker_handle import WorkerHandle


@pytest.fixture
async def ready(engine: "WorkerHandle", model_path: str) -> "AsyncIterator[WorkerHandle]":
    """The engine; afterwards with its original weights."""
    yield engine
    model = Model(model_path)
    await engine._call("prepare_refit_info", state_dict_info(model.tensors))
    sender = ShmSender(model.tensors)
    await engine.update_weights(sender.publish(0, model.tensors))
    sender.close()
