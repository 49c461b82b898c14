"""Rows of every kind of file and dataset, and what is said of those that cannot be read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
from datasets import Dataset, DatasetDict

from turnwise.errors import InputError
from turnwise.rollout import load_rows

ROWS = [{"n": n, "messages": [{"role": "user", "content": "é" * n}]} for n in range(5)]


def write_jsonl(path: Path) -> Path:
    path.with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n\n" for row in ROWS))
    return path.with_suffix(".jsonl")


def write_parquet(path: Path) -> Path:
    table = arrow.Table.from_pylist(ROWS)
    parquet.write_table(table, path.with_suffix(".parquet"), row_group_size=2)
    return path.with_suffix(".parquet")


def save_dataset(path: Path) -> Path:
    Dataset.from_list(ROWS).save_to_disk(path)
    return path


def save_splits(path: Path) -> Path:
    other = Dataset.from_list(ROWS[:1])
    DatasetDict({"test": other, "train": Dataset.from_list(ROWS)}).save_to_disk(path)
    return path


def save_folder(path: Path) -> Path:
    path.mkdir()
    for split, rows in (("train", ROWS), ("test", ROWS[:1])):
        parquet.write_table(arrow.Table.from_pylist(rows), path / f"{split}.parquet")
    return path


@pytest.mark.parametrize(
    "write", [write_jsonl, write_parquet, save_dataset, save_splits, save_folder]
)
def test_rows_come_in_order_as_plain_values_up_to_the_limit(
    tmp_path: Path, write: Callable[[Path], Path]
) -> None:
    path = str(write(tmp_path / "rows"))
    assert load_rows(path, split="train") == ROWS
    assert load_rows(path, split="train", limit=3) == ROWS[:3]
    assert load_rows(path, split="train", limit=9) == ROWS
    if write in (save_splits, save_folder):
        assert load_rows(path, split="test") == ROWS[:1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1}\n{', "line 2: not JSON"),
        ("[1]", "line 1: a row is a JSON object"),
        ("", "has no rows"),
    ],
)
def test_a_file_that_does_not_fit_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        load_rows(str(path), split="train")


@pytest.mark.parametrize("left", [0, 3, 200, -1])
def test_a_parquet_file_that_was_cut_short_is_named(tmp_path: Path, left: int) -> None:
    path = write_parquet(tmp_path / "rows")
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(InputError, match=r"rows\.parquet is not a whole Parquet file: \S") as error:
        load_rows(str(path), split="train")
    assert "\n" not in str(error.value)


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "rows")
    whole = bytearray(path.read_bytes())
    whole[4:100] = b"\xff" * 96
    path.write_bytes(whole)
    with pytest.raises(InputError, match=r"rows\.parquet is not a whole Parquet file"):
        load_rows(str(path), split="train")


def test_a_parquet_file_without_rows_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    parquet.write_table(arrow.schema([("n", arrow.int64())]).empty_table(), path)
    with pytest.raises(InputError, match=r"rows\.parquet has no rows"):
        load_rows(str(path), split="train")


def test_data_that_is_not_there_is_named(tmp_path: Path) -> None:
    for name in ("gone.jsonl", "gone.parquet"):
        with pytest.raises(InputError, match=rf"there is no data file .*{name}"):
            load_rows(str(tmp_path / name), split="train")
    with pytest.raises(InputError, match=r"neither a \.jsonl or \.parquet file nor a dataset"):
        load_rows(str(tmp_path / "gone"), split="train")


def test_a_split_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    path: Any = save_splits(tmp_path / "rows")
    with pytest.raises(InputError, match="has no split dev; it has: test, train"):
        load_rows(str(path), split="dev")
