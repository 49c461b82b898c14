"""Base class of all sections, and number and deadline types."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Self, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationInfo,
    field_validator,
    model_validator,
)

from turnwise.config.aliases import has_no_effect

Tree = dict[str, Any]  # keys and plain values, as loaded from a YAML file
PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]

NO_DEADLINE = 20 * 24 * 3600.0  # seconds for null: 20 days, which every clock and library accepts

Seconds = Annotated[
    float,
    Field(gt=0, le=NO_DEADLINE),
    BeforeValidator(lambda value: NO_DEADLINE if value is None else value),
    PlainSerializer(lambda value: None if value == NO_DEADLINE else value),
]
"""A deadline in seconds; null means no deadline."""
NEEDED_KEYS = ("environment", "data.path")  # must be set, unless a program provides them


def satisfies(holds: Callable[[str], object], message: str) -> AfterValidator:
    """Return a check that raises `message` unless `holds(text)`; {!r} in `message` is replaced by
    the text."""

    def check(text: str) -> str:
        if not holds(text):
            raise ValueError(message.format(text))
        return text

    return AfterValidator(check)


def built_in_or_path(
    key: str, names: Sequence[str], own: str = "package.module:Class"
) -> AfterValidator:
    """Return a check that a name is one of the built-in `names`, or a user-defined name with a
    colon."""
    message = f"{key} must be {', '.join(names)}, or {own}, not {{!r}}"
    return satisfies(lambda name: name in names or ":" in name, message)


class Section(BaseModel):
    """A part of the configuration: unknown keys are errors, docstrings are the help text.

    Plain values are converted as in pydantic if no information is lost: 2.0 becomes the integer 2,
    a text may become a number (YAML reads 1e-6 as a text), and 1 and 0 become true and false. But
    true does not become the number 1, because a user who sets a count to true has misread the key.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=()
    )

    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, tree: object) -> object:
        """Leave out keys and sections without a value, and foreign keys without effect."""
        if not isinstance(tree, dict):
            return tree

        def is_set(key: str, value: object) -> bool:
            field = cls.model_fields.get(key)
            if field is None:
                return not has_no_effect(key, value)
            return value is not None or not (field.is_required() or sections(field.annotation))

        return {key: value for key, value in tree.items() if is_set(key, value)}

    @field_validator("*", mode="before")
    @classmethod
    def _numbers(cls, value: object, info: ValidationInfo) -> object:
        """Refuse booleans in place of numbers, also in lists and mappings of numbers."""
        kind = cls.model_fields[info.field_name or ""].annotation
        if (boolean := next(booleans_for_numbers(kind, value), None)) is not None:
            raise ValueError(f"must be a number, not {str(boolean).lower()}")
        return value

    def changed(self, changes: Mapping[str, object]) -> Self:
        """Return a copy with changed values, which are not checked. For a section, the value is a
        mapping of the section's keys that change."""

        def value(key: str, new: object) -> object:
            old = getattr(self, key)
            return old.changed(new) if isinstance(old, Section) and isinstance(new, dict) else new

        return self.model_copy(update={key: value(key, new) for key, new in changes.items()})

    def mistakes(self) -> Iterator[str]:
        """Yield a sentence for each contradiction between keys; the first one is shown."""
        yield from ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if mistake := next(self.mistakes(), None):
            raise ValueError(mistake)
        return self


def sections(kind: object) -> list[type[Section]]:
    """Return the section classes that a key's type allows; an empty list if it allows plain
    values."""
    members = list(_alternatives(kind))
    found = [m for m in members if isinstance(m, type) and issubclass(m, Section)]
    return found if len(found) == len(members) else []


def booleans_for_numbers(kind: object, value: object) -> Iterator[bool]:
    """Yield each boolean in a value where the type allows numbers but not booleans."""
    kinds = set(_alternatives(kind))
    if isinstance(value, bool) and kinds & {int, float} and not kinds & {bool, object, Any}:
        yield value
    for each in kinds:
        items: Iterable[object] = ()
        if get_origin(each) is list and isinstance(value, list):
            items = value
        elif get_origin(each) is dict and isinstance(value, dict):
            items = value.values()
        for item in items:
            yield from booleans_for_numbers(get_args(each)[-1], item)


def _alternatives(kind: object) -> Iterator[object]:
    """Yield the types that a type allows, without their annotations."""
    if get_origin(kind) is Annotated:
        yield from _alternatives(get_args(kind)[0])
    elif get_origin(kind) in (Union, UnionType):
        for each in get_args(kind):
            yield from _alternatives(each)
    else:
        yield kind
