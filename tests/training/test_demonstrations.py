"""Written conversations as trajectories, with the masks that rollouts would have."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.trajectory.published import (
    SOURCES,
    TOOLS,
    TURN_ENDS,
    chat_template,
    eos_of,
    template_of,
)
from turnwise.config import Config
from turnwise.errors import TrajectoryError
from turnwise.rollouts import Problem
from turnwise.training.row_flags import FLAGS, check_row
from turnwise.training.supervised import RowReader, demonstrate, tools_of
from turnwise.trajectory import ChatTemplate, Message, Trajectory, audit, bridge

ASKED: Message = {"role": "user", "content": "How much is 2 + 2?"}
MORE: Message = {"role": "user", "content": "And 3 + 3?"}
RESULT: Message = {"role": "tool", "name": "calculate", "tool_call_id": "call00000", "content": "4"}


def said(content: str, **more: Any) -> Message:
    return {"role": "assistant", "content": content, **more}


def calling(arguments: Any) -> Message:
    call = {"id": "call00000", "type": "function"}
    call["function"] = {"name": "calculate", "arguments": arguments}  # type: ignore[assignment]
    return said("", tool_calls=[call])


WITH_TOOLS = [ASKED, calling({"a": "2+2"}), RESULT, said("It is 4."), MORE, said("It is 6.")]
PLAIN = [ASKED, said("It is 4."), MORE, said("It is 6.")]
THOUGHT = [
    ASKED,
    said("<think>\nI add.\n</think>\n\nIt is 4."),
    MORE,
    said("<think>\nI add again.\n</think>\n\nIt is 6."),
]
ROLLOUTS = [
    *(("qwen2_5", WITH_TOOLS), ("qwen3", WITH_TOOLS), ("gptoss", WITH_TOOLS)),
    *(("glm4moe", PLAIN), ("glm4moe", WITH_TOOLS), ("glm4moe", THOUGHT)),
    *(("qwen3", THOUGHT), ("deepseek_r1_distill", THOUGHT), ("qwen3_6", THOUGHT)),
    *(("llama3", PLAIN), ("gemma", PLAIN), ("phi3", PLAIN), ("cohere", PLAIN)),
]


STOPS = {"glm4moe": ["<|user|>", "<|observation|>"], "gptoss": ["<|call|>"]}
"""Where the published generation settings stop, besides the end of sequences."""


def published(name: str) -> ChatTemplate:
    """A template that stops where the published settings of its model do."""
    template = template_of(SOURCES[name], eos_of(name))
    ids = {text: index for index, text in template.special_tokens.items()}
    template.stop_token_ids.update(ids[text] for text in STOPS.get(name, ()))
    return template


def texts(template: ChatTemplate, trajectory: Trajectory) -> list[str]:
    return [template.decode_all(turn.completion_token_ids) for turn in trajectory.turns]


def reason_of(template: ChatTemplate, messages: list[Message], tools: Any = None) -> str:
    with pytest.raises(TrajectoryError) as refused:
        demonstrate(template, messages, tools)
    return refused.value.reason


@pytest.mark.parametrize(("name", "messages"), ROLLOUTS)
def test_each_turn_is_trained_up_to_the_token_that_ends_it(
    name: str, messages: list[Message]
) -> None:
    template = published(name)
    made = demonstrate(template, messages, TOOLS if messages is WITH_TOOLS else None)
    turns = [message for message in messages if message["role"] == "assistant"]
    assert len(made.turns) == len(turns)
    for text, message in zip(texts(template, made), turns, strict=True):
        assert text.endswith((*TURN_ENDS, *STOPS.get(name, ())))
        answer = message["content"].rpartition("</think>")[2].strip()
        assert (answer or "calculate") in text
    (branch,) = made.samples()
    assert made.branches()[0].token_ids == branch.token_ids
    report = audit(made)
    assert report.violations == 0, report.first_violation
    assert (report.forked, report.tokens_trained) == ({}, made.sampled_tokens)
    trained = [i for i, m in zip(branch.token_ids, branch.response_mask, strict=True) if m]
    assert template.decode_all(trained) == "".join(texts(template, made))


def test_the_next_header_ends_a_turn_that_has_no_other_end() -> None:
    template = published("glm4moe")
    made = demonstrate(template, WITH_TOOLS, TOOLS)
    call, answer, last = texts(template, made)
    assert call.endswith("</tool_call><|observation|>"), "a result follows"
    assert answer.endswith("4.<|user|>")
    assert last.endswith("6.<|user|>"), "also where nothing follows"
    following = bridge(
        template,
        prompt_token_ids=made.prompt_token_ids(0),
        completion_token_ids=made.turns[0].completion_token_ids,
        new_messages=[RESULT],
        tools=TOOLS,
    )
    assert following.token_ids == made.prompt_token_ids(1), "as in a rollout"


def test_a_turn_that_ends_where_sampling_goes_on_is_refused() -> None:
    for name, end in {"glm4moe": "</tool_call>", "gptoss": "<|call|>"}.items():
        template = template_of(SOURCES[name], eos_of(name))  # the settings of no model
        with pytest.raises(TrajectoryError, match=re.escape(end)) as refused:
            demonstrate(template, WITH_TOOLS[:2], TOOLS)
        assert refused.value.reason == "no_turn_end"
        assert "sampling.stop_token_ids" in str(refused.value)
    base = template_of(SOURCES["qwen2_5"], "<|endoftext|>")  # a base model learns the template
    assert texts(base, demonstrate(base, PLAIN))[-1] == "It is 6.<|im_end|>"


def test_tokens_equal_the_templates_where_it_rewrites_nothing() -> None:
    for tokenizer in ("bpe", "tekken"):
        template = chat_template("qwen2_5", tokenizer)
        (branch,) = demonstrate(template, WITH_TOOLS, TOOLS).samples()
        whole = template.render(WITH_TOOLS, tools=TOOLS, add_generation_prompt=False)
        assert whole[: len(branch.token_ids)] == branch.token_ids


def test_reasoning_stays_in_the_history_as_in_rollouts() -> None:
    """Qwen 3's template leaves it out of earlier turns, and a rollout never does."""
    template = chat_template("qwen3", "bpe")
    (branch,) = demonstrate(template, THOUGHT).samples()
    assert "I add." in template.decode_all(branch.token_ids)
    rendered = template.render_text(THOUGHT, add_generation_prompt=False)
    assert "I add.\n" not in rendered


def test_arguments_may_be_text_as_clients_send_them() -> None:
    template = chat_template("qwen2_5", "bpe")
    as_text = [ASKED, calling(json.dumps({"a": "2+2"})), *WITH_TOOLS[2:]]
    assert demonstrate(template, as_text, TOOLS) == demonstrate(template, WITH_TOOLS, TOOLS)
    assert tools_of({"tools": json.dumps(TOOLS)}) == tools_of({"tools": TOOLS}) == TOOLS
    assert tools_of({}) is tools_of({"tools": ""}) is None


def test_a_message_of_weight_0_is_context() -> None:
    template = chat_template("qwen2_5", "bpe")
    light = [ASKED, said("It is 5.", weight=0), MORE, said("It is 6.")]
    made = demonstrate(template, light)
    assert texts(template, made) == ["It is 6.<|im_end|>"]
    assert "It is 5.<|im_end|>" in template.decode_all(made.prompt_token_ids(0))
    assert demonstrate(template, [*PLAIN[:3], said("no", weight=0)]).turns[1:] == []


@pytest.mark.parametrize("name", FLAGS)
def test_the_flags_of_other_systems_make_a_message_context(name: str) -> None:
    template = chat_template("qwen2_5", "bpe")
    for value in (0, False, 0.0):
        rows = [{**ASKED, name: value}, said("It is 5.", **{name: value}), MORE, said("It is 6.")]
        assert texts(template, demonstrate(template, rows)) == ["It is 6.<|im_end|>"], value
    for value in (1, True, 1.0, None):
        rows = [ASKED, said("It is 4.", **{name: value})]
        assert demonstrate(template, rows) == demonstrate(template, PLAIN[:2]), value


@pytest.mark.parametrize(
    "key", ["mask", "masked", "loss_scale", "no_loss", "train_detail", "weights", "assistant_mask"]
)
def test_a_mask_of_unknown_meaning_refuses_its_row(key: str) -> None:
    template = chat_template("qwen2_5", "bpe")
    for odd in (said("4", **{key: 0}), said("4", weight=0.5), said("4", train="false")):
        assert reason_of(template, [ASKED, odd]) == "unclear_mask"
    parts = [{"type": "text", "text": "4", "train": False}]
    assert reason_of(template, [ASKED, {**said(""), "content": parts}]) == "unclear_mask"
    with pytest.raises(TrajectoryError, match=f"message 2 has '{key}': 0"):
        demonstrate(template, [ASKED, said("4", **{key: 0})])


def test_a_row_may_say_so_as_a_whole() -> None:
    for row, reason in (
        ({"train": False}, "nothing_to_train"),
        ({"weight": 0}, "nothing_to_train"),
        ({"loss_mask": [0, 1]}, "unclear_mask"),
        ({"mask": 1}, "unclear_mask"),
    ):
        with pytest.raises(TrajectoryError, match="the row") as refused:
            check_row({"messages": PLAIN, **row})
        assert refused.value.reason == reason
    check_row({"messages": PLAIN, "weight": 1.0, "train": None, "weight_kg": 70})


def test_quoted_special_tokens_end_no_turn() -> None:
    template = chat_template("qwen2_5", "bpe")
    made = demonstrate(template, [ASKED, said("Turns begin with <|im_start|>, you know.")])
    assert texts(template, made) == ["Turns begin with <|im_start|>, you know.<|im_end|>"]
    stopping = [ASKED, said("Turns end with <|im_end|>, you know.")]
    assert reason_of(template, stopping) == "stops_early", "sampling would stop there"


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("name", ["gptoss", "qwen3", "glm4moe", "qwen3_6"])
def test_reasoning_may_have_any_of_its_names(name: str, key: str) -> None:
    template = published(name)
    made = demonstrate(template, [ASKED, said("It is 4.", **{key: "I add."})])
    (text,) = texts(template, made)
    assert "I add." in text


def test_what_the_template_changes_is_refused() -> None:
    qwen = chat_template("qwen2_5", "bpe")
    assert reason_of(qwen, [ASKED, said("4", reasoning="I add.")]) == "content_changed"
    with pytest.raises(TrajectoryError, match=r"'I add\.' of message 2, which is reasoning apart"):
        demonstrate(qwen, [ASKED, said("4", reasoning="I add.")])
    cuts = template_of(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content[:30] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert texts(cuts, demonstrate(cuts, [ASKED, said("4")])) == ["4<|im_end|>"]
    assert reason_of(cuts, [ASKED, said("It is four, if I am not mistaken.")]) == "content_changed"


@pytest.mark.parametrize(
    ("name", "messages", "reason"),
    [
        ("qwen2_5", [ASKED], "nothing_to_train"),
        ("qwen2_5", [ASKED, {"content": "4"}], "malformed"),
        ("qwen2_5", [ASKED, said("", tool_calls=[{"name": "x"}])], "malformed"),
        ("qwen2_5", [{**ASKED, "content": [{"type": "image"}]}, said("4")], "image_refused"),
        ("deepseek_r1_distill", PLAIN, "unlike_generation"),
        ("glm4moe", PLAIN, "no_turn_end"),
        ("gemma", [{"role": "system", "content": "Be brief."}, *PLAIN], "template_refuses"),
    ],
)
def test_what_cannot_be_exact_is_refused_with_a_reason(
    name: str, messages: list[Message], reason: str
) -> None:
    assert reason_of(chat_template(name, "bpe"), messages) == reason


def test_tools_and_results_hidden_by_the_prompt_are_refused() -> None:
    assert reason_of(chat_template("gemma", "bpe"), WITH_TOOLS, TOOLS) == "tools_hidden"
    assert reason_of(chat_template("phi3", "bpe"), [*WITH_TOOLS]) in (
        "message_dropped",
        "content_changed",
    )


def test_rows_that_teach_to_think_nothing_are_warned_of_once(
    make_config: Callable[..., Config],
) -> None:
    for name, warns in (("qwen3", 1), ("glm4moe", 1), ("qwen3_6", 1), ("qwen2_5", 0)):
        warned: list[str] = []
        reader = RowReader(make_config().model.max_length, published(name), warned.append)
        for number in (1, 2):
            reader.read(Problem(f"rows:{number}", {"messages": PLAIN}))
        assert len(warned) == warns, name
        assert all(text.startswith("rows:1 has an answer without reasoning") for text in warned)
        thinking = RowReader(make_config().model.max_length, published(name), warned.append)
        row = {"messages": [ASKED, said("<think>\nI add.\n</think>\n\nIt is 4.")]}
        thinking.read(Problem("rows:1", row))
        assert len(warned) == warns, name
