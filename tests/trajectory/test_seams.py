"""The seam that the bridge reads off a template: where turns end, and what follows them."""

import itertools
import re
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from tests.trajectory.published import TOOLS
from tests.trajectory.test_bridge import CHATML, MORE
from tests.trajectory.test_segments import backend
from turnwise.trajectory import Bridge, ChatTemplate, bridge
from turnwise.trajectory.bridge import sampled_text

WITH_CALLS = CHATML.replace("{{ m.content }}", "{{ m.content }}{{ m.tool_calls }}")


def follow(
    template: ChatTemplate, said: str, after: list[dict[str, Any]], tools: Any = None
) -> Bridge:
    completion = template.encode(said)
    return bridge(
        template,
        prompt_token_ids=[],
        completion_token_ids=completion,
        new_messages=after,
        tools=tools,
    )


def test_a_turns_end_may_depend_on_the_tools(tokenizer: Any) -> None:
    """Whether the model ended its turn or was cut off, and whatever was rendered before."""
    source = (
        "{% set end = ' over<|im_end|>' if tools else '<|endoftext|>' %}{% for m in messages %}"
        "{% if m.role == 'tool' and not loop.previtem.tool_calls %}"
        "{{ raise_exception('a result without a call') }}{% endif %}"
        "{{ m.role }}: {{ m.content }}{% for call in m.tool_calls or [] %}"
        "{{ call.function.arguments.a }}{% endfor %}{{ end + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    template = ChatTemplate(tokenizer, chat_template=source)
    result = {"role": "tool", "name": "calculate", "tool_call_id": "call00000", "content": "8"}
    for tools, end in ((None, "<|endoftext|>"), (TOOLS, " over<|im_end|>")) * 2:
        for after, sampled in itertools.product((MORE, [result]), ("", end)):
            added = follow(template, f"4{sampled}", after, tools).added_token_ids
            rest = f"{'' if sampled else end}\n{after[0]['role']}: {after[0]['content']}{end}\n"
            assert template.decode_all(added) == f"{rest}assistant: ", (tools, after, sampled)


def test_a_template_of_one_question_ends_a_call_cut_off(tokenizer: Any) -> None:
    """The end is that of an answer before a result: no user may follow."""
    twice = "{% if m.role == 'user' and not loop.first %}{{ raise_exception('asked twice') }}"
    source = WITH_CALLS.replace("<|im_start|>{{", f"{twice}{{% endif %}}<|im_start|>{{{{")
    template = ChatTemplate(tokenizer, chat_template=source)
    following = follow(template, "[4]", [{"role": "tool", "content": "8"}])
    added = template.decode_all(following.added_token_ids)
    assert "<|im_end|>\n<|im_start|>tool\n8<|im_end|>\n" in added, following.detail
    refused = follow(template, "4", MORE)
    assert refused.fork_reason == "template_refuses"
    assert refused.detail == "TemplateError: asked twice"


def test_a_refusal_of_calls_is_that_of_the_usual_form(tokenizer: Any) -> None:
    """Arguments as an object and an empty content; other forms are tried and refused too."""
    source = (
        "{% for m in messages %}{% if m.tool_calls %}"
        "{% if m.content is none %}{{ raise_exception('no content') }}"
        "{% elif m.tool_calls[0].function.arguments is string %}{{ raise_exception('a text') }}"
        "{% else %}{{ raise_exception('no calls') }}{% endif %}{% endif %}"
        "{{ m.content }}<|im_end|>{% endfor %}"
    )
    template = ChatTemplate(tokenizer, chat_template=source)
    prompt, said = template.encode("4?"), template.encode("4<|im_end|>")
    refused = bridge(
        template,
        prompt_token_ids=prompt,
        completion_token_ids=said,
        new_messages=[{"role": "tool", "content": "8"}],
    )
    assert (refused.fork_reason, refused.detail) == ("template_refuses", "TemplateError: no calls")
    assert (refused.prompt_token_ids, refused.completion_token_ids) == (prompt, said)
    assert (refused.token_ids, refused.added_token_ids.tolist()) == (None, [])


def test_a_result_without_a_name_or_an_id_is_given_both(tokenizer: Any) -> None:
    source = WITH_CALLS.replace("{{ m.role }}", "{{ m.role }} {{ m.name }} {{ m.tool_call_id }}")
    template = ChatTemplate(tokenizer, chat_template=source)
    result = {"role": "tool", "content": "8"}
    following = follow(template, "4<|im_end|>", [result, {**result, "name": "add"}])
    added = template.decode_all(following.added_token_ids)
    assert re.findall(r"tool \w+ \w+", added) == ["tool tool call00000", "tool add call00001"]


@pytest.mark.parametrize(
    ("old", "new", "detail"),
    [
        ("in messages", "in messages[:1]", "the template leaves out the assistant's answer"),
        (
            "<|im_end|>",
            "{{ '~' if loop.nextitem and 'More' in loop.nextitem.content }}<|im_end|>",
            "renders these messages differently depending on their contents",
        ),
    ],
)
def test_a_turn_unlike_the_placeholder_begins_a_branch(
    tokenizer: Any, old: str, new: str, detail: str
) -> None:
    template = ChatTemplate(tokenizer, chat_template=CHATML.replace(old, new))
    for _ in range(2):  # a seam that is known by now is no better
        following = follow(template, "4<|im_end|>", MORE)
        assert following.fork_reason == "unlike_placeholder"
        assert detail in following.detail


@pytest.mark.parametrize(
    ("said", "ended"), [("4<|im_start|>", "'<|im_start|>'"), ("4", "'text'"), ("", "'text'")]
)
def test_an_unknown_end_of_a_turn_is_named(tokenizer: Any, said: str, ended: str) -> None:
    """A header without the line break before it ends no turn either."""
    source = (
        "{% for m in messages %}{{ '\n<|im_start|>' + m.role }}: {{ m.content }}{% endfor %}"
        "{{ '\n<|im_start|>assistant: ' if add_generation_prompt else '\n(done)<|endoftext|>' }}"
    )
    following = follow(ChatTemplate(tokenizer, chat_template=source), said, MORE)
    assert following.fork_reason == "turn_end_unknown"
    assert following.detail.startswith(f"the completion ends with {ended}, and the template")


def test_all_messages_of_which_one_is_left_out_are_named(tokenizer: Any) -> None:
    source = CHATML.replace("messages %}", "messages if m.role != 'system' %}")
    late_system = [*MORE, {"role": "system", "content": "Be brief."}]
    following = follow(ChatTemplate(tokenizer, chat_template=source), "4<|im_end|>", late_system)
    assert following.fork_reason == "message_dropped"
    assert following.detail.endswith("one of these messages: user, system")


def test_the_header_that_ends_a_turn_is_that_with_the_tools(tokenizer: Any) -> None:
    """Turns without an end of their own: the model stops at the next message's header."""
    source = (
        "{% set user = '<|im_start|>' if tools else '<|endoftext|>' %}{% for m in messages %}"
        "{{ '<think>' if m.role == 'assistant' else user }}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<think>{% endif %}"
    )
    template = ChatTemplate(tokenizer, chat_template=source)
    template.stop_token_ids.update(template.encode("<|im_start|><|endoftext|>"))
    turn = {"role": "assistant", "content": "4"}
    for tools, header in ((None, "<|endoftext|>"), (TOOLS, "<|im_start|>")) * 2:
        opening = template.render_text(MORE, tools=tools)
        said = sampled_text(template, opening, f"{opening}4", turn, tools)
        assert said == f"4{header}"


class Counting(ChatTemplate):
    """Counts what is rendered and encoded."""

    rendered = encoded = 0

    def render_text(self, *arguments: Any, **options: Any) -> str:
        self.rendered += 1
        return super().render_text(*arguments, **options)

    def encode(self, *arguments: Any, **options: Any) -> list[int]:
        self.encoded += 1
        return super().encode(*arguments, **options)


@pytest.mark.parametrize("end", ["<|im_end|>", " over<|im_end|>"])
def test_a_second_follow_up_is_rendered_and_encoded_once(tokenizer: Any, end: str) -> None:
    """The time of a turn does not grow with the number of renderings that found the seam."""
    template = Counting(tokenizer, chat_template=CHATML.replace("<|im_end|>", end))
    for said in ("4", "4<|im_end|>"):
        first = follow(template, said, MORE)
        template.rendered = template.encoded = 0
        second = follow(template, said, MORE)
        assert (template.rendered, template.encoded) == (1, 2)  # and what was said, in `follow`
        assert second.token_ids == first.token_ids
        assert first.fork_reason is None


@pytest.mark.parametrize(("end", "sampled"), [("<|im_end|>", "<|im_end|>"), ("_end_", "")])
def test_added_words_are_not_encoded_as_a_beginning(end: str, sampled: str) -> None:
    """Some tokenizers write a space before the first word of a text."""
    spaced = PreTrainedTokenizerFast(tokenizer_object=backend("metaspace"), eos_token="<|im_end|>")
    template = ChatTemplate(spaced, chat_template=CHATML.replace("<|im_end|>", end))
    asked = [{"role": "user", "content": "more"}]
    following = bridge(
        template,
        prompt_token_ids=template.render(asked),
        completion_token_ids=template.encode(f"<|im_start|>4{sampled}")[1:],
        new_messages=asked,
    )
    turn = {"role": "assistant", "content": "4"}
    assert following.token_ids == template.render([*asked, turn, *asked])


def test_added_words_are_kept_whatever_token_they_join() -> None:
    """Behind many a text, words become a token with its last letters."""
    joining = backend("bytes", AddedToken("x_en", normalized=False))
    tokens = PreTrainedTokenizerFast(tokenizer_object=joining, eos_token="<|im_end|>")
    template = ChatTemplate(tokens, chat_template=CHATML.replace("<|im_end|>", "_end_"))
    added = template.decode_all(follow(template, "4", MORE).added_token_ids)
    rest = "_end_\n<|im_start|>user\nMore._end_\n<|im_start|>assistant\n"
    assert added.replace(" ", "") == rest  # this tokenizer begins its texts with a space
