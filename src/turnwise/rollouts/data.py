"""Rows of data, from a JSON Lines, CSV or Parquet file, or a dataset on disk or on the Hub.

A row is a dictionary of plain values. Rows of Parquet files, datasets and large JSON Lines and CSV
files are made on access, so that a million rows take no more memory than a thousand rows. Smaller
files are read completely at the start.
"""

import codecs
import csv
import gzip
import json
import os
import sys
import tempfile
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TextIO, cast

from turnwise.config import Config, RolloutConfig
from turnwise.config.data import DataConfig
from turnwise.core.files import numbered
from turnwise.core.optional import Foreign, optional
from turnwise.core.sources import (
    DATA_FILES,
    ENVIRONMENT,
    PACKED,
    WORKER,
    check_data,
    data_files,
    data_suffix,
    why_offline,
)
from turnwise.errors import InputError, first_line, translate_unwritable
from turnwise.rollouts.agents import worker_tasks
from turnwise.rollouts.environment import (
    EnvironmentType,
    load_environment,
    make_rows,
    name_of,
    with_arguments,
)
from turnwise.rollouts.problems import Joined, JoinedProblems, Lazy, Problems, Row
from turnwise.rollouts.row_images import holds_images, with_own_paths, with_urls
from turnwise.rollouts.table_rows import is_of_table, own_keys

_SAVED = ("state.json", "dataset_dict.json")
"""Files that `save_to_disk` writes: the first for one split, the second for several splits."""
_EAGER_ROWS = 10_000
"""Maximum number of rows to read at the start; if there are more, rows are read on access."""
_EAGER_BYTES = 2**22  # maximum size of a file that is read at the start
_UNPACKED_BYTES = 2**20  # number of bytes unpacked at a time


def load_rows(
    path: str,
    *,
    split: str,
    subset: str | None = None,
    limit: int | None = None,
    condition: str | None = None,
    agent_env: Sequence[str] = (),
) -> Sequence[Row]:
    """Return the first `limit` rows in order; with a condition (`data.filter`), the first `limit`
    rows that meet it.

    Args:
        path: A .jsonl or .json (one object on each line, or one array), .csv, .tsv or .parquet
            file, which may be compressed by gzip (.jsonl.gz); or a pattern that matches several
            files (data/*.jsonl); a folder that a dataset's `save_to_disk` wrote; a folder of data
            files; a dataset's name on the Hub; a run folder, for the trajectories of its steps; or
            `worker: COMMAND`, for the tasks that an agent's worker lists.
        split: Split of a dataset that has several splits, or a slice, such as `train[:10%]`.
        subset: Configuration name of a dataset on the Hub.
        agent_env: `rollout.agent_env`, for an agent's worker.

    Raises:
        InputError: names the file, dataset, split or line that cannot be used. If rows are read on
            access, the error about a row is raised on access.
    """
    if path == ENVIRONMENT:
        raise InputError("rows that an environment makes are read by load_training(config)")
    check_data(path)
    file = Path(path).expanduser()
    rows: Sequence[Row]
    if path.startswith(WORKER):
        rows = worker_tasks(path.removeprefix(WORKER).strip(), agent_env)
    elif files := data_files(path) or ([file] if data_suffix(file) and not file.is_dir() else []):
        needed = limit if condition is None else None
        parts = [_read_file(each, needed) for each in files]
        rows = parts[0] if len(parts) == 1 else Joined(parts)
    elif steps := numbered(file / "trajectories", "step", ".jsonl"):
        rows = Joined([_read_file(step, None) for step in steps])
    else:
        rows = _read_dataset(path, split, subset)
    if not rows:
        raise InputError(f"{path} has no rows")
    return _first(rows, limit, rows.__getitem__, condition)


def _first(
    rows: Sequence[Row], limit: int | None, read: Callable[[int], Row], condition: str | None
) -> Sequence[Row]:
    """Return the first rows: as a list, so that mistakes are found early, or read on access if
    there are many rows or the first one has images. With a condition, rows are read until enough
    of them meet it."""
    if condition is not None:
        # This is trusted like the user's own code, such as the classes that a configuration names.
        code = compile(condition, "data.filter", "eval")

        def meets(number: int) -> bool:
            fields = dict(read(number))
            with suppress(Exception):  # such as the TypeError of None >= 1
                return bool(eval(code, fields))
            return False

        numbers = array("Q", islice(filter(meets, range(len(rows))), limit))
        if not numbers:
            fields = ", ".join(map(str, read(0)))
            raise InputError(
                f"data.filter: none of the {len(rows):,} rows meets {condition}; the first one has "
                f"the fields {fields}"
            )
        lazy = Lazy(len(numbers), lambda index: read(numbers[index]))
    else:
        lazy = Lazy(len(rows) if limit is None else min(limit, len(rows)), read)
    return lazy if len(lazy) > _EAGER_ROWS or holds_images(lazy[0]) else list(lazy)


def load_training(
    config: Config, environment: EnvironmentType | None = None, split: str = "train"
) -> Problems | JoinedProblems:
    """Return the problems of data.path, joined if the run has several `environments`. If the path
    is the word `environment`, the argument `environment` makes the rows (None: the configured
    environment makes them)."""
    parts = {}
    for name, part in config.parts().items():
        sets = part.data.eval_sets if split == "eval" else {}
        for of, path in sets.items() or [("", part.data.eval_path)]:
            one = part.changed({"data": {"eval_path": path, "eval_sets": {}}})

            def configured(part: Config = part) -> EnvironmentType:
                return with_arguments(load_environment(part.environment), part.environment_args)

            make = configured if environment is None else lambda: environment
            try:
                path, rows, change = _rows_of(one.data, one.rollout, make, split)
            except InputError as error:
                if not name:
                    raise
                raise InputError(f"environments.{name}: {error}") from error
            problems = Problems(path, rows, name, of, change=change, marked=split == "train")
            parts["/".join(filter(None, (name, of)))] = problems
    return parts[""] if "" in parts else JoinedProblems(parts)


load_heldout = partial(load_training, split="eval")
"""Return the problems of data.eval_path, or the joined problems of all data.eval_sets; if neither
is set, the problems of data.path."""


def _rows_of(
    data: DataConfig, rollout: RolloutConfig, make: Callable[[], EnvironmentType], split: str
) -> tuple[str, Sequence[Row], Callable[[Row], Row] | None]:
    """Return the path and the rows of one environment, and a function to apply to each row on
    access (None if there is nothing to apply). `make` returns the environment. If the environment
    makes the rows itself, the returned path is the name of the split."""
    if split == "eval" and data.eval_path is not None:
        path, part, limit = data.eval_path, data.eval_split, data.eval_limit
    elif data.path is not None:
        split, path, part, limit = "train", data.path, data.split, data.limit
    else:
        raise InputError("data.path must be set: there are no rows")
    condition = data.filter if split == "train" else None
    if path == ENVIRONMENT:
        environment = make()
        name = f"{name_of(environment)}.rows({split!r})"
        return split, checked_rows(make_rows(environment, split), name, limit, condition), None
    rows = load_rows(
        path,
        split=part,
        subset=data.subset,
        limit=limit,
        condition=condition,
        agent_env=rollout.agent_env,
    )
    if not data.allow_urls:
        return path, rows, None
    # Images are fetched on each access to a row, within half of the time limit for reading the row.
    return path, rows, partial(with_urls, seconds=rollout.environment_timeout / 2)


def checked_rows(
    rows: Sequence[Row], name: str, limit: int | None, condition: str | None = None
) -> Sequence[Row]:
    """Return the first `limit` of the rows that user code gave; each must be a dictionary. `name`
    stands for the rows in messages of errors."""
    if not len(rows):
        raise InputError(f"{name} has no rows")

    def read(number: int) -> Row:
        row = rows[number]
        if not isinstance(row, Mapping):
            raise InputError(f"{name}[{number}] is not a dictionary: {repr(row)[:80]}")
        return dict(row)

    return _first(rows, limit, read, condition)


@contextmanager
def _naming_file(path: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise InputError(f"the data file {path} is not UTF-8: {error}") from error
    except OSError as error:
        raise InputError(f"the data file {path} cannot be read: {error}") from error


def _read_file(path: Path, limit: int | None) -> Sequence[Row]:
    """Return the first `limit` rows of a data file; a gzip file is unpacked to a temporary file."""
    with _naming_file(path):
        read = _READERS[data_suffix(path)]
        if path.suffix != PACKED:
            return read(path, limit, path)
        with tempfile.NamedTemporaryFile(suffix=path.stem) as unpacked, gzip.open(path) as packed:
            try:
                for part in iter(partial(packed.read, _UNPACKED_BYTES), b""):
                    with translate_unwritable(Path(unpacked.name)):
                        unpacked.write(part)
            except (EOFError, zlib.error) as error:
                raise InputError(f"the data file {path} cannot be unpacked: {error}") from error
            unpacked.flush()
            return read(path, limit, Path(unpacked.name))  # rows keep the file open


def _read_json(path: Path, limit: int | None, own: Path) -> Sequence[Row]:
    """Read a file that holds one JSON array of rows, or JSON Lines."""
    with own.open("rb") as file:
        if not file.read(64).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
            return _read_jsonl(path, limit, own)
    try:
        rows = json.loads(own.read_text(encoding="utf-8-sig"))[:limit]
    except (json.JSONDecodeError, RecursionError) as error:
        reason = getattr(error, "msg", "nested too deeply")
        raise InputError(
            f"{path}, line {getattr(error, 'lineno', 1)}: not JSON ({reason}); the file holds one "
            "array of objects, or one whole object on each line"
        ) from None
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise InputError(f"{path}, row {number} of its array: a row must be a JSON object")
    cleaned = (own_keys(row) if is_of_table(row) else row for row in rows)
    return [with_own_paths(row, path.parent) for row in cleaned]


def _read_jsonl(path: Path, limit: int | None, own: Path) -> Sequence[Row]:
    def places() -> Iterator[tuple[int, int, int]]:
        end = 0
        with own.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                start, end = end, end + len(line)
                if line.strip():
                    yield number, start, end

    def parse(number: int, line: bytes) -> Row:
        try:
            row = json.loads(line.decode("utf-8-sig"))
        except (json.JSONDecodeError, RecursionError) as error:
            reason = getattr(error, "msg", "nested too deeply")
            raise InputError(
                f"{path}, line {number}: not JSON ({reason}); each line holds one whole object"
            ) from None
        if not isinstance(row, dict):
            raise InputError(f"{path}, line {number}: a row must be a JSON object")
        if b"null" in line and is_of_table(row):
            row = own_keys(row)
        return with_own_paths(row, path.parent) if b'"image' in line else row

    return _rows_at(path, own, islice(places(), limit), parse)


def _read_csv(path: Path, limit: int | None, own: Path) -> Sequence[Row]:
    """Read rows whose fields the first line names; every value is text. All rows are checked now,
    before any access. If the first line of a .csv file has no comma, the separator is a semicolon
    (as spreadsheets write it in many countries) or a tab."""
    csv.field_size_limit(sys.maxsize)
    with own.open(encoding="utf-8-sig") as file:
        header, marks = file.readline(), "\t" if data_suffix(path) == ".tsv" else ",;\t"
    mark = next((mark for mark in marks if mark in header), marks[0])
    reader = partial(csv.reader, delimiter=mark, strict=True)
    names, end = list[str](), 0

    def lines_of(file: TextIO) -> Iterator[str]:
        nonlocal end
        for line in file:
            end += len(line.encode())
            yield line

    def places() -> Iterator[tuple[int, int, int]]:
        nonlocal end
        with own.open("rb") as beginning:
            end = len(codecs.BOM_UTF8) * beginning.read(3).startswith(codecs.BOM_UTF8)
        with own.open(encoding="utf-8-sig", newline="") as file:
            lines = reader(lines_of(file))
            try:
                names.extend(next(lines, []))
                if len(set(names)) < len(names) or not all(name.strip() for name in names):
                    what = "the first line must name the fields, and no two alike"
                    raise InputError(f"{path}, line 1: {what}")
                start = end
                for values in lines:
                    if values and len(values) != len(names):
                        raise InputError(
                            f"{path}, line {lines.line_num}: {len(values)} values for the "
                            f"{len(names)} fields {', '.join(names)}"
                        )
                    if values:
                        yield lines.line_num, start, end
                    start = end
            except csv.Error as error:
                raise InputError(f"{path}, line {lines.line_num}: not CSV ({error})") from None

    def parse(number: int, line: bytes) -> Row:
        (values,) = reader([line.decode()])
        row = dict(zip(names, values, strict=True))
        return with_own_paths(row, path.parent) if "image" in names else row

    return _rows_at(path, own, islice(places(), limit), parse)


def _rows_at(
    path: Path,
    own: Path,
    places: Iterable[tuple[int, int, int]],
    parse: Callable[[int, bytes], Row],
) -> Sequence[Row]:
    """Return the rows at `places`, each a line number, the position of the row's first byte, and
    the position after its last byte. Rows of a large file are parsed on access.

    Args:
        path: The data file, named in errors.
        own: The file to read: the data file, or the temporary file to which it was unpacked.
    """
    found = array("Q")
    for place in places:
        found.extend(place)
    file = os.open(own, os.O_RDONLY)  # stays open for reads on access

    def read(index: int) -> Row:
        number, start, end = found[3 * index : 3 * index + 3]
        with _naming_file(path):
            return parse(number, os.pread(file, end - start, start))

    rows = Lazy(len(found) // 3, read)
    if os.fstat(file).st_size > _EAGER_BYTES:
        return rows
    try:
        return list(rows)
    finally:
        os.close(file)


def _read_parquet(path: Path, limit: int | None, own: Path) -> Sequence[Row]:
    arrow = optional("pyarrow", "data", f"the Parquet file {path}")  # half a second to import
    parquet = optional("pyarrow.parquet", "data", f"the Parquet file {path}")

    def mapped(file: Foreign) -> Foreign:
        """Write the file's rows to a temporary Arrow file, and map that file into memory."""
        with tempfile.NamedTemporaryFile(suffix=".arrow") as unpacked:
            with (
                arrow.OSFile(unpacked.name, "wb") as out,
                arrow.ipc.new_stream(out, file.schema_arrow) as writer,
            ):
                for batch in file.iter_batches(1024):
                    with translate_unwritable(Path(unpacked.name)):
                        writer.write_batch(batch)
            return arrow.ipc.open_stream(arrow.memory_map(unpacked.name)).read_all()

    try:
        with parquet.ParquetFile(own) as file:
            table = file.read() if own.stat().st_size <= _EAGER_BYTES else mapped(file)
    except (OSError, arrow.ArrowException) as error:
        what = f"the data file {path} is not a whole Parquet file"
        raise InputError(f"{what}: {first_line(error)}") from error

    def read(index: int) -> Row:
        return with_own_paths(own_keys(table.slice(index, 1).to_pylist()[0]), path.parent)

    return Lazy(table.num_rows, read)


_READERS: dict[str, Callable[[Path, int | None, Path], Sequence[Row]]] = dict(
    zip(DATA_FILES, (_read_jsonl, _read_json, _read_csv, _read_csv, _read_parquet), strict=True)
)


def _read_dataset(path: str, split: str, subset: str | None) -> Sequence[Row]:
    folder = Path(path).expanduser()
    offline = "" if folder.is_dir() else why_offline()
    datasets = optional("datasets", "data", f"the dataset {path}")  # a second to import
    is_saved = any((folder / name).is_file() for name in _SAVED)
    try:
        if is_saved:
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
        if split.partition("[")[0] not in dataset and "+" not in split:
            raise InputError(f"data: {path} has no split {split}; it has: {', '.join(dataset)}")
        dataset = _selected(dataset, split, path)
    elif is_saved and "[" in split:
        dataset = _selected({split.partition("[")[0]: dataset}, split, path)
    if "Image(" not in repr(dataset.features):
        return Lazy(len(dataset), lambda index: own_keys(dataset[index]))
    table = dataset.with_format("arrow")  # undecoded image files, as in Parquet files
    return Lazy(len(dataset), lambda index: own_keys(table[index].to_pylist()[0]))


def _selected(splits: Mapping[str, Foreign], split: str, path: str) -> Foreign:
    """Return the rows of a split, or of a slice such as `test[:10%]`, as `load_dataset` does."""
    datasets = optional("datasets", "data", f"the dataset {path}")
    sizes = {name: len(dataset) for name, dataset in splits.items()}
    try:
        parts = datasets.ReadInstruction.from_spec(split).to_absolute(sizes)
        chosen = [splits[part.splitname].select(range(part.from_, part.to)) for part in parts]
    except (ValueError, AssertionError, IndexError) as error:
        has = ", ".join(f"{name} ({size:,} rows)" for name, size in sizes.items())
        why = first_line(error)
        raise InputError(f"data: {path} has no split {split}: {why}; it has: {has}") from error
    return chosen[0] if len(chosen) == 1 else datasets.concatenate_datasets(chosen)


def given_rows(rows: Iterable[Row]) -> Iterable[Row]:
    """Return the rows that a program gave; rows of a Hugging Face dataset are returned as
    `load_rows` returns them."""
    if type(rows).__module__.partition(".")[0] != "datasets" or isinstance(rows, Mapping):
        return rows
    if not isinstance(rows, Sized):
        return map(own_keys, rows)  # a streamed dataset
    dataset = cast("Sequence[Row]", rows)  # indexed like a sequence
    return Lazy(len(dataset), lambda index: own_keys(dataset[index]))
