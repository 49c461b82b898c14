"""`turnwise show`: which trajectories are found, and how they are printed."""

import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from turnwise.cli import app
from turnwise.errors import InputError
from turnwise.observe.conversations import (
    Overview,
    conversation,
    read_trajectories,
    select,
    show,
    trajectory_file,
)
from turnwise.trajectory import Image, Outcome, PlacedImage, Prompt, Trajectory, write_jsonl

CALL = {"function": {"name": "calculate", "arguments": '{"a": 1, "b": 2}'}}


def played(
    number: int, reward: float, answer: str, parts: dict[str, float] | None = None, **fields: Any
) -> Trajectory:
    trajectory = Trajectory(f"rows:{number}", status="completed", **fields)
    trajectory.outcome = Outcome(reward, parts or {})
    trajectory.messages = [
        {"role": "user", "content": f"What is {number} plus 2?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": answer},
    ]
    trajectory.add_turn([1], [2, 3], [-0.1, -0.2], [0, 0], "stop")
    return trajectory


PLAYED = [
    played(1, 1.0, "It is 3.", parts={"right": 1.0, "short": 0.5}),
    played(1, 0.0, "It is 4.", sample_index=1, events=Counter(tool_error=2)),
    played(17, 0.5, "I \x1b[31mpass\x07."),
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "trajectories"
    write_jsonl(folder / "step-0001.jsonl", PLAYED[:2])
    write_jsonl(folder / "step-0002.jsonl", PLAYED)
    write_jsonl(folder / "eval-0001.jsonl", PLAYED[2:])
    return tmp_path


def test_images_are_named_with_their_sizes_and_files(tmp_path: Path) -> None:
    image = Image.of(b"red", "png", 56, 84)
    seen = played(1, 1.0, "It is a cat.")
    part = {"type": "image", "image": image}
    seen.messages[0]["content"] = [part, {"type": "text", "text": "What is it?"}]
    prompt = Prompt([1, 9, 9, 9], [PlacedImage(image, 1, 3)])
    seen.add_turn(prompt, [4], [-0.1], [0], "stop")
    path = tmp_path / "trajectories" / "step-0001.jsonl"
    write_jsonl(path, [seen])
    found = CliRunner().invoke(app, ["show", str(tmp_path), "1"]).output
    assert "[image, 56 x 84]What is it?" in found
    place = path.parent / "images" / image.name
    assert f"{place}, 56 x 84 pixels, 3 tokens" in found.replace("\n", "")
    assert place.read_bytes() == b"red"


def test_the_newest_step_is_read_or_the_one_that_is_asked_for(run: Path) -> None:
    assert trajectory_file(run).name == "step-0002.jsonl"
    assert trajectory_file(run, 1).name == "step-0001.jsonl"
    assert trajectory_file(run, heldout=True).name == "eval-0001.jsonl"
    assert trajectory_file(run / "trajectories" / "eval-0001.jsonl").name == "eval-0001.jsonl"
    with pytest.raises(InputError, match="no trajectories of step 3"):
        trajectory_file(run, 3)
    with pytest.raises(InputError, match="no held-out trajectories of step 2"):
        trajectory_file(run, 2, heldout=True)


@pytest.mark.parametrize(
    ("problem", "pattern", "found"),
    [
        (None, None, [0, 1, 2]),
        ("rows:1", None, [0, 1]),
        ("17", None, [2]),
        ("7", None, []),
        (None, r"is [34]\.", [0, 1]),
        (None, "calculate", [0, 1, 2]),
        ("1", "It is 4", [1]),
    ],
)
def test_trajectories_are_chosen_by_problem_and_by_what_was_said(
    problem: str | None, pattern: str | None, found: list[int]
) -> None:
    assert select(PLAYED, problem, pattern) == [PLAYED[n] for n in found]


def test_a_summary_has_rewards_lengths_and_outcomes() -> None:
    assert Overview.of(PLAYED).lines() == [
        "3 trajectories of 2 problems  reward 0.500 ± 0.408 (0 to 1)  1.0 turns, 2 tokens",
        "groups: spread of rewards 0.500 on average, 0 of 1 with equal rewards",
        "reward parts: right 1.000, short 0.500",
        "ended: completed 3",
        "tools: error 2",
    ]
    longer = played(17, 0.5, "I pass.", events=Counter(tool_call=3, tool_error=1, lost_turn=1))
    longer.add_turn([1, 2, 3, 4], [5], [-0.1], [0], "stop")
    first, groups, _, tools, events = Overview.of([PLAYED[2], longer]).lines()
    assert first.endswith("1.5 turns, 2 tokens (2 to 3)")
    assert groups == "groups: spread of rewards 0.000 on average, 1 of 1 with equal rewards"
    assert (tools, events) == ("tools: call 3, error 1", "events: lost_turn 1")
    assert Overview.of([]).lines() == ["no trajectories"]


def test_a_conversation_shows_calls_and_no_control_character() -> None:
    text = conversation(PLAYED[2], "worst").plain
    assert text.splitlines() == [
        "── worst: rows:17 #0  reward 0.5  completed  1 turn, 2 tokens",
        "user       What is 17 plus 2?",
        'assistant  → calculate({"a": 1, "b": 2})',
        "tool       3",
        r"assistant  I \x1b[31mpass\x07.",
    ]


def test_the_row_stands_beside_the_reward(tmp_path: Path) -> None:
    seen = played(1, 0.0, "It is 4.", row={"answer": "3", "why": "1 + 2\n= 3"})
    write_jsonl(tmp_path / "trajectories" / "step-0001.jsonl", [seen])
    printed = CliRunner().invoke(app, ["show", str(tmp_path), "1"]).output.splitlines()
    assert printed[1:4] == ["row        answer: 3", "row        why: 1 + 2", " " * 11 + "= 3"]


@pytest.mark.parametrize(
    ("best", "worst", "shown"),
    [(1, 1, ["best: rows:1 #0", "worst: rows:1 #1"]), (0, 0, []), (9, 9, ["best"] * 3)],
)
def test_each_trajectory_is_shown_once(best: int, worst: int, shown: list[str]) -> None:
    console = Console(file=io.StringIO(), width=200)
    show(console, Overview.of(PLAYED, best, worst))
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    heads = [line for line in printed.splitlines() if line.startswith("──")]
    assert len(heads) == len(shown)
    assert all(part in head for part, head in zip(shown, heads, strict=True))


def test_a_line_that_is_no_trajectory_is_named(run: Path) -> None:
    path = run / "trajectories" / "step-0001.jsonl"
    for wrong in ("{}", "[1]", "nothing"):
        whole = path.read_text().splitlines()
        path.write_text("\n".join([whole[0], wrong]))
        with pytest.raises(InputError, match=r"step-0001.jsonl, line 2 is no trajectory"):
            list(read_trajectories(path))


def test_the_command(run: Path) -> None:
    shown = CliRunner().invoke(app, ["show", str(run), "--best", "0"])
    assert shown.exit_code == 0, shown.output
    assert "worst: rows:1 #1" in shown.output
    assert "best" not in shown.output
    assert "step-0002.jsonl" in shown.output.replace("\n", "")
    assert "alarm" not in shown.output
    rows = [
        {"step": n, "trajectories": 8, "reward_mean": 0, "dropped": {"failed": 8}}
        for n in (1, 2, 3)
    ]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (run / "config.yaml").write_text("model: {path: m}\n")
    alarmed = CliRunner().invoke(app, ["show", str(run)])
    assert "alarm at step 3: 50% of the trajectories fail" in alarmed.output
    found = CliRunner().invoke(app, ["show", str(run), "17"])
    assert found.output.count("──") == 1
    none = CliRunner().invoke(app, ["show", str(run), "18"])
    assert "no trajectory matches" in none.output


def test_a_folder_without_steps_shows_what_rollout_wrote(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no run folder"):
        trajectory_file(tmp_path / "none")
    with pytest.raises(InputError, match="has no trajectories"):
        trajectory_file(tmp_path)
    (tmp_path / "eval.jsonl").touch()
    assert trajectory_file(tmp_path) == tmp_path / "eval.jsonl"
    (tmp_path / "rollouts.jsonl").touch()
    assert trajectory_file(tmp_path) == tmp_path / "rollouts.jsonl"
    assert trajectory_file(tmp_path, heldout=True) == tmp_path / "eval.jsonl"
    with pytest.raises(InputError, match="has no trajectories of step 3"):
        trajectory_file(tmp_path, step=3)
