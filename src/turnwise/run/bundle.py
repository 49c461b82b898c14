"""A bundle: what `turnwise replay` needs of a run to make a step again, in one zip file."""

import json
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from turnwise.config import Config, load_config
from turnwise.config.base import NEEDED_KEYS
from turnwise.config.load import has_secrets, masked
from turnwise.core.files import number_of
from turnwise.core.json_types import JsonObject
from turnwise.errors import InputError, translate_unwritable
from turnwise.observe.conversations import read_trajectories, trajectory_file
from turnwise.rollouts import Problem
from turnwise.rollouts.problems import make_stream
from turnwise.run.commands import FROM_CONFIG, load_problems
from turnwise.training import checkpoint
from turnwise.trajectory.images import FOLDER

ROWS = "rows.jsonl"
"""The rows of the step's problems: id, row and environment."""
_MAX_BYTES = 2**37  # of the unpacked files of a bundle: 128 GiB


def write_bundle(run: Path, step: int | None, target: Path | None, *, weights: bool) -> Path:
    """Write a step of a run into a file, and return the file's path. Secrets of the configuration
    are masked. The trajectories of earlier steps are added if the trainer can reach the step's
    weights with them: from the initial model or, with `weights`, from the last checkpoint.

    Raises:
        InputError: when the run lacks the step.
    """
    file = trajectory_file(run, step)
    number = number_of(file)
    target = target or Path(f"{run.resolve().name}-step-{number}.zip")
    config = load_config(run / "config.yaml", optional=NEEDED_KEYS)
    rows: dict[str, str] = {}
    if config.environment or config.environments:
        find = finder(config, run)
        for name in dict.fromkeys(each.problem_id for each in read_trajectories(file)):
            problem = find(name)
            row = {"id": name, "row": problem.row, "environment": problem.environment}
            rows[name] = _as_line(name, row)
    newest = checkpoint.newest_before(checkpoint.checkpoints_of(run), number)
    begins = 0 if newest is None else number_of(newest)
    steps = range(begins + 1 if weights or not begins else number, number + 1)
    paths = [path for each in steps if (path := trajectories_of(run, each)).is_file()]
    paths += (run / "trajectories" / FOLDER).glob("*")
    paths.append(run / "training" / f"step-{number:04d}.safetensors")
    paths += newest.rglob("*") if weights and newest is not None else ()
    temporary = target.with_name(f"{target.name}.tmp")
    with (
        translate_unwritable(target),
        zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as made,
    ):
        text = (run / "config.yaml").read_text()
        if has_secrets(config):
            text = yaml.safe_dump(masked(config), sort_keys=False)
        made.writestr("config.yaml", text)
        lines = (line for line in read_lines(run / "metrics.jsonl") if line["step"] <= number)
        made.writestr("metrics.jsonl", "".join(f"{json.dumps(line)}\n" for line in lines))
        made.writestr(ROWS, "".join(rows.values()))
        for path in paths:
            if path.is_file():
                made.write(path, path.relative_to(run))
    temporary.replace(target)
    return target


def _as_line(name: str, row: JsonObject) -> str:
    try:
        return f"{json.dumps(row)}\n"
    except TypeError as error:
        raise InputError(f"the row {name} cannot be bundled: {error}") from error


@contextmanager
def opened_bundle(source: Path) -> Iterator[Path]:
    """Yield the folder of a bundle's files, unpacked for a `with` block; of a run, its folder.

    Raises:
        InputError: when a file is no bundle.
    """
    if not source.is_file():
        yield source
        return
    with TemporaryDirectory(prefix="turnwise-") as folder:
        place = Path(folder, source.stem)
        try:
            with zipfile.ZipFile(source) as bundle:
                size = sum(each.file_size for each in bundle.infolist())
                if size > min(_MAX_BYTES, shutil.disk_usage(folder).free):
                    raise InputError(f"{source}: its {size:,} bytes do not fit into {folder}")
                bundle.extractall(place)
        except (zipfile.BadZipFile, OSError) as error:
            raise InputError(f"{source} is no bundle of `turnwise bundle`: {error}") from error
        yield place


def finder(config: Config, run: Path) -> Callable[[str], Problem]:
    """Return the function that finds a problem by its id: in a bundle's rows, or in the run's data.
    It raises InputError if there is none."""
    if not (rows := run / ROWS).is_file():
        problems = load_problems(config, FROM_CONFIG)
        return make_stream(problems, config.data, config.seed, config.environment_weights).find
    bundled = {line["id"]: Problem(**line) for line in read_lines(rows)}

    def find(name: str) -> Problem:
        if name not in bundled:
            raise InputError(f"the bundle has no row {name}")
        return bundled[name]

    return find


def trajectories_of(run: Path, step: int) -> Path:
    """Return the file of a step's trajectories."""
    return run / "trajectories" / f"step-{step:04d}.jsonl"


def read_lines(path: Path) -> Iterator[JsonObject]:
    """Yield the objects of a JSON Lines file; none if there is no file."""
    if path.is_file():
        with path.open(encoding="utf-8") as file:
            yield from map(json.loads, file)
