"""The ladder of examples and the programs of the pages, run as they are written.

Rung 2 is run by `test_runs.py::test_the_synchronous_run_is_the_plain_loop`, rung 4 by
`rollouts/test_agents.py`, the last by `test_gsm8k.py`.
"""

import json
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT, command_environment, python
from tests.examples.ladder import PAGES
from tests.pages import PAGES as ALL_PAGES
from tests.pages import blocks
from turnwise.config import load_config
from turnwise.rollouts.environment import load_object

RUNGS = sorted(path.name for path in (ROOT / "examples").glob("step*"))


def run_ladder(folder: Path, part: str, names: tuple[str, ...]) -> str:
    """Run a part of the ladder, and check the metrics of these rungs; returns its output."""
    done = subprocess.run(
        [*python(), "-m", "tests.examples.ladder", str(folder), part],
        cwd=ROOT,
        env=command_environment(),
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name in names:
        rows = [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").open()]
        assert [row["step"] for row in rows][-2:] == [1, 2]
        assert rows[-1]["trajectories"] == 4 * 8
        assert rows[-1]["dropped"] == {}, name
    return done.stdout


def test_the_ladder_runs(tmp_path: Path) -> None:
    assert run_ladder(tmp_path, "first", ("step01", "step03")).count("--- ") == 5


@pytest.mark.slow  # pipelines, self-play and simulated users have tests of their own
def test_the_rest_of_the_ladder_runs(tmp_path: Path) -> None:
    said = run_ladder(tmp_path, "rest", ("step07",))
    assert said.count("--- ") == 4
    metrics = tmp_path / "runs" / "step06" / "metrics.jsonl"
    (*_, answered) = (json.loads(line) for line in metrics.open())
    assert answered["env"]["user_calls"] > 0.0
    assert answered["exact_percent"] == 100.0
    assert "step 2  reward" in said.partition("--- step05")[2]


RUN_BY = {
    "docs/how-to/agents.md": ("rollouts/test_agent_endpoint.py", "rollouts/test_agent_worker.py"),
    "docs/how-to/ray-cluster.md": ("serving/colocated/test_own_actors.py",),
    "docs/how-to/trl.md": ("trl/test_trainer.py",),
    "docs/how-to/your-trainer.md": ("weights/test_sync.py",),
}
"""Tests that run a page's own programs."""


def test_programs_of_several_pages_are_the_same_program() -> None:
    ran = {}
    for page, tests in RUN_BY.items():
        for test in tests:
            assert f'"{page}"' in (ROOT / "tests" / test).read_text()
    for page, name in PAGES:
        (ran[name],) = (block.text for block in blocks(page) if block.name == name)
    for page in ALL_PAGES:
        for block in blocks(page):
            if "__main__" in block.text and page not in RUN_BY:
                assert block.text == ran[block.name or ""], f"{block} is run by no test"


@pytest.mark.parametrize("rung", RUNGS)
def test_a_rung_fits_on_a_screen_and_its_configuration_loads(rung: str) -> None:
    folder = ROOT / "examples" / rung
    for path in folder.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 60, path
    assert rung in (ROOT / "examples" / "README.md").read_text()
    for path in folder.glob("config.yaml"):
        config = load_config(path)
        load_object(config.environment, "environment")
        assert Path(config.model.path).is_dir()
