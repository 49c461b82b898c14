"""Tool calls of every format that vLLM has a parser for, cut at each character."""

import os
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from tests.chat.tool_calls import CALLS, TOKENS
from turnwise.chat.tool_parser import FORMATS, ToolCall, ToolParser, format_of
from turnwise.errors import InputError

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "tool-parsers.md"
WITHOUT = {"cohere_command3", "cohere_command4", "openai"}
"""vLLM's parsers that read calls in its server only."""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add one.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}},
                "required": ["a"],
            },
        },
    }
]


@pytest.fixture(scope="module")
def parsers() -> dict[str, ToolParser]:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=words, additional_special_tokens=TOKENS
    )
    return {name: ToolParser(name, tokenizer) for name in CALLS}


def outcome(parser: ToolParser, text: str) -> str:
    """Return what a text is: "read", "malformed" or "text"."""
    parsed = parser.parse(text, TOOLS)
    if parsed.malformed:
        assert not parsed.calls
        assert parsed.content == text
        return "malformed"
    assert all(call.name == "add" and "1" in call.arguments for call in parsed.calls), parsed
    return "read" if parsed.calls else "text"


@pytest.fixture(scope="module")
def outcomes(parsers: dict[str, ToolParser]) -> dict[str, list[str]]:
    """The outcome of each call after each of its characters."""
    return {
        name: [outcome(parsers[name], call[:end]) for end in range(1, len(call) + 1)]
        for name, call in CALLS.items()
    }


def test_every_parser_of_vllm_has_a_format_and_a_call() -> None:
    from turnwise.internals import vllm

    names = set(vllm.ToolParserManager.list_registered())
    assert names == FORMATS.keys() | WITHOUT | {"hf"}  # hf: the tokenizer's own description
    assert CALLS.keys() == FORMATS.keys()


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_is_cut_is_never_text_once_it_has_begun(
    outcomes: dict[str, list[str]], name: str
) -> None:
    found = outcomes[name]
    begun = found.index("malformed")
    assert "text" not in found[begun:]
    assert set(found[:begun]) <= {"text"}
    assert found[-1] == "read"


@pytest.mark.parametrize("name", CALLS)
def test_no_call_runs_by_halves_and_none_is_dropped(
    parsers: dict[str, ToolParser], name: str
) -> None:
    parser, call = parsers[name], CALLS[name]
    twice = parser.parse(f"{call}\n{call}", TOOLS)
    assert twice.malformed or len(twice.calls) == 2
    for end in range(1, len(call), 7):  # a second call that is cut
        parsed = parser.parse(call + "\n" + call[:end], TOOLS)
        assert parsed.malformed or len(parsed.calls) == 2 or not _names_it(name, call[:end])


def _names_it(name: str, part: str) -> bool:
    """Return whether a part of a call has its own mark, or the tool's name where it has none."""
    form = FORMATS[name]
    if form.bare:
        return form.bare("add") in part
    return any(mark in part for mark in ([form.each] if form.each else form.begins))


@pytest.mark.parametrize("name", CALLS)
def test_answers_without_a_call_are_text(parsers: dict[str, ToolParser], name: str) -> None:
    for text in ("", "The answer is 4.", 'As JSON: {"answer": [4], "name": "Bob"}', "See [1] (a)."):
        assert outcome(parsers[name], text) == "text"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("kimi_k2", CALLS["kimi_k2"].replace('{"a": 1}', "{arguments}")),
        ("deepseek_v3", CALLS["deepseek_v3"].replace('{"a": 1}', "{arguments}")),
        ("deepseek_v31", CALLS["deepseek_v31"].replace('{"a": 1}', "{arguments}")),
        ("hermes", '<tool_call>\n{"name": "add", "arguments": {arguments}}\n</tool_call>'),
    ],
)
@pytest.mark.parametrize("arguments", ['{"a": 1', "{a: 1}", "[1]", "1" * 5000, '{"a": ' * 5000])
def test_arguments_that_are_no_object_make_a_call_malformed(
    parsers: dict[str, ToolParser], name: str, text: str, arguments: str
) -> None:
    assert outcome(parsers[name], text.replace("{arguments}", arguments)) == "malformed"


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v31"])
def test_a_call_without_any_arguments_has_none(parsers: dict[str, ToolParser], name: str) -> None:
    text = CALLS[name].replace('{"a": 1}', "")
    assert parsers[name].parse(text, TOOLS).calls == [ToolCall("add", "{}")]


def test_marks_within_reasoning_or_arguments_are_no_calls(parsers: dict[str, ToolParser]) -> None:
    quoted = CALLS["hermes"].replace("1", '"<tool_call>"')
    parsed = parsers["hermes"].parse(quoted, TOOLS)
    assert parsed.calls == [ToolCall("add", '{"a": "<tool_call>"}')]
    thought = "<think>perhaps <tool_call>?</think>The answer is 4."
    assert outcome(parsers["hermes"], thought) == "text"


def test_a_parser_reads_each_text_without_the_one_before(parsers: dict[str, ToolParser]) -> None:
    parser = parsers["granite4"]
    assert outcome(parser, "<tool_call>{") == "malformed"
    assert outcome(parser, CALLS["granite4"]) == "read"


@pytest.mark.parametrize("name", sorted(WITHOUT))
def test_parsers_that_only_read_in_vllms_server_are_refused(name: str, tokenizer: Any) -> None:
    with pytest.raises(InputError, match=f"rollout.tool_parser: vLLM's parser {name} reads calls"):
        ToolParser(name, tokenizer)


def test_a_plug_in_of_vllm_is_asked_for_its_mark() -> None:
    class Own:
        bot_token = "<call>"

    assert format_of("own", Own()).begins == ("<call>",)


def test_the_page_has_the_table(outcomes: dict[str, list[str]]) -> None:
    """Compare the page with the table; `TABLE=1` in the environment writes it."""
    lines = ["| parser | a call | text | malformed | read |", "|---|---|---|---|---|"]
    for name, call in CALLS.items():
        found = outcomes[name]
        shown = call.replace("\n", "⏎").replace("|", "\\|")
        cells = [_ranges(found, kind) for kind in ("text", "malformed", "read")]
        lines.append(f"| `{name}` | `{shown}` | {' | '.join(cells)} |")
    page = PAGE.read_text(encoding="utf-8")
    before, _, after = page.partition("<!-- calls -->\n")
    rest = after.partition("<!-- /calls -->")[2]
    wanted = f"{before}<!-- calls -->\n" + "\n".join(lines) + f"\n<!-- /calls -->{rest}"
    if os.environ.get("TABLE"):
        PAGE.write_text(wanted, encoding="utf-8")
    assert page == wanted, "run this test with TABLE=1"


def _ranges(found: list[str], kind: str) -> str:
    """Return the numbers of the characters after which a call is of a kind."""
    texts = []
    for is_kind, group in groupby(enumerate(found, 1), lambda item: item[1] == kind):
        numbers = [number for number, _ in group]
        if is_kind:
            first, last = numbers[0], numbers[-1]
            texts.append(str(first) if first == last else f"{first}–{last}")
    return ", ".join(texts)
