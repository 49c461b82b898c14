import json
import logging
import logging.config
from typing import Any

import pytest

from turnwise.chat.tool_parser import ToolCall, ToolParser
from turnwise.config.data import template_text
from turnwise.errors import InputError
from turnwise.trajectory import ChatTemplate

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def parser(tokenizer: Any) -> ToolParser:
    return ToolParser("hermes", tokenizer)


def test_text_without_a_call_is_content(parser: ToolParser) -> None:
    parsed = parser.parse("The answer is 4.", [])
    assert (parsed.content, parsed.calls, parsed.malformed) == ("The answer is 4.", [], False)


def test_several_calls_keep_their_order(parser: ToolParser) -> None:
    parsed = parser.parse(f"Let me see. {CALL}\n{CALL.replace('1', '2')}", [])
    assert parsed.content == "Let me see. "
    assert parsed.calls == [ToolCall("add", '{"a": 1}'), ToolCall("add", '{"a": 2}')]
    assert not parsed.malformed


@pytest.mark.parametrize(
    "text",
    [
        CALL.replace("}}", "}"),
        "<tool_call>",
        "<tool_call>\n[1]\n</tool_call>",
        CALL + "<tool_call>{",
    ],
)
def test_a_call_that_cannot_be_read_is_malformed(parser: ToolParser, text: str) -> None:
    parsed = parser.parse(text, [])
    assert parsed.malformed
    assert not parsed.calls
    assert parsed.content == text


def test_the_calls_of_our_template_are_read(parser: ToolParser, tokenizer: Any) -> None:
    calls = [{"name": "add", "arguments": {"a": n, "é": ['"', {}]}} for n in (1, 2)]
    message = {
        "role": "assistant",
        "content": "So.",
        "tool_calls": [{"function": c} for c in calls],
    }
    text = ChatTemplate(tokenizer, chat_template=template_text("hermes")).render_text(
        [{"role": "user", "content": "Go."}, message], add_generation_prompt=False
    )
    said = text.rpartition("assistant\n")[2].removesuffix("<|im_end|>\n")
    parsed = parser.parse(said, [])
    assert parsed.content.strip() == "So."
    assert [{"name": c.name, "arguments": json.loads(c.arguments)} for c in parsed.calls] == calls


def test_it_logs_nothing_even_where_logging_was_set_up_since(
    parser: ToolParser, caplog: pytest.LogCaptureFixture
) -> None:
    levels = {"version": 1, "disable_existing_loggers": False, "loggers": {"vllm": {"level": 10}}}
    logging.config.dictConfig(levels)  # as vLLM does when an engine starts
    with caplog.at_level(logging.DEBUG):
        assert parser.parse(CALL.replace("}}", "}"), []).malformed
    assert caplog.records == []


def test_an_unknown_format_is_refused(tokenizer: Any) -> None:
    with pytest.raises(InputError, match=r"one of .*, not 'hermez'; did you mean hermes"):
        ToolParser("hermez", tokenizer)


def test_the_marks_of_a_call(parser: ToolParser, tokenizer: Any) -> None:
    assert parser.tags() == ("<tool_call>", "</tool_call>")
    with pytest.raises(InputError, match="pythonic does not mark where a call ends"):
        ToolParser("pythonic", tokenizer).tags()


def test_a_parser_that_does_not_fit_the_tokenizer_is_refused(tokenizer: Any) -> None:
    with pytest.raises(InputError, match="llama3_json does not fit the model's tokenizer: "):
        ToolParser("llama3_json", tokenizer)
