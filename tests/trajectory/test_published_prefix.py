"""`replace_prefix_tokens` on every published template, beside the rule that it grew from.

`python -m tests.trajectory.test_published_prefix` prints how often both agree.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.trajectory.published import SOURCES, TOOLS, chat_template, eos_of
from tests.trajectory.test_bridge import NEWS, Case, family, message
from turnwise.chat.messages import Conversation
from turnwise.chat.prompts import RefusedParameter, spliced_prompt
from turnwise.compat.nemo_rl import _replace_prefix_tokens
from turnwise.errors import TrajectoryError
from turnwise.trajectory import replace_prefix_tokens

KINDS = (
    "answer",
    "second answer",
    "reasoning kept",
    "long reasoning",
    "call",
    "call after call",
)
OTHER_ENDS = ("glm4moe", "gptoss", "phi3", "phi3_5")
"""Templates that end an assistant's turn otherwise than with the tokenizer's EOS."""
THINKING = {"default": {}, "on": {"enable_thinking": True}, "off": {"enable_thinking": False}}


def published_rule(eos: int, model: list[int], prefix: list[int], whole: list[int]) -> list[int]:
    """NeMo-RL's: the last end of a turn within the first `len(prefix)` rendered ids."""
    end = len(model) - 1 if model[-1] == eos else len(model)
    start = max(i for i in range(min(len(prefix), len(whole))) if whole[i] == eos)
    return [*model[:end], *whole[start:]]


@dataclass(frozen=True)
class Compared(Case):
    thought: str

    def outcome(self) -> str:
        """The function's results next to the rule's."""
        template, render = self.template, self.template.render_text
        turns = [*self.before, self.turn]
        try:
            opening = render(self.before, tools=self.tools)
            closed = template.render(turns, tools=self.tools, add_generation_prompt=False)
            text = render([*turns, *self.after], tools=self.tools)
        except Exception:
            return "the template refuses it"
        eos, prefix = template.tokenizer.eos_token_id, closed.tolist()
        end = eos_of(self.name)
        seam = text.rfind(end, 0, text.find(NEWS))
        if text.count(NEWS) != len(self.after) or seam < 0 or eos not in prefix:
            return "the template drops a message, or the end of the turn"
        if (said := self.sampled(opening, end)) is None:
            return "the template drops a message, or the end of the turn"
        model, whole = template.encode(opening + said), template.encode(text)
        right = template.decode_all(model).removesuffix(end) + text[seam:]
        rule = published_rule(eos, model, prefix, whole)
        holds = template.decode_all(rule) == right
        try:
            ours = replace_prefix_tokens(template.tokenizer, model, prefix, whole)
        except TrajectoryError as error:
            if holds:
                return f"wrong: refused where the rule is right: {error.reason}, {error}"
            shown = template.decode_all(rule)
            return f"refused, where the rule gives {shown[-60:]!r} for {right[-60:]!r}"
        if holds:
            return (
                "the same ids as the rule" if ours == rule else "wrong: other ids than the rule's"
            )
        if template.decode_all(ours) != right:
            return f"wrong: {template.decode_all(ours)!r} for {right!r}"
        return "right where the rule is wrong"

    def sampled(self, opening: str, end: str) -> str | None:
        """The model's text after the opening; None where the template does not write it."""
        rendered = self.template.render_text(
            [*self.before, self.turn], tools=self.tools, add_generation_prompt=False
        )
        rendered = rendered[: rendered.rfind(end)]
        if rendered.startswith(opening):
            return rendered[len(opening) :] + end
        if "tool_calls" in self.turn:
            start = rendered.rfind("<tool_call>")
            if start < 0:
                return None
            answer = rendered[start:]
        else:
            content = self.turn["content"]
            answer = content if isinstance(content, str) else content[0]["text"]
        if opening.rstrip().endswith("<think>"):  # it opens the model's reasoning
            return f"{self.thought}\n</think>\n\n{answer.rpartition('</think>')[2].lstrip()}{end}"
        return answer + end


WRITTEN = {
    '"a": "ü", "b": 1000.0': '"b": 1e3, "a": "\\u00fc",',
    "\n1000.0\n</parameter>": "\n1e3\n</parameter>",
}
"""How the model writes what a template prints."""


class Otherwise(Compared):
    """A call that the model writes otherwise than the template, and text after it."""

    def sampled(self, opening: str, end: str) -> str | None:
        said = super().sampled(opening, end)
        for printed, written in WRITTEN.items():
            if said is not None and printed in said:
                return f"{said.removesuffix(end).replace(printed, written)} Done.{end}"
        return None


def call(number: int, deepseek: bool) -> dict[str, Any]:
    arguments: Any = {"a": f"{number} + 2"}
    function = {"name": "calculate", "arguments": json.dumps(arguments) if deepseek else arguments}
    made = {"type": "function", "id": f"call0000{number}", "function": function}
    return {"role": "assistant", "content": None if deepseek else "", "tool_calls": [made]}


def result(number: int, text: str) -> dict[str, Any]:
    return {
        "role": "tool",
        "name": "calculate",
        "tool_call_id": f"call0000{number}",
        "content": text,
    }


def cases(name: str) -> Iterator[tuple[str, str, Compared]]:
    deepseek = name.startswith("deepseek")
    asked = [message(name, "user", "What is 2 + 2?")]
    more = [message(name, "user", f"{NEWS} And 3 + 3?")]
    thought = "Two and two."
    kept = message(name, "assistant", f"<think>\n{thought}\n</think>\n\nIt is 4.")
    long = message(name, "assistant", f"<think>\n{20 * thought}\n</think>\n\nIt is 4.")
    plain = message(name, "assistant", "It is 4.")
    earlier = [*asked, message(name, "assistant", "It is 4."), message(name, "user", "Sure?")]
    called = [*asked, call(1, deepseek), result(1, "3")]
    made: dict[str, tuple[Any, ...]] = {
        "answer": (asked, plain, more, None),
        "second answer": (earlier, message(name, "assistant", "Yes."), more, None),
        "reasoning kept": (asked, kept, more, None),
        "long reasoning": (earlier, long, more, None),
        "call": (asked, call(2, deepseek), [result(2, f"{NEWS} 4")], TOOLS),
        "call after call": (called, call(2, deepseek), [result(2, f"{NEWS} 4")], TOOLS),
    }
    for thinking, variables in THINKING.items():
        template = chat_template(name, "bpe").with_variables(**variables)
        for kind in KINDS:
            before, turn, after, tools = made[kind]
            hidden = 20 * thought if kind == "long reasoning" else thought
            yield kind, thinking, Compared(name, template, before, turn, after, tools, hidden)


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_the_result_is_the_rules_wherever_that_is_right(name: str) -> None:
    outcomes = {(kind, thinking): case.outcome() for kind, thinking, case in cases(name)}
    assert {key: o for key, o in outcomes.items() if o.startswith("wrong")} == {}
    served = [o for o in outcomes.values() if o.startswith(("the same", "right"))]
    assert bool(served) == (family(name) not in OTHER_ENDS)


def otherwise(name: str) -> str:
    """The outcome of a call that a template prints otherwise than the model wrote it."""
    deepseek = name.startswith("deepseek")
    turn, arguments = call(2, deepseek), {"a": "ü", "b": 1000.0}
    text = json.dumps(arguments, ensure_ascii=False)
    turn["tool_calls"][0]["function"]["arguments"] = text if deepseek else arguments
    asked, more = [message(name, "user", "What is 2 + 2?")], [result(2, f"{NEWS} 4")]
    return Otherwise(name, chat_template(name, "bpe"), asked, turn, more, TOOLS, "Two.").outcome()


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_a_call_that_is_printed_otherwise_gives_the_rules_result(name: str) -> None:
    assert not otherwise(name).startswith("wrong")


@pytest.mark.parametrize("name", ["qwen3", "qwen2_5", "llama3_1"])
def test_known_templates_print_calls_otherwise(name: str) -> None:
    assert otherwise(name) == "the same ids as the rule"


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_nothink", "llama3_1"])
def test_a_server_splices_calls_whose_arguments_are_text(name: str) -> None:
    """As clients send them; some templates take objects alone."""
    template, turn = chat_template(name, "bpe"), call(2, False)
    asked, more = [message(name, "user", "2 + 2?")], [result(2, f"{NEWS} 4")]
    case = Compared(name, template, asked, turn, more, TOOLS, "Two.")
    said = case.sampled(template.render_text(asked, tools=TOOLS), eos_of(name))
    assert said is not None
    required = [*template.render(asked, tools=TOOLS).tolist(), *template.encode(said)]
    function = turn["tool_calls"][0]["function"]
    function["arguments"] = json.dumps(function["arguments"])
    ids = spliced_prompt(template, Conversation([*asked, turn, *more], TOOLS), required)
    assert ids[: len(required)] == required
    assert template.decode_all(ids[len(required) :]).count(NEWS) == 1


def test_a_template_may_leave_out_text_before_a_call() -> None:
    """Llama's prints the call alone; what the client sends is compared nevertheless."""
    template, turn = chat_template("llama3_1", "bpe"), call(2, False)
    asked, more = [message("llama3_1", "user", "2 + 2?")], [result(2, "4")]
    printed = '{"name": "calculate", "parameters": {"a": "2 + 2"}}'
    said = template.encode(f"I add. {printed}{eos_of('llama3_1')}")
    required = [*template.render(asked, tools=TOOLS).tolist(), *said]
    sent = [*asked, {**turn, "content": "I add."}, *more]
    assert template.render(sent) == template.render([*asked, turn, *more]), "as it is published"
    ids = spliced_prompt(template, Conversation(sent, TOOLS), required)
    assert ids[: len(required)] == required
    for content in ("I subtract.", ""):
        sent[1]["content"] = content
        with pytest.raises(RefusedParameter, match=r"required_prefix_token_ids: .*was sent with"):
            spliced_prompt(template, Conversation(sent, TOOLS), required)


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_a_question_that_was_edited_is_refused(name: str) -> None:
    template = chat_template(name, "bpe")
    answer = message(name, "assistant", "It is 4.")
    more = message(name, "user", "And 3 + 3?")
    said, sent = (message(name, "user", f"What is 2 {sign} 2?") for sign in "+-")
    model = [
        *template.render([said]).tolist(),
        *template.encode("It is 4."),
        template.tokenizer.eos_token_id,
    ]
    prefix = template.render([sent, answer], add_generation_prompt=False)
    with pytest.raises(TrajectoryError):
        replace_prefix_tokens(
            template.tokenizer, model, prefix, template.render([sent, answer, more])
        )


if __name__ == "__main__":
    counted: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    for each in sorted(SOURCES):
        for kind, thinking, case in cases(each):
            outcome = case.outcome()
            if outcome.startswith(("refused", "wrong")):
                sys.stdout.write(f"{each}, {kind}, thinking {thinking}: {outcome}\n"[:500])
            counted[kind][outcome.partition(",")[0].partition(":")[0]] += 1
    for kind, counts in counted.items():
        sys.stdout.write(f"{kind:16} {dict(counts)}\n")


class OnlyEos:
    """A tokenizer as NeMo-RL's own tests have it."""

    eos_token_id = 2


@pytest.mark.parametrize(
    ("model", "prefix", "whole", "expected"),
    [
        ([], [9, 2], [9, 2, 33, 44], [9, 2, 33, 44]),
        ([100, 2], [9, 2, 9, 2], [9, 2, 9, 2, 77, 88], [100, 2, 77, 88]),
        ([8, 99, 99, 2], [8, 88, 2], [8, 2, 70, 2, 40], [8, 99, 99, 2, 70, 2, 40]),
    ],
)
def test_ids_alone_suffice_for_the_published_rule(
    model: list[int], prefix: list[int], whole: list[int], expected: list[int]
) -> None:
    """`_replace_prefix_tokens` with a tokenizer that cannot decode."""
    assert _replace_prefix_tokens(OnlyEos(), model, prefix, whole) == expected
