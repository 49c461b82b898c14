"""Arguments of tools that others describe, validated by a schema that nobody trusts."""

import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from turnwise.errors import InputError
from turnwise.tools import Tool
from turnwise.tools.json_schema import ArgumentsSchema, check_parameters
from turnwise.tools.schema import ArgumentsError
from turnwise.tools.toolbox import Toolbox

TREE = {
    "type": "object",
    "properties": {
        "value": {"type": "integer"},
        "children": {"type": "array", "items": {"$ref": "#"}},
    },
    "required": ["value"],
}


def schema_of(schema: Any) -> ArgumentsSchema:
    return ArgumentsSchema(json.dumps(schema), "tool")


def of_x(schema: Any, **more: Any) -> ArgumentsSchema:
    return schema_of({"type": "object", "properties": {"x": schema}, **more})


def mistake(schema: ArgumentsSchema, arguments: Any) -> str:
    with pytest.raises(ArgumentsError) as caught:
        schema.read(json.dumps(arguments))
    return str(caught.value)


def doubling(levels: int, applied: str = "allOf") -> dict[str, Any]:
    """References that double `levels` times."""
    parts = {
        f"a{i}": {applied: [{"$ref": f"#/$defs/a{i + 1}"}, {"$ref": f"#/$defs/a{i + 1}"}]}
        for i in range(levels)
    }
    return {"$defs": {**parts, f"a{levels}": {"type": "string"}}}


@pytest.fixture
def listener() -> Iterator[tuple[str, list[str]]]:
    """A server's address, and the paths that it was asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("key", ["$ref", "$dynamicRef", "$recursiveRef"])
@pytest.mark.parametrize("where", ["property", "definition", "elsewhere", "draft7", "id"])
def test_nothing_is_fetched_for_a_schema(
    listener: tuple[str, list[str]], tmp_path: Path, key: str, where: str
) -> None:
    (tmp_path / "secret.json").write_text('{"const": "SECRET"}')
    url, asked = listener
    for address in (f"{url}/a", f"file://{tmp_path}/secret.json", "secret.json", "//host/a"):
        reference = {key: address}
        schema: dict[str, Any] = {
            "property": {"properties": {"x": reference}},
            "definition": {"properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": {"a": reference}},
            "elsewhere": {"properties": {"x": {"$ref": "#/parts/a"}}, "parts": {"a": reference}},
            "draft7": {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "dependencies": {"x": reference},
            },
            "id": {"$id": f"{url}/base/", "properties": {"x": reference}},
        }[where]
        with pytest.raises(InputError, match="its parameters refer to another document, '"):
            schema_of(schema)
    assert asked == []


def test_an_unknown_dialect_is_not_fetched(listener: tuple[str, list[str]]) -> None:
    url, asked = listener
    schema = schema_of({"$schema": f"{url}/meta", "$id": f"{url}/id", "required": ["x"]})
    assert mistake(schema, {}) == 'arguments: "x" is a required property'
    assert asked == []


def test_data_and_names_are_no_references() -> None:
    schema = schema_of(
        {
            "properties": {
                "$ref": {"type": "string"},
                "pattern": {"type": "string"},
                "x": {"default": {"$ref": "http://other/"}, "enum": [{"$ref": "http://other/"}]},
            }
        }
    )
    assert schema.read('{"$ref": "a", "pattern": "("}') == {"$ref": "a", "pattern": "("}


@pytest.mark.parametrize(
    "reference", ["#/$defs/a", "#/$defs/a%20b", "#/$defs/c~1d", "#named", "#/parts/0/e"]
)
def test_references_within_the_schema_are_followed(reference: str) -> None:
    integer = {"type": "integer"}
    schema = of_x(
        {"$ref": reference},
        **{
            "$defs": {"a": integer, "a b": integer, "c/d": integer, "n": {"$anchor": "named"}},
            "parts": [{"e": integer}],
        },
    )
    schema.read('{"x": 1}')
    if reference != "#named":
        assert mistake(schema, {"x": "a"}) == 'x: "a" is not of type "integer"'


def test_a_reference_to_nothing_is_named() -> None:
    with pytest.raises(InputError, match=r"tool: its parameters are not a JSON schema: .*nowhere"):
        of_x({"$ref": "#/nowhere"})


@pytest.mark.parametrize(
    "pattern", ["^(a+)+$", "^(a|a)*$", r"^(?=a)(a|a)*(a|a)*\1$", "(?=(a+)+b)", "(.*)(?=b)b(.*)c"]
)
async def test_a_pattern_cannot_hold_the_process(pattern: str) -> None:
    called: list[Any] = []
    schema = {"type": "object", "properties": {"x": {"type": "string", "pattern": pattern}}}
    box = Toolbox([Tool("t", "", schema, called.append)], timeout=60, max_chars=1000)
    result = await box.call("t", json.dumps({"x": "a" * 50_000 + "!"}))
    assert result.outcome == "bad_arguments"
    assert not called
    assert result.text.startswith("Error: t cannot take these arguments: x: ")
    assert len(result.text) < 400


def test_patterns_may_look_around() -> None:
    schema = of_x({"type": "string", "pattern": r"^(?!\s)(?=.*\d).{4,}$"})
    schema.read('{"x": "abc1"}')
    assert mistake(schema, {"x": "abcd"}).startswith('x: "abcd" does not match "^(?!')


def test_an_unreadable_pattern_is_unchecked_and_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parameters = {
        "properties": {"x": {"type": "string", "pattern": r"^a\Z"}},
        "patternProperties": {"(": {"type": "integer"}},
        "additionalProperties": False,
    }
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            schema = check_parameters(parameters, "scribe")
    assert len(caplog.records) == 2
    assert all("tool scribe: the pattern" in record.message for record in caplog.records)
    schema.read('{"x": "b", "other": "c"}')
    assert mistake(schema, {"x": 1}) == 'x: 1 is not of type "string"'


@pytest.mark.parametrize("applied", ["allOf", "anyOf", "oneOf"])
@pytest.mark.parametrize(
    "place",
    [
        {"properties": {"x": {"$ref": "#/$defs/a0"}}},
        {"additionalProperties": {"items": {"$ref": "#/$defs/a0"}}},
        {"propertyNames": {"$ref": "#/$defs/a0"}},
        {"if": {"not": {"$ref": "#/$defs/a0"}}},
        {"properties": {"x": {"$ref": "#/$defs/a0", "unevaluatedProperties": False}}},
    ],
)
def test_references_that_double_are_refused(applied: str, place: Any) -> None:
    with pytest.raises(InputError, match=r"checked by more than 100,000 steps for one value"):
        schema_of({**place, **doubling(40, applied)})


def test_parts_that_are_evaluated_twice_count_twice() -> None:
    schema: Any = {"type": "string"}
    for _ in range(30):
        schema = {"anyOf": [schema, {"maxLength": 1}], "unevaluatedProperties": False}
    with pytest.raises(InputError, match=r"steps for one value"):
        of_x(schema)


def test_a_reference_that_leads_to_itself_is_refused() -> None:
    for loop in ({"$ref": "#"}, {"allOf": [{"not": {"$ref": "#/$defs/a"}}]}):
        with pytest.raises(InputError, match="have a reference that leads to itself"):
            schema_of({"anyOf": [loop], "$defs": {"a": {"$ref": "#"}}})


def test_a_long_chain_and_deep_or_long_schemas_are_refused() -> None:
    parts = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(5000)}
    with pytest.raises(InputError, match="refer to 100 schemas in a row"):
        of_x({"$ref": "#/$defs/a0"}, **{"$defs": {**parts, "a5000": {}}})
    deep: Any = {}
    for _ in range(300):
        deep = {"properties": {"x": deep}}
    with pytest.raises(InputError, match="its parameters cannot be read: Recursion limit"):
        schema_of(deep)
    with pytest.raises(InputError, match="have more than 262,144 characters"):
        of_x({"enum": ["a" * 300_000]})
    with pytest.raises(InputError, match="have more than 500 patterns"):
        schema_of({"properties": {str(i): {"pattern": f"{i}"} for i in range(600)}})


def test_schemas_that_contain_themselves_are_taken() -> None:
    schema = schema_of(TREE)
    nested: Any = {"value": 1}
    for _ in range(20):
        nested = {"value": 1, "children": [nested, {"value": 2}]}
    schema.read(json.dumps(nested))
    nested["children"][0]["children"][1]["value"] = "no"
    assert mistake(schema, nested) == 'children.0.children.1.value: "no" is not of type "integer"'
    for _ in range(100):
        nested = {"value": 1, "children": [nested]}
    assert "arguments: nested more than 100 levels deep" in mistake(schema, nested)


def test_any_json_within_itself_is_taken_to_the_full_depth() -> None:
    value = {
        "anyOf": [
            {"type": ["string", "number", "boolean", "null"]},
            {"type": "object", "additionalProperties": {"$ref": "#/$defs/value"}},
            {"type": "array", "items": {"$ref": "#/$defs/value"}},
        ]
    }
    schema = of_x({"$ref": "#/$defs/value"}, **{"$defs": {"value": value}})
    nested: Any = 1
    for _ in range(45):
        nested = {"a": [nested]}
    schema.read(json.dumps({"x": nested}))


def test_a_doubling_recursion_is_checked_to_an_affordable_depth() -> None:
    member = {"type": "object", "properties": {"left": {"$ref": "#/$defs/a"}}}
    members = [{**member, "title": str(n)} for n in range(4)]
    schema = of_x({"$ref": "#/$defs/a"}, **{"$defs": {"a": {"anyOf": members}}})
    nested: Any = {}
    for _ in range(5):
        nested = {"left": nested}
    schema.read(json.dumps({"x": nested}))
    for _ in range(20):
        nested = {"left": nested}
    assert "levels deep" in mistake(schema, {"x": nested})


def test_mistakes_are_named_with_their_path_and_in_few_words() -> None:
    schema = schema_of(
        {
            "type": "object",
            "properties": {
                "n": {"type": "integer", "minimum": 3},
                "kind": {"enum": ["a", "b"]},
                "items": {"items": {"type": "string"}},
            },
            "required": ["n"],
            "additionalProperties": False,
        }
    )
    assert mistake(schema, {"n": "5"}) == 'n: "5" is not of type "integer"'
    assert mistake(schema, {"n": 1}) == "n: 1 is less than the minimum of 3"
    assert mistake(schema, {"n": 3, "kind": "c"}) == 'kind: "c" is not one of "a" or "b"'
    assert mistake(schema, {"m": 3}) == (
        "arguments: Additional properties are not allowed ('m' was unexpected); "
        'arguments: "n" is a required property'
    )
    long = mistake(schema, {"n": "7" * 5000})
    assert long.startswith('n: "777')
    assert long.endswith('777" is not of type "integer"')
    assert len(long) < 250
    assert mistake(schema, {"n": 3, "items": [1] * 20}).count("is not of type") == 5
    assert "arguments: do not fit the tool's JSON schema" in mistake(
        schema, {"n": 3, "items": [1] * 200_000}
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("{", "not JSON"),
        ("[1]", "must be a JSON object"),
        ('{"x": ' * 100_000, "not JSON (nested too deeply)"),
        ('{"x": %s}' % ("1" * 5000), "not JSON (a number is too long)"),
        ('{"x": "\\ud800"}', "a text has half a character (a lone surrogate)"),
        ('{"x": NaN}', "not JSON (NaN)"),
    ],
)
def test_arguments_that_are_no_object_are_the_models_mistake(arguments: str, words: str) -> None:
    with pytest.raises(ArgumentsError) as caught:
        of_x({"type": ["string", "integer"], "pattern": "^a"}).read(arguments)
    assert words in str(caught.value)


def test_formats_are_not_checked() -> None:
    of_x({"type": "string", "format": "date-time"}).read('{"x": "tomorrow"}')


def test_what_is_no_schema_is_named() -> None:
    with pytest.raises(InputError, match=r"are not a JSON schema: properties.x.type: \"strin\" is"):
        of_x({"type": "strin"})
    with pytest.raises(InputError, match="tool t: its parameters are not JSON: "):
        check_parameters({"properties": {"x": {"default": {1, 2}}}}, "t")
