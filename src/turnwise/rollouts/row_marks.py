"""Marks of rows: digests that show a resumed run whether its data changed since the checkpoint.

At most 64 rows are marked, whatever the number of rows. Nearly all marks differ if the data were
replaced, or the rows were moved, shuffled or selected differently. An edited row is noticed only if
it is marked.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress

from turnwise.core.json_types import JsonObject
from turnwise.core.optional import Foreign
from turnwise.errors import InputError

_MARKED = 64


def marks_of(rows: Sequence[JsonObject]) -> dict[str, str]:
    """Return digests of the first row, the last row, and some rows between them, by their numbers
    from 1. A row that cannot be read, or differs on each read, has no mark. Reads these rows."""
    steps = min(len(rows), _MARKED) - 1
    numbers = {round(k * (len(rows) - 1) / max(1, steps)) for k in range(steps + 1)}
    marks = {}
    for number in sorted(numbers):
        with suppress(InputError, RecursionError):
            mark = _digest(rows[number])
            if mark == _digest(rows[number]):
                marks[str(number + 1)] = mark
    return marks


def changed(before: Mapping[str, str], now: Mapping[str, str]) -> tuple[list[int], int]:
    """Return the numbers of the rows whose marks differ, and the number of compared rows."""
    both = before.keys() & now.keys()
    return sorted(int(number) for number in both if before[number] != now[number]), len(both)


def _digest(row: JsonObject) -> str:
    text = json.dumps(_plain(row), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _plain(value: Foreign) -> Foreign:
    if isinstance(value, str):  # a file, such as an image, may be in another folder now
        return os.path.basename(value) if value.startswith("/") else value
    if isinstance(value, bytes):
        return hashlib.blake2b(value, digest_size=8).hexdigest()
    if isinstance(value, Mapping):
        return {str(key): _plain(below) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(below) for below in value]
    return value if isinstance(value, int | float | None) else type(value).__name__
