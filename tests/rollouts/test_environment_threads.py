"""The thread of an environment: what belongs to a thread can be used in all plain methods."""

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from turnwise.config import Config, RolloutConfig
from turnwise.core.deadlines import StallClock
from turnwise.errors import TrajectoryError
from turnwise.rollouts.episode import Episode, playing
from turnwise.rollouts.problems import Problem
from turnwise.rollouts.runner import Stage
from turnwise.trajectory import Trajectory

HERE = "tests.rollouts.test_environment_threads"
meeting = threading.Barrier(2)


def meet(name: str) -> str:
    """Wait for another call of this function.

    Args:
        name: Who waits.
    """
    meeting.wait(20)
    return name


class Shop:
    """Keeps a connection that only the thread may use that made it."""

    problem = "What does tea cost?"

    def __init__(self, row: dict[str, Any]) -> None:
        self.threads = {threading.get_ident()}
        self.busy = self.most = 0
        self.held = threading.Event()
        self.tools = [self.price, self.hang, meet]

    def setup(self) -> None:
        self.data = sqlite3.connect(":memory:")
        self.data.execute("create table prices (name, price)")
        self.data.execute("insert into prices values ('tea', 3)")

    def price(self, name: str) -> int:
        """Look up a price.

        Args:
            name: Name of the article.
        """
        self.busy += 1
        self.most = max(self.most, self.busy)
        self.threads.add(threading.get_ident())
        time.sleep(0.01)
        (found,) = self.data.execute("select price from prices where name = ?", (name,)).fetchone()
        self.busy -= 1
        return int(found)

    def hang(self) -> None:
        """Hang."""
        self.held.wait(60)

    def reward(self, trajectory: Trajectory) -> float:
        self.threads.add(threading.get_ident())
        return float(self.data.execute("select count(*) from prices").fetchone()[0])

    def metrics(self, trajectory: Trajectory) -> dict[str, float]:
        return {"most": self.most, "threads": len(self.threads)}

    def close(self) -> None:
        self.data.close()


async def no_failure(reason: str, error: Exception) -> None:
    raise AssertionError(reason) from error


def shop(**keys: Any) -> Episode:
    return Episode(Shop, Problem("rows:1", {}), RolloutConfig(**keys))


async def play(episode: Episode) -> dict[str, float]:
    """Play an episode with three calls at once; return its metrics."""
    async with playing(episode, StallClock(60), no_failure):
        call, tea = episode.toolbox.call, '{"name": "tea"}'
        results = await asyncio.gather(*(call("price", tea) for _ in range(3)))
        assert [result.text for result in results] == ["3"] * 3
        both = await asyncio.gather(*(call("meet", tea) for _ in range(2)))
        assert [result.text for result in both] == ["tea"] * 2, "plain functions run together"
        trajectory = Trajectory("rows:1", 0)
        assert (await episode.reward(trajectory)).final == 1.0
        return await episode.metrics(trajectory)


async def test_a_connection_from_setup_works_in_every_plain_method() -> None:
    assert await play(shop()) == {"most": 1, "threads": 1}


async def test_it_does_in_an_environments_own_process(
    make_config: Callable[..., Config], template: Any
) -> None:
    config = make_config(environment=f"{HERE}:Shop", rollout={"environment_process": True})
    loop: Any = None
    stage = Stage(config, None, loop, template, {})
    assert await play(stage.episode(Problem("rows:1", {}))) == {"most": 1, "threads": 1}


async def test_a_call_after_a_hanging_one_gets_another_thread() -> None:
    episode, reported = shop(tool_timeout=0.2, environment_timeout=20), list[str]()

    async def report(reason: str, error: Exception) -> None:
        reported.append(reason)

    async with playing(episode, StallClock(60), report):
        hung = await episode.toolbox.call("hang", "{}")
        assert hung.outcome == "timeout"
        refused = await episode.toolbox.call("price", '{"name": "tea"}')
        assert "ProgrammingError" in refused.text, "the connection is of the thread that hangs"
        with pytest.raises(TrajectoryError, match="ProgrammingError"):
            await episode.reward(Trajectory("rows:1", 0))
        episode.environment.held.set()
    assert reported == ["close_error"]


async def test_threads_of_environments_that_ended_serve_others() -> None:
    for _ in range(3):
        await asyncio.gather(*(play_briefly() for _ in range(4)))
    before = threading.active_count()
    for _ in range(5):
        await asyncio.gather(*(play_briefly() for _ in range(4)))
    assert threading.active_count() <= before + 4


async def play_briefly() -> None:
    async with playing(episode := shop(), StallClock(60), no_failure):
        assert (await episode.toolbox.call("price", '{"name": "tea"}')).text == "3"
