"""Documentation of every key: its type, default and meaning, as records and as commented YAML."""

import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Literal, NamedTuple, Union, get_args, get_origin

import yaml
from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

from turnwise.config.base import NEEDED_KEYS, NO_DEADLINE, Section, Tree, sections
from turnwise.config.schema import Config

_BOUNDS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
Kinds = list[type[Section]]
_ANY = TypeAdapter(object)


class Key(NamedTuple):
    """One key of the configuration, as shown in the reference."""

    name: str  # the full name, such as `training.steps`
    type: str  # the type in words, such as `int > 0` or `mask | drop`
    default: str | None  # the default as YAML; None for a key that must be set
    meaning: str  # one or more sentences, with the unit and the meaning of null
    kind: str = ""  # the `name` of the section kind that has this key; empty if every kind has it


@cache
def known_keys() -> dict[str, str]:
    """Return every key as `section.key`, in order, with its meaning."""
    return {key.name: key.meaning for key in describe_keys()}


def explain_config(config: Config | None = None) -> str:
    """Return a configuration, or the defaults if it is None, as YAML with a comment above each
    key."""
    lines: list[str] = []
    for key, field, value, parts in _walk(Config, config, chosen=True):
        indent, name, meaning = "  " * key.count("."), key.rpartition(".")[2], _meaning(field)
        if parts:
            kinds = [f"  {text}" for text in _kinds(parts)] if len(parts) > 1 else []
            lines += ["", *(f"{indent}# {text}" for text in (meaning, *kinds) if text)]
            lines += [f"{indent}{name}:"]
            continue
        required = config is None and (field.is_required() or key in NEEDED_KEYS)
        lines += [f"{indent}# {'(required) ' if required else ''}{meaning}"] if meaning else []
        lines += [f"{indent}{name}: {'' if required else _as_yaml(value)}".rstrip()]
    return "\n".join(lines) + "\n"


def _walk(
    kind: type[Section], section: Section | None, prefix: str = "", *, chosen: bool = False
) -> Iterator[tuple[str, FieldInfo, object, Kinds]]:
    """Yield every key of a section class, with its field, its value (from `section`, or the
    default), and the section classes that the value may have. Below a key with several such
    classes, yield no keys unless `chosen`; then yield the keys of the class in use."""
    for name, field in kind.model_fields.items():
        value = field.default if section is None else getattr(section, name)
        if value == NO_DEADLINE or (section is None and field.is_required()):
            value = None
        parts = sections(field.annotation)
        yield prefix + name, field, value, parts
        if len(parts) == 1 or (parts and chosen):
            below = value if isinstance(value, Section) else None
            of = parts[0] if below is None else type(below)
            yield from _walk(of, below, f"{prefix}{name}.", chosen=chosen)
    for name, value in (section.model_extra or {}).items() if section else ():
        yield prefix + name, FieldInfo(), value, []  # an argument of a user-defined class


def describe_keys(
    kind: type[Section] = Config,
    section: Section | None = None,
    prefix: str = "",
    *,
    items: bool = False,
) -> Iterator[Key]:
    """Yield the keys of a section class, with defaults from `section` if it is given. `items` adds
    the keys of sections in lists (`rollout.rewards[].weight`), in mappings
    (`environments.NAME.weight`), and of sections that may be null."""
    for key, field, value, parts in _walk(kind, section, prefix):
        if not parts:
            default = None if field.is_required() else _as_yaml(value)
            of_type = _type_name(field.annotation, field.metadata)
            if key in NEEDED_KEYS:
                default, of_type = None, "str"
            yield Key(key, of_type, default, _meaning(field))
            for where, each in _items(field.annotation) if items else ():
                yield from describe_keys(each, None, f"{key}{where}.", items=True)
        if len(parts) > 1:
            names = " | ".join(map(_name, parts))
            meaning = f"{_meaning(field)} {'; '.join(_kinds(parts))}"
            assert isinstance(value, Section)
            yield Key(f"{key}.name", names, _name(type(value)), meaning)
            for part in parts:
                below = describe_keys(part, value if isinstance(value, part) else None, f"{key}.")
                named = (k for k in below if k.name != f"{key}.name")
                yield from (k._replace(kind=_name(part)) for k in named)


def _items(kind: object) -> Iterator[tuple[str, type[Section]]]:
    """Yield the section classes in a key's plain value. Each comes with the text between the key
    and a subkey, such as `[]` or `.NAME`, without the final dot."""
    if isinstance(kind, type) and issubclass(kind, Section):
        yield "", kind
    elif (origin := get_origin(kind)) in (list, dict):
        place = "[]" if origin is list else ".NAME"
        yield from ((place + where, each) for where, each in _items(get_args(kind)[-1]))
    elif origin in (Annotated, Union, UnionType):
        for part in get_args(kind):
            yield from _items(part)


def _name(section: type[Section]) -> str:
    return str(section.model_fields["name"].default)


CHOICES = {key: parts for key, _, _, parts in _walk(Config, None) if len(parts) > 1}
"""Possible kinds of each key whose value is one of several sections, chosen by `name`."""


def _kinds(parts: Sequence[type[Section]]) -> list[str]:
    return [f"{_name(part)}: {part.__doc__}" for part in parts]


def _meaning(field: FieldInfo) -> str:
    """Return a key's docstring on one line; add its possible values if it does not name them."""
    text = " ".join((field.description or "").split())
    values = [str(value) for value in _literals(field.annotation)]
    if text and not all(re.search(rf"\b{value}\b", text) for value in values):
        text += f" Values: {', '.join(values)}."
    return text


def _literals(kind: object) -> Iterator[object]:
    if get_origin(kind) is Literal:
        yield from get_args(kind)
    else:
        for part in get_args(kind):
            yield from _literals(part)


def _type_name(kind: object, metadata: Sequence[object] = ()) -> str:
    """Return a key's type in words, with its bounds."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is NoneType:
        return "null"
    if origin is Annotated:
        return _type_name(arguments[0], arguments[1:])
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin is list:
        return f"list of {_type_name(arguments[0])}"
    if origin is dict or kind == Tree:
        return "mapping"
    if isinstance(kind, type) and not arguments:
        name = "mapping" if issubclass(kind, Section) else kind.__name__
        nullable = " | null" if any(type(m).__name__ == "PlainSerializer" for m in metadata) else ""
        bounds = [  # without the upper bound of a deadline
            f"{sign} {limit:g}"
            for item in metadata
            for one in getattr(item, "metadata", None) or [item]
            for name_of_bound, sign in _BOUNDS.items()
            if (limit := getattr(one, name_of_bound, None)) not in (None, NO_DEADLINE)
        ]
        return name + (f" {', '.join(bounds)}" if bounds else "") + nullable
    return " | ".join(_type_name(part) for part in arguments)


def _as_yaml(value: object) -> str:
    value = _ANY.dump_python(value)  # also converts sections in lists and mappings
    if isinstance(value, str) and "\n" in value:
        return json.dumps(value)  # valid YAML too, and on one line
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10_000)
    return text.removesuffix("\n").removesuffix("...").strip()
