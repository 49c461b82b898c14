import itertools
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer
from transformers.utils import get_json_schema

from examples.calculator.conversations import conversation_text, encode, solved_conversation
from examples.calculator.demo import how_to_view, print_results
from examples.calculator.environment import Calculator
from examples.calculator.phrasings import SEEN, UNSEEN
from examples.calculator.prepare import MODEL, prepare
from examples.calculator.problems import (
    Row,
    demonstrations,
    heldout_problems,
    is_held_out,
    train_problems,
)
from examples.calculator.tokenizer import build_tokenizer
from examples.calculator.tool import TOOL_SCHEMA, calculate
from examples.calculator.warm_start import rows
from turnwise.errors import InputError
from turnwise.training.supervised import demonstrate, tools_of
from turnwise.trajectory import ChatTemplate, Outcome, Trajectory, write_jsonl

SEED = 3


def numbers(rows: list[Row]) -> set[int]:
    asked = {int(n) for row in rows for n in re.findall(r"\d+", row["question"])}
    return asked | {calculate(*step) for row in rows for step in row["steps"]}


def test_no_held_out_number_is_ever_trained_on() -> None:
    heldout = heldout_problems(200, SEED)
    asked = {int(n) for row in heldout for n in re.findall(r"\d+", row["question"])}
    trained = numbers(train_problems(4000, SEED))
    trained |= numbers(list(itertools.islice(demonstrations(SEED), 4000)))
    assert len(asked) > 100
    assert not asked & trained
    assert not any(map(is_held_out, trained))


def test_the_tools_schema_is_that_of_its_function() -> None:
    assert get_json_schema(calculate) == TOOL_SCHEMA


def test_half_of_the_held_out_problems_use_unseen_phrasings() -> None:
    seen, unseen = ({phrasing.name for phrasing in pool} for pool in (SEEN, UNSEEN))
    assert not seen & unseen
    heldout = heldout_problems(200, SEED)
    assert sum(row["phrasing"] in unseen for row in heldout) == 100
    assert {row["phrasing"] for row in itertools.islice(demonstrations(SEED), 500)} == seen
    assert {row["phrasing"] for row in train_problems(500, SEED)} == seen | unseen


def test_the_teacher_forgets_third_steps_and_mixes_up_operations() -> None:
    forgotten, confused = [], []
    for row in itertools.islice(demonstrations(SEED), 3000):
        asked = len(re.findall(r"\d+", row["question"])) - 1
        done = [operation for _, operation, _ in row["steps"]]
        if asked == 3:
            forgotten.append(len(done) == 2)
        if row["phrasing"] == "words":
            words = re.findall("plus|minus|times", row["question"])
            meant = [{"plus": "+", "minus": "-", "times": "*"}[word] for word in words]
            confused += [a != b for a, b in zip(done, meant, strict=False)]
        assert row["answer"] == calculate(*row["steps"][-1])
    assert 0.5 < sum(forgotten) / len(forgotten) < 0.9
    assert 0.05 < sum(confused) / len(confused) < 0.2


def test_the_kept_model_is_small_and_has_the_built_tokenizer(tmp_path: Path) -> None:
    assert sum(file.stat().st_size for file in MODEL.iterdir()) < 3_000_000
    kept = AutoTokenizer.from_pretrained(MODEL)
    question = heldout_problems(1, SEED)[0]
    assert conversation_text(kept, question) == conversation_text(
        made := build_tokenizer(0), question
    )
    assert kept.get_vocab() == made.get_vocab()
    prepare(tmp_path, SEED, train=3, heldout=2)
    copied, own = ((folder / "model.safetensors") for folder in (tmp_path / "model", MODEL))
    assert copied.read_bytes() == own.read_bytes()
    assert (tmp_path / "train.jsonl").read_text().count("\n") == 3


def test_the_demo_prints_the_change_and_a_learnt_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = heldout_problems(1, SEED)[0]
    whole = solved_conversation(row)
    a, operation, b = row["steps"][0]
    for step, messages, reward in ((0, whole[:3], 0.0), (5, whole, 1.0)):
        kept = Trajectory(
            "heldout.jsonl:1", messages=messages, status="completed", outcome=Outcome(reward)
        )
        kept.add_turn([1], [2, 3], [0.0, 0.0], [step, step], "stop")
        write_jsonl(tmp_path / "trajectories" / f"eval-{step:04d}.jsonl", [kept])
    steps = [{"step": 0, "accuracy_heldout": 0.5}]
    steps += [{"step": n, "accuracy_heldout": None, "sampled_tokens": 300} for n in range(1, 5)]
    steps += [{"step": 5, "accuracy_heldout": 0.975, "sampled_tokens": 300}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(step)}\n" for step in steps))
    print_results(tmp_path, [row])
    printed = capsys.readouterr().out
    assert f"whose answer is {row['answer']}, before:" in printed
    assert printed.count(row["question"]) == 2
    assert printed.count(f"calculate(a={a}, operation='{operation}', b={b})") == 2
    assert printed.count(f"The answer is {row['answer']}.") == 1
    assert "after 5 steps with 1,500 sampled tokens; evaluations sampled\n   4 more" in printed
    assert "accuracy before RL 0.500, after RL 0.975" in printed


def test_the_demo_ends_with_a_command_that_a_shell_finds() -> None:
    program, name, run, *_ = how_to_view(Path("runs/demo")).split()
    assert (name, run) == ("view", "runs/demo")
    assert Path(program).resolve() == Path(sys.executable).with_name("turnwise").resolve()


def test_a_problem_is_a_chain_of_calls_that_ends_in_the_answer() -> None:
    for row in (*train_problems(50, SEED), *heldout_problems(50, SEED)):
        assert 2 <= len(row["steps"]) <= 3
        result = row["steps"][0][0]
        for a, operation, b in row["steps"]:
            assert a == result
            assert str(b) in row["question"]
            assert len(str(b)) <= 4
            result = calculate(a, operation, b)
        assert result == row["answer"]


def test_only_the_same_seed_gives_the_same_problems() -> None:
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


def test_warm_start_trains_only_assistant_turns_and_their_end(tokenizer: Any) -> None:
    row = train_problems(1, SEED)[0]
    (example,) = encode(tokenizer, [row])
    assert tokenizer.decode(example.ids) == conversation_text(tokenizer, row)
    trained = tokenizer.decode([i for i in example.labels if i >= 0])
    turns = trained.removesuffix("<|im_end|>").split("<|im_end|>")
    calls = len(row["steps"])
    assert len(turns) == calls + 1
    assert all(turn.startswith("<tool_call>") for turn in turns[:calls])
    assert turns[-1] == solved_conversation(row)[-1]["content"]


def test_each_row_of_the_warm_start_is_exact(template: ChatTemplate) -> None:
    for row in itertools.islice(rows(SEED), 20):
        made = demonstrate(template, row["messages"], tools_of(row))
        said = [message for message in row["messages"] if message["role"] == "assistant"]
        assert len(made.turns) == len(said)
        (branch,) = made.samples()
        rendered = template.render(
            row["messages"], tools=tools_of(row), add_generation_prompt=False
        )
        assert rendered[: len(branch.token_ids)] == branch.token_ids
