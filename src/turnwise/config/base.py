"""Base class of all sections, and number and deadline types."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Self, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    model_validator,
)

from turnwise.config.aliases import asks_for_nothing

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


def must(holds: Callable[[str], object], message: str) -> AfterValidator:
    """Return the check of a text that must hold; {!r} in the message of an error is the text."""

    def check(text: str) -> str:
        if not holds(text):
            raise ValueError(message.format(text))
        return text

    return AfterValidator(check)


def named(key: str, names: Sequence[str], own: str = "package.module:Class") -> AfterValidator:
    """Return the check of a name that is built in, or of the user's own, which has a colon."""
    message = f"{key} must be {', '.join(names)}, or {own}, not {{!r}}"
    return must(lambda name: name in names or ":" in name, message)


class Section(BaseModel):
    """A part of the configuration: unknown keys are errors, docstrings are the help text."""

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
                return not asks_for_nothing(key, value)
            return value is not None or not (field.is_required() or sections(field.annotation))

        return {key: value for key, value in tree.items() if is_set(key, value)}

    def changed(self, changes: Mapping[str, object]) -> Self:
        """Return a copy with other values, which are not checked; those of a section are a mapping
        of what changes there."""

        def value(key: str, new: object) -> object:
            old = getattr(self, key)
            return old.changed(new) if isinstance(old, Section) and isinstance(new, dict) else new

        return self.model_copy(update={key: value(key, new) for key, new in changes.items()})

    def mistakes(self) -> Iterator[str]:
        """Yield a sentence for each contradiction between keys; the first one is shown."""
        yield from ()

    @model_validator(mode="before")
    @classmethod
    def _without_truths(cls, tree: object) -> object:
        """Refuse true and false where a number is asked for: pydantic takes them for 1 and 0."""
        for key, value in tree.items() if isinstance(tree, dict) else ():
            field = cls.model_fields.get(key)
            if field is None or bool in (kinds := _plain_kinds(field.annotation)):
                continue
            given = value if isinstance(value, list) else [value]
            if {int, float} & kinds and any(isinstance(one, bool) for one in given):
                raise ValueError(f"{key} must be a number, not {str(value).lower()}")
        return tree

    @model_validator(mode="after")
    def _check(self) -> Self:
        if mistake := next(self.mistakes(), None):
            raise ValueError(mistake)
        return self


def _plain_kinds(kind: object) -> set[type]:
    """Return the plain types that a key's type is made of."""
    found = {kind} if isinstance(kind, type) else set()
    return found.union(*map(_plain_kinds, get_args(kind)))


def sections(kind: object) -> list[type[Section]]:
    """Return the section classes that a key's type allows; none where it is a plain value."""
    members = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    members = tuple(get_args(m)[0] if get_origin(m) is Annotated else m for m in members)
    if all(isinstance(member, type) and issubclass(member, Section) for member in members):
        return list(members)
    return []
