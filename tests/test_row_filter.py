"""`data.filter`: conditions on rows, of which only harmless parts exist."""

from typing import Any

import pytest

from turnwise.config import parse_config
from turnwise.config.row_filter import RowFilter
from turnwise.errors import InputError

ROW: dict[str, Any] = {
    "reward": 1.0,
    "status": "completed",
    "turns": [1, 2, 3],
    "metrics": {"steps": 4, "of a shop": {"sold": True}},
    "level": None,
}


@pytest.mark.parametrize(
    ("condition", "meets"),
    [
        ("reward >= 1", True),
        ("reward >= 1 and len(turns) < 3", False),
        ("0.5 < reward <= 1 and not status == 'length'", True),
        ("status in ['completed', 'length']", True),
        ("metrics.steps == 4 and metrics['of a shop'].sold", True),
        ("turns[0] == 1 and turns[-1] == 3 and reward > -1", True),
        ("level >= 3", False),
        ("level == null or level >= 3", True),
        ("metrics.none.of.these", False),
        ("status >= 3", False),
        ("nothing == null", True),
        ("turns[9] == null", True),
        ("true", True),
    ],
)
def test_a_condition_reads_the_row(condition: str, meets: bool) -> None:
    assert RowFilter(condition)(ROW) is meets


@pytest.mark.parametrize(
    "condition",
    [
        "__import__('os').system('true')",
        "status.upper()",
        "len(turns, 2)",
        "[x for x in turns]",
        "(lambda: 1)()",
        "f'{reward}'",
        "9 ** 9 ** 9",
        "status * 99999999 == 1",
        "reward is null",
        "reward if status else 0",
        "turns[:1]",
        "(reward := 2)",
        "reward =>",
        "",
        "a" * 501,
    ],
)
def test_anything_but_a_condition_is_refused(condition: str) -> None:
    with pytest.raises(ValueError, match="condition"):
        RowFilter(condition)


def test_names_of_python_are_only_fields_of_the_row() -> None:
    assert RowFilter("__class__ == null and reward.__class__ == null")(ROW)
    assert RowFilter("metrics.keys == null")(ROW)
    assert RowFilter("reward >= 1 and metrics.steps > 2").fields == {"metrics", "reward"}


def test_a_mistake_in_the_key_is_one_sentence() -> None:
    tree = {"environment": "a:B", "model": {"path": "m"}, "data": {"path": "rows.jsonl"}}
    tree["data"] = {"path": "rows.jsonl", "filter": "reward.count(1)"}
    with pytest.raises(InputError, match=r"data.filter: 'reward.count\(1\)' cannot be part of a"):
        parse_config(tree)
