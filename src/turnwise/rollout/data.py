"""Rows of data: of a JSON Lines or Parquet file, or of a dataset on disk or on the hub.

A row is a dictionary of plain values. Which fields it must have is the environment's business.
"""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from turnwise.config import DataConfig
from turnwise.errors import InputError
from turnwise.rollout.problems import Row

_SAVED = ("state.json", "dataset_dict.json")
"""Files in a folder of `save_to_disk`: one split, or several."""


def load_rows(
    path: str, *, split: str, subset: str | None = None, limit: int | None = None
) -> list[Row]:
    """Rows in their order, the first `limit` of them.

    Args:
        path: A .jsonl, .json (one object a line) or .parquet file; a folder that a dataset's
            `save_to_disk` wrote; a folder of data files or a dataset's name on the hub.
        split: Of a dataset that has several.
        subset: Configuration name of a dataset on the hub.

    Raises:
        InputError: when there is no such file, dataset or split, it cannot be read, or it has
            no row.
    """
    file = Path(path).expanduser()
    if file.suffix in (".jsonl", ".json"):
        rows = _read_jsonl(file)
    elif file.suffix == ".parquet":
        rows = _read_parquet(file)
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


def _read_jsonl(path: Path) -> Iterator[Row]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise InputError(f"{path}, line {number}: a row is a JSON object")
                yield row
    except FileNotFoundError:
        raise InputError(f"there is no data file {path}") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{path}, line {number}: not JSON ({error.msg})") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the data file {path} cannot be read: {error}") from error


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow as arrow  # half a second to import, and only needed here
    import pyarrow.parquet as parquet

    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except FileNotFoundError:
        raise InputError(f"there is no data file {path}") from None
    except (OSError, arrow.ArrowException) as error:
        raise InputError(
            f"the data file {path} is not a whole Parquet file: {_first_line(error)}"
        ) from error


def _read_dataset(path: str, split: str, subset: str | None) -> Iterator[Row]:
    import datasets  # a second to import, and only needed here

    folder = Path(path).expanduser()
    try:
        if any((folder / name).is_file() for name in _SAVED):
            dataset = datasets.load_from_disk(folder)
        else:
            dataset = datasets.load_dataset(path, subset, split=split)
    except Exception as error:
        raise InputError(
            f"data: {path} is neither a .jsonl or .parquet file nor a dataset that can be "
            f"loaded: {_first_line(error)}"
        ) from error
    if isinstance(dataset, dict):
        if split not in dataset:
            raise InputError(f"data: {path} has no split {split}; it has: {', '.join(dataset)}")
        dataset = dataset[split]
    return (dict(row) for row in dataset)


def _first_line(error: Exception) -> Any:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
