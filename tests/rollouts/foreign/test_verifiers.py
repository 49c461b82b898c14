"""verifiers 0.4, in an environment of its own, as an agent: its taskset and harness are trained."""

import json
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import ROOT, command_environment, python
from turnwise.trajectory import audit, read_jsonl

VENV = ".venv-bench"
FOLDER = "examples/verifiers"
SERVICE = [f"{ROOT}/{VENV}/bin/python", f"{FOLDER}/service.py", f"{FOLDER}/env.toml"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rows of the example's taskset, in a folder of their own."""
    subprocess.run(["make", "-s", f"{VENV}/.installed"], cwd=ROOT, check=True)
    path = tmp_path_factory.mktemp("verifiers") / "rows.jsonl"
    subprocess.run([*SERVICE, "--rows", str(path)], cwd=ROOT, check=True)
    return path


@contextmanager
def service(log: Path) -> Iterator[str]:
    """Start the example's service; returns the address of its agent."""
    with (
        log.open("w") as output,
        subprocess.Popen(SERVICE, cwd=ROOT, stdout=output, stderr=output) as process,
    ):
        try:
            ends = time.monotonic() + 180
            while not (found := re.search(r"http://\S+/run", log.read_text())):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < ends, "the service did not start"
                time.sleep(0.2)
            yield found[0]
        finally:
            process.terminate()


def test_a_taskset_and_a_harness_are_trained_exactly(rows: Path) -> None:
    changes = [f"data.path={rows}", f"output_dir={rows.parent}"]
    with service(rows.parent / "service.log") as agent:
        command = ["turnwise.cli", "train", f"{FOLDER}/config.yaml", f"rollout.agent={agent}"]
        done = subprocess.run(
            [*python(), "-m", *command, *changes],
            cwd=ROOT,
            env=command_environment(),
            capture_output=True,
            text=True,
            timeout=900,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "exact      100 %" in done.stdout
    run = rows.parent / "verifiers"
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").open()][-3:]
    assert [row["step"] for row in metrics] == [1, 2, 3]
    assert [row["dropped"] for row in metrics] == [{}] * 3
    assert all(set(row["env"]) >= {"turns", "letters"} for row in metrics)
    trajectories = [t for path in (run / "trajectories").glob("step-*") for t in read_jsonl(path)]
    assert len(trajectories) >= 3 * 16
    assert {t.reward for t in trajectories} <= {0.0, 1.0}
    for trajectory in trajectories:
        assert audit(trajectory).first_violation is None
        assert trajectory.metrics["turns"] == len(trajectory.turns)
    assert any(len(t.turns) > 1 for t in trajectories), "no trajectory called the tool"
