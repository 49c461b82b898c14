"""pydantic's validators of unions and collections, bounded for bodies from clients.

pydantic collects every mistake in a list; for a value of a union, it collects the mistakes against
every member of the union. An item of Responses can have 60 types, so a list of 1,000 wrong items
gives 200,000 errors before anything can refuse the body. A `bound` validator stops at the first
wrong entry, and tries only the members of a union that have the value's `type`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

from pydantic import TypeAdapter
from pydantic_core import SchemaValidator

from turnwise.internals import internal

_FAILING_FAST = {"dict", "frozenset", "list", "set", "tuple"}
"""Kinds of schemas that have the option `fail_fast`."""
_KEPT = ("ref", "metadata", "serialization")
"""Keys of a union's schema that do not depend on the union's members."""
_BOUND = WeakSet[TypeAdapter[Any]]()
_FEW = 4  # a union of at most 4 members is left as it is
_OTHER, _NONE = "type=?", "type="
_Schema = dict[str, Any]
_GIVEN = {"metadata", "default", "expected"}
"""Keys of a schema whose values are not schemas."""


def bound(adapter: TypeAdapter[Any]) -> None:
    """Bound the time and memory of an adapter's validation by the size of the value: validation
    stops at the first wrong entry of a collection. The adapter still accepts the same values."""
    if adapter in _BOUND:
        return
    _BOUND.add(adapter)
    core: _Schema = dict(adapter.core_schema)
    definitions = {each["ref"]: each for each in core.get("definitions", ())}
    # A complete class already has an unbounded validator, which pydantic would use by default.
    adapter.validator = SchemaValidator(_bounded(core, definitions, {}), _use_prebuilt=False)


OF_A_TYPE = (AttributeError, KeyError, IndexError)
"""Errors that a type's own code raises, such as a validator that inspects a value before pydantic
has validated the value."""


def odd_value(error: Exception, value: object) -> tuple[list[str], str]:
    """Describe the mistake in a value on which its type's own code failed. Return the key of the
    wrong part, as a list of at most one item, and a sentence."""
    odd = getattr(error, "obj", None)
    entries = value.items() if isinstance(value, dict) else ()
    named = [str(key) for key, part in entries if part is odd and odd is not None]
    said = f"{type(odd).__name__} is not what is expected here" if named else f"{error!r}"
    return named[:1], said


def _bounded(part: Any, definitions: Mapping[str, _Schema], done: dict[int, Any]) -> Any:
    """Return a copy of a schema, or of a part of a schema, that stops at the first mistake."""
    if isinstance(part, list | tuple):
        return type(part)(_bounded(each, definitions, done) for each in part)
    if not isinstance(part, dict):
        return part
    if id(part) in done:
        return done[id(part)]
    copied: _Schema = {}
    done[id(part)] = copied
    kind = part.get("type")
    if not isinstance(kind, str):  # this is not a schema, but the fields of a schema by name
        kind = None
    for key, value in part.items():
        given = kind is not None and key in _GIVEN
        copied[key] = value if given else _bounded(value, definitions, done)
    if kind in _FAILING_FAST:
        copied["fail_fast"] = True
    if kind == "union" and len(part["choices"]) > _FEW:
        types = [_types(_member(choice), definitions) for choice in part["choices"]]
        done[id(part)] = copied = _tagged(copied, types)
    return copied


def _member(choice: Any) -> _Schema:
    """Return the schema of a union's member; `choice` may be a pair of the schema and a label."""
    found: _Schema = choice[0] if isinstance(choice, tuple) else choice
    return found


def _types(schema: _Schema, definitions: Mapping[str, _Schema]) -> frozenset[str] | None:
    """Return the values that a union's member allows for `type`; None if the member does not
    require a `type`."""
    while schema.get("type") not in ("typed-dict", "model-fields"):
        if schema.get("type") == "definition-ref":
            schema = definitions[schema["schema_ref"]]
        elif schema.get("type") in ("model", "definitions", "function-after"):
            schema = schema["schema"]
        else:
            return None
    field = schema["fields"].get("type", {})
    values = field.get("schema", {})
    if values.get("type") != "literal" or field.get("required", True) is False:
        return None  # a `type` with a default is not required
    if schema.get("type") == "typed-dict" and not field.get("required", schema.get("total", True)):
        return None
    return frozenset(map(str, values["expected"]))


def _tagged(union: _Schema, types: Sequence[frozenset[str] | None]) -> _Schema:
    """Return a union that tries only the members with the value's `type`, and the members that do
    not require a `type`. If no member has the value's `type`, all members are tried, so that the
    errors name the known types."""
    known = frozenset[str]().union(*(each for each in types if each is not None))
    if len(known) < _FEW:
        return union

    def of(tag: str | None) -> _Schema:
        pairs = zip(union["choices"], types, strict=True)
        fitting = [member for member, own in pairs if own is None or tag in own]
        return {**union, "choices": fitting or union["choices"][:1]}  # the first refuses the value

    choices = {f"{_NONE}{tag}": of(tag) for tag in known}
    choices |= {_NONE: of(None), _OTHER: dict(union)}
    kept: _Schema = {key: union[key] for key in _KEPT if key in union}
    for each in choices.values():
        each.pop("ref", None)
    return {
        "type": "tagged-union",
        "choices": choices,
        "discriminator": _tag(known),
        **kept,
    }


def _tag(known: frozenset[str]) -> Callable[[object], str]:
    def tag(value: object) -> str:
        if isinstance(value, dict):
            kind: object = value.get("type")
        else:
            kind = getattr(value, "type", None)
        if kind is None:
            return _NONE
        return f"{_NONE}{kind}" if isinstance(kind, str) and kind in known else _OTHER

    return tag


internal(TypeAdapter(int), "core_schema")
internal(TypeAdapter(int), "validator")
