"""The bridge over published templates; see `published` for where they come from."""

import ast
import copy
import inspect
import json
import random
import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trajectory.more import run_with
from tests.trajectory.published import (
    SOURCES,
    TOKENIZERS,
    TOOLS,
    TURN_ENDS,
    WANTS_PARTS,
    chat_template,
    eos_of,
    spelled,
)
from turnwise.config.data import template_text
from turnwise.trajectory import Bridge, ChatTemplate, bridge
from turnwise.trajectory.bridge import Seam, find_seam

CASES = settings(deadline=None, max_examples=300)
NEWS = "§"  # new messages begin with what nothing else holds
words = st.text(alphabet='ab0 \n."{}:é界', min_size=1, max_size=20)
names = st.sampled_from(sorted(SOURCES))
tokenizers = st.sampled_from(TOKENIZERS)

# What published templates do not take, and so nobody could continue.
REFUSED = {
    "cohere": {"tool": "template_refuses"},
    "cohere2": {"tool": "message_dropped"},
    "gemma": {"tool": "template_refuses"},
    "gemma3": {"tool": "template_refuses"},
    "llama3_1": {"parallel": "template_refuses"},
    "llama3_2": {"parallel": "template_refuses"},
    "phi3": {"tool": "message_dropped"},
    "phi3_5": {"tool": "message_dropped"},
}

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Case:
    """One assistant's turn in a conversation, and what follows it."""

    name: str
    template: ChatTemplate
    before: list[dict[str, Any]]
    turn: dict[str, Any]
    after: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None

    @property
    def opening(self) -> str:
        return self.template.render_text(self.before, tools=self.tools)

    @property
    def said(self) -> str:
        """The turn as the template writes it, up to its end."""
        whole = self.template.render_text(
            [*self.before, self.turn], tools=self.tools, add_generation_prompt=False
        )
        if whole.startswith(self.opening):
            said = whole[len(self.opening) :]
        elif "tool_calls" in self.turn:  # a think block opens here and not in a finished turn
            said = whole[whole.rfind("calculate") :]
        else:
            return text_of(self.turn) + eos_of(self.name)
        ends = [m.end() for m in self.template.special_token_pattern.finditer(said)]
        turn_ends = [e for e in ends if any(said[:e].endswith(t) for t in turn_ends_in(said))]
        return said[: turn_ends[-1]] if turn_ends else said

    @property
    def whole(self) -> str:
        return self.template.render_text([*self.before, self.turn, *self.after], tools=self.tools)

    def bridge(self, completion: list[int]) -> Bridge:
        return bridge(
            self.template,
            prompt_token_ids=self.template.encode(self.opening),
            completion_token_ids=completion,
            new_messages=self.after,
            tools=self.tools,
        )


def turn_ends_in(text: str) -> list[str]:
    return [part for part in MARKERS.findall(text) if part in TURN_ENDS]


MARKERS = re.compile(r"<[^<>]*>")


def text_of(message: dict[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def family(name: str) -> str:
    return name.removesuffix("_training")


def message(name: str, role: str, content: str, **more: Any) -> dict[str, Any]:
    parts = family(name) in WANTS_PARTS
    return {
        "role": role,
        "content": [{"type": "text", "text": content}] if parts else content,
        **more,
    }


@st.composite
def answers(draw: st.DrawFn) -> Case:
    """A turn of text, maybe with reasoning, and a user's next message."""
    name = draw(names)
    said = draw(words)
    if draw(st.booleans()):
        said = f"<think>\n{draw(words)}\n</think>\n\n{said}"
    before = [message(name, "user", draw(words))]
    if draw(st.booleans()):
        before += [message(name, "assistant", draw(words)), message(name, "user", draw(words))]
    return Case(
        name,
        chat_template(name, draw(tokenizers)),
        before,
        message(name, "assistant", said),
        [message(name, "user", NEWS + draw(words))],
        None,
    )


@st.composite
def calls(draw: st.DrawFn) -> Case:
    """A turn of tool calls, their results, and maybe a user who says more."""
    name = draw(names.filter(lambda n: family(n) not in WANTS_PARTS))
    count = draw(st.integers(1, 3))
    ids = [f"call{index:05d}" for index in range(count)]
    made = [
        {
            "type": "function",
            "id": identity,
            "function": {"name": "calculate", "arguments": {"a": draw(words)}},
        }
        for identity in ids
    ]
    deepseek = name.startswith("deepseek")  # wants arguments as text and no content
    if deepseek:
        for call in made:
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    results = [
        {
            "role": "tool",
            "name": "calculate",
            "tool_call_id": identity,
            "content": NEWS + draw(words),
        }
        for identity in ids
    ]
    if draw(st.booleans()):
        results.append({"role": "user", "content": NEWS + draw(words)})
    return Case(
        name,
        chat_template(name, draw(tokenizers)),
        [{"role": "user", "content": draw(words)}],
        {"role": "assistant", "content": None if deepseek else "", "tool_calls": made},
        results,
        TOOLS,
    )


def check(case: Case, completion: list[int], result: Bridge) -> None:
    """Prefix identity, equal text where the template rewrites nothing, one turn end."""
    template, opening = case.template, case.opening
    past = [*template.encode(opening), *completion]
    assert result.token_ids is not None, (case.name, result.fork_reason, result.detail)
    assert result.token_ids[: len(past)] == past
    said = template.decode_all(completion)
    text = template.decode_all(result.token_ids)
    assert text.startswith(opening + said)
    whole = case.whole
    if whole.startswith(opening + said):
        assert text == whole
    added = text[len(opening + said) :]
    assert added.count(NEWS) == len(case.after)
    if turn_ends_in(said[-30:]):
        assert not turn_ends_in(added.partition(NEWS)[0]), "a second end of the turn"


@CASES
@given(case=answers(), rng=st.randoms(use_true_random=False))
def test_an_answer_bridges_to_what_the_user_says_next(case: Case, rng: random.Random) -> None:
    completion = spelled(case.template, case.said, rng)
    check(case, completion, case.bridge(completion))


@CASES
@given(case=calls(), rng=st.randoms(use_true_random=False))
def test_tool_calls_bridge_to_their_results(case: Case, rng: random.Random) -> None:
    refused = REFUSED.get(family(case.name), {})
    parallel = len(case.turn["tool_calls"]) > 1
    expected = refused.get("tool") or (refused.get("parallel") if parallel else None)
    if expected is not None:
        result = case.bridge(case.template.encode("said" + eos_of(case.name)))
        assert (result.token_ids, result.fork_reason) == (None, expected)
        assert result.detail
        return
    completion = spelled(case.template, case.said, rng)
    check(case, completion, case.bridge(completion))


@CASES
@given(case=answers(), rng=st.randoms(use_true_random=False), data=st.data())
def test_a_turn_that_was_cut_off_gets_its_end_once(
    case: Case, rng: random.Random, data: st.DataObject
) -> None:
    content = text_of(case.turn)
    cut = content[: data.draw(st.integers(0, len(content)))]
    completion = spelled(case.template, cut, rng)
    result = case.bridge(completion)
    past = [*case.template.encode(case.opening), *completion]
    assert result.token_ids is not None, (case.name, result.fork_reason, result.detail)
    assert result.token_ids[: len(past)] == past
    assert case.template.decode_all(result.added_token_ids).count(NEWS) == 1
    stopped = replace(case, turn=message(case.name, "assistant", cut.strip() or "x"))
    text = case.template.decode_all(result.token_ids)
    rewritten = not stopped.whole.startswith(stopped.opening + cut)
    if (
        not rewritten
        and cut.strip() == cut != ""
        and stopped.said in (cut, *(cut + end for end in TURN_ENDS))
    ):
        assert text == stopped.whole
    if not family(case.name).startswith("glm"):
        added = text[len(case.opening + cut) :]
        assert len(turn_ends_in(added.partition(NEWS)[0])) == 1, "not one end of the turn"


@pytest.mark.slow
@pytest.mark.parametrize(
    "test",
    [
        test_an_answer_bridges_to_what_the_user_says_next,
        test_tool_calls_bridge_to_their_results,
        test_a_turn_that_was_cut_off_gets_its_end_once,
    ],
)
def test_more_conversations_bridge(test: Any) -> None:
    run_with(test, examples=3000)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("name", sorted(SOURCES))
def test_every_published_template_bridges(name: str, tokenizer: str) -> None:
    case = Case(
        name,
        chat_template(name, tokenizer),
        [message(name, "user", "What is 2 + 2?")],
        message(name, "assistant", "It is 4."),
        [message(name, "user", f"{NEWS} And 3 + 3?")],
        None,
    )
    completion = case.template.encode(case.said)
    check(case, completion, case.bridge(completion))


def simple(name: str, after: list[dict[str, Any]]) -> Case:
    before, turn = [message(name, "user", "Hi.")], message(name, "assistant", "It is 4.")
    return Case(name, chat_template(name, "bpe"), before, turn, after, None)


def added_text(name: str, said: str, after: list[dict[str, Any]]) -> str | None:
    """The ids that the bridge adds, or the reason why it adds none."""
    case = simple(name, after)
    result = case.bridge(case.template.encode(said))
    if result.token_ids is None:
        return result.fork_reason
    return case.template.decode_all(result.added_token_ids)


ASSISTANT = "<|im_start|>assistant\n"
MORE = [{"role": "user", "content": "More."}]


@pytest.mark.parametrize(
    ("name", "said", "added"),
    [
        # Final turns end with <|return|>, others with <|end|>: the sampled one stays.
        ("gptoss", "4<|return|>", "<|start|>user<|message|>More.<|end|><|start|>assistant"),
        ("gptoss", "4", "<|end|><|start|>user<|message|>More.<|end|><|start|>assistant"),
        # The conversation ends with <|endoftext|>, a turn with <|end|>.
        ("phi3", "4<|end|>", "\n<|user|>\nMore.<|end|>\n<|assistant|>\n"),
        ("phi3", "4<|endoftext|>", "\n<|user|>\nMore.<|end|>\n<|assistant|>\n"),
        # A turn has no end of its own; the next header stops the model.
        ("glm4moe", "4", "<|user|>\nMore.<|assistant|>"),
        ("glm4moe", "4<|user|>", "\nMore.<|assistant|>"),
        ("glm4moe", "4<|endoftext|>", "<|user|>\nMore.<|assistant|>"),
        ("glm4moe_training", "4<|endoftext|>", "<|user|>\nMore.<|assistant|>"),
        # Markers that end no turn: what they end is cut off.
        ("qwen3", "<think>", "<|im_end|>\n<|im_start|>user\nMore.<|im_end|>\n" + ASSISTANT),
        ("qwen3", "4<|im_start|>", "<|im_end|>\n<|im_start|>user\nMore.<|im_end|>\n" + ASSISTANT),
    ],
)
def test_ends_of_turns(name: str, said: str, added: str) -> None:
    assert added_text(name, said, MORE) == added


def test_a_moved_or_dropped_message_is_reported() -> None:
    late_system = [*MORE, {"role": "system", "content": "Be brief."}]
    for name in ("deepseekv3", "cohere2", "deepseek_r1_distill"):
        assert added_text(name, "4", late_system) == "message_dropped"
    assert "Be brief." in (added_text("qwen2_5", "4", late_system) or "")


def test_gemma_opens_the_result_inside_the_assistants_turn() -> None:
    results = [{"role": "tool", "name": "calculate", "content": "4"}]
    expected = 'response:calculate{value:<|"|>4<|"|>}<tool_response|>'
    assert added_text("gemma4", "<tool_call|><|tool_response>", results) == expected
    assert added_text("gemma4", "<tool_call|>", results) == "<|tool_response>" + expected
    assert added_text("gemma4", "<tool_call|><turn|>", results) == "turn_end_unknown"


def test_a_template_that_looks_calls_up_by_their_ids(tokenizer: Any) -> None:
    source = (
        "{% set ns = namespace(ids=[]) %}{% for m in messages %}"
        "{% if m.tool_calls %}{% set ns.ids = m.tool_calls | map(attribute='id') | list %}"
        "call {{ m.tool_calls[0].function.arguments.a }} {{ ns.ids[0] }}<|im_end|>"
        "{% elif m.role == 'tool' %}{% if m.tool_call_id not in ns.ids %}"
        "{{ raise_exception('no such call') }}{% endif %}{{ m.tool_call_id }}: {{ m.content }}"
        "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    )
    template = ChatTemplate(tokenizer, chat_template=source)
    for identity in ("first0001", "other0002"):
        result = bridge(
            template,
            prompt_token_ids=[],
            completion_token_ids=template.encode(f"call 4 {identity}<|im_end|>"),
            new_messages=[{"role": "tool", "tool_call_id": identity, "content": "8"}],
        )
        assert template.decode_all(result.added_token_ids) == f"{identity}: 8"


@pytest.mark.parametrize("end", ["<|im_end|>", "<|as text|>"])
def test_white_space_that_is_a_token_ends_no_turn(tokenizer: Any, end: str) -> None:
    """Nor where a template's own marks are none, as those of hermes with Gemma's tokenizer."""
    spaced = copy.deepcopy(tokenizer)
    spaced.add_tokens(["\n\n", "\n"])
    template = ChatTemplate(spaced, chat_template=CHATML.replace("<|im_end|>", end))
    result = bridge(
        template,
        prompt_token_ids=[],
        completion_token_ids=template.encode("cut off\n"),
        new_messages=MORE,
    )
    assert template.decode_all(result.added_token_ids).startswith(f"{end}\n<|im_start|>user")


def test_a_models_further_stop_tokens_end_its_turn(tokenizer: Any) -> None:
    template = ChatTemplate(tokenizer)
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    ask = {"prompt_token_ids": [], "completion_token_ids": [5, end], "new_messages": MORE}
    template.stop_token_ids.add(end)
    added = template.decode_all(bridge(template, **ask).added_token_ids)
    assert added.startswith("\n<|im_start|>user\nMore.")


def worked_example() -> list[dict[str, str]]:
    """The two tables at the top of `bridge`'s module: the text of each part by its name."""
    text = inspect.getdoc(inspect.getmodule(bridge)) or ""
    parts = re.findall(r'^    (\w[\w ]*?)  +(".*?")(?:  |$)', text, re.MULTILINE)
    tables: list[dict[str, str]] = []
    for name, literal in parts:
        if name in ("prompt", "before"):  # each table's first part
            tables.append({})
        tables[-1][name] = ast.literal_eval(literal)
    return tables


def test_the_worked_example_of_the_modules_docstring(tokenizer: Any) -> None:
    template = ChatTemplate(tokenizer, chat_template=CHATML)
    parts, placeholder = worked_example()
    question, more = ({"role": "user", "content": text} for text in ("2 + 2?", "3 + 3?"))
    assert template.render_text([question]) == parts["prompt"]
    prompt = template.encode(parts["prompt"])
    completion = template.encode(parts["completion"])

    result = bridge(
        template,
        prompt_token_ids=prompt,
        completion_token_ids=completion,
        new_messages=[more],
    )

    added = parts["rest of turn end"] + parts["new message"] + parts["generation prompt"]
    assert result.token_ids == [*prompt, *completion, *template.encode(added)]
    (seam,) = template.seams.values()
    rendered = template.render_text([*seam.placeholder, more])
    assert rendered == "".join(placeholder.values())
    assert (seam.turn_end, seam.sentinels) == (placeholder["turn end"], 1)

    cut_off = bridge(
        template,
        prompt_token_ids=prompt,
        completion_token_ids=template.encode("4"),
        new_messages=[more],
    )
    assert template.decode_all(cut_off.added_token_ids) == "<|im_end|>" + added


def test_the_seams_of_the_docstring(tokenizer: Any) -> None:
    shown = re.findall(r"^    (\w+) +([\"'].*)$", inspect.getdoc(Seam) or "", re.MULTILINE)
    answered = ChatTemplate(tokenizer, chat_template=CHATML)
    called = ChatTemplate(tokenizer, chat_template=template_text("hermes"))
    result = {"role": "tool", "name": "add", "tool_call_id": "call00000", "content": "8"}
    seams = find_seam(answered, MORE, None), find_seam(called, [result], None)
    assert len(shown) == 4 * len(seams)
    for index, (name, value) in enumerate(shown):
        assert getattr(seams[index // 4], name) == ast.literal_eval(value), (index, name)


def test_there_are_as_many_templates_as_we_say() -> None:
    assert len(SOURCES) >= 72
