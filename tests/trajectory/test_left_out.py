"""The shipped templates, and what published ones leave out without a word."""

from typing import Any

import pytest

from tests.trajectory.published import SOURCES, TOOLS, chat_template, template_of
from turnwise.config.data import TEMPLATE_NAMES, template_text
from turnwise.errors import InputError
from turnwise.trajectory import ChatTemplate
from turnwise.trajectory.check_template import check_template
from turnwise.trajectory.left_out import check_messages, check_results, check_tools, left_out

USER = {"role": "user", "content": "How is it in Oslo?"}
SYSTEM = {"role": "system", "content": "Be brief."}
CHAT = "{%% for m in messages %%}%s<|im_end|>{%% endfor %%}"
NO_SYSTEM = CHAT % "{% if m.role != 'system' %}{{ m.content }}{% endif %}"
NO_RESULTS = CHAT % "{{ m.role }}{% if m.role != 'tool' %}{{ m.content }}{% endif %}"


@pytest.mark.parametrize("name", TEMPLATE_NAMES)
@pytest.mark.parametrize("tokenizer", ["bpe", "tekken"])
def test_our_templates_bridge_exactly(name: str, tokenizer: str) -> None:
    ours = template_of(template_text(name), tokenizer=tokenizer)
    assert [finding.verdict for finding in check_template(ours)] == ["exact"] * 8
    assert left_out(ours, TOOLS) == (["tools"] if name == "chatml" else [])


def test_hermes_writes_tools_calls_and_results(template: ChatTemplate) -> None:
    hermes = ChatTemplate(template.tokenizer, chat_template=template_text("hermes"))
    arguments = {"b": "né", "a": [1, {"c": None}]}
    functions = [{"name": "calculate", "arguments": form} for form in (arguments, '{"a": 1}')]
    calls = [{"type": "function", "function": function} for function in functions]
    conversation = [
        SYSTEM,
        USER,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "4"},
        {"role": "tool", "content": "5"},
    ]
    text = hermes.render_text(conversation, tools=TOOLS)
    assert text == hermes.render_text(conversation, tools=TOOLS)
    assert text.startswith("<|im_start|>system\nBe brief.\n\nYou can call these tools")
    assert "<tools>\n" + '{"type": "function", "function": {"name": "calculate",' in text
    assert text.endswith(
        "<|im_start|>assistant\n"
        '<tool_call>\n{"name": "calculate", "arguments": {"b": "né", "a": [1, {"c": null}]}}\n'
        '</tool_call>\n<tool_call>\n{"name": "calculate", "arguments": {"a": 1}}\n</tool_call>'
        "<|im_end|>\n<|im_start|>user\n<tool_response>\n4\n</tool_response>\n"
        "<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_bos_comes_first_where_the_tokenizer_has_its_own() -> None:
    for name in TEMPLATE_NAMES:
        assert (
            template_of(template_text(name)).render_text([USER]).startswith("<s><|im_start|>user")
        )
        like_smollm = template_of(template_text(name))
        like_smollm.tokenizer.bos_token = "<|im_start|>"  # type: ignore[attr-defined]
        assert like_smollm.render_text([USER]).startswith("<|im_start|>user")


def test_omitted_tools_raise_an_error_with_the_keys() -> None:
    chatml = template_of(template_text("chatml"))
    for _ in range(2):  # from the cache, too
        with pytest.raises(InputError, match=r"model\.chat_template .* rollout\.tools_in_prompt"):
            check_tools(chatml, [USER], TOOLS)
    check_tools(chat_template("qwen3", "bpe"), [USER], TOOLS)
    raising = template_of("{{ raise_exception('no') }}")
    check_tools(raising, [USER], TOOLS)  # rendering the prompt reports it


def test_omitted_messages_raise_an_error_with_their_role() -> None:
    hidden = template_of(NO_SYSTEM)
    with pytest.raises(InputError, match=r"leaves out messages of the role system.*chat_template"):
        check_messages(hidden, [SYSTEM, USER])
    check_messages(hidden, [USER])
    check_messages(hidden, [{"role": "system", "content": ""}, USER])
    check_messages(chat_template("gemma", "bpe"), [SYSTEM, USER])  # refuses it, which is no silence


def test_results_of_tools_that_are_left_out_are_an_error() -> None:
    for source in (NO_RESULTS, SOURCES["phi3"]):
        with pytest.raises(InputError, match=r"leaves out the results of tools.*chat_template"):
            check_results(template_of(source), TOOLS)
    for name in TEMPLATE_NAMES:
        check_results(template_of(template_text(name)), TOOLS)


@pytest.mark.parametrize(
    ("name", "hidden"),
    [
        ("qwen2_5", []),
        ("qwen3", ["earlier reasoning"]),
        ("phi3", ["tools", "results of tools"]),
    ],
)
def test_what_a_published_template_leaves_out_is_named(name: str, hidden: list[str]) -> None:
    assert left_out(chat_template(name, "bpe"), TOOLS) == hidden


def test_contents_in_parts_are_looked_at_too() -> None:
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "Hello."}]}]
    check_messages(template_of(CHAT % "{{ m.content[0].text }}"), parts)
    with pytest.raises(InputError, match="of the role user"):
        check_messages(template_of(CHAT % "{{ m.content[0].type }}"), parts)
