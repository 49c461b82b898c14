"""The GSM8K example: its prompt, its calculator and its reward."""

import asyncio
import itertools
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils import get_json_schema

from examples.gsm8k.environment import Gsm8k, calculate
from examples.gsm8k.solutions import earns, solved_conversation
from turnwise.errors import InputError

ROWS = [json.loads(line) for line in Path(__file__).with_name("gsm8k_rows.jsonl").open()]
"""Rows written for the tests, in GSM8K's form."""

QUESTION = "Natalia sold 48 clips in April and half as many in May. How many in all?"


def reward(text: str, gold: str = "72") -> float:
    environment = Gsm8k({"question": QUESTION, "answer": f"48 + 24 = 72\n#### {gold}"})
    return environment.reward(SimpleNamespace(final_text=text))


def test_gold_solutions_earn_one_and_changed_numbers_nothing():
    for row in ROWS:
        environment = Gsm8k(row)
        working, gold = row["answer"].rsplit("#### ", 1)
        changed = f"{working}#### {float(gold.replace(',', '')) + 1:,}"
        assert environment.reward(SimpleNamespace(final_text=row["answer"])) == 1.0, row
        assert environment.reward(SimpleNamespace(final_text=changed)) == 0.0, row


def test_a_worked_solution_becomes_a_conversation_that_earns_one():
    """The conversations of the small model's warm start."""
    for row in ROWS:
        messages = solved_conversation(row)
        assert earns(row, messages) == 1.0, row
        assert "<<" not in json.dumps(messages)
        roles = [message["role"] for message in messages]
        assert roles == ["user", *["assistant", "tool"] * (len(roles) // 2 - 1), "assistant"]


def test_each_operation_of_an_annotation_is_a_call():
    messages = solved_conversation(ROWS[8])
    calls = [
        (*call["function"]["arguments"].values(), answer["content"])
        for message, answer in itertools.pairwise(messages)
        for call in message.get("tool_calls", ())
    ]
    assert calls == [(2, "*", 9, "18"), (3, "*", 4, "12"), (18, "+", 12, "30"), (30, "/", 2, "15")]
    assert messages[1]["content"] == "All of it costs (2*9)+(3*4) = $"
    assert messages[3]["content"] == ""
    assert messages[7]["content"] == "30.\nEach of them pays 30/2 = $"
    assert messages[-1]["content"] == "15.\n#### 15"


def test_an_annotation_that_is_no_arithmetic_is_text():
    assert [m["role"] for m in solved_conversation(ROWS[10])].count("tool") == 1
    assert len(solved_conversation(ROWS[9])) == 2


@pytest.mark.parametrize(
    "answer",
    [
        "#### 72", "####72", "#### 72.00", "#### $72", r"#### \$72", "#### 72%", r"#### 72\%",
        "#### +72", "#### 072", "#### 72.", "#### **72**", "**#### 72**", "#### 72\r\n",
        r"#### $\boxed{72}$", r"#### \(72\)", r"So \[\boxed{72}\] it is.", r"\boxed{\$72}",
        r"\boxed{ 72.0 }", "#### 72\nNatalia sold 72 clips.", "#### 71\nNo:\n#### 72",
        r"\boxed{71} or rather #### 72",
    ],
)  # fmt: skip
def test_the_gold_number_earns_one_however_it_is_written(answer):
    assert reward(answer) == 1.0


@pytest.mark.parametrize("answer", ["1,080", "1080", "$1,080.00", "1{,}080"])
@pytest.mark.parametrize("marked", ["#### {}", "\\boxed{{{}}}"])
def test_thousands_may_have_commas(marked, answer):
    assert reward(marked.format(answer), gold="1,080") == 1.0


@pytest.mark.parametrize("answer", ["-3", "-$3", "$-3", "\u22123", "-3.0"])
def test_a_negative_number_is_told_from_a_positive_one(answer):
    assert reward(f"#### {answer}", gold="-3") == 1.0
    assert reward(f"#### {answer}", gold="3") == 0.0


@pytest.mark.parametrize(
    "answer",
    [
        "#### 73", "#### -72", "#### 720", "#### 7200%", "#### 0.72", "#### 72.01", r"\boxed{7}",
        "#### 72\n#### 73", r"#### 72 \boxed{73}", r"\boxed{72} #### 73",
    ],
)  # fmt: skip
def test_another_number_earns_nothing(answer):
    assert reward(answer) == 0.0


@pytest.mark.parametrize(
    "answer",
    ["", "72", "The answer is 72.", "### 72", "boxed{72}", r"\boxed{72", "####", "#### \n72"],
)
def test_a_number_without_a_whole_marker_earns_nothing(answer):
    assert reward(answer) == 0.0


@pytest.mark.parametrize(
    "answer", ["72 or 73", "7 2", "71, 72", "8*9", "144/2", "72 clips", "7,2", "٧٢", "--72"]
)  # fmt: skip
def test_more_than_a_number_earns_nothing(answer):
    assert reward(f"#### {answer}") == 0.0
    assert reward(rf"\boxed{{{answer}}}") == 0.0


@pytest.mark.parametrize(
    "answer",
    [
        "9**9**9", "10^10^10", "10^{10^{10}}", "1e999999999", "9999999999!", r"\binom{10^9}{10^8}",
        r"\int_0^{10^9} e^{x^{x}} dx", r"\frac{1}{0}", r"\input{/etc/passwd}", r"\def\x{\x\x}\x",
        "{" * 50_000, "\\boxed{" * 50_000, "####" * 50_000, "9" * 1_000_000, "9," * 500_000,
        " " * 1_000_000 + "72", "$" * 1_000_000, "72" + "$" * 1_000_000 + "x", "(" * 60,
        "__import__('os')", "nan", "inf", "\x00", "\ud800", "\u2028", "🧮",
    ],
    ids=lambda answer: repr(answer[:20]),
)  # fmt: skip
def test_hostile_text_earns_nothing_and_at_once(answer):
    for text in (answer, f"#### {answer}", rf"\boxed{{{answer}}}", rf"#### \boxed{{{answer}"):
        start = time.thread_time()
        assert reward(text) == 0.0
        assert time.thread_time() - start < 10


@given(st.text())
def test_no_text_raises(text):
    for marked in (text, f"#### {text}", rf"\boxed{{{text}}}"):
        assert reward(marked) in (0.0, 1.0)


@given(st.integers(-(10**9), 10**9), st.integers(-(10**9), 10**9))
def test_two_whole_numbers_agree_when_they_are_equal(gold, answer):
    assert reward(f"#### {answer:,}", gold=str(gold)) == float(gold == answer)
    assert reward(rf"\boxed{{{gold}.0}}", gold=f"{gold:,}") == 1.0


def test_rewards_are_right_in_worker_threads():
    numbers = [i % 7 + 69 for i in range(400)]
    with ThreadPoolExecutor(8) as pool:
        rewards = list(pool.map(lambda number: reward(f"#### {number}.00"), numbers))
    assert rewards == [float(number == 72) for number in numbers]


async def test_rewards_are_right_on_an_event_loop():
    assert reward("#### 72") == 1.0
    assert await asyncio.to_thread(reward, "#### 73") == 0.0


@pytest.mark.parametrize("field", ["question", "answer"])
def test_a_row_without_a_field_is_refused_by_its_name(field):
    row = {"question": QUESTION, "answer": "#### 72"}
    with pytest.raises(InputError, match=re.escape(repr(field))):
        Gsm8k({name: text for name, text in row.items() if name != field})
    with pytest.raises(InputError, match=re.escape(repr(field))):
        Gsm8k({**row, field: None})


@pytest.mark.parametrize("answer", ["", "72", "#### many"])
def test_a_row_without_a_gold_number_is_refused(answer):
    with pytest.raises(InputError, match="number"):
        Gsm8k({"question": QUESTION, "answer": answer})


def test_the_problem_holds_the_question_and_not_the_answer():
    environment = Gsm8k({"question": QUESTION, "answer": "48 + 24 = 72\n#### 72"})
    [message] = environment.problem
    assert message["role"] == "user"
    assert message["content"].startswith(QUESTION)
    assert "####" in message["content"]
    assert r"\boxed{N}" in message["content"]
    assert "72" not in message["content"]


@pytest.mark.parametrize(
    ("a", "operation", "b", "result"),
    [
        (48, "+", 24, 72), (48, "-", 50, -2), (48, "*", 0.5, 24), (48, "/", 2, 24),
        (1, "/", 8, 0.125), (0.1, "+", 0.2, 0.3), (1, "/", 3, 0.333333333333),
        (10**20, "*", 3, 3 * 10**20),
    ],
)  # fmt: skip
def test_the_calculator_writes_results_as_a_person_would(a, operation, b, result):
    assert repr(calculate(a, operation, b)) == repr(result)


def test_the_calculator_refuses_what_it_cannot_do():
    with pytest.raises(ZeroDivisionError):
        calculate(1, "/", 0)
    with pytest.raises(ValueError, match="operation"):
        calculate(9, "**", 9)


def test_the_calculator_describes_itself_to_a_model():
    [tool] = Gsm8k({"question": QUESTION, "answer": "#### 72"}).tools
    function = get_json_schema(tool)["function"]
    assert function["name"] == "calculate"
    assert function["parameters"]["required"] == ["a", "operation", "b"]
    assert function["parameters"]["properties"]["operation"]["enum"] == ["+", "-", "*", "/"]
    assert all(field["description"] for field in function["parameters"]["properties"].values())
