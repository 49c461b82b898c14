from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from turnwise.errors import InputError
from turnwise.trajectory import ChatTemplate

QUESTION = [{"role": "user", "content": "What is 2 + 2?"}]


def test_decoding_leaves_out_the_end_token_only(template: ChatTemplate) -> None:
    ids = template.encode("<tool_call>{}</tool_call><|im_end|>")
    assert template.decode(ids) == "<tool_call>{}</tool_call>"


def test_a_template_of_ones_own_and_its_variables(tokenizer: Any) -> None:
    own = ChatTemplate(tokenizer, chat_template="{{ messages[0].content }}{{ more }}", more="!")
    assert own.render_text(QUESTION) == QUESTION[0]["content"] + "!"
    assert own.render(QUESTION) == own.encode(own.render_text(QUESTION))


def test_markers_are_the_tokens_that_text_never_makes(template: ChatTemplate) -> None:
    end = template.tokenizer.eos_token_id
    assert template.markers[end] == "<|im_end|>"
    assert set(template.encode("a<|im_end|><tool_call>b")) & set(template.markers) == {
        end,
        template.tokenizer.convert_tokens_to_ids("<tool_call>"),
    }
    found = [m.group() for m in template.marker_pattern.finditer("a<|im_end|>\n<tool_call>{")]
    assert found == ["<|im_end|>", "<tool_call>"]


def test_two_threads_encode_at_once(template: ChatTemplate) -> None:
    text = "What is 2 + 2? " * 2000
    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(template.encode, [text] * 8))
    assert all(ids == results[0] for ids in results)
    assert template.decode_all(results[0]) == text


def test_a_tokenizer_without_a_template_is_refused() -> None:
    with pytest.raises(InputError, match="the tokenizer of m has no chat template"):
        ChatTemplate(SimpleNamespace(chat_template=None, name_or_path="m"))
