"""Who begins next when all slots are taken."""

import asyncio

import pytest

from turnwise.core.slots import Slots


class Line:
    """Tasks that hold a slot until they are let go, in the order in which they began."""

    def __init__(self, count: int, last_below: int = 99) -> None:
        self.slots = Slots(count, last_below)
        self.began: list[str] = []
        self.gates: dict[str, asyncio.Event] = {}

    def start(self, name: str, *, last: bool = False) -> "asyncio.Task[None]":
        self.gates[name] = asyncio.Event()

        async def hold() -> None:
            async with self.slots.taken(last=last):
                self.began.append(name)
                await self.gates[name].wait()

        return asyncio.create_task(hold())


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_what_is_last_begins_after_all_others_and_each_kind_in_its_order() -> None:
    line = Line(1)
    tasks = [line.start("a")]
    await settled()
    tasks += [line.start(name, last=name.startswith("eval")) for name in ("eval1", "eval2")]
    tasks += [line.start(name) for name in ("b", "c")]
    for name in ("a", "b", "c", "eval1", "eval2"):
        await settled()
        assert line.began[-1] == name
        line.gates[name].set()
    await asyncio.gather(*tasks)
    assert line.began == ["a", "b", "c", "eval1", "eval2"]


async def test_a_free_slot_is_taken_by_whoever_comes() -> None:
    line = Line(2)
    tasks = [line.start("eval", last=True), line.start("a"), line.start("b")]
    await settled()
    assert line.began == ["eval", "a"]
    line.gates["eval"].set()
    await settled()
    assert line.began == ["eval", "a", "b"]
    for gate in line.gates.values():
        gate.set()
    await asyncio.gather(*tasks)


async def test_what_is_last_fills_the_places_that_others_leave() -> None:
    line = Line(8, last_below=3)
    names = ["a", "b", "c", "d"]
    tasks = [line.start(name) for name in names]
    tasks += [line.start(name, last=True) for name in ("eval1", "eval2")]
    await settled()
    assert line.began == names, "slots are free, but the step's trajectories are not over"
    for name, began in (("a", []), ("b", ["eval1"]), ("c", ["eval1", "eval2"])):
        line.gates[name].set()
        await settled()
        assert line.began == [*names, *began]
    for gate in line.gates.values():
        gate.set()
    await asyncio.gather(*tasks)


async def test_more_slots_are_taken_at_once_and_fewer_take_none_away() -> None:
    line = Line(2)
    tasks = [line.start(name) for name in "abcdefgh"]
    await settled()
    assert line.began == ["a", "b"]
    line.slots.grow(2.5)
    await settled()
    assert line.began == ["a", "b", "c", "d", "e"], "nobody has to end before"
    line.slots.grow(1.0)
    for name in ("a", "b", "c"):
        line.gates[name].set()
    await settled()
    assert len(line.began) == 5
    line.gates["d"].set()
    await settled()
    assert line.began[5:] == ["f"]
    for gate in line.gates.values():
        gate.set()
    await asyncio.gather(*tasks)
    assert line.began == list("abcdefgh")


@pytest.mark.parametrize("handed_over", [False, True])
async def test_a_slot_outlives_those_that_are_cancelled_while_they_wait(handed_over: bool) -> None:
    line = Line(1)
    first = line.start("first")
    await settled()
    gone, after = line.start("gone"), line.start("after")
    await settled()
    if handed_over:  # in the same turn of the event loop
        line.gates["first"].set()
        await asyncio.sleep(0)
    gone.cancel()
    line.gates["first"].set()
    await settled()
    assert line.began[-1] == "after"
    line.gates["after"].set()
    await asyncio.gather(first, after)
    line.start("next")
    await settled()
    assert line.began[-1] == "next"
    line.gates["next"].set()
    await settled()
