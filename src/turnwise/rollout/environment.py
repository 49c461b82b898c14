"""Environments: what a row of data asks, the tools at hand, and what an answer is worth."""

import importlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from turnwise.config import DataConfig
from turnwise.errors import InputError
from turnwise.trajectory import Message, Trajectory

Row = dict[str, Any]


class Environment(Protocol):
    """One attempt's world, made of one row; each trajectory gets an instance of its own.

    A class with this shape is named in the configuration as `package.module:Class`. Tools may be
    bound methods and share state through the instance.
    """

    problem: Sequence[Message]
    """The messages that the model answers."""
    tools: Sequence[Callable[..., Any]]
    """Plain functions, sync or async, typed and documented."""

    def __init__(self, row: Row) -> None: ...

    def reward(self, trajectory: Trajectory) -> float:
        """What the finished trajectory earns; may be `async`."""
        ...


EnvironmentType = Callable[[Row], Environment]


def load_object(path: str, key: str) -> Any:
    """Import `package.module:Name`.

    Raises:
        InputError: naming the configuration key and what is missing.
    """
    module_name, separator, name = path.partition(":")
    if not separator:
        raise InputError(f"{key} reads package.module:Name, not {path!r}")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise InputError(f"{key}: {module_name} cannot be imported: {error}") from error
    try:
        return getattr(module, name)
    except AttributeError:
        raise InputError(f"{key}: {module_name} has no {name}") from None


def load_rows(
    path: str, *, split: str, subset: str | None = None, limit: int | None = None
) -> list[Row]:
    """Rows of a .jsonl file, or of a split of a Hugging Face dataset.

    Raises:
        InputError: when there is no such file or dataset, a line is not a JSON object, or no
            row is left.
    """
    if Path(path).suffix in (".jsonl", ".json"):
        rows = _read_jsonl(Path(path), limit)
    else:
        rows = _read_dataset(path, split, subset, limit)
    if not rows:
        raise InputError(f"{path} has no rows")
    return rows


def load_eval_rows(data: DataConfig) -> tuple[str, list[Row]]:
    """The rows that evaluation takes, and where they are from: eval_path, or else path."""
    if data.eval_path is None:
        rows = load_rows(data.path, split=data.split, subset=data.subset, limit=data.limit)
        return data.path, rows
    rows = load_rows(
        data.eval_path, split=data.eval_split, subset=data.subset, limit=data.eval_limit
    )
    return data.eval_path, rows


def make_environment(factory: EnvironmentType, row: Row, where: str) -> Environment:
    """Build an environment; a row that lacks a field raises `InputError` naming `where`."""
    try:
        return factory(row)
    except KeyError as error:
        raise InputError(
            f"{where} has no field {error}; it has: {', '.join(map(str, row))}"
        ) from error
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def _read_jsonl(path: Path, limit: int | None) -> list[Row]:
    rows: list[Row] = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if limit is not None and len(rows) >= limit:
                    break
                if not line.strip():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise InputError(f"{path}, line {number}: a row is a JSON object")
                rows.append(row)
    except FileNotFoundError:
        raise InputError(f"there is no data file {path}") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{path}, line {number}: not JSON ({error.msg})") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the data file {path} cannot be read: {error}") from error
    return rows


def _read_dataset(path: str, split: str, subset: str | None, limit: int | None) -> list[Row]:
    import datasets  # a second to import, and only needed here

    try:
        dataset = datasets.load_dataset(path, subset, split=split)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(
            f"data: {path} is neither a .jsonl file nor a dataset that can be loaded: {reason}"
        ) from error
    return [dict(row) for row in dataset.select(range(min(limit or len(dataset), len(dataset))))]
