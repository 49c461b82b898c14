"""Two examples without a model: their rows, their tools and their rewards; `make base` trains."""

import asyncio
import random
from typing import Any

import pytest
from jinja2 import Environment

from examples.base.run import HERE
from examples.base.stories import NEW, TAUGHT, Stories, calculate, make_row, solved
from examples.sqlite.environment import Database, make_rows, opened, run
from examples.sqlite.environment import solved as solved_question
from turnwise.tools.schema import function_schema
from turnwise.trajectory import Trajectory


def test_a_story_has_the_answer_of_its_sum() -> None:
    rng = random.Random(0)
    for events in (1, 2, 3, 4):
        row = make_row(rng, TAUGHT + NEW, events)
        assert str(calculate(row["sum"])) == row["answer"]
        assert all(number in row["question"] for number in row["sum"].split()[::2])
        assert len(row["sum"].split()) == 2 * events + 1
        trajectory = Trajectory("rows:1", messages=solved(row))
        assert Stories(row).reward(trajectory) == 1.0
        assert Stories({**row, "answer": "0"}).reward(trajectory) == 0.0


@pytest.mark.parametrize("text", ["", "2 * 3", "1 +", "-1 + 2", "__import__('os')", "1 2"])
def test_only_sums_are_calculated(text: str) -> None:
    with pytest.raises(ValueError, match="whole numbers with"):
        calculate(text)


def test_the_template_shows_the_tool_and_writes_calls_in_python() -> None:
    text = (HERE / "template.jinja").read_text()
    made = Environment().from_string(text).render(
        messages=solved({"question": "How many?", "sum": "1 + 2", "answer": "3"}),
        tools=[function_schema(calculate).description],
        bos_token="<bos>",
        add_generation_prompt=True,
    )  # fmt: skip
    turns = [turn.removeprefix("<start_of_turn>") for turn in made.split("<eos>\n")]
    assert turns == [
        "<bos><start_of_turn>tools\ncalculate(expression): Calculate a sum such as 12 + 30 - 4.\n",
        "user\nHow many?",
        'model\n[calculate(expression="1 + 2")]',
        "tool\n3",
        "model\n3",
        "model\n",
    ]


def test_a_question_is_solved_by_its_statement() -> None:
    rows = list(make_rows(40, 0))
    assert rows == list(make_rows(40, 0))
    for row in rows:
        environment = Database(row)
        calls = [m["tool_calls"][0]["function"] for m in solved_question(row) if "tool_calls" in m]
        results = []
        for call in calls:
            result: Any = getattr(environment, call["name"])(**call["arguments"])
            results.append(asyncio.run(result) if asyncio.iscoroutine(result) else result)
        assert results == [f"{row['table']}(name, {row['column']})", row["answer"], "thank you"]
        assert environment.done
        assert environment.reward(None) == 1.0
        environment.answer("none of these")
        assert environment.reward(None) == 0.0
        environment.close()


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM pets", "DROP TABLE pets", "ATTACH '/tmp/x.db' AS x", "PRAGMA page_count",
        "CREATE TABLE x (y)", "nonsense",
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT MAX(i) FROM n",
    ],
)  # fmt: skip
def test_a_statement_can_only_read_and_ends(sql: str) -> None:
    row = {"table": "pets", "column": "weight", "rows": [["Rex", 3]]}
    database = opened(row)
    with pytest.raises(Exception, match=r"not authorized|prohibited|syntax|interrupted"):
        run(database, sql)
    assert run(database, "SELECT * FROM pets") == "Rex, 3"
    assert run(database, "SELECT * FROM pets WHERE weight > 9") == "no rows"
    database.close()
