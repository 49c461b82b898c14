"""`turnwise init`: the project's files, and that they work."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.conftest import ROOT, command_environment, python
from tests.pages import blocks
from tests.test_cli import metrics_of
from turnwise.cli import app
from turnwise.config import load_config
from turnwise.errors import InputError
from turnwise.run.project import MODEL, make_project

FILES = [
    *("README.md", "config.yaml", "environment.py", "heldout.jsonl", "rows.jsonl"),
    "test_environment.py",
]


def test_a_project_has_six_files_and_its_own_test_passes(
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
        assert not re.search(r"\{[a-z_]+\}", (folder / name).read_text()) or name.endswith(".py")


def test_the_model_of_a_project_is_packaged(tmp_path: Path) -> None:
    make_project(tmp_path / "weather")
    config = load_config(tmp_path / "weather" / "config.yaml")
    assert (config.name, config.model.path) == ("weather", MODEL)
    assert config.model.chat_template == "hermes"
    assert config.training.learning_rate == 2e-5


@pytest.mark.parametrize("model", ["Qwen/Qwen3-0.6B", "some/other: model"])
def test_another_model_has_settings_of_its_own(tmp_path: Path, model: str) -> None:
    make_project(tmp_path / "123", model)
    config = load_config(tmp_path / "123" / "config.yaml")
    assert (config.name, config.model.path) == ("123", model)
    assert config.training.learning_rate == 1e-6
    assert bool(config.model.template_args) is ("Qwen3" in model)


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


@pytest.mark.parametrize("page", ["README.md", "docs/tutorial.md"])
def test_the_pages_show_the_class_of_a_project(page: str, tmp_path: Path) -> None:
    make_project(tmp_path / "weather")
    (text,) = (block.text for block in blocks(page) if block.name == "environment.py")
    file = (tmp_path / "weather" / "environment.py").read_text()
    assert ast.unparse(without_docstrings(text)) == ast.unparse(without_docstrings(file))


def without_docstrings(text: str) -> ast.Module:
    """A program without the docstrings of its file and classes."""
    tree = ast.parse(text)
    for node in (tree, *tree.body):
        if isinstance(node, ast.Module | ast.ClassDef) and ast.get_docstring(node):
            del node.body[0]
    return tree


@pytest.mark.slow
def test_a_published_model_learns_the_project(tmp_path: Path) -> None:
    subprocess.run(["make", "-s", ".venv/.real"], cwd=ROOT, check=True, timeout=900)
    make_project(tmp_path / "weather")
    done = subprocess.run(
        [*python(), "-m", "turnwise", "train", "config.yaml"],
        cwd=tmp_path / "weather",
        env=command_environment(),
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stderr
    run = tmp_path / "weather" / "runs" / "weather"
    measured = [row["accuracy_heldout"] for row in metrics_of(run)]
    assert measured[0] < 0.4
    assert max(filter(None, measured)) > 0.8
