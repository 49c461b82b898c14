"""Arguments of every kind, in every tool-call format: each arrives as it was written, or not at
all."""

import json
from typing import Any

import pytest

from tests.chat.tool_calls import CALLS, TOKENS
from turnwise.chat.tool_parser import FORMATS, ToolParser

TEXT = {"type": "string"}
ANY: dict[str, Any] = {"type": "object"}
KINDS: dict[str, tuple[dict[str, Any], Any]] = {
    "text": (TEXT, "Oslo"),
    "words": (TEXT, "two words, and a comma: yes"),
    "empty": (TEXT, ""),
    "lines": (TEXT, "one\ntwo\n\nthree"),
    "code": (TEXT, "def f(x):\n    return x['a'] + 1  # {}"),
    "quotes": (TEXT, "she said \"no\" and 'yes'"),
    "backslash": (TEXT, "C:\\new\\table"),
    "numeric text": (TEXT, "007"),
    "decimal text": (TEXT, "1.50"),
    "text true": (TEXT, "true"),
    "text null": (TEXT, "null"),
    "text JSON": (TEXT, '{"x": 1}'),
    "tags": (TEXT, "<b>bold</b> & <br/>"),
    "unicode": (TEXT, "Ærøskøbing 東京 🙂"),
    "int": ({"type": "integer"}, 42),
    "negative": ({"type": "integer"}, -7),
    "float": ({"type": "number"}, 2.5),
    "true": ({"type": "boolean"}, True),
    "false": ({"type": "boolean"}, False),
    "null": ({"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
    "or null": ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, 3),
    "ints": ({"type": "array", "items": {"type": "integer"}}, [1, 2, 3]),
    "texts": ({"type": "array", "items": TEXT}, ["a", "1", "true"]),
    "no items": ({"type": "array", "items": {"type": "integer"}}, []),
    "choice": ({"enum": ["red", "blue"]}, "blue"),
    "dict": (ANY, {"n": 1, "yes": True, "none": None, "text": "1", "f": 0.5}),
    "list[dict]": ({"type": "array", "items": ANY}, [{"n": 1, "text": "true"}, {"none": None}]),
    "nested": (ANY, {"a": {"b": [1, {"c": "x"}]}, "d": "e"}),
    "map": ({"type": "object", "additionalProperties": {"type": "integer"}}, {"x": 1, "y": 2}),
}


def gemma(value: Any) -> str:
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case dict():
            return "{" + ",".join(f"{key}:{gemma(each)}" for key, each in value.items()) + "}"
        case list():
            return "[" + ",".join(map(gemma, value)) + "]"
    return json.dumps(value)


def written(name: str, value: Any) -> str:
    """Return the call add(a=value) in a format."""
    call = CALLS[name]
    as_json = json.dumps(value, ensure_ascii=False)
    plain = value if isinstance(value, str) else as_json
    if name == "gemma4":
        return call.replace("a:1", f"a:{gemma(value)}")
    for given in ('{"a": 1}', '{"a":1}'):
        if given in call:
            return call.replace(given, '{"a": ' + as_json + "}")
    if "a=1" in call:
        return call.replace("a=1", f"a={value!r}")
    if name == "kimi_k3":
        kinds = {str: "string", bool: "boolean", dict: "object", list: "array", type(None): "null"}
        call = call.replace('type="number"', f'type="{kinds.get(type(value), "number")}"')
    call = call.replace('string="false"', f'string="{str(isinstance(value, str)).lower()}"')
    head, tail = call.rsplit("1", 1)
    return head + plain + tail


@pytest.fixture(scope="module")
def parsers() -> dict[str, ToolParser]:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=words, additional_special_tokens=TOKENS
    )
    return {name: ToolParser(name, tokenizer) for name in CALLS}


def read(parser: ToolParser, name: str, schema: dict[str, Any], value: Any) -> Any:
    """Return the argument that a tool gets, or "malformed" in its place."""
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]
    parsed = parser.parse(written(name, value), tools)
    if parsed.malformed:
        return "malformed"
    if not parsed.calls:
        return "text"
    assert [call.name for call in parsed.calls] == ["add"]
    return json.loads(parsed.calls[0].arguments).get("a", "missing")


CONVERTED = {"decimal text": 1.5, "text true": True, "text null": None, "text JSON": {"x": 1}}
LISTS = ("code", "ints", "texts", "no items", "list[dict]", "nested")
LIMITS: dict[str, dict[str, Any]] = {
    "dots": {"text null": None},
    "functiongemma": CONVERTED,
    "muse_glimmer": CONVERTED,
    "hy_v3": {"null": "null"},
    "hy_v4": {"null": "null"},
    "phi4_mini_json": {kind: "malformed" for kind in LISTS},
    "step3": {"tags": "malformed", "null": "null"},
}
"""Arguments that vLLM's parsers read in another way, by format and kind."""


@pytest.mark.parametrize("name", CALLS)
def test_every_kind_of_argument_arrives_as_it_was_written(
    parsers: dict[str, ToolParser], name: str
) -> None:
    found = {kind: read(parsers[name], name, *given) for kind, given in KINDS.items()}
    wanted = {kind: value for kind, (_, value) in KINDS.items()} | LIMITS.get(name, {})
    assert json.dumps(found) == json.dumps(wanted)  # 1 is not True


@pytest.mark.parametrize("name", [name for name in CALLS if FORMATS[name].value_ends])
def test_a_value_that_quotes_its_own_end_is_not_cut(
    parsers: dict[str, ToolParser], name: str
) -> None:
    end = FORMATS[name].value_ends[0]
    for value in (f"write {end} last", f"{end}{end}", f"a{end}\nb", f"{end} x {end}"):
        assert read(parsers[name], name, TEXT, value) in ("malformed", value)
    call = written(name, "QQ")
    quoted = call.replace("QQ", f"see {call} there")
    parameters = {"type": "object", "properties": {"a": TEXT}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]
    parsed = parsers[name].parse(quoted, tools)
    assert parsed.malformed or [json.loads(each.arguments)["a"] for each in parsed.calls] == [
        f"see {call} there"
    ]


@pytest.mark.parametrize(
    ("schema", "bare", "value"),
    [
        ({}, "1", 1),
        ({}, "true", True),
        ({}, "null", None),
        ({}, "1.5e3", 1500.0),
        ({}, "word", "word"),
        (ANY, "{b:{c:[1,null,{d:false}]}}", {"b": {"c": [1, None, {"d": False}]}}),
        (ANY, '{b:<|"|>1<|"|>,c:1}', {"b": "1", "c": 1}),
        ({"type": "object", "properties": {"b": TEXT}}, "{b:01,c:1}", {"b": "01", "c": 1}),
        ({"type": "object", "additionalProperties": TEXT}, "{b:1}", {"b": "1"}),
        ({"type": "array"}, '[1,true,<|"|>2<|"|>]', [1, True, "2"]),
        (TEXT, "1", "1"),
    ],
)
def test_gemmas_values_have_the_types_that_were_written(
    parsers: dict[str, ToolParser], schema: dict[str, Any], bare: str, value: Any
) -> None:
    parameters = {"type": "object", "properties": {"a": schema}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]
    text = CALLS["gemma4"].replace("a:1", f"a:{bare}")
    found = parsers["gemma4"].parse(f"{text}\n{text}", tools)
    assert not found.malformed
    assert [call.arguments for call in found.calls] == [json.dumps({"a": value})] * 2


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("part", ["[", "{", '{"a":[', " ", "\n", "call"])
async def test_parsers_do_not_get_a_turn_that_would_take_them_minutes(
    parsers: dict[str, ToolParser], name: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = CALLS[name]
    head = call[: call.rindex("1")]
    text = call * 300 if part == "call" else head + part * 100_000
    if part == "call" and FORMATS[name].bare:
        text = call + "[" * 300  # these have no marks

    given: list[object] = []
    monkeypatch.setattr(parsers[name], "_type", given.append)
    assert (await parsers[name].read(text, [])).malformed or FORMATS[name].bare
    assert not given
