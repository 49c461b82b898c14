"""Owners share the trainer by tokens, however many models each of them has."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable

import pytest

from tests.virtual_time import run_virtually
from turnwise.tinker.queue import ModelOrder, TrainerQueue

PER_SECOND = 10_000
"""Tokens that the trainer computes in a second."""


class Trainer:
    """Computes passes of models, and counts the tokens of each owner."""

    def __init__(self) -> None:
        self.queue = TrainerQueue()
        self.tokens = Counter[str]()
        self.running = 0

    async def compute(self, owner: str, tokens: int) -> None:
        async def work() -> None:
            self.running += 1
            assert self.running == 1
            await asyncio.sleep(tokens / PER_SECOND)
            self.running -= 1
            self.tokens[owner] += tokens

        await self.queue.call(owner, tokens, work())

    async def train(self, owner: str, size: Callable[[], int], pause: float = 0.0) -> None:
        """Train a model without end, two requests ahead; each takes `pause` seconds before it asks
        for the trainer."""
        order = ModelOrder()

        async def request(position: int) -> None:
            async with self.queue.request(owner, order, position):
                await asyncio.sleep(pause)
                await self.compute(owner, size())

        waiting = list[asyncio.Task[None]]()
        for position in range(1, 100_000):
            waiting.append(asyncio.create_task(request(position)))
            if len(waiting) > 2:
                await waiting.pop(0)


def shares(
    seconds: float, models: dict[str, tuple[int, Callable[[], int], float]]
) -> dict[str, float]:
    """Return each owner's share of all tokens, by its number of models, sizes of passes and
    pauses."""

    async def work() -> dict[str, float]:
        trainer = Trainer()
        tasks = [
            asyncio.create_task(trainer.train(owner, size, pause))
            for owner, (count, size, pause) in models.items()
            for _ in range(count)
        ]
        await asyncio.sleep(seconds)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        total = sum(trainer.tokens.values())
        assert total > 0.9 * seconds * PER_SECOND, "the trainer computes nearly all the time"
        return {owner: trainer.tokens[owner] / total for owner in models}

    return run_virtually(work())


def between(low: int, high: int) -> Callable[[], int]:
    chance = random.Random(f"{low} {high}")
    return lambda: chance.randint(low, high)


@pytest.mark.parametrize(
    ("many", "single", "pause"),
    [
        (between(4000, 4000), between(4000, 4000), 0.0),
        (between(1000, 30_000), between(1000, 30_000), 0.005),
        (between(20_000, 32_768), between(500, 2000), 0.005),
        (between(500, 2000), between(20_000, 32_768), 0.005),
    ],
    ids=["equal", "mixed", "small beside large", "large beside small"],
)
def test_eight_models_get_no_more_than_one(
    many: Callable[[], int], single: Callable[[], int], pause: float
) -> None:
    found = shares(600.0, {"eight": (8, many, pause), "one": (1, single, pause)})
    assert found == {"eight": pytest.approx(0.5, abs=0.05), "one": pytest.approx(0.5, abs=0.05)}


def test_three_owners_get_a_third_each() -> None:
    size = between(1000, 30_000)
    found = shares(900.0, {"a": (1, size, 0.0), "b": (3, size, 0.002), "c": (9, size, 0.005)})
    assert list(found.values()) == [pytest.approx(1 / 3, abs=1 / 30)] * 3


def test_a_light_owner_neither_waits_nor_delays_others() -> None:
    """It does not save what it did not use for a long time."""

    async def work() -> None:
        trainer = Trainer()
        busy = [asyncio.create_task(trainer.train("busy", lambda: 4000)) for _ in range(8)]
        clock = asyncio.get_running_loop().time
        for _ in range(50):
            await asyncio.sleep(3)
            began = clock()
            await trainer.compute("rare", 1000)
            assert clock() - began < 0.6, "one call of the others, and its own"
        before = trainer.tokens["busy"]
        rare = asyncio.create_task(trainer.train("rare", lambda: 4000))
        await asyncio.sleep(60)
        assert trainer.tokens["busy"] - before > 0.4 * 60 * PER_SECOND
        for task in (*busy, rare):
            task.cancel()
        await asyncio.wait([*busy, rare])

    run_virtually(work())


def test_calls_that_are_cancelled_give_their_turns_to_others() -> None:
    async def work() -> None:
        trainer, ended = Trainer(), list[int]()

        async def one(number: int) -> None:
            await trainer.compute(f"owner {number % 3}", 10_000)
            ended.append(number)

        tasks = [asyncio.create_task(one(number)) for number in range(9)]
        await asyncio.sleep(0.5)
        for number in (0, 4, 7):  # the one that runs, and two that wait
            tasks[number].cancel()
        await asyncio.sleep(0.1)
        assert trainer.running == 1, "the trainer ends what it has begun"
        await asyncio.wait(tasks)
        assert sorted(ended) == [1, 2, 3, 5, 6, 8]
        assert asyncio.get_running_loop().time() == pytest.approx(7.0, abs=0.2)
        await trainer.compute("owner 5", 1000)

    run_virtually(work())
