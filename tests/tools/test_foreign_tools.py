"""Tools of other frameworks, by openai-agents here and by all four in their own environment."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import agents
import pytest

import turnwise
from tests.blocking import gate, new_gate
from tests.conftest import ROOT
from turnwise.config import Config, ToolConfig
from turnwise.rollouts import Problem
from turnwise.rollouts.configured_tools import load_tools
from turnwise.rollouts.episode import Episode
from turnwise.tools.foreign import adopted
from turnwise.tools.toolbox import Toolbox


@agents.function_tool
def greet(ctx: agents.RunContextWrapper[Any], name: str, often: int) -> str:
    """Greet somebody.

    Args:
        name: Whom.
        often: How many times.
    """
    return f"{ctx.context.greeting if ctx.context else 'Hi'} {name}" * often


@agents.function_tool
def hang() -> None:
    """Never answer."""
    gate().wait()


@pytest.fixture(autouse=True)
def _gate() -> Iterator[None]:
    own = new_gate()
    yield
    own.set()


class Hall(turnwise.Environment):
    problem = "Greet."
    greeting = "Hello"

    def __init__(self, row: dict[str, Any]) -> None:
        self.tools = [greet] if row.get("own") else []

    def reward(self, trajectory: Any) -> float:
        return 1.0


def test_its_schema_is_the_one_that_the_framework_sends() -> None:
    (schema,) = Toolbox([greet], timeout=60, max_chars=99).schemas  # type: ignore[list-item]
    assert schema == {
        "type": "function",
        "function": {
            "name": "greet",
            "description": "Greet somebody.",
            "parameters": greet.params_json_schema,
        },
    }


@pytest.mark.parametrize("own", [True, False], ids=["environment", "configuration"])
async def test_a_tool_of_openai_agents_is_called_wherever_it_is_given(
    make_config: Callable[..., Config], own: bool
) -> None:
    uses = [] if own else [ToolConfig(use=f"{__name__}:greet")]
    problem = Problem("rows:1", {"own": own})
    episode = Episode(Hall, problem, make_config().rollout, load_tools(uses))
    await episode.open()
    result = await episode.toolbox.call("greet", '{"name": "Ada", "often": 2}')
    # The environment is the context of its own tools.
    assert result.text == ("Hello Ada" if own else "Hi Ada") * 2
    refused = await episode.toolbox.call("greet", '{"name": "Ada", "often": "x"}')
    assert refused.outcome == "bad_arguments"
    assert 'greet cannot take these arguments: often: "x" is not of type' in refused.text


async def test_one_that_hangs_misses_its_deadline() -> None:
    result = await Toolbox([adopted(hang)], timeout=0.5, max_chars=99).call("hang", "{}")
    assert result.outcome == "timeout"


def test_what_is_no_tool_of_another_framework_stays_as_it_is() -> None:
    def plain(a: int) -> int:
        return a

    tool = turnwise.Tool("t", "", {"type": "object"}, str)
    for given in (plain, tool, Hall, Hall({}).reward, {"type": "function"}, "add", None):
        assert adopted(given) is given


ITEM = "[Item(name='tea', color=<Color.GREEN: 'green'>)]"
RESULTS = [
    ("ok", f"Ada sends {ITEM}, now"),
    (
        "bad_arguments",
        'Error: openai_order cannot take these arguments: items.0.name: 3 is not of type "string"',
    ),
    ("timeout", "Error: openai_wait did not answer within 5 s"),
    ("ok", f"Ada sends {ITEM}, soon"),
    (
        "bad_arguments",
        "Error: pydantic_order cannot take these arguments: "
        'items.0.name: 3 is not of type "string"',
    ),
    ("ok", '{"name": "tea", "color": "green"}'),
    ("error", "Error: pydantic_retry failed: ModelRetry: another number, please"),
    ("ok", f"{ITEM}, soon"),
    (
        "bad_arguments",
        'Error: langchain_order cannot take these arguments: items: 3 is not of type "array"',
    ),
    ("ok", "1"),
    ("ok", "5"),
    ("ok", "Oslo: rain for 2 days"),
    (
        "bad_arguments",
        'Error: smol_weather cannot take these arguments: city: 3 is not of type "string"',
    ),
    ("ok", "HI!"),
]


@pytest.mark.slow
def test_tools_of_four_frameworks_get_their_own_types() -> None:
    subprocess.run(["make", "agents"], cwd=ROOT, check=True, timeout=1_000)
    done = subprocess.run(
        [".venv-agents/bin/python", "-m", "tests.tools.foreign_tools"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": "src:."},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert [tuple(result) for result in said["results"]] == RESULTS
    functions = {schema["function"]["name"]: schema["function"] for schema in said["schemas"]}
    assert len(functions) == 10
    for name, function in functions.items():
        assert function["description"], name
        assert function["parameters"]["type"] == "object", name
        assert "ctx" not in function["parameters"]["properties"], name
    assert functions["smol_weather"]["parameters"]["required"] == ["city"]
    items = functions["pydantic_order"]["parameters"]["properties"]["items"]
    assert items["description"] == "What to order."
