from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.calculator.tool import calculate
from turnwise.errors import InputError, TrajectoryError
from turnwise.rollout.tools import Toolbox
from turnwise.trajectory import ChatTemplate

QUESTION = [{"role": "user", "content": "What is 2 + 2?"}]
SCHEMAS = Toolbox([calculate], timeout=1, max_chars=100).schemas
words = st.text(alphabet="abc 019-", min_size=1, max_size=10).map(str.strip).filter(bool)


def tool_messages(results: list[str]) -> list[dict[str, Any]]:
    return [{"role": "tool", "name": "calculate", "content": result} for result in results]


def with_template(tokenizer: Any, chat_template: str) -> ChatTemplate:
    """The tokenizer's ids under another template."""
    other = SimpleNamespace(
        chat_template=chat_template,
        eos_token_id=tokenizer.eos_token_id,
        encode=tokenizer.encode,
        apply_chat_template=partial(tokenizer.apply_chat_template, chat_template=chat_template),
    )
    return ChatTemplate(other)


@settings(deadline=None, max_examples=50)
@given(answer=words, results=st.lists(words, min_size=1, max_size=3))
def test_the_next_prompt_is_what_the_template_renders(
    template: ChatTemplate, answer: str, results: list[str]
) -> None:
    prompt = template.render(QUESTION, tools=SCHEMAS)
    sampled = [*template.encode(answer), template.tokenizer.eos_token_id]
    conversation = [*QUESTION, {"role": "assistant", "content": answer}, *tool_messages(results)]
    following = template.next_prompt([*prompt, *sampled], tool_messages(results), tools=SCHEMAS)
    assert following == template.render(conversation, tools=SCHEMAS)


def test_sampled_ids_stay_though_the_template_would_tokenise_them_otherwise(
    template: ChatTemplate,
) -> None:
    canonical = template.encode("The answer is 4.")
    spelled_out = [i for char in "The answer is 4." for i in template.encode(char)]
    assert spelled_out != canonical
    prompt = template.render(QUESTION)
    past = [*prompt, *spelled_out, template.tokenizer.eos_token_id]
    following = template.next_prompt(past, tool_messages(["4"]))
    assert following[: len(past)] == past
    assert template.decode(following[len(prompt) :]).startswith("The answer is 4.<|im_end|>\n")


def test_a_turn_that_was_cut_off_gets_its_end(template: ChatTemplate) -> None:
    prompt = template.render(QUESTION)
    cut, end = template.encode("The ans"), template.tokenizer.eos_token_id
    following = template.next_prompt([*prompt, *cut], tool_messages(["4"]))
    assert following[: len(prompt) + len(cut) + 1] == [*prompt, *cut, end]
    finished = template.next_prompt([*prompt, *cut, end], tool_messages(["4"]))
    assert finished == following


def test_decoding_leaves_out_the_end_token_only(template: ChatTemplate) -> None:
    ids = template.encode("<tool_call>{}</tool_call><|im_end|>")
    assert template.decode(ids) == "<tool_call>{}</tool_call>"


def test_a_template_that_rewrites_the_past_is_a_reason_and_not_a_guess(tokenizer: Any) -> None:
    rewriting = (
        "{% for m in messages %}{% if m.role == 'assistant' and not loop.last %}[earlier]"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    with pytest.raises(TrajectoryError, match="rewrites an assistant turn") as error:
        with_template(tokenizer, rewriting).next_prompt([1, 2], tool_messages(["4"]))
    assert error.value.reason == "bridge"


def test_a_template_that_marks_the_last_assistant_turn_alone_bridges(tokenizer: Any) -> None:
    """As Qwen3's does, with an empty think block that later renderings leave out."""
    thinking = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    template = with_template(tokenizer, thinking)
    sampled = template.encode("<think>\n\n</think>\n\n4<|im_end|>")
    past = [*template.render(QUESTION), *sampled]
    added = "\n<|im_start|>tool\n8<|im_end|>\n<|im_start|>assistant\n"
    following = template.next_prompt(past, [{"role": "tool", "content": "8"}])
    assert following == [*past, *template.encode(added)]


def test_a_tokenizer_without_a_template_is_refused() -> None:
    with pytest.raises(InputError, match="the tokenizer of m has no chat template"):
        ChatTemplate(SimpleNamespace(chat_template=None, name_or_path="m"))
