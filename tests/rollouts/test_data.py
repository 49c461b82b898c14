"""Rows of every kind of file and dataset, and what is said of those that cannot be read."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
from datasets import Dataset, DatasetDict

from tests.trajectory.test_thinking_templates import thinking
from turnwise.errors import InputError
from turnwise.rollouts import data, load_rows
from turnwise.rollouts.data import given_rows
from turnwise.rollouts.problems import Lazy

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


def tool(name: str, parameter: str) -> dict[str, Any]:
    properties = {parameter: {"type": "string", "description": "It."}} if parameter else {}
    parameters = {"type": "object", "properties": properties, "required": [*properties]}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def talk(name: str, **arguments: str) -> list[dict[str, Any]]:
    function = {"name": name, "arguments": arguments}
    call = {"id": "call00000", "type": "function", "function": function}
    return [
        {"role": "user", "content": "Please."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00000", "content": "null"},
    ]


CALLS = [
    {
        "messages": talk("weather", city="Oslo"),
        "tools": [tool("weather", "city"), tool("now", "")],
        "answer": "rain",
    },
    {"messages": talk("add", left="1", right="2"), "tools": [tool("add", "left")], "answer": None},
]


def test_a_programs_dataset_gives_the_rows_of_its_file() -> None:
    dataset = Dataset.from_list(CALLS)
    assert list(given_rows(dataset)) == list(given_rows(dataset.to_iterable_dataset())) == CALLS
    assert given_rows(CALLS) is CALLS
    splits = DatasetDict({"train": dataset})
    assert given_rows(splits) is splits


@pytest.mark.parametrize("kind", ["jsonl", "written", "parquet", "saved", "folder"])
def test_a_row_has_no_keys_of_another_rows_messages_and_tools(tmp_path: Path, kind: str) -> None:
    """Arrow would show the model parameters that its tools do not have."""
    path = tmp_path / "rows"
    if kind == "jsonl":
        path = path.with_suffix(".jsonl")
        path.write_text("".join(json.dumps(row) + "\n" for row in CALLS))
    elif kind == "written":
        path = path.with_suffix(".jsonl")
        Dataset.from_list(CALLS).to_json(path)
        assert "null" in path.read_text()
    elif kind == "saved":
        Dataset.from_list(CALLS).save_to_disk(path)
    else:
        path = path / "train.parquet" if kind == "folder" else path.with_suffix(".parquet")
        path.parent.mkdir(exist_ok=True)
        parquet.write_table(arrow.Table.from_pylist(CALLS), path)
    name = path.parent if kind == "folder" else path
    rows = load_rows(str(name), split="train")
    assert list(rows) == CALLS
    template = thinking("keeps")
    for row, given in zip(rows, CALLS, strict=True):
        asked = row["messages"][:-1], row["tools"]
        text = template.render_text(asked[0], tools=asked[1])
        assert "null" not in text
        expected = template.render(given["messages"][:-1], tools=given["tools"])
        assert template.render(asked[0], tools=asked[1]) == expected


@pytest.mark.parametrize("kind", ["jsonl", "written", "parquet", "saved"])
def test_a_null_that_is_a_value_stays_in_every_form(tmp_path: Path, kind: str) -> None:
    own = {
        "messages": talk("weather", city="Oslo"),
        "tools": [tool("weather", "city")],
        "state": {"x": None, "y": 0, "below": [{"role": "admin", "until": None}, None]},
        "answer": None,
    }
    own["messages"][1]["tool_calls"][0]["function"]["arguments"]["city"] = None  # it is required
    path = tmp_path / "rows.jsonl"
    dataset = Dataset.from_list([own])
    if kind == "jsonl":
        path.write_text(json.dumps(own) + "\n")
    elif kind == "written":
        dataset.to_json(path)
    elif kind == "saved":
        dataset.save_to_disk(path)
    else:
        dataset.to_parquet(path := path.with_suffix(".parquet"))
    assert list(load_rows(str(path), split="train")) == [own]


@pytest.mark.parametrize("arguments", [{"x": None, "y": 0}, {}])
def test_a_null_that_a_line_of_json_says_stays(tmp_path: Path, arguments: dict[str, Any]) -> None:
    row = {"messages": talk("move", **arguments)}
    row["messages"][1]["content"] = None
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    assert list(load_rows(str(path), split="train")) == [row]


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
    ("name", "text", "message"),
    [
        ("rows.jsonl", b'{"a": 1}\n{', "line 2: not JSON .*; each line holds one whole object"),
        ("rows.json", b'[\n{"a": 1},\n]', "line [23]: not JSON .*; the file holds one array"),
        ("rows.json", b'[{"a": 1}, 2]', "row 2 of its array: a row must be a JSON object"),
        ("rows.json", b'{\n"a": 1}', "line 1: not JSON .*; each line holds one whole object"),
        ("rows.jsonl.gz", b'{"a": 1}', "cannot be read: .*gzip"),
        ("rows.jsonl.gz", gzip.compress(b'{"a": 1}', mtime=0)[:-9], "cannot be unpacked"),
        ("rows.jsonl.gz", gzip.compress(b'{"a": 1}\n{', mtime=0), "line 2: not JSON"),
        ("rows.jsonl", b'{"a": 1}\n\n[1]', "line 3: a row must be a JSON object"),
        ("rows.jsonl", b"[" * 100_000, "line 1: not JSON"),
        ("rows.jsonl", b"", "has no rows"),
        ("rows.jsonl", b'{"a": "\xe9"}', "is not UTF-8"),
        ("rows.csv", b"", "has no rows"),
        ("rows.csv", b"a,b\n", "has no rows"),
        ("rows.csv", b"a,b\n1,2\n\n3\n", "line 4: 1 values for the 2 fields a, b"),
        ("rows.csv", b"a,b\n1,2,3\n", "line 2: 3 values for the 2 fields a, b"),
        ("rows.csv", b"a,a\n1,2\n", "line 1: the first line must name the fields"),
        ("rows.csv", b"a,\n1,2\n", "line 1: the first line must name the fields"),
        ("rows.csv", b'a,b\n1,"2\n', "line 2: not CSV"),
        ("rows.tsv", b"a\tb\n1,2\n", "line 2: 1 values for the 2 fields a, b"),
    ],
)
def test_a_file_that_does_not_fit_is_named(
    tmp_path: Path, name: str, text: bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(text)
    with pytest.raises(InputError, match=rf"{name}.*{message}"):
        load_rows(str(path), split="train")


@pytest.mark.parametrize("eager_bytes", [2**22, 0])
def test_packed_files_arrays_and_patterns_give_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eager_bytes: int
) -> None:
    monkeypatch.setattr(data, "_EAGER_BYTES", eager_bytes)
    lines = [json.dumps(row).encode() + b"\n" for row in ROWS]
    (tmp_path / "array.json").write_text("\ufeff\n" + json.dumps(ROWS, indent=2))
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(b"".join(lines)))
    (tmp_path / "table.csv.gz").write_bytes(gzip.compress(b"a,b\n1,2\n", mtime=0))
    for number in (1, 0, 2):
        (tmp_path / f"part-{number}.jsonl").write_bytes(b"".join(lines[2 * number :][:2]))
    (tmp_path / "part-3.txt").write_text("no data")
    for name in ("array.json", "packed.jsonl.gz", "part-*", "part-*.jsonl", "**/part-?.jsonl"):
        assert list(load_rows(str(tmp_path / name), split="train")) == ROWS, name
        assert list(load_rows(str(tmp_path / name), split="train", limit=3)) == ROWS[:3], name
    assert list(load_rows(str(tmp_path / "table.csv.gz"), split="train")) == [{"a": "1", "b": "2"}]
    with pytest.raises(InputError, match=r"no data file matches .*none-\*\.jsonl"):
        load_rows(str(tmp_path / "none-*.jsonl"), split="train")


def test_a_slice_of_a_saved_dataset_works_as_on_the_hub(tmp_path: Path) -> None:
    splits = str(save_splits(tmp_path / "splits"))
    for split, expected in {
        "train[:2]": ROWS[:2],
        "train[20%:60%]": ROWS[1:3],
        "train[-1:]": ROWS[-1:],
        "test[:1]+train[:1]": [ROWS[0], ROWS[0]],
    }.items():
        assert list(load_rows(splits, split=split)) == expected, split
    single = str(save_dataset(tmp_path / "single"))
    assert list(load_rows(single, split="train[:2]")) == ROWS[:2]
    with pytest.raises(
        InputError, match=r"has no split train\[x:y\]: .*; it has: .*train \(5 rows\)"
    ):
        load_rows(splits, split="train[x:y]")


@pytest.mark.parametrize(
    ("name", "comma"), [("rows.csv", ","), ("rows.csv", ";"), ("rows.tsv", "\t")]
)
@pytest.mark.parametrize("eager_bytes", [2**22, 0])
def test_a_table_gives_rows_of_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, comma: str, eager_bytes: int
) -> None:
    monkeypatch.setattr(data, "_EAGER_BYTES", eager_bytes)
    path = tmp_path / name
    long = "é" * 200_000
    lines = ("question,answer", '"1, or\n""2""?",07', f"{long},", "")
    path.write_text("\ufeff" + "\r\n".join(lines).replace(",", comma), newline="")
    assert load_rows(str(path), split="train") == [
        {"question": f'1{comma} or\n"2"?', "answer": "07"},
        {"question": long, "answer": ""},
    ]


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
    with pytest.raises(InputError, match=r"there is no .*gone \(\.jsonl, .* Hugging Face name\)"):
        load_rows(str(tmp_path / "gone"), split="train")
    (tmp_path / "rows.txt").write_text("text")
    with pytest.raises(
        InputError, match=r"rows\.txt is not a kind of file that can be read \(\.jsonl"
    ):
        load_rows(str(tmp_path / "rows.txt"), split="train")
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match=r"neither a file \(\.jsonl, .*\) nor a dataset"):
        load_rows(str(tmp_path / "folder"), split="train")


def test_a_split_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    path: Any = save_splits(tmp_path / "rows")
    with pytest.raises(InputError, match="has no split dev; it has: test, train"):
        load_rows(str(path), split="dev")


def test_lines_of_a_large_file_are_parsed_on_demand(tmp_path: Path) -> None:
    path, last = tmp_path / "large.jsonl", 12_000
    text = "é" * 250
    with path.open("w") as file:
        for n in range(last):
            file.write(json.dumps({"n": n, "text": text}, ensure_ascii=False) + "\n")
            file.write("\n" if n == 7 else "not JSON\n" if n == 30 else "")
        file.write(f'{{"n": {last}}}')  # no newline at the end
    rows = load_rows(str(path), split="train")
    assert isinstance(rows, Lazy)
    assert len(rows) == last + 2
    assert [rows[index]["n"] for index in (0, 7, 8, 30, 32, -2, -1)] == [
        *(0, 7, 8, 30, 31, last - 1, last),
    ]
    assert rows[8]["text"] == text
    assert [row["n"] for row in rows[last - 1 :]] == [last - 2, last - 1, last]
    with pytest.raises(InputError, match=r"large\.jsonl, line 33: not JSON"):
        rows[31]
    assert len(load_rows(str(path), split="train", limit=3)) == 3


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_rows_of_a_large_table_are_parsed_on_demand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(data, "_EAGER_BYTES", 100)
    monkeypatch.setattr(data, "_EAGER_ROWS", 100)
    path = tmp_path / "rows.csv"
    lines = [f'{n},"é ""{n}"",{end}{n}"{end if n % 7 else end + end}' for n in range(1000)]
    path.write_text(f"a,b{end}" + "".join(lines), newline="")
    rows = load_rows(str(path), split="train", limit=900)
    assert isinstance(rows, Lazy)
    assert len(rows) == 900
    for n in (0, 1, 7, 8, 899):
        assert rows[n] == {"a": str(n), "b": f'é "{n}",{end}{n}'}
    assert rows[450:452][1]["a"] == "451"
