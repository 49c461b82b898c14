"""Gemma 4's arguments with the types that the model wrote.

The format marks each text: `a:<|"|>1<|"|>` is a text, `a:1` is a number. vLLM's parser keeps both
as texts and converts them by the tool's schema. Where the schema does not give a type, as in a
`dict` or a `list[dict]`, vLLM's parser leaves numbers, true, false and null as texts.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from turnwise.core.json_types import JsonObject
from turnwise.core.optional import Foreign

_BEGIN, _END, _MARK = "<|tool_call>call:", "<tool_call|>", '<|"|>'
_SPACE = " \n\t,"
_MAX_DEPTH = 100
_CHOICES = ("enum", "const", "allOf", "$ref")


@dataclass(frozen=True, slots=True)
class _Bare:
    """A value that is not marked as a text."""

    text: str


def with_types(
    text: str, calls: list[tuple[str, str]], schemas: Mapping[str, JsonObject]
) -> list[str]:
    """Return the arguments of each call, with the types that the model wrote where the schema does
    not give a type. `calls` has the names and arguments that vLLM read from `text`; `schemas` has
    the schema of each tool's parameters."""
    written = [_call(part.partition(_END)[0]) for part in text.split(_BEGIN)[1:]]
    if len(written) != len(calls):  # vLLM read different calls: keep its arguments
        return [arguments for _, arguments in calls]
    typed = []
    for (name, arguments), (named, found) in zip(calls, written, strict=True):
        if name != named or found is None:
            typed.append(arguments)
        else:
            whole = _merged(json.loads(arguments), found, schemas.get(name, {}))
            typed.append(json.dumps(whole, ensure_ascii=False))
    return typed


def _merged(given: Foreign, written: Foreign, schema: Foreign) -> Foreign:
    """Return vLLM's value, with the types that the model wrote where vLLM left texts."""
    schema = schema if isinstance(schema, dict) else {}
    if isinstance(written, _Bare):
        if given != written.text or takes_texts(schema):
            return given
        try:
            value = json.loads(written.text)
        except ValueError:
            return given
        return given if isinstance(value, str) else value
    if isinstance(given, dict) and isinstance(written, dict) and given.keys() == written.keys():
        own, others = schema.get("properties"), schema.get("additionalProperties")
        known = own if isinstance(own, dict) else {}
        return {k: _merged(v, written[k], known.get(k, others)) for k, v in given.items()}
    if isinstance(given, list) and isinstance(written, list) and len(given) == len(written):
        items = schema.get("items")
        return [_merged(*pair, items) for pair in zip(given, written, strict=True)]
    return given


def takes_texts(schema: JsonObject) -> bool:
    """Return whether a schema allows a string, or defers to listed values or other schemas."""
    types = schema.get("type", [])
    if "string" in (types if isinstance(types, list) else [types]):
        return True
    members = [each for key in ("anyOf", "oneOf") for each in schema.get(key, ())]
    if members and all(isinstance(each, dict) for each in members):
        return any(map(takes_texts, members))
    return any(key in schema for key in _CHOICES)


def _call(text: str) -> tuple[str, JsonObject | None]:
    """Return the name of a call, and its arguments as written, or None if these are broken."""
    name, brace, rest = text.partition("{")
    try:
        return name.strip(), _ArgumentReader(rest).members() if brace else None
    except (IndexError, ValueError, RecursionError):
        return name.strip(), None


class _ArgumentReader:
    """Reads arguments from left to right; raises IndexError or ValueError if they are broken."""

    def __init__(self, text: str) -> None:
        self._text, self._at, self._depth = text, 0, 0

    def members(self) -> JsonObject:
        """Read the rest of an object whose opening brace has been read."""
        found: JsonObject = {}
        while self._next() != "}":
            key = self._text_at() if self._begins() else self._until(":").strip()
            self._at = self._text.index(":", self._at) + 1
            found[key] = self._value()
        self._at += 1
        return found

    def _value(self) -> object:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise ValueError
        match self._next():
            case "{":
                self._at += 1
                value: object = self.members()
            case "[":
                self._at += 1
                items = list[object]()
                while self._next() != "]":
                    items.append(self._value())
                self._at += 1
                value = items
            case _:
                value = self._text_at() if self._begins() else _Bare(self._until(",}]").strip())
        self._depth -= 1
        return value

    def _next(self) -> str:
        while self._text[self._at] in _SPACE:
            self._at += 1
        return self._text[self._at]

    def _begins(self) -> bool:
        return self._text.startswith(_MARK, self._at)

    def _text_at(self) -> str:
        begin = self._at + len(_MARK)
        end = self._text.index(_MARK, begin)
        self._at = end + len(_MARK)
        return self._text[begin:end]

    def _until(self, marks: str) -> str:
        begin = self._at
        while self._text[self._at] not in marks:
            self._at += 1
        return self._text[begin : self._at]
