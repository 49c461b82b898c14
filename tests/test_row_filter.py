"""`data.filter`: a condition on rows."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from turnwise.config import Config, parse_config
from turnwise.errors import InputError
from turnwise.rollouts.data import load_heldout, load_training
from turnwise.run.commands import ProgramInputs, load_problems

ROWS: list[dict[str, Any]] = [
    {"reward": 1.0, "status": "completed", "turns": [1, 2], "metrics": {"steps": 4}},
    {"reward": 0.0, "status": "completed", "turns": [1]},
    {"reward": None, "status": "length", "turns": []},
    {"reward": 1.0, "status": "length"},
]


@pytest.mark.parametrize(
    ("condition", "meeting"),
    [
        ("reward >= 1", [0, 3]),
        ("reward >= 1 and len(turns) < 6", [0]),
        ("0 <= reward < 1 or status == 'length'", [1, 3]),  # the third is no number
        ("reward is None or reward >= 1", [0, 2, 3]),
        ("metrics['steps'] == 4", [0]),
        ("True", [0, 1, 2, 3]),
    ],
)
def test_rows_that_meet_the_condition_are_used(
    condition: str, meeting: list[int], make_config: Callable[..., Config], tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    config = make_config(data={"path": str(path), "eval_path": str(path), "filter": condition})
    expected = [ROWS[index] for index in meeting]
    assert [problem.row for problem in load_training(config)] == expected
    assert len(load_heldout(config)) == len(ROWS)
    given = load_problems(config, ProgramInputs(rows=ROWS))
    assert [problem.row for problem in given] == expected
    limited = config.model_copy(update={"data": config.data.model_copy(update={"limit": 1})})
    assert [problem.row for problem in load_training(limited)] == expected[:1]


def test_a_condition_that_no_row_meets_is_a_mistake(
    make_config: Callable[..., Config],
) -> None:
    config = make_config(data={"path": "d", "filter": "rewrad >= 1"})
    fields = "data.filter: none of the 4 rows meets rewrad >= 1; the first one has the fields rew"
    with pytest.raises(InputError, match=fields):
        load_problems(config, ProgramInputs(rows=ROWS))


@pytest.mark.parametrize("condition", ["reward =>", "", "import os", "a = 1"])
def test_a_mistake_in_the_key_is_one_sentence(condition: str) -> None:
    tree = {"environment": "a:B", "model": {"path": "m"}}
    data = {"path": "rows.jsonl", "filter": condition}
    with pytest.raises(InputError, match=r"data.filter: .* is no expression such as reward >= 1"):
        parse_config({**tree, "data": data})
