"""A resumed run notices that its data are others, whatever their number and form."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from turnwise.config import parse_config
from turnwise.errors import InputError
from turnwise.rollouts.data import load_training
from turnwise.rollouts.problems import Lazy, Problems, make_stream

MANY = 1000


def rows(name: str, count: int = MANY) -> list[dict[str, Any]]:
    return [{"question": f"{name} {number}", "answer": number} for number in range(count)]


def written(path: Path, own: Sequence[dict[str, Any]]) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in own))
    return str(path)


def stream(path: str, **data: Any) -> Any:
    tree = {"environment": "package:Class", "model": {"path": "model"}}
    config = parse_config({**tree, "data": {"path": path, **data}})
    return make_stream(load_training(config), config.data, config.seed, config.environment_weights)


def stopped(path: str, **data: Any) -> Any:
    """The state of a run, as a checkpoint has it."""
    return json.loads(json.dumps(stream(path, **data).state()))


def test_as_many_other_rows_are_refused(tmp_path: Path) -> None:
    for count in (1, 2, 50, MANY):
        state = stopped(written(tmp_path / "rows.jsonl", rows("one", count)))
        other = stream(written(tmp_path / "rows.jsonl", rows("other", count)))
        before = other.state()
        with pytest.raises(InputError, match="such as row 1, are others now; give it the same"):
            other.restore(state)
        assert other.state() == before


def test_a_selection_of_as_many_rows_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", rows("one"))
    state = stopped(path, filter="answer % 2 == 0")
    with pytest.raises(InputError, match="are others now"):
        stream(path, filter="answer % 2").restore(state)
    stream(path, filter="answer in range(0, 1000, 2)").restore(state)


def test_rows_in_another_order_are_refused(tmp_path: Path) -> None:
    state = stopped(written(tmp_path / "rows.jsonl", rows("one", 50)))
    turned = written(tmp_path / "rows.jsonl", rows("one", 50)[::-1])
    with pytest.raises(InputError, match="are in another order"):
        stream(turned).restore(state)


def test_a_row_that_was_edited_is_named_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = rows("one", 50)
    state = stopped(written(tmp_path / "rows.jsonl", own))
    own[16]["answer"] = "seventeen"
    stream(written(tmp_path / "rows.jsonl", own)).restore(state)
    assert "1 of 50 rows that were compared, such as row 17, were edited" in caplog.text


def test_the_same_rows_in_another_place_and_form_are_equal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = [{**row, "image": f"{row['answer']}.png"} for row in rows("one", 50)]
    for folder in ("here", "there"):
        written(tmp_path / folder / "rows.jsonl", own)
        (tmp_path / folder / "3.png").write_bytes(b"")
    state = stopped(str(tmp_path / "here" / "rows.jsonl"))
    stream(str(tmp_path / "there" / "rows.jsonl")).restore(state)
    again = [{key: row[key] for key in reversed(row)} for row in own]
    stream(written(tmp_path / "here" / "rows.jsonl", again)).restore(state)
    del state["marks"]  # of an older version
    stream(written(tmp_path / "here" / "rows.jsonl", rows("other", 50))).restore(state)
    assert not caplog.records


def test_marks_read_few_rows_and_fetch_no_images() -> None:
    read: list[int] = []

    def make(index: int) -> dict[str, Any]:
        read.append(index)
        if index == 0:
            raise InputError("cannot be read")
        return {"n": index, "random": len(read) if index == 999_999 else 0}

    def fetch(row: dict[str, Any]) -> dict[str, Any]:
        raise AssertionError

    problems = Problems("rows", Lazy(1_000_000, make), change=fetch, marked=True)
    assert len(problems.marks) == 62, "neither of the first row nor of the last, which varies"
    assert len(read) <= 128
    assert not Problems("held out", Lazy(9, make)).marks
