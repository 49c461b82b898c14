"""What a run keeps of each row is a few numbers: no row, no trajectory, no text.

`python -m benchmarks.rows` measures the same with a million rows.
"""

import gc
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from turnwise.config import JudgeConfig, parse_config
from turnwise.core.run_files import RunFiles
from turnwise.observe.conversations import Overview
from turnwise.rollouts import Group, Problem, judge
from turnwise.rollouts.data import load_rows, load_training
from turnwise.rollouts.evaluation import GroupLog, evaluate, groups_at_once
from turnwise.rollouts.problems import Lazy, Problems, ProblemStream
from turnwise.trajectory import Outcome, Trajectory

ROWS = 10_000
N = 2


@contextmanager
def keeping_nothing() -> Iterator[None]:
    """Fail where the `with` block leaves objects for each of `ROWS`; an array is one object."""
    gc.collect()
    before = sys.getallocatedblocks()
    yield
    gc.collect()
    each = (sys.getallocatedblocks() - before) / ROWS
    assert each < 0.1, f"{each:.2f} objects a row"


async def play(problem: Problem, tag: str) -> Group:
    trajectories = [
        Trajectory(
            problem.id,
            index,
            outcome=Outcome(problem.row["n"] % 2, metrics={"steps": float(index)}),
        )
        for index in range(N)
    ]
    return Group(problem.id, trajectories)


def test_training_keeps_only_the_order_and_last_outcome_of_rows() -> None:
    problems = Problems("rows.jsonl", Lazy(ROWS, lambda index: {"n": index, "text": "a" * 500}))
    with keeping_nothing():
        stream = ProblemStream(problems, seed=0)
        stream.take(ROWS + 1)
    with keeping_nothing():
        stream = ProblemStream(problems, seed=0, max_rest=16)
        for problem in stream.take(ROWS):
            stream.learn(problem.id, "hopeless" if problem.row["n"] % 3 else "mixed")
        counts = stream.pools()[""]
    assert (counts["fresh"], counts["mixed"]) == (0, ROWS // 3 + 1)
    stream = ProblemStream(problems, seed=0, shuffle=False)
    assert [problem.row["n"] for problem in stream.take(3)] == [0, 1, 2]


async def test_an_evaluation_keeps_only_where_its_trajectories_are(
    tmp_path: Path,
) -> None:
    rows = tmp_path / "rows.jsonl"
    with rows.open("w") as file:
        file.writelines(json.dumps({"n": n, "text": "a" * 500}) + "\n" for n in range(ROWS))
    model = {"environment": "package:Class", "model": {"path": "model"}}
    data = {"data": {"path": str(rows)}, "eval": {"sampling": {"n": N}}}
    config = parse_config({**model, **data})
    log = GroupLog(tmp_path / "eval.jsonl")
    overview = Overview()
    with keeping_nothing():
        evaluation = await evaluate(
            *(play, load_training(config), config.eval, config.rollout),
            *(groups_at_once(config, N), "eval"),
            lambda group: overview.add(group.trajectories),
            log,
        )
    assert overview.lines()[0].startswith(f"{N * ROWS:,} trajectories of {ROWS:,} problems")
    assert (evaluation.finished, evaluation.accuracy) == (N * ROWS, 0.5)
    assert evaluation.env == {"steps": 0.5}
    assert len(evaluation.trajectories) == N * ROWS
    for place in (0, 1, 2 * N + 1, N * ROWS - 1):
        found = evaluation.trajectories[place]
        assert found.problem_id == f"rows.jsonl:{place // N + 1}"
        assert found.sample_index == place % N


async def test_trajectories_are_found_where_groups_differ_in_size(tmp_path: Path) -> None:
    log = GroupLog(tmp_path / "eval.jsonl")
    assert list(log.trajectories) == []
    for place, count in ((3, 2), (0, 0), (1, 3), (2, 0), (4, 1)):
        await log.keep(place, Group(f"{place}", [Trajectory(f"{place}", n) for n in range(count)]))
    found = [(one.problem_id, one.sample_index) for one in log.trajectories]
    assert found == [("1", 0), ("1", 1), ("1", 2), ("3", 0), ("3", 1), ("4", 0)]


def test_a_large_parquet_file_is_not_read_into_memory(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    table = arrow.table({"n": range(ROWS), "text": [f"{n:0400}" for n in range(ROWS)]})
    parquet.write_table(table, path, compression="none", row_group_size=ROWS // 8)
    del table
    before = arrow.total_allocated_bytes()
    rows = load_rows(str(path), split="train")
    assert len(rows) == ROWS
    assert rows[ROWS - 1] == {"n": ROWS - 1, "text": f"{ROWS - 1:0400}"}
    assert rows[ROWS // 8]["n"] == ROWS // 8
    assert arrow.total_allocated_bytes() - before < 10 * ROWS


def test_a_judge_remembers_the_last_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge, "_KNOWN", 3)
    files = RunFiles(tmp_path)
    for number in range(5):
        files.append("judge.jsonl", json.dumps({"key": f"{number:064}", "answer": "{}"}) + "\n")
    options: dict[str, Any] = {"url": "http://127.0.0.1:1/v1", "model": "m", "rubric": "Good?"}
    made = judge.Judge(JudgeConfig(**options), "judge", files)
    assert [int(key) for key in made._answers] == [2, 3, 4]
