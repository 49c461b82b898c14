"""Comparison of two servers' answers, field by field."""

import json
import math
from collections.abc import Iterator
from typing import Any

import httpx

OF_A_REQUEST = {
    *(
        "id",
        "item_id",
        "call_id",
        "request_id",
        "response_id",
        "created",
        "created_at",
        "completed_at",
    ),
    *("sequence_number", "system_fingerprint"),
    # What was asked before decides how much of a prompt is in the cache.
    *("cached_tokens", "cache_write_tokens"),
}
"""Keys whose values differ from one request to the next."""
GROWING = {"content", "text", "arguments", "delta", "partial_json"}
"""Keys of texts that are streamed in pieces."""
TOLERANCE = 2e-3
"""Between log-probs of one model in batches of other sizes."""
Difference = tuple[str, object, object]
"""The path of a field, and both values."""


def read(response: httpx.Response) -> Any:
    """Return an answer as a tree: its status, its type, and its JSON, text or joined events."""
    kind = response.headers.get("content-type", "").partition(";")[0]
    body: Any = response.text
    if kind == "application/json":
        body = response.json()
    elif kind == "text/event-stream":
        body = joined(response.text)
    return {"status": response.status_code, "type": kind, "body": body}


def joined(text: str) -> dict[str, Any]:
    """Return server-sent events by type and choice: how many pieces a text comes in is chance."""
    made: dict[str, Any] = {}
    for event in text.split("\n\n"):
        fields = [line.partition(": ")[::2] for line in event.splitlines()]
        name = "".join(value for field, value in fields if field == "event")
        data = "".join(value for field, value in fields if field == "data")
        if not data or data == "[DONE]":
            made |= {data: True} if data else {}
            continue
        tree = json.loads(data)
        for choice in tree.get("choices") or ():  # an event may have several pieces of one call
            if calls := choice.get("delta", {}).get("tool_calls"):
                choice["delta"]["tool_calls"] = _merged([], calls)
        indices = [choice["index"] for choice in tree.get("choices") or ()]
        key = f"{name or 'event'} {indices} {tree.get('output_index', '')}"
        made[key] = _merged(made[key], tree) if key in made else tree
    return made


def _merged(before: Any, after: Any, key: str = "") -> Any:
    """Return one value for two pieces of a stream."""
    match before, after:
        case dict(), dict():
            names = {**before, **after}
            return {name: _of_both(before, after, name) for name in names}
        case list(), list() if all(isinstance(each, dict) and "index" in each for each in after):
            by_index = {each["index"]: each for each in before}
            for each in after:
                index = each["index"]
                by_index[index] = _merged(by_index[index], each) if index in by_index else each
            return list(by_index.values())
        case list(), list():
            return before + after
        case str(), str() if key in GROWING:
            return before + after
    return before if after is None else after


def _of_both(before: dict[str, Any], after: dict[str, Any], name: str) -> Any:
    if name in before and name in after:
        return _merged(before[name], after[name], name)
    return before.get(name, after.get(name))


def differences(ours: Any, theirs: Any, path: str = "") -> Iterator[Difference]:
    """Yield each field that differs, but for those of one request."""
    match ours, theirs:
        case dict(), dict():
            for name in sorted({*ours, *theirs} - OF_A_REQUEST):
                if name not in ours or name not in theirs:
                    yield f"{path}.{name}", ours.get(name, "absent"), theirs.get(name, "absent")
                else:
                    yield from differences(ours[name], theirs[name], f"{path}.{name}")
        case list(), list() if len(ours) == len(theirs):
            for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
                yield from differences(mine, other, f"{path}[{index}]")
        case float() | int(), float() | int() if isinstance(ours, float | int):
            if not math.isclose(ours, theirs, abs_tol=TOLERANCE):
                yield path, ours, theirs
        case _:
            if ours != theirs:
                yield path, ours, theirs
