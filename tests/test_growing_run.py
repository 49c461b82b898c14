"""A training run that gets engines, and gives them back, while it goes on."""

import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import ROOT, command_environment, python
from tests.test_cli import Lottery, file, metrics_of, turnwise
from turnwise.observe.timeline import TIMELINE
from turnwise.trajectory import audit, read_jsonl

__all__ = ["Lottery", "file"]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), id="synchronous"),
        pytest.param(
            ("training.max_staleness=2", "rollout.processes=2", "weights.transport=collective"),
            id="ahead, in two processes, by collective",
        ),
    ],
)
def test_a_run_goes_on_with_as_many_engines_as_it_is_asked_for(
    file: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    run, said = tmp_path / "runs" / "growing", tmp_path / "said.txt"
    with said.open("wb") as output:
        process = subprocess.Popen(
            [
                *(*python(), "-m", "turnwise.cli", "train", str(file), "name=growing"),
                *("training.steps=100000", "eval.every=0", *options),
            ],
            cwd=ROOT,
            env=command_environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
        )

    def steps_with(engines: int, count: int = 3) -> int:
        """Wait until so many more steps were made with so many engines; return the last step."""
        ends = time.monotonic() + 400
        before = len(metrics_of(run)) if (run / "metrics.jsonl").exists() else 0
        while True:
            assert process.poll() is None, said.read_text()
            assert time.monotonic() < ends, said.read_text()
            rows = metrics_of(run)[before:] if (run / "metrics.jsonl").exists() else []
            found = [row["step"] for row in rows if row["engines"] == engines]
            if len(found) >= count:
                return int(found[-1])
            time.sleep(0.05)

    def workers_of(step: int) -> set[str]:
        lines = (run / TIMELINE / f"step-{step:04d}.jsonl").read_text()
        return {name for name in ("worker-0", "worker-1") if f'"{name}"' in lines}

    try:
        assert workers_of(steps_with(1)) == {"worker-0"}
        asked = turnwise("scale", run, "--workers", 2)
        assert asked.returncode == 0, asked.stderr
        assert asked.stdout.startswith("engines: 1 now, 2 wanted; ")
        assert workers_of(steps_with(2, count=6)) == {"worker-0", "worker-1"}
        asked = turnwise("scale", run, "--workers", 1)
        assert asked.stdout.startswith("engines: 2 now, 1 wanted; ")
        last = steps_with(1, count=6)
        assert workers_of(last) == {"worker-0"}
    finally:
        process.terminate()
        process.wait(300)
    rows = metrics_of(run)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert all(not row["dropped"] for row in rows), "nothing is lost"
    assert all(row["canary_diff_max"] < 1e-3 for row in rows)
    played: Counter[tuple[str, int]] = Counter()
    for step in range(1, last + 1):
        trajectories = list(read_jsonl(run / "trajectories" / f"step-{step:04d}.jsonl"))
        assert len(trajectories) == 16
        assert all(audit(each).first_violation is None for each in trajectories)
        played.update((each.problem_id, step) for each in trajectories)
    assert set(played.values()) == {4}
    refused = turnwise("scale", run, "--workers", 2)
    assert refused.returncode == 2
    assert f"no process of a run in {run} is running here" in refused.stderr
