import json
from pathlib import Path

import pytest

from turnwise.errors import InputError
from turnwise.rollout import load_rows


def test_rows_of_a_file_come_in_order_up_to_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"n": n}) + "\n\n" for n in range(5)))
    assert load_rows(str(path), split="train") == [{"n": n} for n in range(5)]
    assert load_rows(str(path), split="train", limit=2) == [{"n": 0}, {"n": 1}]


def test_rows_of_a_hugging_face_dataset_come_by_split(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"question": split}) + "\n")
    assert load_rows(str(tmp_path), split="test") == [{"question": "test"}]


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


def test_data_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no data file .*gone\.jsonl"):
        load_rows(str(tmp_path / "gone.jsonl"), split="train")
    with pytest.raises(InputError, match=r"neither a \.jsonl file nor a dataset"):
        load_rows(str(tmp_path / "gone"), split="train")
