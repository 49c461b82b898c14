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
    taken = table.take()
    assert taken is not None
    assert (taken[0], taken[1].number) == ("b", 1)
    assert not table.touch("b")
    assert len(table) == 2


def test_one_that_a_request_uses_makes_room_if_all_are_in_use() -> None:
    table = AdapterTable()
    for number, name in enumerate("abc"):
        table.bring(name, adapter(number))
    with table.using("a", "first"), table.using("b", "second"):
        assert [name for name, _ in (table.take(), table.take())] == ["c", "a"]  # type: ignore[misc]
        assert not table.touch("a")  # a new request waits until it is loaded again


def test_those_of_the_configuration_never_make_room() -> None:
    table = AdapterTable()
    table.add("served", adapter(0))
    assert table.touch("served")
    assert table.take() is None
