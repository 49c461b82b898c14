"""Adapters that an engine loads when a request needs them, and that make room for others."""

import asyncio
import itertools
from typing import Any

import pytest

from turnwise.core.deadlines import StallClock
from turnwise.core.json_types import JsonObject
from turnwise.engine.adapters import AdapterTable, LoadedAdapter
from turnwise.engine.protocol import Route
from turnwise.engine.vllm_engine import VllmEngine
from turnwise.errors import InputError


def adapter(name: str, number: int) -> LoadedAdapter:
    request: Any = None
    return LoadedAdapter(number, name, request, brought=True)


def test_the_one_that_was_not_needed_for_longest_makes_room() -> None:
    table = AdapterTable()
    for number, name in enumerate("abc"):
        table.add(adapter(name, number))
    assert table.touch("a")
    assert not table.touch("d")
    taken = table.evict()
    assert taken is not None
    assert (taken.name, taken.number) == ("b", 1)
    assert not table.touch("b")
    assert len(table) == 2


def test_one_that_a_request_uses_makes_room_if_all_are_in_use() -> None:
    table = AdapterTable()
    for number, name in enumerate("abc"):
        table.add(adapter(name, number))
    with table.using("a", "first"), table.using("b", "second"):
        taken = [table.evict(), table.evict()]
        assert [each.name for each in taken if each is not None] == ["c", "a"]
        assert not table.touch("a")  # a new request waits until it is loaded again


def test_those_of_the_configuration_never_make_room() -> None:
    table = AdapterTable()
    served = adapter("served", 0)
    served.brought = False
    table.add(served)
    assert table.touch("served")
    assert table.evict() is None


class Slots(VllmEngine):
    """An engine that holds adapters, without vLLM; `loading` is set once a load may end."""

    def __init__(self, slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.name = "worker-0"
        self.held = set[int]()
        self.loading = asyncio.Event()
        self.loading.set()
        numbers = itertools.count(1)
        self._adapters, self._slots = AdapterTable(), slots
        monkeypatch.setattr(self._adapters, "new", lambda name: adapter(name, next(numbers)))
        self._clock, self._loading = StallClock(60), asyncio.Lock()

    async def _ask(self, method: str, *args: object) -> list[JsonObject]:
        number = int(str(args[0]))
        if method == "remove_adapter":
            self.held.discard(number)
        else:
            assert len(self.held) < self._slots
            self.held.add(number)
            await self.loading.wait()
        return []

    async def request(self, name: str, ends: asyncio.Event) -> None:
        await self._bring(Route(adapter=name, folder="folder"))
        with self._adapters.using(name, f"{name} {id(ends)}"):
            await ends.wait()


async def test_a_load_that_is_cancelled_takes_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, ends = Slots(1, monkeypatch), asyncio.Event()
    ends.set()
    engine.loading.clear()
    for name in "abc":
        waiting = asyncio.create_task(engine.request(name, ends))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert not engine.held
    engine.loading.set()
    await engine.request("d", ends)
    assert len(engine.held) == 1


async def test_a_busy_client_does_not_keep_its_slot_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, ends = Slots(1, monkeypatch), [asyncio.Event(), asyncio.Event(), asyncio.Event()]
    first = asyncio.create_task(engine.request("a", ends[0]))
    await asyncio.sleep(0.01)
    other = asyncio.create_task(engine.request("b", ends[1]))
    await asyncio.sleep(0.03)
    later = asyncio.create_task(engine.request("a", ends[2]))
    ends[0].set()
    ends[1].set()
    await asyncio.wait_for(asyncio.gather(first, other), 5)
    ends[2].set()
    await asyncio.wait_for(later, 5)


async def test_a_cancelled_wait_for_a_slot_keeps_the_adapter_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, ends = Slots(1, monkeypatch), asyncio.Event()
    first = asyncio.create_task(engine.request("a", ends))
    await asyncio.sleep(0.01)
    other = asyncio.create_task(engine.request("b", ends))
    await asyncio.sleep(0.03)
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)
    assert engine._adapters.touch("a")
    ends.set()
    await first


async def test_an_engine_without_slots_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="max_loras: no slot of 0"):
        await Slots(0, monkeypatch).request("a", asyncio.Event())
