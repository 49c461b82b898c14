"""The source reads as CONTRIBUTING says: short files, plain docstrings, few `Any`."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import turnwise
from tests.conftest import ROOT

SOURCES = sorted((ROOT / "src").rglob("*.py"))
MAX_LINES = 600
MAX_ANY_LINES = 150
MAX_CONFIG_PARAMETERS = 40
MAX_TEST_NAME = 60
RIDDLE = re.compile(r"(What|Where|Of|Which|Why|How)\b")
DIALECT = re.compile(r"\b(told|anew|under way)\b", re.IGNORECASE)
PROSE = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "src/**/*.py", "examples/**/*.py")
    for path in ROOT.glob(pattern)
    if "build" not in path.relative_to(ROOT).parts
)


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring, those of attributes included."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text.strip()


def test_no_file_is_longer_than_600_lines() -> None:
    lengths = {str(path): len(path.read_text().splitlines()) for path in SOURCES}
    assert len(lengths) > 100
    assert {path: n for path, n in lengths.items() if n > MAX_LINES} == {}


def test_no_two_classes_have_the_same_name() -> None:
    found: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert len(found) > 300
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}


def test_a_docstring_begins_with_a_noun_or_an_imperative() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text[:60]}"
        for path in SOURCES
        for line, text in docstrings(path)
        if RIDDLE.match(text)
    ]
    assert found == []


def test_names_of_tests_are_short() -> None:
    names = [
        node.name
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if node.name.startswith("test_")
    ]
    assert len(names) > 2000
    assert [name for name in names if len(name) > MAX_TEST_NAME] == []


def test_words_of_our_own_are_gone() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
        for path in PROSE
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if DIALECT.search(line)
    ]
    assert found == []


def test_the_run_uses_no_default_executor() -> None:
    """User code may use up asyncio's default executor: our own calls have threads of their own."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("to_thread", "run_in_executor")
    ]
    assert found == []


def test_few_lines_name_any() -> None:
    lines = [line for path in SOURCES for line in path.read_text().splitlines()]
    assert sum(bool(re.search(r"\bAny\b", line)) for line in lines) <= MAX_ANY_LINES


def test_few_functions_take_the_whole_configuration() -> None:
    """Composition is in `run`; other functions take the section, or the values, that they use."""
    composing = {"config", "run", "cli", "observe"}
    found = [
        f"{path.relative_to(ROOT)}:{argument.lineno}"
        for path in SOURCES
        if path.relative_to(ROOT / "src" / "turnwise").parts[0] not in composing
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for argument in [*node.args.args, *node.args.kwonlyargs]
        if argument.annotation is not None
        and ast.unparse(argument.annotation).strip("'") == "Config"
    ]
    assert 20 < len(found) <= MAX_CONFIG_PARAMETERS, found


def test_every_public_class_and_function_has_an_example() -> None:
    public = {name: getattr(turnwise, name) for name in turnwise.__all__}
    without = [
        name
        for name, value in public.items()
        if (inspect.isclass(value) or inspect.isfunction(value))
        if not (inspect.isclass(value) and issubclass(value, BaseException))
        if "Example:" not in (value.__doc__ or "")
    ]
    assert len(public) > 20
    assert without == []
