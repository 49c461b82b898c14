"""`turnwise init`: the project's files, and that they work."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.conftest import ROOT
from turnwise.cli import app
from turnwise.config import load_config
from turnwise.errors import InputError
from turnwise.run.project import HUB_MODEL, make_project

FILES = ["README.md", "config.yaml", "environment.py", "rows.jsonl", "test_environment.py"]


def test_a_project_has_five_files_and_its_own_test_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["init", "my-adder"])
    assert (done.exit_code, done.exception) == (0, None), done.output
    folder = tmp_path / "my-adder"
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert all(name in done.stdout for name in FILES)
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:asyncio"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert tested.returncode == 0, tested.stdout
    assert "3 passed" in tested.stdout
    for name in FILES:
        assert "{" not in (folder / name).read_text() or name.endswith((".py", ".jsonl"))


def test_in_a_clone_the_demos_model_is_trained(tmp_path: Path) -> None:
    make_project(tmp_path / "adder")
    config = load_config(tmp_path / "adder" / "config.yaml")
    assert Path(config.model.path) == (ROOT / "examples/calculator/warm_started").resolve()
    assert (config.name, config.training.updates_per_step) == ("adder", 2)


@pytest.mark.parametrize("model", [HUB_MODEL, "some/other: model"])
def test_another_model_has_settings_of_its_own(tmp_path: Path, model: str) -> None:
    make_project(tmp_path / "123", model)
    config = load_config(tmp_path / "123" / "config.yaml")
    assert (config.name, config.model.path) == ("123", model)
    assert config.training.learning_rate == 1e-6
    assert bool(config.model.template_args) is (model == HUB_MODEL)


def test_a_models_folder_is_found_from_the_projects_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    make_project(Path("adder"), "model")
    assert load_config("adder/config.yaml").model.path == str(tmp_path / "model")


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    make_project(tmp_path / "adder")
    mine = tmp_path / "adder" / "environment.py"
    mine.write_text("mine")
    with pytest.raises(InputError, match="adder exists and is not an empty folder"):
        make_project(tmp_path / "adder")
    assert mine.read_text() == "mine"
    with pytest.raises(InputError, match="cannot name a project"):
        make_project(tmp_path / "my adder")


def test_the_rows_have_answers_that_are_right(tmp_path: Path) -> None:
    make_project(tmp_path / "adder")
    rows = [json.loads(line) for line in (tmp_path / "adder/rows.jsonl").read_text().splitlines()]
    assert len(rows) == 64
    for row in rows:
        sum_of = row["question"].removeprefix("Compute ").removesuffix(".")
        assert eval(sum_of) == row["answer"] >= 0
