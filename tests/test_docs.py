"""Checks of the docs: keys, tests and files that they name exist, and their code blocks work."""

import ast
import asyncio
import csv
import importlib.util
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from docs.reference import TABLES, additions_of_modules, on_page_markdown
from tests.coming_from import file_of, without
from tests.conftest import ROOT
from tests.pages import PAGES, blocks, write_files
from turnwise.cli import app
from turnwise.compat.chatlearn.model_file import read_model
from turnwise.compat.chatlearn.pipeline_file import PipelineFile
from turnwise.compat.openenv import OpenEnv
from turnwise.compat.reasoning_gym import ReasoningGym
from turnwise.config import Config, RolloutConfig, known_keys, load_config
from turnwise.rollouts.environment import load_object
from turnwise.rollouts.episode import Episode
from turnwise.rollouts.problems import Problem
from turnwise.tinker.backend import server_config

TABLE = ROOT / "docs" / "coming-from.md"
_SECTIONS = "|".join(
    name for name, field in Config.model_fields.items() if hasattr(field.annotation, "model_fields")
)
_KEY = re.compile(rf"`((?:{_SECTIONS})\.[a-z_.]+)[`:]")


_FILE = re.compile(
    r"(?<![\w./-])((?:[\w-]+/)+(?:[\w-]+\.(?:py|js|md|txt|yaml|toml))?|[\w-]+\.py)(?![\w/])"
)
_STEP = re.compile(
    r"^ *(?:-> )?([A-Z]\w+)[.\w]*(?: -> \w+)* +((?:[a-z_]+/)+(?:\w+\.py)?)(?=\s)", re.M
)


def rows() -> Iterator[tuple[str, str]]:
    for line in TABLE.read_text().splitlines():
        if line.startswith("| "):
            theirs, ours = (cell.strip() for cell in line.strip("|").split(" | "))
            if ours != "Turnwise":
                yield theirs, ours


@cache
def _functions(file: str) -> set[str]:
    """The names of the functions of a test's file."""
    body = ast.parse((ROOT / "tests" / file).read_text()).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_row_names_its_tests_and_their_owner() -> None:
    """Tests have their whole names, and no row is there twice. That a row's tests fail without the
    owner is what `python -m tests.coming_from` shows."""
    found = [theirs for theirs, _ in rows()]
    assert len(found) > 200
    assert max(Counter(found).values()) == 1
    with (ROOT / "tests" / "coming_from.csv").open(newline="") as file:
        named = {line["row"]: line for line in csv.DictReader(file)}
    assert [*named] == found
    for theirs, line in named.items():
        tests = line["tests"].split()
        assert tests, theirs
        for file_of_test, _, name in (test.partition("::") for test in tests):
            assert name in _functions(file_of_test), (theirs, name)
        module, _, qualified = line["owner"].partition(":")
        if theirs == "KubeRay, SkyPilot":  # files of YAML, which no code reads
            assert not module
            continue
        assert "taken away" in without(file_of(module), qualified), theirs


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md", "additions"])
def test_every_file_that_is_named_is_there(page: str) -> None:
    """`additions` are the sentences of modules on how to add things."""
    text = TABLES[page]() if page in TABLES else (ROOT / page).read_text()
    named = set(_FILE.findall(text)) - {"weights/TRANSPORT.py"}
    assert len(named) > 10
    source = ROOT / "src" / "turnwise"
    folders = (ROOT, source, source / "weights", source / "training" / "algorithms")
    assert [name for name in named if not any((place / name).exists() for place in folders)] == []


def test_the_architectures_page_says_how_to_add_things() -> None:
    found = additions_of_modules()
    assert len(found) == len({what for what, _, _ in found}) >= 28
    assert ("a reward", "rollouts/rewards.py") in {(what, file) for what, _, file in found}
    page = on_page_markdown((ROOT / "ARCHITECTURE.md").read_text())
    assert all(f"| {what} |" in page for what, _, _ in found)


def test_the_paths_name_what_their_files_define() -> None:
    steps = _STEP.findall((ROOT / "ARCHITECTURE.md").read_text())
    assert len(steps) > 15
    for name, place in steps:
        path = ROOT / "src" / "turnwise" / place.replace("TRANSPORT", "transport")
        files = path.rglob("*.py") if path.is_dir() else [path]
        assert any(re.search(rf"\b{name}\b", file.read_text()) for file in files), (name, place)


@pytest.mark.parametrize("file", PAGES)
def test_every_key_is_one_of_the_configuration(file: str) -> None:
    known = known_keys()
    text = (ROOT / file).read_text()
    if file == "docs/coming-from.md":
        text = "\n".join(ours for _, ours in rows())
    keys = [key for key in _KEY.findall(text) if key != "metrics.jsonl"]  # a file
    sections = {key.rpartition(".")[0] for key in known}
    assert [k for k in keys if k not in known and k.rstrip(".") not in sections] == []


_BASE = "environment: my:Env\nmodel: {path: a}\ndata: {path: rows.jsonl}\n"
_MODEL_FILES = ("policy.yaml", "shared.yaml")
"""YAML blocks of these names are files of a pipeline's modules."""
_ROWS: dict[str, dict[str, Any]] = {
    "docs/how-to/environments.md": {
        **{"most": 9, "number": 4, "step": 3},
        **{"complaint": "My order is late.", "wish": "its price back"},
    },
    "docs/how-to/images.md": {"ground": "white", "colour": "teal"},
    "docs/how-to/self-play.md": {"worth": 9},
    "docs/how-to/tools.md": {"question": "How warm is it?", "answer": "21", "answers": ["21"]},
}
_ROW = {"question": "How warm is it in Oslo?", "celsius": 21, "answer": "21"}
_COMMANDS: Any = typer.main.get_command(app)
_OF_A_FOLDER = ("bundle", "init", "replay", "scale", "show", "stuck", "view", "whatif")
"""Commands whose argument is a folder that a reader makes or has."""


def test_every_block_is_checked_or_says_why_not() -> None:
    found = [block for page in PAGES for block in blocks(page)]
    assert len(found) > 60
    for block in found:
        assert block.language in {"python", "yaml", "sh", "text"}, block
        if block.reason:
            assert len(block.reason) > 8, block
    # A block that no test runs is an exception: think before you raise this number.
    assert sum(block.reason is not None for block in found) <= 7


@pytest.fixture(params=[page for page in PAGES if any(blocks(page))])
def page(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """A page whose files are in the working directory, and can be imported."""
    write_files(request.param, tmp_path, {})
    if not (tmp_path / "config.yaml").exists():
        (tmp_path / "config.yaml").write_text(_BASE)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield request.param
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)


def test_yaml_blocks_are_configurations(page: str) -> None:
    for block in blocks(page):
        if block.language == "yaml":
            assert block.name, f"{block} needs a first line with the name of its file"
            if block.name in _MODEL_FILES:
                read_model(Path(block.name))
                continue
            base = yaml.safe_load(_BASE)
            if "environments" in yaml.safe_load(block.text):
                base = {"model": base["model"]}
            config = load_config(block.name, defaults=base)
            for key, value in (
                *(("environment", part.environment or "") for part in config.parts().values()),
                ("rollout.agent", config.rollout.agent or ""),
                ("rollout.chat_scheduler", config.rollout.chat_scheduler or ""),
                ("rollout.sampler", config.rollout.sampler or ""),
                *(("engine.logits_processors", one) for one in config.engine.logits_processors),
                *(
                    ("rollout.rewards", part.function or part.group_function or "")
                    for part in config.rollout.rewards
                ),
                *(("rollout.tools", part.use or "") for part in config.rollout.tools),
            ):
                if Path(f"{value.partition(':')[0]}.py").exists() or value.startswith("examples."):
                    load_object(value, key)


def test_python_blocks_run(page: str) -> None:
    """Blocks that train only once they are a program are run by `examples/test_ladder.py`."""
    for block in blocks(page):
        if block.language == "python":
            names: dict[str, Any] = {"__name__": "page"}
            exec(compile(block.text, str(block), "exec"), names)
            for kind in list(names.values()):
                if isinstance(kind, type) and hasattr(kind, "reward"):
                    if issubclass(kind, OpenEnv | ReasoningGym):
                        continue  # its server has the problem, or a package that is not installed
                    problem = Problem(str(block), _ROWS.get(page, _ROW))
                    asyncio.run(_open_and_close(Episode(kind, problem, RolloutConfig())))


async def _open_and_close(episode: Episode) -> None:
    await episode.open()
    assert episode.problem
    await episode.close(lambda reason, error: pytest.fail(f"{reason}: {error}"))


def test_shell_blocks_name_commands_files_and_targets_that_exist(page: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^([\w-]+):", makefile, re.MULTILINE)
    variables = set(re.findall(r"\$\((\w+)\)", makefile))
    for block in blocks(page):
        if block.language != "sh":
            continue
        checked = subprocess.run(["bash", "-n"], input=block.text, text=True, capture_output=True)
        assert checked.returncode == 0, (block, checked.stderr)
        if block.reason:
            continue
        for line in filter(None, block.text.splitlines()):
            program, *arguments = shlex.split(line, comments=True)
            match program, arguments:
                case "make", [target, *assignments]:
                    assert target in targets, (block, line)
                    for assignment in assignments:
                        variable, equals, _ = assignment.partition("=")
                        assert equals, (block, line)
                        assert variable in variables, (block, line)
                case "cd", [folder]:
                    assert f"turnwise init {folder}" in (ROOT / page).read_text()
                case "python", ["-m", module, *_]:
                    assert importlib.util.find_spec(module), (block, line)
                case "turnwise", [name, *options]:
                    command = _COMMANDS.commands[name]
                    if name == "export":
                        assert command.make_context(name, options).params["run"], (block, line)
                        continue
                    if name == "trace":
                        source, target = options[1:]
                        assert options[0] in command.commands, (block, line)
                        assert source.endswith(".jsonl"), (block, line)
                        assert target.endswith(".jsonl"), (block, line)
                        continue
                    context = command.make_context(name, options)
                    if name == "tinker":
                        server_config(*(context.params[key] for key in ("model", "config")))
                        continue
                    if name in (
                        "bundle",
                        "init",
                        "replay",
                        "scale",
                        "show",
                        "stuck",
                        "view",
                        "whatif",
                    ):
                        continue  # a folder that a reader makes or has
                    file, overrides = (context.params.get(key) for key in ("file", "overrides"))
                    if context.params.get("resume"):  # the run's own file, and no other
                        load_config("config.yaml", [file] if file else [])
                    elif name == "doctor" and file is None:
                        assert not overrides, (block, line)
                    elif name == "pipeline":
                        PipelineFile(file, overrides)
                    elif name == "eval" and not file.endswith(".yaml"):  # two models
                        assert all("=" in each for each in overrides[1:]), (block, line)
                    elif name == "eval":
                        changes = [each for each in overrides or () if "=" in each]
                        load_config(file, changes, yaml.safe_load(_BASE))
                    else:
                        load_config(file, overrides or (), yaml.safe_load(_BASE))
                case _:
                    raise AssertionError(f"{block}: no test knows how to check {line!r}")


def test_the_number_of_keys_is_that_of_the_configuration() -> None:
    (count,) = re.findall(
        r"^\| configuration keys \| (\d+) \|", (ROOT / "README.md").read_text(), re.M
    )
    assert int(count) == len(known_keys())
