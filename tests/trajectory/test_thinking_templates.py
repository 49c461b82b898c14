"""Templates of models that think: reasoning stays in its block, and stays as it was sampled.

The template has the structure of those of current models: the generation prompt opens the block of
reasoning, a finished turn is divided at the block's end, reasoning before the last question is left
out, and consecutive tool results share one user's turn.
"""

import json
import re
from typing import Any, Literal

import pytest

from tests.trajectory.published import TOOLS, template_of
from turnwise.chat.messages import Conversation, answer
from turnwise.chat.prompts import next_prompt
from turnwise.chat.session import Session
from turnwise.engine.protocol import Completion
from turnwise.trajectory import ChatTemplate, Prompt, Trajectory, audit, bridge
from turnwise.trajectory.check_template import check_template

_HEAD = """
{%- set last = namespace(question=-1) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}{%- set last.question = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if tools -%}{{- '<|im_start|>system\n' + tools|tojson + '<|im_end|>\n' -}}{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'assistant' -%}
    {{- '<|im_start|>assistant\n' -}}
    {%- set said = message.content or '' -%}
    {%- set thought = message.reasoning_content or '' -%}
"""
_DIVIDED = """
    {%- if '</think>' in said -%}
      {%- set thought = said.split('</think>')[0].split('<think>')[-1].strip('\n') -%}
      {%- set said = said.split('</think>')[-1].lstrip('\n') -%}
    {%- endif -%}
"""
_TAIL = """
    {{- said -}}
    {%- for call in message.tool_calls or [] -%}
      {{- '<tool_call>\n' + call.function.name + call.function.arguments|tojson -}}
      {{- '\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\n' -}}
  {%- elif message.role == 'tool' -%}
    {%- if loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
    {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' -}}
    {%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
  {%- else -%}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n<think>\n' -}}{%- endif -%}
"""
_BLOCK = "{{- '<think>\\n' + thought + '\\n</think>\\n\\n' -}}"
KINDS = {
    "forgets": f"{_HEAD}{_DIVIDED}"
    "{%- if loop.index0 > last.question -%}" + _BLOCK + "{%- endif -%}" + _TAIL,
    "keeps": f"{_HEAD}{_DIVIDED}{_BLOCK}{_TAIL}",
    # The mistake of a published training template: the block is empty, the reasoning behind it.
    "misplaces": _HEAD + "{{- '<think>\\n\\n</think>\\n\\n' -}}" + _TAIL,
}
THOUGHTS = ("first idea", "second idea", "third idea")
QUESTIONS = ("Oslo?", "And Rome?", "And Bern?", "Thanks.")


def thinking(kind: str) -> ChatTemplate:
    return template_of(KINDS[kind])


async def play(
    template: ChatTemplate, history: Literal["exact", "template"]
) -> tuple[Trajectory, list[str]]:
    """Three turns that think, each after a question; returns also the text of each prompt."""
    trajectory, messages = Trajectory("p"), [{"role": "user", "content": QUESTIONS[0]}]
    prompt, reason, texts = template.render(messages), None, []
    for thought, question in zip(THOUGHTS, QUESTIONS[1:], strict=True):
        said = f"{thought}\n</think>\n\nRain."
        # Character by character: not the ids that a tokenizer would make of the text.
        sampled = [i for c in said[: len(thought)] for i in template.encode(c)]
        sampled += template.encode(said[len(thought) :] + "<|im_end|>")
        trajectory.add_turn(
            prompt, sampled, [-0.5] * len(sampled), [0] * len(sampled), "stop", fork_reason=reason
        )
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": question}]
        prompt, reason = await next_prompt(
            template,
            prompt_token_ids=prompt,
            completion_token_ids=sampled,
            new_messages=messages[-1:],
            conversation=messages,
            tools=None,
            history=history,
        )
        texts.append(template.decode_all(prompt))
    trajectory.status = "completed"
    return trajectory, texts


def outside(text: str) -> list[str]:
    """The thoughts that a text has outside of a block."""
    rest = re.sub(r"<think>\n.*?\n</think>", "", text, flags=re.DOTALL)
    return [thought for thought in THOUGHTS if thought in rest]


@pytest.mark.parametrize("kind", KINDS)
async def test_an_exact_history_keeps_thoughts_in_their_blocks(kind: str) -> None:
    """Whatever the template makes of a finished turn."""
    template = thinking(kind)
    trajectory, texts = await play(template, "exact")
    assert [turn.fork_reason for turn in trajectory.turns] == [None] * 3
    (branch,) = trajectory.branches()
    for index, text in enumerate(texts, start=1):
        assert outside(text) == []
        assert [thought in text for thought in THOUGHTS] == [n < index for n in range(3)]
    sampled = [token for turn in trajectory.turns for token in turn.completion_token_ids]
    trained = [t for t, m in zip(branch.token_ids, branch.response_mask, strict=True) if m]
    assert trained == sampled
    assert audit(trajectory).violations == 0


@pytest.mark.parametrize(
    ("kind", "reasons", "misplaced"),
    [
        ("forgets", [None, "history_rewritten", "history_rewritten"], []),
        ("keeps", [None, None, None], []),
        ("misplaces", [None, "history_rewritten", "history_rewritten"], [*THOUGHTS]),
    ],
)
async def test_a_differing_template_history_becomes_a_counted_branch(
    kind: str, reasons: list[str | None], misplaced: list[str]
) -> None:
    trajectory, texts = await play(thinking(kind), "template")
    assert [turn.fork_reason for turn in trajectory.turns] == reasons
    assert outside(texts[-1]) == misplaced
    report = audit(trajectory)
    assert report.violations == 0
    assert sum(map(sum, (s.response_mask for s in trajectory.samples()))) == report.tokens_sampled


@pytest.mark.parametrize(
    ("kind", "verdict"), [("keeps", "exact"), ("forgets", "keeps"), ("misplaces", "keeps")]
)
def test_the_check_of_a_template_shows_what_it_does_to_thoughts(kind: str, verdict: str) -> None:
    found = {finding.case: finding for finding in check_template(thinking(kind))}
    case = found["reasoning and an answer, then the user"]
    assert case.verdict == verdict
    assert bool(case.detail) is (verdict == "keeps")


def call(city: str, index: int) -> dict[str, Any]:
    function = {"name": "calculate", "arguments": json.dumps({"a": city})}
    return {"id": f"call{index:05d}", "type": "function", "function": function}


def result(text: str, index: int) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call{index:05d}", "content": text}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "returned",
    [
        {"reasoning_content": "first idea"},
        {"reasoning": "first idea"},
        {},
        {"reasoning_content": None, "refusal": None, "annotations": []},
        {"reasoning_content": "something else"},
    ],
)
def test_a_session_keeps_sampled_ids_whatever_reasoning_it_gets(
    kind: str, returned: dict[str, Any]
) -> None:
    """Three turns that call a tool; the server gave reasoning apart from content."""
    template, session = thinking(kind), Session("s")
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Oslo?"}]
    path = template.render(messages, tools=TOOLS)
    for turn in range(4):
        asked = Conversation(messages, TOOLS)
        prompt = session.next_prompt(asked, template)
        if turn:
            assert prompt.fork_reason is None
            assert prompt.token_ids is not None
            assert prompt.token_ids[: len(path)] == path
            added = template.decode_all(prompt.token_ids[len(path) :])
            assert added == (
                f"\n<|im_start|>user\n<tool_response>\n{turn - 1}\n</tool_response><|im_end|>\n"
                "<|im_start|>assistant\n<think>\n"
            )
            path = prompt.token_ids
        text = f'first idea\n</think>\n\n<tool_call>\ncalculate{{"a": "{turn}"}}\n</tool_call>'
        sampled = template.encode(text + "<|im_end|>")
        said = answer("", [("calculate", {"a": str(turn)})])
        session.record(
            path,
            Completion(sampled, [-0.5] * len(sampled), [0] * len(sampled), "stop"),
            asked=asked,
            answer=lambda said=said: said,  # type: ignore[misc]
            prompt=prompt,
        )
        path = Prompt.joined(path, sampled)
        calls = [call(str(turn), turn)]
        messages += [
            {"role": "assistant", "content": None, "tool_calls": calls, **returned},
            result(str(turn), turn),
        ]
    assert len(session.trajectory.branches()) == 1
    changed = [dict(message) for message in messages]
    changed[1] |= {"content": "first idea", "tool_calls": None}  # as if it had answered
    assert session.next_prompt(Conversation(changed, TOOLS), template).fork_reason == (
        "history_changed"
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("results", [1, 2, 3])
def test_parallel_results_share_a_turn_as_in_the_template(kind: str, results: int) -> None:
    template = thinking(kind)
    question = [{"role": "user", "content": "Oslo and Rome?"}]
    calls = [call(f"city {n}", n) for n in range(results)]
    for one in calls:
        one["function"]["arguments"] = json.loads(one["function"]["arguments"])
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    answers = [result(f"rain {n}", n) for n in range(results)]
    opening = template.render_text(question, tools=TOOLS)
    whole = template.render_text([*question, turn, *answers], tools=TOOLS)
    said = "".join(
        f'<tool_call>\ncalculate{{"a": "city {n}"}}\n</tool_call>' for n in range(results)
    )
    bridged = bridge(
        template,
        prompt_token_ids=template.encode(opening),
        completion_token_ids=template.encode(f"idea\n</think>\n\n{said}<|im_end|>"),
        new_messages=answers,
        tools=TOOLS,
    )
    assert bridged.token_ids is not None
    end = f"{said}<|im_end|>\n"
    text = template.decode_all(bridged.token_ids)
    assert text.partition(end)[2] == whole.partition(end)[2] != ""
    assert text.count("<|im_start|>user") == 2
    assert bridged.added_token_ids == template.encode(text.partition(said)[2])[1:]
