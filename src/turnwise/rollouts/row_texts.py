"""A row as texts, which trajectories keep so that people can understand a reward."""

import json
from collections.abc import Mapping, Sequence
from itertools import islice

from turnwise.chat.messages import said
from turnwise.core.optional import Foreign
from turnwise.rollouts.problems import Row
from turnwise.trajectory import Message

_MAX_FIELDS = 50
_MAX_CHARS = 1_000  # maximum number of characters that a trajectory keeps of a field
_LONG = 40  # minimum number of characters of a text that is left out if a message contains it


def row_texts(row: Row, messages: Sequence[Message]) -> dict[str, str]:
    """Return the fields of a row as texts, and cut long texts. Fields that are None, or that are
    already in messages that the model read, are left out. Runs no user code, even if the type of a
    field is defined by the user.

    Example:
        >>> asked = "Which number follows three hundred and ninety-nine?"
        >>> row_texts({"question": asked, "answer": 400}, [{"role": "user", "content": asked}])
        {'answer': '400'}
    """
    heard = [said(message) for message in messages if message.get("role") != "assistant"]
    texts: dict[str, str] = {}
    for name, value in islice(row.items(), _MAX_FIELDS):
        if value is None or _is_said(value, heard):
            continue
        text = value if isinstance(value, str) else _json(value)
        text = f"{text[:_MAX_CHARS]} ..." if len(text) > _MAX_CHARS else text
        texts[_as_utf8(str(name))] = _as_utf8(text)
    return texts


def _as_utf8(text: str) -> str:
    """Return a text that UTF-8 can encode: a lone surrogate becomes an escape sequence."""
    return text.encode(errors="backslashreplace").decode()


def _is_said(value: Foreign, heard: Sequence[str]) -> bool:
    """Return whether messages contain a value: a long text, or a list of messages whose texts all
    occur in them."""
    if isinstance(value, str):
        return len(value) >= _LONG and any(value in each for each in heard)
    contents = [
        each.get("content") if isinstance(each, Mapping) and "role" in each else None
        for each in (value[:_MAX_FIELDS] if isinstance(value, list) else ())
    ]
    said_all = all(isinstance(one, str) and any(one in each for each in heard) for one in contents)
    return bool(contents) and said_all


def _json(value: Foreign) -> str:
    """Return the beginning of a value's JSON. A value that JSON cannot hold becomes its type's
    name."""
    encoder = json.JSONEncoder(ensure_ascii=False, default=lambda one: f"[{type(one).__name__}]")
    text = ""
    try:
        for part in encoder.iterencode(value):
            text += part
            if len(text) > _MAX_CHARS:
                break
    except (TypeError, ValueError, RecursionError):  # keys that are not texts, cycles
        return f"[{type(value).__name__}]"
    return text
