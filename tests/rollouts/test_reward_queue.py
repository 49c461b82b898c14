"""A reward model that has many to score: what moves is not cut."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.virtual_time import virtual_time
from turnwise.config import Config, RewardConfig, RolloutConfig
from turnwise.core.actor import ActorHandle
from turnwise.core.deadlines import StallClock
from turnwise.errors import DeadlineError, TurnwiseError
from turnwise.rollouts.episode import Episode
from turnwise.rollouts.problems import Problem
from turnwise.rollouts.reward_model import RemoteRewardModel, RewardModel
from turnwise.rollouts.rewards import RewardManager
from turnwise.trajectory import Image, Trajectory


@virtual_time
async def test_a_long_queue_that_moves_is_waited_for(make_config: Callable[..., Config]) -> None:
    slot, open_ = asyncio.Lock(), asyncio.Event()
    open_.set()

    async def score(messages: list[Any]) -> float:
        async with slot:
            await open_.wait()
            await asyncio.sleep(0.1)
            return float(len(messages))

    model = RemoteRewardModel("model", make_config(rollout={"stall_timeout": 0.8}))
    actor: Any = SimpleNamespace(score=SimpleNamespace(remote=score))
    model._actor = ActorHandle(actor, "the reward model")
    scores = await asyncio.gather(*(model.score([{}] * number) for number in range(12)))
    assert scores == [float(number) for number in range(12)]
    open_.clear()
    with pytest.raises(DeadlineError, match="scored no trajectory within"):
        await model.score([{}])


async def test_a_reward_model_does_not_judge_what_it_cannot_see() -> None:
    part = {"type": "image", "image": Image.of(b"GIF89a", "gif", 28, 28)}
    with pytest.raises(TurnwiseError, match="reads text alone"):
        await RewardModel().score([{"role": "user", "content": [part]}])


@virtual_time
async def test_waiting_for_a_reward_model_is_no_stall() -> None:
    async def score(messages: list[Any]) -> float:
        await asyncio.sleep(0.6)
        return 1.0

    rewards, clock = RewardManager([RewardConfig(model="m")]), StallClock(0.2)
    nothing = Episode(lambda row: None, Problem("rows:1", {}), RolloutConfig())
    models: Any = {"m": SimpleNamespace(score=score)}
    rewards.models = models
    trajectory = Trajectory("rows:1")
    async with clock.watching():
        await rewards.reward(nothing, trajectory, {}, clock)
    assert trajectory.reward == 1.0
