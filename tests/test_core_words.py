"""The core knows nothing of other systems: their words are in the folders of their interfaces."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import ROOT

SRC = ROOT / "src/turnwise"
FOREIGN = ("compat", "trl", "tinker")
WORDS = re.compile(
    r"(?<![A-Za-z])(?:verl|VERL|trl|TRL)(?![a-z])"
    r"|(?i:nemo|chatlearn|tinker|skyrl|dataproto|chat_?scheduler)"
)
TABLES = {
    "__init__.py": "says where names are that it had",
    "cli/commands.py": "has the commands of these interfaces",
    "config/rollout.py": "has the keys of users' chat schedulers and of TRL's reward functions",
    "config/schema.py": "has the prefixes of other packages' environments",
    "pipeline.py": "says where names are that it had",
    "rollouts/environment.py": "has the adapters of other packages' environments, by prefix",
    "rollouts/rewards.py": "has the adapters of other kinds of reward functions, by key",
}
"""Files with a table that leads to these interfaces, each with its reason."""


def names_and_texts(tree: ast.AST) -> Iterator[str]:
    """Yield all names and strings of a file but its docstrings, which may cite a source."""
    prose = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.value
        for field in ("id", "attr", "name", "arg", "module"):
            if isinstance(value := getattr(node, field, None), str):
                yield value


def foreign_words(path: Path) -> list[str]:
    return [text for text in names_and_texts(ast.parse(path.read_text())) if WORDS.search(text)]


def test_words_of_other_systems_are_in_their_folders() -> None:
    found = {
        name: words
        for path in sorted(SRC.rglob("*.py"))
        if not (name := path.relative_to(SRC).as_posix()).startswith(FOREIGN)
        if (words := foreign_words(path))
    }
    assert {name: words for name, words in found.items() if name not in TABLES} == {}
    assert found.keys() == TABLES.keys(), "a table that is gone needs no exception"


def test_an_unknown_key_is_answered_without_slow_imports() -> None:
    """Also one of another system, whose table is in the folder of its interfaces."""
    code = (
        "import sys\nfrom turnwise.config import parse_config\n"
        "for key in ('no_such', 'actor_rollout_ref'):\n"
        "    try: parse_config({'model': {'path': 'm'}, key: {'rollout': {'name': 1}}})\n"
        "    except Exception as error: print(error)\n"
        "slow = {'ray', 'torch', 'vllm', 'transformers', 'fastapi'}\n"
        "assert not slow & sys.modules.keys(), slow & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "no_such" in done.stdout
    assert "actor_rollout_ref.rollout.name" in done.stdout


def test_a_word_of_another_system_is_found() -> None:
    tree = ast.parse('"""As in TRL."""\nclass DataProtoReader:\n    key = "rollout.verl"\n')
    assert [text for text in names_and_texts(tree) if WORDS.search(text)] == [
        "DataProtoReader",
        "rollout.verl",
    ]
