"""Rows of tables: removes the null keys that a table adds to messages and tools.

In Arrow, every record of a column has the keys of all records of the column; the keys that a record
lacks get null values. Parquet files, datasets, and JSON Lines that `Dataset.to_json` wrote have
such keys. In messages, calls and descriptions of tools, a null means the same as a missing key, but
a model would see it, so these keys are removed. Everywhere else a null is a value, and is kept.
"""

import json
from collections.abc import Collection, Mapping
from contextlib import suppress

from turnwise.core.optional import Foreign
from turnwise.rollouts.problems import Row

_CONVERSATIONS = ("messages", "conversations", "prompt", "completion", "chosen", "rejected")


def own_keys(row: Row) -> Row:
    """Return a row of a table without null keys in messages, calls, descriptions of tools, and
    trajectories. A null argument of a call is kept if the called tool requires this argument."""
    if "turns" in row:  # a trajectory, or a trace
        return {name: _without_null(value) for name, value in row.items()}
    required = _required(row.get("tools"))
    return {
        name: _without_null(value) if name == "tools" else _cleaned(value, required)
        for name, value in row.items()
    }


def is_of_table(row: Row) -> bool:
    """Return whether the messages or tools of a row have keys that a table added: all messages have
    the same keys, with some null values, or a tool has a parameter that is null."""
    for said in map(row.get, _CONVERSATIONS):
        records = [one for one in said if isinstance(one, dict)] if isinstance(said, list) else []
        same = len({frozenset(one) for one in records}) == 1
        if same and any(None in one.values() for one in records):
            return True
    return any(None in known.values() for known in map(_properties, _functions(row.get("tools"))))


def _cleaned(value: Foreign, required: Mapping[str, Collection[str]]) -> Foreign:
    if isinstance(value, list):
        return [_cleaned(one, required) for one in value]
    if not isinstance(value, dict):
        return value
    if ("role" in value and "content" in value) or ("from" in value and "value" in value):
        return _message(value, required)
    if isinstance(value.get("function"), dict) or ("name" in value and "parameters" in value):
        return _without_null(value)
    return {key: _cleaned(below, required) for key, below in value.items()}


def _message(message: Row, required: Mapping[str, Collection[str]]) -> Row:
    made: Row = _without_null(message)
    calls = message.get("tool_calls")
    for before, call in zip(calls or (), made.get("tool_calls") or (), strict=False):
        function = before.get("function") if isinstance(before, dict) else None
        if isinstance(function, dict) and isinstance(given := function.get("arguments"), dict):
            kept = required.get(str(function.get("name")), ())
            call["function"]["arguments"] = {
                key: _without_null(value)
                for key, value in given.items()
                if value is not None or key in kept
            }
    return made


def _without_null(value: Foreign) -> Foreign:
    if isinstance(value, dict):
        return {key: _without_null(below) for key, below in value.items() if below is not None}
    return [_without_null(below) for below in value] if isinstance(value, list) else value


def _required(tools: Foreign) -> dict[str, Collection[str]]:
    """Return the parameters that each tool requires, by its name."""
    required: dict[str, Collection[str]] = {}
    for function in _functions(tools):
        parameters = function.get("parameters")
        names = parameters.get("required") if isinstance(parameters, dict) else None
        required[str(function.get("name"))] = names if isinstance(names, list) else ()
    return required


def _properties(function: Row) -> Row:
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    return properties if isinstance(properties, dict) else {}


def _functions(tools: Foreign) -> list[Row]:
    if isinstance(tools, str):  # as JSON text
        with suppress(ValueError, RecursionError):
            tools = json.loads(tools)
    given = [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    functions = (tool.get("function", tool) for tool in given)
    return [function for function in functions if isinstance(function, dict)]
