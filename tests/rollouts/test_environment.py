"""What an environment may leave out, and what is said of one that cannot be used."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from turnwise.config import Config, RolloutConfig
from turnwise.errors import InputError
from turnwise.rollouts import Problem, Runner
from turnwise.rollouts.environment import load_object, naming_row
from turnwise.rollouts.episode import Episode

HERE = "tests.rollouts.test_environment"
MESSAGES = [{"role": "user", "content": "hello"}]


def made(problem: Any, *tools: Any) -> Episode:
    """An environment of a class that only has what it is given."""

    class Desk:
        def __init__(self, row: dict[str, Any]) -> None:
            if problem is not None:
                self.problem = problem
            if tools:
                (self.tools,) = tools

    return preview(Desk)


def preview(environment: Any) -> Episode:
    episode = Episode(environment, Problem("rows.jsonl:3", {}), RolloutConfig())
    assert asyncio.run(episode.preview(set_up=True))
    return episode


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: One number.
        b: The other.
    """
    return a + b


def test_a_text_is_one_message_and_tools_may_be_left_out() -> None:
    episode = made("hello")
    assert episode.problem == MESSAGES
    assert episode.toolbox.names == []
    episode = made(MESSAGES, (add,))
    assert episode.problem == MESSAGES
    assert episode.toolbox.names == ["add"]


@pytest.mark.parametrize("problem", [None, [], 3, ["hello"], [{"content": "hello"}], {"role": "u"}])
def test_a_problem_that_is_no_conversation_is_named(problem: Any) -> None:
    message = r"^rows\.jsonl:3: Desk\.problem must be a string, or a list of messages .*, not "
    with pytest.raises(InputError, match=message):
        made(problem)


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([{"type": "function", "function": {"name": "add"}}], r"Desk\.call_tool.* must run"),
        ([{"name": "add"}], r"a description in Desk\.tools must be {\"type\": .*, not {'name'"),
        (["add"], r"a tool in Desk\.tools must be a function or method .* not 'add'"),
        (add, r"Desk\.tools must be a list of functions, not <function add"),
        ({"add": add}, r"Desk\.tools must be a list of functions, not {'add'"),
        ([add, add], r"Desk\.tools has two functions named add"),
    ],
)
def test_tools_that_are_no_functions_are_named(tools: Any, message: str) -> None:
    with pytest.raises(InputError, match=rf"^rows\.jsonl:3: .*{message}"):
        made("hello", tools)


class Careless:
    """Its property for tools has a mistake of its own."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.problem = MESSAGES

    @property
    def tools(self) -> list[Any]:
        return [self.no_such_tool]  # type: ignore[attr-defined]


def test_a_failing_property_does_not_count_as_missing() -> None:
    with pytest.raises(InputError, match="'Careless' object has no attribute 'no_such_tool'"):
        preview(Careless)


class Broken:
    """Fails as its row says."""

    def __init__(self, row: dict[str, Any]) -> None:
        if row["fails"] == "judge":
            raise ValueError("the judge is down")
        self.problem = {"a": row["question"]}[row["fails"]]


def line_of(text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, start=1) if text in line)


@pytest.mark.parametrize(
    ("row", "message", "line"),
    [
        (
            {"fails": "judge"},
            "failed: ValueError: the judge is down",
            "raise ValueError",
        ),
        (
            {"fails": "fails", "question": 1},
            "failed: KeyError: 'fails'",
            "self.problem = {",
        ),
        ({"fails": "a"}, "KeyError: 'question'", "self.problem = {"),
    ],
)
def test_an_environment_that_cannot_be_built_names_its_line(
    make_config: Callable[..., Config],
    tokenizer: Any,
    row: dict[str, Any],
    message: str,
    line: str,
) -> None:
    runner = Runner(make_config(environment=f"{HERE}:Broken"), tokenizer)
    with pytest.raises(InputError, match=r"rows\.jsonl:1") as error:
        runner.check(Problem("rows.jsonl:1", row))
    assert message in str(error.value)
    said, _, fields = str(error.value).partition("; the row has: ")
    assert said.endswith(f"(tests/rollouts/test_environment.py:{line_of(line)})")
    assert fields == ("fails" if "question" not in row and "KeyError" in message else "")


def test_a_key_that_is_no_fields_is_not_called_one() -> None:
    with pytest.raises(InputError) as error, naming_row("rows.jsonl:1", {"city": "Oslo"}):
        _ = {"Rome": 1}["Oslo"]
    assert "the environment failed: KeyError: 'Oslo' (tests/rollouts/test_env" in str(error.value)
    assert "has no field" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import no_such_package", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("\n1 / 0", r"ZeroDivisionError: division by zero \(.*/plug_in\.py:2\)"),
        ("def broken(:", r"SyntaxError: .*plug_in\.py, line 1"),
    ],
)
def test_a_module_that_cannot_be_imported_names_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    (tmp_path / "plug_in.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InputError, match=rf"environment: plug_in cannot be imported: {message}"):
        load_object("plug_in:Desk", "environment")
