"""Adapters that an engine loads when a request needs them, and that make room for others."""

from typing import Any

from turnwise.engine.adapters import AdapterTable, LoadedAdapter


def adapter(number: int) -> LoadedAdapter:
    request: Any = None
    return LoadedAdapter(number, request)


def test_the_one_that_was_not_needed_for_longest_makes_room() -> None:
    table = AdapterTable()
    for number, name in enumerate("abc"):
        table.bring(name, adapter(number))
    assert table.touch("a")
    assert not table.touch("d")
    idle = table.take_idle()
    assert idle is not None
    assert idle.number == 1
    assert not table.touch("b")
    assert len(table) == 2


def test_one_that_a_request_uses_stays() -> None:
    table = AdapterTable()
    table.bring("a", adapter(0))
    with table.using("a", "request"):
        assert table.take_idle() is None
    assert table.take_idle() is not None


def test_those_of_the_configuration_never_make_room() -> None:
    table = AdapterTable()
    table.add("served", adapter(0))
    assert table.touch("served")
    assert table.take_idle() is None
