"""Files with one trajectory per line; a folder next to them has each of their images once."""

import json
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

from turnwise.errors import translate_unwritable
from turnwise.trajectory.images import FOLDER, save_images
from turnwise.trajectory.trajectory import Trajectory

_NAMED = re.compile(rb'"([0-9a-f]{32})":\{"format":"(\w+)"')
"""Description of an image in a line (`Trajectory.to_json`): its hash and format."""


def write_jsonl(path: Path, trajectories: Iterable[Trajectory]) -> None:
    """Write one trajectory per line, and the images into a folder next to the file. If that fails,
    no part of the file appears, and a TurnwiseError is raised."""
    temporary = path.with_suffix(".tmp")
    with translate_unwritable(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w", encoding="utf-8") as file:
            for trajectory in trajectories:
                save_images(path.parent / FOLDER, trajectory.images.values())
                file.write(trajectory.to_json() + "\n")
        temporary.replace(path)


def read_jsonl(path: Path) -> Iterator[Trajectory]:
    """Yield the trajectories of a file; a last line that was never completed is left out.

    Example:
        for trajectory in read_jsonl(Path("runs/demo/trajectories/step-0001.jsonl")):
            print(trajectory.problem_id, trajectory.reward)
    """
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                trajectory = Trajectory.from_json(line, path.parent / FOLDER)
            except json.JSONDecodeError:
                if line.endswith("\n") or not line.startswith("{"):
                    raise
                return  # the program ended while it wrote the line, as in an evaluation
            yield trajectory


def remove_files(paths: Iterable[Path]) -> None:
    """Remove files of trajectories in one folder, and the images that no remaining file in the
    folder names."""
    alone: set[str] = set()  # names of images
    for path in paths:
        folder = path.parent
        if (folder / FOLDER).is_dir():
            alone |= _images_of(path, path.stat().st_mtime_ns)
        path.unlink(missing_ok=True)
    for path in folder.glob("*.jsonl") if alone else ():
        alone -= _images_of(path, path.stat().st_mtime_ns)
    for name in alone:
        (folder / FOLDER / name).unlink(missing_ok=True)


@lru_cache(maxsize=1024)  # each step asks for the files that are kept
def _images_of(path: Path, written: int) -> frozenset[str]:
    """Return the names of the images of a file of trajectories. `written` is the file's
    modification time, so that a changed file is read again."""
    with path.open("rb") as file:  # no text has such a description: its quotes would be escaped
        found = (pair for line in file for pair in _NAMED.findall(line))
        return frozenset(f"{key.decode()}.{kind.decode()}" for key, kind in found)
