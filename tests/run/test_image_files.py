"""Images in a run folder: each once, and only as long as a file that is kept names it."""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from turnwise.config import Config
from turnwise.errors import TrajectoryError
from turnwise.rollouts import Group, Problem
from turnwise.run.run_dir import RunDir
from turnwise.trajectory import Image, PlacedImage, Prompt, Trajectory, read_jsonl

IMAGES = [Image.of(bytes([number]) * 9, "png", 28, 28) for number in range(6)]
SHARED, HELD = IMAGES[4:]


def shown(*images: Image) -> Trajectory:
    places = [PlacedImage(image, at, 1) for at, image in enumerate(images)]
    trajectory = Trajectory("p", messages=[{"role": "user", "content": ',"images":{"x"'}])
    trajectory.add_turn(Prompt([9] * 3, places), [1], [-0.5], [0], "stop")
    return trajectory


def kept_by(folder: Path, keep: int | None) -> RunDir:
    """Return a run's folder that keeps a number of files."""
    made = RunDir.__new__(RunDir)
    made.path = folder
    made._config = cast(Config, SimpleNamespace(trajectories=SimpleNamespace(keep=keep)))
    return made


def names(images: Iterable[Image]) -> set[str]:
    return {image.name for image in images}


@pytest.mark.parametrize("keep", [None, 2])
def test_images_go_with_the_last_file_that_names_them(tmp_path: Path, keep: int | None) -> None:
    run = kept_by(tmp_path, keep)
    group = Group.of(Problem("p", {}))
    group.trajectories = [shown(HELD, IMAGES[0])]
    asyncio.run(run.group_log("eval", 0).keep(0, group))
    for step in range(4):
        run.write_trajectories(step, [shown(IMAGES[step], SHARED)])
    folder = tmp_path / "trajectories"
    left = {file.name for file in (folder / "images").iterdir()}
    if keep is None:
        assert left == names(IMAGES)
        return
    assert left == names([IMAGES[0], IMAGES[2], IMAGES[3], SHARED, HELD])
    for file in folder.glob("*.jsonl"):
        for trajectory in read_jsonl(file):
            assert all(image.read() for image in trajectory.images.values())


def test_a_run_that_goes_on_knows_the_images_of_earlier_files(tmp_path: Path) -> None:
    for step in range(2):
        kept_by(tmp_path, None).write_trajectories(step, [shown(IMAGES[step])])
    before = next(read_jsonl(tmp_path / "trajectories" / "step-0000.jsonl"))
    again = kept_by(tmp_path, 2)
    again.write_trajectories(2, [shown(IMAGES[1])])
    left = {file.name for file in (tmp_path / "trajectories" / "images").iterdir()}
    assert left == names(IMAGES[1:2])
    with pytest.raises(TrajectoryError, match="No such file") as error:
        before.images[IMAGES[0].hash].read()
    assert error.value.reason == "image_lost"


def test_a_run_of_text_has_no_folder_of_images(tmp_path: Path) -> None:
    run = kept_by(tmp_path, 1)
    for step in range(3):
        run.write_trajectories(step, [shown()])
    assert [file.name for file in (tmp_path / "trajectories").iterdir()] == ["step-0002.jsonl"]
