"""verifiers 0.4, in an environment of its own, as an agent: its taskset and harness are trained."""

import json
import re
import shutil
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
SERVICE = [f"{ROOT}/{VENV}/bin/python", f"{FOLDER}/service.py"]
PICTURES = """\
[taskset]
id = "pictures_v1"

[agent]
max_turns = 4
harness = { id = "pictures_v1" }
runtime = { type = "subprocess" }
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rows of the example's taskset, in a folder of their own."""
    return write_rows(f"{FOLDER}/env.toml", tmp_path_factory.mktemp("verifiers") / "rows.jsonl")


def write_rows(env: str, path: Path) -> Path:
    subprocess.run(["make", "-s", f"{VENV}/.installed"], cwd=ROOT, check=True)
    subprocess.run([*SERVICE, env, "--rows", str(path)], cwd=ROOT, check=True)
    return path


@contextmanager
def service(log: Path, env: str = f"{FOLDER}/env.toml") -> Iterator[str]:
    """Start the example's service of an environment; returns the address of its agent."""
    with (
        log.open("w") as output,
        subprocess.Popen([*SERVICE, env], cwd=ROOT, stdout=output, stderr=output) as process,
    ):
        try:
            ends = time.monotonic() + 180
            while not (found := re.search(r"http://\S+/run", log.read_text())):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < ends, "the service did not start"
                time.sleep(0.05)
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


def test_tasks_with_pictures_are_trained_exactly(vision_path: str, tmp_path: Path) -> None:
    """In the task's prompt, as the eval client sends it, and in a later message."""
    for name in ("pictures_v1.py", "plain_png.py"):
        shutil.copy(Path(__file__).with_name(name), tmp_path)
    env = tmp_path / "env.toml"
    env.write_text(PICTURES)
    rows = write_rows(str(env), tmp_path / "rows.jsonl")
    assert json.loads(rows.read_text().splitlines()[0])["prompt"] == "Which colour?\n[image]"
    config = {
        "environment": "turnwise:AgentTask",
        "model": {"path": vision_path, "max_length": 512},
        "data": {"path": str(rows)},
        "engine": {"kv_cache_gib": 0.0625},
        "rollout": {"loop": "agent", "agent_rewards": True, "prompts_per_step": 2},
        "sampling": {"n": 2, "max_tokens": 8},
        "training": {"steps": 1},
        "output_dir": str(tmp_path),
        "name": "run",
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    with service(tmp_path / "service.log", str(env)) as agent:
        command = ["turnwise.cli", "train", str(tmp_path / "config.yaml"), f"rollout.agent={agent}"]
        done = subprocess.run(
            [*python(), "-m", *command],
            cwd=ROOT,
            env=command_environment(),
            capture_output=True,
            text=True,
            timeout=900,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    trajectories = [*read_jsonl(tmp_path / "run" / "trajectories" / "step-0001.jsonl")]
    assert len(trajectories) == 4
    for trajectory in trajectories:
        assert [len(turn.images) for turn in trajectory.turns] == [1, 1]
        assert [turn.fork_reason for turn in trajectory.turns] == [None, None]
        assert audit(trajectory).violations == 0
