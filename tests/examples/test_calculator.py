import itertools
import re
from types import SimpleNamespace
from typing import Any

import pytest

from examples.calculator.conversations import conversation_text, encode, solved_conversation
from examples.calculator.environment import Calculator
from examples.calculator.phrasings import SEEN, UNSEEN
from examples.calculator.problems import (
    Row,
    heldout_problems,
    train_problems,
    validation_problems,
    warm_start_problems,
)
from examples.calculator.tool import calculate
from turnwise.errors import InputError

SEED = 3


def numbers(rows: list[Row]) -> set[int]:
    asked = {int(n) for row in rows for n in re.findall(r"\d+", row["question"])}
    return asked | {row["answer"] for row in rows}


def test_no_held_out_number_is_ever_trained_on() -> None:
    heldout = heldout_problems(200, SEED)
    asked = {int(n) for row in heldout for n in re.findall(r"\d+", row["question"])}
    trained = numbers(train_problems(4000, SEED)) | numbers(validation_problems(200, SEED))
    trained |= numbers(list(itertools.islice(warm_start_problems(SEED), 4000)))
    assert len(asked) > 100
    assert not asked & trained


def test_half_of_the_held_out_problems_are_in_phrasings_that_the_warm_start_never_saw() -> None:
    seen, unseen = ({phrasing.name for phrasing in pool} for pool in (SEEN, UNSEEN))
    assert not seen & unseen
    heldout = heldout_problems(200, SEED)
    assert sum(row["phrasing"] in unseen for row in heldout) == 100
    assert {row["phrasing"] for row in itertools.islice(warm_start_problems(SEED), 500)} == seen
    assert {row["phrasing"] for row in train_problems(500, SEED)} == seen | unseen


@pytest.mark.parametrize("row", [*train_problems(50, SEED), *heldout_problems(50, SEED)])
def test_a_problem_is_a_chain_of_calls_that_ends_in_the_answer(row: Row) -> None:
    assert 2 <= len(row["steps"]) <= 3
    result = row["steps"][0][0]
    for a, operation, b in row["steps"]:
        assert a == result
        assert str(b) in row["question"]
        assert len(str(b)) <= 4
        result = calculate(a, operation, b)
    assert result == row["answer"]


def test_the_same_seed_gives_the_same_problems_and_another_does_not() -> None:
    assert train_problems(20, SEED) == train_problems(20, SEED)
    assert train_problems(20, SEED) != train_problems(20, SEED + 1)


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("The answer is 42.", 1.0),
        ("So the answer is 42", 1.0),
        ("The answer is 420.", 0.0),
        ("The answer is 42.5.", 0.0),
        ("The answer is -42.", 0.0),
        ("The answer is 42. The answer is 43.", 0.0),
        ("42", 0.0),
        ("", 0.0),
    ],
)
def test_only_the_right_answer_earns_a_reward(text: str, reward: float) -> None:
    environment = Calculator({"question": "What is 6 * 7?", "answer": 42})
    assert environment.reward(SimpleNamespace(final_text=text)) == reward


@pytest.mark.parametrize("field", ["question", "answer"])
def test_a_row_without_its_field_is_named(field: str) -> None:
    row = {"question": "What is 6 * 7?", "answer": 42}
    del row[field]
    with pytest.raises(InputError, match=field):
        Calculator(row)


def test_the_warm_start_trains_on_assistant_turns_and_their_end_alone(tokenizer: Any) -> None:
    row = train_problems(1, SEED)[0]
    (example,) = encode(tokenizer, [row])
    assert tokenizer.decode(example.ids) == conversation_text(tokenizer, row)
    trained = tokenizer.decode([i for i in example.labels if i >= 0])
    turns = trained.removesuffix("<|im_end|>").split("<|im_end|>")
    calls = len(row["steps"])
    assert len(turns) == calls + 1
    assert all(turn.startswith("<tool_call>") for turn in turns[:calls])
    assert turns[-1] == solved_conversation(row)[-1]["content"]
