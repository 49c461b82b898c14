"""A full disk: whatever a run writes, it ends with one sentence that names the file."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from turnwise.config import Config, parse_config
from turnwise.errors import InputError, TurnwiseError
from turnwise.observe.metrics import StepMetrics
from turnwise.rollouts import Group
from turnwise.run.run_dir import RunDir
from turnwise.trajectory import ExactnessReport, Trajectory

FULL = "/dev/full"


def config(folder: Path) -> Config:
    tree = {"environment": "a:B", "model": {"path": "m"}, "data": {"path": "d"}}
    return parse_config({**tree, "output_dir": str(folder), "name": "run"})


@pytest.mark.parametrize(
    ("file", "said", "write"),
    [
        (
            "trajectories/step-0001.tmp",
            "trajectories/step-0001.jsonl",
            lambda run: run.write_trajectories(1, [Trajectory("p")] * 1000),
        ),
        (
            "trajectories/eval-0001.jsonl",
            "trajectories/eval-0001.jsonl",
            lambda run: asyncio.run(
                run.group_log("eval", 1).keep(0, Group("p", [Trajectory("p")] * 1000))
            ),
        ),
        (
            "exactness.json.tmp",
            "exactness.json",
            lambda run: run.write_exactness(ExactnessReport()),
        ),
        ("reward.png", "reward.png", lambda run: run.draw()),
        (
            "metrics.jsonl",
            "metrics.jsonl",
            lambda run: run.metrics.write(StepMetrics(step=1).to_json()),
        ),
    ],
)
def test_a_full_disk_is_one_sentence_that_names_the_file(
    tmp_path: Path, file: str, said: str, write: Callable[[RunDir], Any]
) -> None:
    run = RunDir(config(tmp_path))
    path = run.path / file
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(FULL)
    with pytest.raises(TurnwiseError) as error:
        write(run)
    run.metrics.close()
    assert str(error.value) == f"{run.path / said} cannot be written: No space left on device"


def test_a_run_folder_on_a_full_disk_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml.tmp").symlink_to(FULL)
    with pytest.raises(InputError, match=r"the run folder .*/run cannot be written: .*No space"):
        RunDir(config(tmp_path))
