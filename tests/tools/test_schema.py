"""Functions as tools: what the model reads of their types, and how its arguments arrive."""

import copy
import datetime
import enum
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NotRequired, Optional, Union

import jsonschema
import pytest
from pydantic import BaseModel, ConfigDict, Field
from transformers.utils import get_json_schema
from typing_extensions import TypedDict

from examples.calculator.tool import TOOL_SCHEMA, calculate
from examples.gsm8k.environment import calculate as calculate_float
from turnwise.errors import InputError
from turnwise.tools.schema import ArgumentsError, function_schema

INTEGER, NULL = {"type": "integer"}, {"type": "null"}


class Color(enum.Enum):
    RED = "red"
    GREEN = "green"


class Item(BaseModel):
    """Something to buy."""

    name: str = Field(description="What it is.")
    count: int = Field(default=1, ge=1)


@dataclass
class Point:
    x: float
    y: float
    names: list[str] = field(default_factory=list)


class Span(TypedDict):
    first: int
    last: NotRequired[int]


class Node(BaseModel):
    title: str
    children: list["Node"] = []


class Cat(BaseModel):
    kind: Literal["cat"]


class Dog(BaseModel):
    kind: Literal["dog"]
    barks: bool


class Opaque:
    pass


class Loose(BaseModel):
    model_config = ConfigDict(extra="allow")
    a: int


ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "description": "What it is."},
        "count": {"type": "integer", "minimum": 1, "default": 1},
    },
    "required": ["name"],
    "additionalProperties": False,
    "description": "Something to buy.",
}
POINT = {
    "type": "object",
    "properties": {
        "x": {"type": "number"},
        "y": {"type": "number"},
        "names": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["x", "y"],
    "additionalProperties": False,
}
NODE = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "children": {"type": "array", "items": {"$ref": "#/$defs/Node"}, "default": []},
    },
    "required": ["title"],
    "additionalProperties": False,
}
TYPES: list[tuple[Any, dict[str, Any], object, object]] = [
    (Optional[int], {"anyOf": [INTEGER, NULL]}, None, None),  # noqa: UP045
    (int | str, {"anyOf": [INTEGER, {"type": "string"}]}, "x", "x"),
    (
        list[list[int]],
        {"type": "array", "items": {"type": "array", "items": INTEGER}},
        [[1]],
        [[1]],
    ),
    (tuple[int, ...], {"type": "array", "items": INTEGER}, [1, 2], (1, 2)),
    (
        tuple[float, float],
        {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2},
        [1, 2.5],
        (1.0, 2.5),
    ),
    (
        tuple[int, str],
        {
            "type": "array",
            "prefixItems": [INTEGER, {"type": "string"}],
            "minItems": 2,
            "maxItems": 2,
        },
        [1, "a"],
        (1, "a"),
    ),
    (set[int], {"type": "array", "items": INTEGER, "uniqueItems": True}, [1, 2], {1, 2}),
    (Color, {"type": "string", "enum": ["red", "green"]}, "red", Color.RED),
    (Literal["a"], {"type": "string", "enum": ["a"]}, "a", "a"),
    (Item, ITEM, {"name": "tea", "count": 2}, Item(name="tea", count=2)),
    (Point, POINT, {"x": 1, "y": 2}, Point(1.0, 2.0)),
    (
        Span,
        {
            "type": "object",
            "properties": {"first": INTEGER, "last": INTEGER},
            "required": ["first"],
            "additionalProperties": False,
        },
        {"first": 1},
        {"first": 1},
    ),
    (
        dict[str, Item],
        {"type": "object", "additionalProperties": ITEM},
        {"a": {"name": "tea"}},
        {"a": Item(name="tea")},
    ),
    (
        dict[Color, int],
        {
            "type": "object",
            "additionalProperties": INTEGER,
            "propertyNames": {"type": "string", "enum": ["red", "green"]},
        },
        {"red": 1},
        {Color.RED: 1},
    ),
    (
        Annotated[Union[Cat, Dog], Field(discriminator="kind")],  # noqa: UP007
        {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {"kind": {"type": "string", "enum": ["cat"]}},
                    "required": ["kind"],
                    "additionalProperties": False,
                },
                {
                    "type": "object",
                    "properties": {
                        "kind": {"type": "string", "enum": ["dog"]},
                        "barks": {"type": "boolean"},
                    },
                    "required": ["kind", "barks"],
                    "additionalProperties": False,
                },
            ]
        },
        {"kind": "dog", "barks": True},
        Dog(kind="dog", barks=True),
    ),
    (
        Loose,
        {
            "type": "object",
            "properties": {"a": INTEGER},
            "required": ["a"],
            "additionalProperties": True,
        },
        {"a": 1, "b": 2},
        Loose(a=1, b=2),  # type: ignore[call-arg]
    ),
    (
        Annotated[int, Field(ge=1, description="How many.")],
        {"type": "integer", "minimum": 1, "description": "How many."},
        3,
        3,
    ),
    (Annotated[str, "Where to."], {"type": "string", "description": "Where to."}, "x", "x"),
    (
        datetime.date,
        {"type": "string", "format": "date"},
        "2026-01-02",
        datetime.date(2026, 1, 2),
    ),
    (Any, {}, [1], [1]),
    (dict, {"type": "object"}, {"a": 1}, {"a": 1}),
    (list, {"type": "array"}, [1], [1]),
]


def taking(hint: object) -> Callable[..., object]:
    """Return a function of one argument of a type."""

    def take(value: object) -> object:
        return value

    take.__annotations__["value"] = hint
    return take


def parameters(function: Callable[..., object]) -> dict[str, Any]:
    described: dict[str, Any] = function_schema(function).description["function"]["parameters"]
    return described


def named(function: Callable[..., object], **arguments: object) -> dict[str, object]:
    """Return a function's arguments as a call with these in JSON gives them."""
    given, keywords = function_schema(function).read(json.dumps(arguments))
    assert given == []
    return keywords


@pytest.mark.parametrize(
    ("hint", "schema", "sent", "arrived"), TYPES, ids=[str(hint)[:40] for hint, *_ in TYPES]
)
def test_each_type_has_its_schema_and_arrives_as_itself(
    hint: object, schema: dict[str, Any], sent: object, arrived: object
) -> None:
    function = taking(hint)
    found = parameters(function)
    assert found == {
        "type": "object",
        "properties": {"value": schema},
        "required": ["value"],
        **({} if found.get("additionalProperties", True) else {"additionalProperties": False}),
    }
    jsonschema.Draft202012Validator.check_schema(found)
    jsonschema.validate({"value": sent}, found)
    value = named(function, value=sent)["value"]
    assert value == arrived
    assert type(value) is type(arrived)


def plain(words: list[str], weights: dict[str, float], exact: bool, tries: Literal[1, 2]) -> str:
    """Search, and say what was found.

    It takes a moment.

    Args:
        words: Words to look for,
            in any order.
        weights: How much each counts.
        exact: Whether all must be there.
        tries: How often.

    Returns:
        What was found.
    """
    return str((words, weights, exact, tries))


def ready() -> None:
    """Say so."""


@pytest.mark.parametrize("function", [plain, ready, calculate, calculate_float])
def test_plain_arguments_are_described_as_transformers_does(
    function: Callable[..., object],
) -> None:
    ours = function_schema(function).description
    assert json.dumps(ours) == json.dumps(get_json_schema(function))
    if function is calculate:
        assert ours == TOOL_SCHEMA


def order(items: list[Item], color: Color, at: Point, note: str = "none", more: int = 0) -> str:
    """Order something.

    Args:
        items: What to order.
        color: Of the ribbon.
        note: For the driver.
    """
    return note


def test_rich_arguments_are_described_with_their_fields() -> None:
    assert function_schema(order).description == {
        "type": "function",
        "function": {
            "name": "order",
            "description": "Order something.",
            "parameters": {
                "type": "object",
                "properties": {
                    "items": {"type": "array", "items": ITEM, "description": "What to order."},
                    "color": {
                        "type": "string",
                        "enum": ["red", "green"],
                        "description": "Of the ribbon.",
                    },
                    "at": POINT,
                    "note": {"type": "string", "description": "For the driver.", "default": "none"},
                    "more": {"type": "integer", "default": 0},
                },
                "required": ["items", "color", "at"],
                "additionalProperties": False,
            },
            "return": {"type": "string"},
        },
    }
    arrived = named(order, items=[{"name": "tea"}], color="green", at={"x": 1, "y": 2}, more=3)
    assert arrived == {
        "items": [Item(name="tea")],
        "color": Color.GREEN,
        "at": Point(1.0, 2.0),
        "note": "none",
        "more": 3,
    }


def test_strict_mode_takes_a_schema_with_all_arguments_required() -> None:
    from agents.strict_schema import ensure_strict_json_schema

    @dataclass
    class Size:
        width: int
        unit: Literal["cm", "in"]

    def send(
        size: Size, pet: Cat | Dog, colors: list[Color], at: tuple[float, float] | None
    ) -> None:
        """Send a pet."""

    found = parameters(send)
    assert ensure_strict_json_schema(copy.deepcopy(found)) == found


def test_a_type_that_contains_itself_keeps_a_reference() -> None:
    found = parameters(taking(Node))
    assert found["properties"] == {"value": NODE}
    assert found["$defs"] == {"Node": NODE}
    jsonschema.validate({"value": {"title": "a", "children": [{"title": "b"}]}}, found)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"value": {"title": "a", "children": [{"name": "b"}]}}, found)
    tree = named(taking(Node), value={"title": "a", "children": [{"title": "b"}]})["value"]
    assert tree == Node(title="a", children=[Node(title="b")])


def google(first: int, second: int, third: int = 1) -> None:
    """Do it.

    At once.

    Args:
        first (int): The first,
            of them.
        second: The second: of two.

    Raises:
        ValueError: Never.
    """


def numpy(first: int, second: int, third: int = 1) -> None:
    """Do it.

    At once.

    Parameters
    ----------
    first : int
        The first,
        of them.
    second
        The second: of two.
    """


def sphinx(first: int, second: int, third: int = 1) -> None:
    """Do it.

    At once.

    :param int first: The first,
        of them.
    :param second: The second: of two.
    :raises ValueError: Never.
    """


@pytest.mark.parametrize("function", [google, numpy, sphinx])
def test_docstrings_are_read_in_three_styles(function: Callable[..., object]) -> None:
    said = function_schema(function).description["function"]
    assert said["description"] == "Do it.\n\nAt once."
    assert said["parameters"]["properties"] == {
        "first": {"type": "integer", "description": "The first, of them."},
        "second": {"type": "integer", "description": "The second: of two."},
        "third": {"type": "integer", "default": 1},
    }


def test_what_an_annotation_says_counts_more_than_the_docstring() -> None:
    def look(
        place: Annotated[str, "A city."],
        day: Annotated[str, "not this", Field(description="A date.")],
        far: int = Field(default=3, description="In km.", le=9),
    ) -> None:
        """Look.

        Args:
            place: Some place.
            day: Some day.
            far: Some way.
        """

    found = parameters(look)
    assert found["required"] == ["place", "day"]
    assert found["properties"] == {
        "place": {"type": "string", "description": "A city."},
        "day": {"type": "string", "description": "A date."},
        "far": {"type": "integer", "maximum": 9, "description": "In km.", "default": 3},
    }
    assert named(look, place="x", day="y") == {"place": "x", "day": "y", "far": 3}


def test_a_function_without_a_description_is_still_offered() -> None:
    def bare(value: int) -> Any:
        return value

    assert function_schema(bare).description["function"] == {
        "name": "bare",
        "description": "",
        "parameters": {
            "type": "object",
            "properties": {"value": INTEGER},
            "required": ["value"],
            "additionalProperties": False,
        },
        "return": {},
    }


@pytest.mark.parametrize(
    ("hint", "described"),
    [
        (dict[str, int], True),
        (type(None), True),
        (Item, False),
        (int | None, False),
        (Node, False),
        (Opaque, False),
    ],
)
def test_a_result_is_described_if_its_type_is_plain(hint: object, described: bool) -> None:
    function = taking(int)
    function.__annotations__["return"] = hint
    assert ("return" in function_schema(function).description["function"]) == described


def test_any_name_and_any_kind_of_argument_is_passed_on() -> None:
    def odd(
        copy: int, json: int = 1, /, model_config: int = 2, *rest: int, _x: int = 3, **more: int
    ) -> object:
        return (copy, json, model_config, rest, _x, more)

    assert list(parameters(odd)["properties"]) == ["copy", "json", "model_config", "_x"]
    given, keywords = function_schema(odd).read('{"copy": 7, "_x": 8}')
    assert odd(*given, **keywords) == (7, 1, 2, (), 8, {})  # type: ignore[arg-type]
    with pytest.raises(ArgumentsError, match="argument_0: Extra inputs are not permitted"):
        function_schema(odd).read('{"copy": 7, "argument_0": 8}')


def test_a_default_that_json_cannot_hold_stays_a_default() -> None:
    def late(when: object = lambda: 1, names: list[str] = []) -> None:  # noqa: B006
        """Wait."""

    properties = parameters(late)["properties"]
    assert properties == {
        "when": {},
        "names": {"type": "array", "items": {"type": "string"}, "default": []},
    }
    names: Any = named(late)["names"]
    names.append("a")
    assert named(late)["names"] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            '{"items": [{"name": 3}], "color": "red", "at": {"x": 1, "y": 2}}',
            "items.0.name: Input s",
        ),
        ('{"items": [{}], "color": "red", "at": {"x": 1, "y": 2}}', "items.0.name: Field required"),
        (
            '{"items": [], "color": "blue", "at": {"x": 1, "y": 2}}',
            "color: Input should be 'red' or",
        ),
        ('{"items": [], "color": "red", "at": {"x": 1}}', "at.y: Field required"),
        ('{"items": [], "color": "red"}', "at: Field required"),
        ("[]", "arguments: Input should be an object"),
        ('{"items": [', "arguments: Invalid JSON"),
    ],
)
def test_a_mistake_is_named_with_its_path(arguments: str, message: str) -> None:
    with pytest.raises(ArgumentsError) as caught:
        function_schema(order).read(arguments)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("hint", "sent", "message"),
    [
        (int | list[int], {}, "value: Input should be a valid integer or a valid array"),
        (
            list[int | Item],
            [{"name": 1}],
            "value.0: Input should be a valid integer; value.0.name: ",
        ),
        (Annotated[Cat | Dog, Field(discriminator="kind")], {"kind": "dog"}, "value.barks: Field"),
        (dict[str, int], {"a.b": "x"}, "value.a.b: Input should be a valid integer"),
        (int | None, "x", "value: Input should be a valid integer"),
    ],
)
def test_the_path_of_a_mistake_has_no_names_of_types(
    hint: object, sent: object, message: str
) -> None:
    with pytest.raises(ArgumentsError) as caught:
        named(taking(hint), value=sent)
    assert str(caught.value).startswith(message)


def test_few_of_many_mistakes_are_named() -> None:
    with pytest.raises(ArgumentsError) as caught:
        named(taking(list[int]), value=["x"] * 1000)
    assert str(caught.value).count("valid integer") == 5


def untyped(a, b: int) -> None:  # type: ignore[no-untyped-def]
    """Do it."""


def opaque(a: int, b: Opaque) -> None:
    """Do it."""


def unresolved(a: "Missing") -> None:  # type: ignore[name-defined]  # noqa: F821
    """Do it."""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (untyped, "tool untyped .* its argument a has no type hint"),
        (opaque, "tool opaque .* its argument b has a type that cannot be described .*Opaque"),
        (unresolved, "tool unresolved .* its type hints cannot be read .*'Missing' is not defined"),
    ],
)
def test_an_undescribable_function_is_refused_in_one_sentence(
    function: Callable[..., object], message: str
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        function_schema(function)
    assert "\n" not in str(caught.value)


def test_methods_leave_out_their_first_argument() -> None:
    class Desk:
        def work(self, hours: int) -> None:
            """Work."""

        @classmethod
        def rest(cls, hours: int) -> None:
            """Rest."""

    for function in (Desk.work, Desk.rest.__func__):  # type: ignore[attr-defined]
        assert list(parameters(function)["properties"]) == ["hours"]


def odd(city: str, *rest: str, **options: int) -> str:
    """Find a city.

    Args:
        town: Its name.
        options: More.
    """
    return city


def silent(city: str) -> str:
    return city


def test_what_a_description_lacks_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING"):
        for _ in range(3):
            function_schema(odd)
            function_schema(silent)
    assert [record.message for record in caplog.records] == [
        "tool odd: *rest is not offered to the model",
        "tool odd: **options is not offered to the model",
        "tool odd: its docstring describes town, and it has no such argument",
        "tool silent: it has no docstring, so the model reads its name and arguments only",
    ]


def test_an_argument_that_is_a_function_is_refused() -> None:
    def sort(by: Callable[[int], int] | None = None) -> int:
        """Sort."""
        return 1

    with pytest.raises(InputError, match="its argument by has a type that cannot be described"):
        function_schema(sort)
