"""`turnwise trace timeline`: the events of a step, as trace viewers read them."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from turnwise.cli import app
from turnwise.errors import InputError
from turnwise.observe.timeline import write_timeline
from turnwise.trajectory import Outcome, Trajectory, write_jsonl


def played(number: int, turns: int) -> Trajectory:
    trajectory = Trajectory(f"rows:{number}", status="completed", outcome=Outcome(1.0))
    ids = [1]
    for _ in range(turns):
        trajectory.add_turn(ids, [2, 3], [-0.1, -0.2], [0, 0], "stop")
        ids = [*ids, 2, 3]
    return trajectory


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of one step: two trajectories, whose first turns overlap on one worker."""
    write_jsonl(tmp_path / "trajectories" / "step-0004.jsonl", [played(1, 2), played(2, 1)])
    times: list[list[list[Any]]] = [
        [[0, 100.0, 100.5, 101.0, "worker-0", None, 1.5], [1, 103.0, None, 104.0, "worker-1"]],
        [[0, 100.25, 100.5, 102.0, "worker-0", 0.125, 0.0]],
    ]
    (tmp_path / "timeline").mkdir()
    lines = "".join(json.dumps(turns) + "\n" for turns in times)
    (tmp_path / "timeline" / "step-0004.jsonl").write_text(lines)
    return tmp_path


def test_each_trajectory_and_each_worker_has_its_rows(run: Path, tmp_path: Path) -> None:
    target = tmp_path / "step.json"
    done = CliRunner().invoke(app, ["trace", "timeline", str(run), str(target), "--step", "4"])
    assert done.exit_code == 0, done.output
    assert done.stdout == f"3 turns\n{target}\n"
    events = json.loads(target.read_text())["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {
        (1, 1): "rows:1 #0",
        (1, 2): "rows:2 #0",
        (2, 1): "worker-0",
        (2, 2): "worker-0",
        (2, 3): "worker-1",
    }
    spans = {(e["pid"], e["tid"], e["name"]): (e["ts"], e["dur"]) for e in events if e["ph"] == "X"}
    assert spans == {
        (1, 1, "until the first token"): (0.0, 500_000.0),
        (1, 1, "turn 0"): (500_000.0, 500_000.0),
        (1, 1, "tools"): (1_000_000.0, 1_500_000.0),
        (1, 1, "between turns"): (2_500_000.0, 500_000.0),
        (1, 1, "turn 1"): (3_000_000.0, 1_000_000.0),
        (1, 2, "queued"): (250_000.0, 125_000.0),
        (1, 2, "until the first token"): (375_000.0, 125_000.0),
        (1, 2, "turn 0"): (500_000.0, 1_500_000.0),
        (2, 1, "rows:1 #0 turn 0"): (0.0, 1_000_000.0),
        (2, 2, "rows:2 #0 turn 0"): (250_000.0, 1_750_000.0),
        (2, 3, "rows:1 #0 turn 1"): (3_000_000.0, 1_000_000.0),
    }
    (first,) = (e for e in events if e["pid"] == 1 and e["tid"] == 1 and e["name"] == "turn 1")
    assert first["args"] == {"worker": "worker-1", "prompt": 3, "sampled": 2}


def test_an_evaluation_has_its_own(run: Path, tmp_path: Path) -> None:
    for folder in ("trajectories", "timeline"):
        file = run / folder / "step-0004.jsonl"
        file.with_stem("eval-0004").write_text(file.read_text().splitlines()[0] + "\n")
    target = tmp_path / "eval.json"
    done = CliRunner().invoke(app, ["trace", "timeline", str(run), str(target), "--heldout"])
    assert (done.exit_code, done.stdout) == (0, f"2 turns\n{target}\n")


def test_a_step_without_times_is_a_mistake(run: Path, tmp_path: Path) -> None:
    (run / "timeline" / "step-0004.jsonl").unlink()
    with pytest.raises(InputError, match=r"has no timeline/step-0004\.jsonl"):
        write_timeline(run, None, tmp_path / "step.json")
