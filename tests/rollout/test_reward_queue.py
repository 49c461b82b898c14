"""A reward model that has many to score: what moves is not cut (C31)."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from turnwise.config import Config
from turnwise.errors import DeadlineError
from turnwise.rollout.reward_model import RemoteRewardModel


async def test_a_long_queue_that_moves_is_waited_for(make_config: Callable[..., Config]) -> None:
    slot, open_ = asyncio.Lock(), asyncio.Event()
    open_.set()

    async def score(messages: list[Any]) -> float:
        async with slot:
            await open_.wait()
            await asyncio.sleep(0.1)
            return float(len(messages))

    model = RemoteRewardModel("model", make_config(rollout={"stall_timeout": 0.5}))
    model._actor = SimpleNamespace(score=SimpleNamespace(remote=score))
    scores = await asyncio.gather(*(model.score([{}] * number) for number in range(12)))
    assert scores == [float(number) for number in range(12)]
    open_.clear()
    with pytest.raises(DeadlineError, match="scored no trajectory in 0.5 s"):
        await model.score([{}])
