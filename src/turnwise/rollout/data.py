"""Rows of data: of a JSON Lines, CSV or Parquet file, or of a dataset on disk or on the Hub.

A row is a dictionary of plain values. Which fields it must have is the environment's business.
"""

import csv
import json
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from turnwise.config import DataConfig
from turnwise.errors import InputError
from turnwise.rollout.problems import Row
from turnwise.sources import DATA_FILES, check_data, why_offline

_SAVED = ("state.json", "dataset_dict.json")
"""Files in a folder of `save_to_disk`: one split, or several."""


def load_rows(
    path: str, *, split: str, subset: str | None = None, limit: int | None = None
) -> list[Row]:
    """Rows in their order, the first `limit` of them.

    Args:
        path: A .jsonl or .json (one object a line), .csv, .tsv or .parquet file; a folder that a
            dataset's `save_to_disk` wrote; a folder of data files or a dataset's name on the Hub.
        split: Of a dataset that has several.
        subset: Configuration name of a dataset on the Hub.

    Raises:
        InputError: when there is no such file, dataset or split, it cannot be read, or it has
            no row; the message names the line of a row that is wrong.
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


def load_eval_rows(data: DataConfig) -> tuple[str, list[Row]]:
    """The rows that evaluation takes, and where they are from: eval_path, or else path."""
    if data.eval_path is None:
        rows = load_rows(data.path, split=data.split, subset=data.subset, limit=data.limit)
        return data.path, rows
    rows = load_rows(
        data.eval_path, split=data.eval_split, subset=data.subset, limit=data.eval_limit
    )
    return data.eval_path, rows


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
                raise InputError(f"{path}, line {number}: a row is a JSON object")
            yield row


def _read_csv(path: Path) -> Iterator[Row]:
    """Rows of a file whose first line names the fields; every value is text."""
    csv.field_size_limit(sys.maxsize)
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = csv.reader(file, delimiter="\t" if path.suffix == ".tsv" else ",", strict=True)
        try:
            names = next(lines, [])
            if len(set(names)) < len(names) or not all(name.strip() for name in names):
                raise InputError(
                    f"{path}, line 1: the first line names the fields, each by a name of its own"
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
    import pyarrow as arrow  # half a second to import, and only needed here
    import pyarrow.parquet as parquet

    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except (OSError, arrow.ArrowException) as error:
        raise InputError(
            f"the data file {path} is not a whole Parquet file: {_first_line(error)}"
        ) from error


_READERS: dict[str, Callable[[Path], Iterator[Row]]] = dict(
    zip(DATA_FILES, (_read_jsonl, _read_jsonl, _read_csv, _read_csv, _read_parquet), strict=True)
)


def _read_dataset(path: str, split: str, subset: str | None) -> Iterator[Row]:
    folder = Path(path).expanduser()
    offline = "" if folder.is_dir() else why_offline()
    import datasets  # a second to import, and only needed here

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
            f"loaded: {_first_line(error)}"
        ) from error
    if isinstance(dataset, dict):
        if split not in dataset:
            raise InputError(f"data: {path} has no split {split}; it has: {', '.join(dataset)}")
        dataset = dataset[split]
    return (dict(row) for row in dataset)


def _first_line(error: Exception) -> Any:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
