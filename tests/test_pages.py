"""The pages on the terminal: what is found for words, and what a name is explained by."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from turnwise.cli import app, pages
from turnwise.config.explain import known_keys
from turnwise.errors import InputError
from turnwise.observe.metrics import meanings


def printed(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize(
    ("query", "page"),
    [
        ("how do I write an environment", "tutorial.md"),
        ("the run hangs", "how-to/stuck-run.md"),
        ("resume after a crash", "how-to/resume.md"),
        ("my own loss", "how-to/algorithms.md"),
        ("Gymnasium", "how-to/public-environments.md"),
        ("sleep GPU memory estimate", "how-to/memory.md"),
    ],
)
def test_words_find_the_page(query: str, page: str) -> None:
    assert page in [each.page for each in pages.search(query, 3)]


def test_every_metric_and_key_is_explained() -> None:
    for name in [*meanings(), *known_keys()]:
        first = pages.explain(name)[0]
        assert first.text, name


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tool_malformed", "the model writes calls that cannot be read"),
        ("environment_timeout", "drops its trajectory"),
        ("content_changed", "the template leaves out, or changes, a text"),
        ("training.steps", "default: 100"),
        ("grad_norm", "Norm of the policy's gradient"),
    ],
)
def test_a_name_is_explained(name: str, said: str) -> None:
    assert said in printed("explain", name).replace("\n", " ")


def test_programs_get_one_json_value() -> None:
    found: list[dict[str, Any]] = json.loads(printed("docs", "curriculum", "-n", "2", "--json"))
    assert [each.keys() for each in found] == [{"page", "title", "text"}] * 2
    assert json.loads(printed("explain", "kl", "--json"))[0]["page"] == "reference/metrics.md"
    keys = json.loads(printed("config", "--json"))
    assert {each["name"] for each in keys} == {*known_keys()}


def test_what_no_page_has_is_one_sentence() -> None:
    with pytest.raises(InputError, match="no page has a word of 'qwxz'"):
        pages.search("qwxz", 3)
    with pytest.raises(InputError, match="no page has the name 'qwxz'"):
        pages.explain("qwxz")


def test_the_pages_suffice_to_write_an_environment(tmp_path: Path, model_path: str) -> None:
    """A script that does what a found section says, word by word."""
    found = pages.search("write an environment", 3)
    section = next(each for each in found if each.page == "tutorial.md")
    command = re.search(r"`turnwise (init (\w+))`", section.text)
    code = re.search(r"```python\n# environment\.py\n(.+?)```", section.text, re.DOTALL)
    assert command is not None
    assert code is not None
    program = (sys.executable, "-m", "turnwise", *command[1].split(), "--model", model_path)
    subprocess.run(program, cwd=tmp_path, check=True, capture_output=True)
    project = tmp_path / command[2]
    own = project / "environment.py"
    assert own.read_text() != code[1]
    own.write_text(code[1])
    tested = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    done = subprocess.run(tested, cwd=project, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


def test_an_installation_without_pages_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(pages, "_INSTALLED", tmp_path / "a")
    monkeypatch.setattr(pages, "_CLONE", tmp_path / "b")
    with pytest.raises(InputError, match="this installation has no pages"):
        pages.pages_folder()
