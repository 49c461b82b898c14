"""SmolLM2's example: its calculator, its prompt, and what it prints; training is `make real`."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from examples.smollm2.environment import QUESTION, Sums, calculate, solved
from examples.smollm2.run import CONFIG, print_results
from tests.conftest import ROOT
from turnwise.config import load_config
from turnwise.trajectory import Outcome, Trajectory, write_jsonl


@pytest.mark.parametrize(
    ("expression", "result"),
    [("12 + 30 - 4", 38), ("7", 7), ("-5 + 2", -3), (" 1-2 +  3 ", 2), ("0007 + 1", 8)],
)
def test_a_sum_is_calculated(expression: str, result: int) -> None:
    assert calculate(expression) == result


@pytest.mark.parametrize("text", ["", "2 * 3", "1 +", "1 + 2 =", "1 2", "2.5 + 1", "__import__"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="whole numbers with"):
        calculate(text)


def test_the_example_of_the_prompt_is_right() -> None:
    asked, called, result, answer = solved("31 + 8 - 12")
    assert "31 + 8 - 12" in asked["content"]
    (call,) = called["tool_calls"]
    assert str(calculate(**call["function"]["arguments"])) == result["content"]
    assert answer["content"] == result["content"] == "27"


def test_the_results_show_two_problems_and_the_accuracy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step, reward in ((0, 0.0), (12, 1.0)):
        kept = []
        for number in range(1, 4):
            messages = solved(f"{number} + 1") if reward else solved(f"{number} + 1")[:1]
            one = Trajectory(
                f"eval:{number}", messages=messages, status="completed", outcome=Outcome(reward)
            )
            one.add_turn([1], [2, 3], [0.0, 0.0], [step, step], "stop")
            kept.append(one)
        write_jsonl(tmp_path / "trajectories" / f"eval-{step:04d}.jsonl", kept)
    steps: list[dict[str, Any]] = [
        {"step": 0, "accuracy_heldout": 0.25},  # nothing is trained in it
        {"step": 1, "accuracy_heldout": None, "train_memory_gib": 4.0},
        {"step": 12, "accuracy_heldout": 0.75, "train_memory_gib": 4.5},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(step)}\n" for step in steps))
    print_results(tmp_path)
    printed = capsys.readouterr().out
    assert printed.count("before:") == printed.count("after:") == 2
    assert printed.count("calculate(expression='2 + 1')") == 1
    assert "step   0   0.250  ##########" in printed
    assert "step  12   0.750" in printed
    assert "at most 4.5 GiB in the trainer" in printed


@pytest.mark.slow
def test_the_problems_are_those_of_reasoning_gym() -> None:
    subprocess.run(["make", "-s", ".venv/.real"], cwd=ROOT, check=True, timeout=900)
    given = load_config(CONFIG).environment_args
    train, heldout = (Sums.rows(split, **given) for split in ("train", "eval"))
    assert len(train) == 500
    assert not {row["question"] for row in train} & {row["question"] for row in heldout}
    for row in heldout[:20]:
        environment = Sums(dict(row), **given)
        expression = row["metadata"]["expression"]
        assert environment.problem[-1] == {"role": "user", "content": QUESTION.format(expression)}
        assert environment.score(str(calculate(expression))) == 1.0
        assert environment.score("no") == 0.0
