"""Rows of data, loaded from a JSON Lines, CSV or Parquet file, or a dataset on disk or on the Hub.

A row is a dictionary of plain values. The environment decides which fields it must have.
"""

import csv
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from turnwise.config import Config, DataConfig
from turnwise.core.optional import optional
from turnwise.core.sources import DATA_FILES, check_data, why_offline
from turnwise.errors import InputError, first_line
from turnwise.rollout.problems import Problem, Row

_SAVED = ("state.json", "dataset_dict.json")
"""Files in a folder of `save_to_disk`: one split, or several."""


def load_rows(
    path: str, *, split: str, subset: str | None = None, limit: int | None = None
) -> list[Row]:
    """Load the first `limit` rows, in their order.

    Args:
        path: A .jsonl or .json (one object a line), .csv, .tsv or .parquet file; a folder that a
            dataset's `save_to_disk` wrote; a folder of data files or a dataset's name on the Hub.
        split: Split of a dataset that has several.
        subset: Configuration name of a dataset on the Hub.
        limit: Maximum number of rows; None loads all.

    Raises:
        InputError: when the file, dataset or split does not exist, cannot be read, or has no
            rows; the message names the line of an invalid row.

    Example:
        rows = load_rows("train.jsonl", split="train", limit=100)
    """
    check_data(path)
    file = Path(path).expanduser()
    if (read := _READERS.get(file.suffix)) and not file.is_dir():
        rows = _read_file(file, read)
    else:
        rows = _read_dataset(path, split, subset)
    taken = list(islice(rows, limit))
    if not taken:
        raise InputError(f"{path} has no rows")
    return taken


def load_training_rows(data: DataConfig) -> tuple[str, list[Row]]:
    """Return data.path and the training rows.

    Raises:
        InputError: as `load_rows` does, and when data.path is not set.
    """
    if data.path is None:
        raise InputError("data.path must be set: there are no rows")
    rows = load_rows(data.path, split=data.split, subset=data.subset, limit=data.limit)
    return data.path, rows


def load_eval_rows(data: DataConfig) -> tuple[str, list[Row]]:
    """Return the path of the rows for evaluation (eval_path, or else path), and the rows.

    Example:
        path, rows = load_eval_rows(config.data)
    """
    if data.eval_path is None:
        return load_training_rows(data)
    rows = load_rows(
        data.eval_path, split=data.eval_split, subset=data.subset, limit=data.eval_limit
    )
    return data.eval_path, rows


def load_training(config: Config) -> list[Problem]:
    """Return the problems of data.path."""
    return make_problems(*load_training_rows(config.data))


def load_heldout(config: Config) -> list[Problem]:
    """Return the problems of data.eval_path, or of data.path if that is not set."""
    return make_problems(*load_eval_rows(config.data))


def make_problems(path: str, rows: Sequence[Row]) -> list[Problem]:
    """Return a problem for each row, named by the last part of the path and the row's number."""
    name = Path(path).name
    return [Problem(f"{name}:{number}", row) for number, row in enumerate(rows, start=1)]


def _read_file(path: Path, read: Callable[[Path], Iterator[Row]]) -> Iterator[Row]:
    try:
        yield from read(path)
    except UnicodeDecodeError as error:
        raise InputError(f"the data file {path} is not UTF-8: {error}") from error
    except OSError as error:
        raise InputError(f"the data file {path} cannot be read: {error}") from error


def _read_jsonl(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (json.JSONDecodeError, RecursionError) as error:
                reason = getattr(error, "msg", "nested too deeply")
                raise InputError(
                    f"{path}, line {number}: not JSON ({reason}); each line holds one whole object"
                ) from None
            if not isinstance(row, dict):
                raise InputError(f"{path}, line {number}: a row must be a JSON object")
            yield row


def _read_csv(path: Path) -> Iterator[Row]:
    """Yield the rows of a file whose first line names the fields; every value is text."""
    csv.field_size_limit(sys.maxsize)
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = csv.reader(file, delimiter="\t" if path.suffix == ".tsv" else ",", strict=True)
        try:
            names = next(lines, [])
            if len(set(names)) < len(names) or not all(name.strip() for name in names):
                raise InputError(
                    f"{path}, line 1: the first line names the fields, each differently"
                )
            for values in lines:
                if not values:
                    continue
                if len(values) != len(names):
                    raise InputError(
                        f"{path}, line {lines.line_num}: {len(values)} values for the "
                        f"{len(names)} fields {', '.join(names)}"
                    )
                yield dict(zip(names, values, strict=True))
        except csv.Error as error:
            raise InputError(f"{path}, line {lines.line_num}: not CSV ({error})") from None


def _read_parquet(path: Path) -> Iterator[Row]:
    arrow = optional("pyarrow", "data", f"the Parquet file {path}")  # half a second to import
    parquet = optional("pyarrow.parquet", "data", f"the Parquet file {path}")

    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except (OSError, arrow.ArrowException) as error:
        raise InputError(
            f"the data file {path} is not a whole Parquet file: {first_line(error)}"
        ) from error


_READERS: dict[str, Callable[[Path], Iterator[Row]]] = dict(
    zip(DATA_FILES, (_read_jsonl, _read_jsonl, _read_csv, _read_csv, _read_parquet), strict=True)
)


def _read_dataset(path: str, split: str, subset: str | None) -> Iterator[Row]:
    folder = Path(path).expanduser()
    offline = "" if folder.is_dir() else why_offline()
    datasets = optional("datasets", "data", f"the dataset {path}")  # a second to import
    try:
        if any((folder / name).is_file() for name in _SAVED):
            dataset = datasets.load_from_disk(folder)
        else:
            dataset = datasets.load_dataset(path, subset, split=split)
    except Exception as error:
        if offline:
            raise InputError(
                f"data: there is no file or folder {path}, {offline}, and the Hugging Face cache "
                "on this machine has no such dataset"
            ) from None
        raise InputError(
            f"data: {path} is neither a file ({', '.join(DATA_FILES)}) nor a dataset that can be "
            f"loaded: {first_line(error)}"
        ) from error
    if isinstance(dataset, dict):
        if split not in dataset:
            raise InputError(f"data: {path} has no split {split}; it has: {', '.join(dataset)}")
        dataset = dataset[split]
    return (dict(row) for row in dataset)
