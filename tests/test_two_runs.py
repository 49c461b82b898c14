"""Two runs of one name on one machine at the same time, and one that is killed meanwhile."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.test_cli import Lottery, metrics_of, write_config
from tests.test_runs import SHORT, Held, Running
from turnwise.config import Config
from turnwise.trajectory import audit, read_jsonl

pytestmark = pytest.mark.slow

__all__ = ["Held", "Lottery"]


def exact(run: Path, steps: int) -> None:
    """Check that every engine had the weights of its own trainer, and no others."""
    rows = metrics_of(run)
    assert [row["weight_version"] for row in rows] == list(range(1, steps + 1))
    for row in rows:
        assert row["canary_diff_max"] < 1e-4
        assert row["logprob_diff_max"] < 1e-4
    for path in (run / "trajectories").glob("step-*.jsonl"):
        assert all(audit(each).violations == 0 for each in read_jsonl(path))


@pytest.mark.parametrize("transport", ["ipc", "shm"])
def test_two_runs_of_one_name_stay_apart_even_after_a_kill(
    make_config: Callable[..., Config],
    tmp_path_factory: pytest.TempPathFactory,
    transport: str,
) -> None:
    folders = [tmp_path_factory.mktemp("job") for _ in range(2)]
    files = [write_config(make_config, folder) for folder in folders]
    go = folders[0] / "go"

    def start(place: int) -> Running:
        seed = f"seed={place}"  # so that their weights differ
        arguments = (*SHORT, f"weights.transport={transport}", "training.threads=1", seed)
        steps = ("training.steps=4", "training.learning_rate=0.01", "name=same")
        return Running(files[place], *arguments, *steps, steps=2, go=go)

    runs = []
    for place in range(2):
        runs.append(start(place))
        runs[place].until("step    2/4", "held")
    runs[1].kill()
    shutil.rmtree(folders[1] / "runs" / "same")
    again = start(1)
    again.until("step    2/4", "held")
    go.touch()
    for running in (runs[0], again):
        _, stderr = running.process.communicate(timeout=1000)
        assert running.process.returncode == 0, stderr
        assert running.mark.left() == []
    for folder in folders:
        exact(folder / "runs" / "same", 4)
