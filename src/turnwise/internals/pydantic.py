"""pydantic's validators of unions and collections, where a foreign body is validated.

pydantic notes each mistake of a list, and for each entry of a union the mistakes of all members:
1,000 wrong entries among the 60 types of an item of Responses are 200,000 errors, made before
anything can refuse the body. A `bound` validator stops at the first wrong entry, and tries only
those members of a union whose `type` the value has.
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
"""Keys of a union that say nothing of its members."""
_BOUND = WeakSet[TypeAdapter[Any]]()
_FEW = 4  # members of a union that are all tried
_OTHER, _NONE = "type=?", "type="
_Schema = dict[str, Any]
_GIVEN = {"metadata", "default", "expected"}
"""Keys of a schema with values that are no schemas."""


def bound(adapter: TypeAdapter[Any]) -> None:
    """Let an adapter validate as before, but in a time and memory that follow the value's size:
    after the first wrong entry of a collection it looks at no other."""
    if adapter in _BOUND:
        return
    _BOUND.add(adapter)
    core: _Schema = dict(adapter.core_schema)
    definitions = {each["ref"]: each for each in core.get("definitions", ())}
    # A complete class has a validator already, which would be used as it is.
    adapter.validator = SchemaValidator(_bounded(core, definitions, {}), _use_prebuilt=False)


OF_A_TYPE = (AttributeError, KeyError, IndexError)
"""Errors of a type's own code, which looks into a value before it is validated."""


def odd_value(error: Exception, value: object) -> tuple[list[str], str]:
    """Return what is wrong with a value whose type's own code failed: the key of the part that it
    cannot look into, if it is one, and a sentence."""
    odd = getattr(error, "obj", None)
    entries = value.items() if isinstance(value, dict) else ()
    named = [str(key) for key, part in entries if part is odd and odd is not None]
    said = f"{type(odd).__name__} is not what is expected here" if named else f"{error!r}"
    return named[:1], said


def _bounded(part: Any, definitions: Mapping[str, _Schema], done: dict[int, Any]) -> Any:
    """Return a copy of a schema, or of a part of one, with fast failure."""
    if isinstance(part, list | tuple):
        return type(part)(_bounded(each, definitions, done) for each in part)
    if not isinstance(part, dict):
        return part
    if id(part) in done:
        return done[id(part)]
    copied: _Schema = {}
    done[id(part)] = copied
    kind = part.get("type")
    if not isinstance(kind, str):  # no schema: the fields of one, by their names
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
    """Return the schema of a union's member, which may have a label."""
    found: _Schema = choice[0] if isinstance(choice, tuple) else choice
    return found


def _types(schema: _Schema, definitions: Mapping[str, _Schema]) -> frozenset[str] | None:
    """Return the values of `type` that a member of a union may have; None if it needs none."""
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
        return None  # with a default, too
    if schema.get("type") == "typed-dict" and not field.get("required", schema.get("total", True)):
        return None
    return frozenset(map(str, values["expected"]))


def _tagged(union: _Schema, types: Sequence[frozenset[str] | None]) -> _Schema:
    """Return a union that tries the members with the `type` of a value and those that need none;
    all if no member has it, so that their errors name the known ones."""
    known = frozenset[str]().union(*(each for each in types if each is not None))
    if len(known) < _FEW:
        return union

    def of(tag: str | None) -> _Schema:
        pairs = zip(union["choices"], types, strict=True)
        fitting = [member for member, own in pairs if own is None or tag in own]
        return {**union, "choices": fitting or union["choices"][:1]}  # the first refuses it

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
