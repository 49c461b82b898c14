import os
from pathlib import Path

import pytest

from turnwise.core.files import number_of, numbered, temporary, write_file


def test_numbered_lists_entries_by_number_and_skips_other_names(tmp_path: Path) -> None:
    names = ["step-9990", "step-10000", "step-0002", "step-10000.tmp", "step-3.old", "eval-0001"]
    for name in (*names, "step-0007.jsonl", "step-", "step-x1", "my-step-4", "step-1-2"):
        (tmp_path / name).touch()
    found = numbered(tmp_path, "step")
    assert [path.name for path in found] == ["step-0002", "step-9990", "step-10000"]
    assert [number_of(path) for path in found] == [2, 9990, 10000]
    assert [path.name for path in numbered(tmp_path, "step", ".jsonl")] == ["step-0007.jsonl"]
    assert [number_of(path) for path in numbered(tmp_path, "step", ".tmp")] == [10000]
    assert numbered(tmp_path / "nowhere", "step") == []
    assert numbered(tmp_path / "step-0002", "step") == []


def test_a_file_is_the_old_one_until_the_new_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.yaml"
    write_file(path, "old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "full")))
        with pytest.raises(OSError, match="full"):
            write_file(path, "new")
    assert path.read_text() == "old"
    write_file(path, "new ü")
    assert path.read_text(encoding="utf-8") == "new ü"
    assert not temporary(path).exists()
