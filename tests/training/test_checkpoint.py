import json
import pickle
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import ROOT, command_environment, python
from turnwise.config import Config, TrainingConfig, dump_config
from turnwise.errors import InputError
from turnwise.training import checkpoint, checkpoint_state
from turnwise.training.optimizer import TrainableModule


def make(checkpoints: Path, step: int) -> Path:
    folder = checkpoints / f"step-{step:04d}"
    place = checkpoint.begin(folder)
    (place / "state" / "loop.json").write_text(json.dumps({"step": step}))
    (place / "model.safetensors").write_bytes(bytes(100))
    checkpoint.commit(folder)
    return folder


def test_the_newest_whole_checkpoint_is_taken_and_flaws_named(
    tmp_path: Path,
) -> None:
    folders = [make(tmp_path, step) for step in range(1, 5)]
    assert checkpoint.newest_whole(tmp_path) == (folders[3], [])
    (folders[3] / "model.safetensors").write_bytes(bytes(99))
    (folders[2] / "state" / "loop.json").unlink()
    checkpoint.begin(tmp_path / "step-0005")  # a crash while it was written
    found, flaws = checkpoint.newest_whole(tmp_path)
    assert found == folders[1]
    assert flaws == [
        f"{folders[3]}/model.safetensors has 99 bytes, not 100",
        f"{folders[2]}/state/loop.json is missing",
    ]
    for folder in folders[:2]:
        (folder / "state" / "files.json").write_text("{")
    with pytest.raises(InputError, match=r"no whole checkpoint to resume from: .* has 99 bytes"):
        checkpoint.newest_whole(tmp_path)


def test_a_checkpoint_written_again_takes_the_place_of_the_first(tmp_path: Path) -> None:
    folder = make(tmp_path, 1)
    make(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-0001"]
    assert checkpoint.incomplete_reason(folder) == ""


def test_the_last_ones_and_the_best_are_kept(tmp_path: Path) -> None:
    for step in range(1, 7):
        make(tmp_path, step)
    checkpoint.prune(tmp_path, keep_last=2, best=3)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["step-0003", "step-0005", "step-0006"]


def save_with_little_room(config_file: str, folder: str) -> None:
    """In a process of its own, whose files may not grow beyond a megabyte."""
    from turnwise.config import load_config
    from turnwise.errors import TurnwiseError
    from turnwise.training.rank import TrainerRank

    policy = TrainerRank(load_config(config_file))
    policy.save(checkpoint.begin(Path(folder) / "step-0001"))
    checkpoint.commit(Path(folder) / "step-0001")
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
    try:
        policy.save(checkpoint.begin(Path(folder) / "step-0002"))
    except TurnwiseError as error:
        sys.stdout.write(str(error))


def test_a_full_disk_is_one_sentence_and_what_was_saved_stays(
    make_config: Callable[..., Config], tmp_path: Path
) -> None:
    config = make_config(training={"threads": 1}, engine={})
    (tmp_path / "config.yaml").write_text(dump_config(config))
    call = "tests.training.test_checkpoint import save_with_little_room as save"
    done = subprocess.run(
        [
            *python(),
            "-c",
            f"import sys; from {call}; save(*sys.argv[1:])",
            str(tmp_path / "config.yaml"),
            str(tmp_path),
        ],
        cwd=ROOT,
        env=command_environment(),
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert "state cannot be written: the disk did not take everything" in done.stdout, done.stderr
    assert checkpoint.newest_whole(tmp_path) == (tmp_path / "step-0001", [])


class Evil:
    """A pickle of it makes a file named `ran` where it is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return Path.touch, (self.folder / "ran",)


def learners() -> dict[str, Any]:
    module = torch.nn.Linear(4, 4)
    return {"policy": TrainableModule(module, TrainingConfig(), 1e-3, 10)}


def test_a_checkpoint_runs_no_code_that_somebody_put_into_it(tmp_path: Path) -> None:
    place = checkpoint.begin(tmp_path / "step-0001")
    saved = learners()
    checkpoint_state.save_state(place, 0, saved, {"version": 7})
    loaded = learners()
    assert checkpoint_state.load_state(place, 0, loaded)["version"] == 7
    weights = [ls["policy"].module.weight for ls in (saved, loaded)]
    assert torch.equal(*weights)

    metadata = place / "state" / ".metadata"
    whole = metadata.read_bytes()
    metadata.write_bytes(pickle.dumps(Evil(tmp_path)))
    with pytest.raises(InputError, match=r"cannot be loaded: \.metadata names .* not metadata"):
        checkpoint_state.load_state(place, 0, learners())
    metadata.write_bytes(whole)

    spiked = {"policy": {"model": {"weight": Evil(tmp_path), "bias": torch.zeros(4)}}}
    checkpoint_state.save(spiked, checkpoint_id=place / "state", no_dist=True)
    with pytest.raises(InputError, match=r"cannot be loaded: policy\.model\.weight is no tensor"):
        checkpoint_state.load_state(place, 0, learners())
    assert not (tmp_path / "ran").exists()
