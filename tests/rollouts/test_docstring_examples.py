"""The examples in the docstrings of classes that users write, and of small functions, run."""

import doctest
import importlib
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

import turnwise
from tests.simulated import SimulatedEngine
from turnwise.config import Config, RolloutConfig, SamplingConfig
from turnwise.rollouts import AgentLoop, Environment, Problem, RolloutContext, Runner
from turnwise.rollouts.episode import Episode
from turnwise.trajectory import Trajectory

ROW = {"city": "Oslo", "weather": "rain"}


def example(documented: type) -> Any:
    """The one class that a docstring's Example section defines."""
    _, _, text = inspect.cleandoc(documented.__doc__ or "").partition("Example:\n")
    names: dict[str, Any] = {
        "Trajectory": Trajectory,
        "Environment": Environment,
        "turnwise": turnwise,
        "RolloutContext": RolloutContext,
    }
    known = set(names)
    exec(textwrap.dedent(text), names)
    (made,) = (value for name, value in names.items() if name not in known and name[0] != "_")
    return made


@pytest.mark.parametrize("module", ["problems", "judge"])
def test_the_examples_of_functions(module: str) -> None:
    results = doctest.testmod(importlib.import_module(f"turnwise.rollouts.{module}"))
    assert results.attempted > 0
    assert results.failed == 0


async def test_the_example_of_an_environment() -> None:
    opened = Episode(example(Environment), Problem("rows:1", ROW), RolloutConfig())
    assert await opened.preview(set_up=True)
    result = await opened.toolbox.call("look_up", '{"city": "Oslo"}')
    assert (opened.problem[0]["role"], result.text) == ("user", "rain")
    trajectory = Trajectory("rows:1", messages=[{"role": "assistant", "content": "It will rain."}])
    assert opened.environment.reward(trajectory) == 1.0


@pytest.mark.parametrize(("documented", "turns"), [(RolloutContext, 2), (AgentLoop, 1)])
async def test_the_examples_of_agent_loops(
    make_config: Callable[..., Config], tokenizer: Any, documented: type, turns: int
) -> None:
    runner = Runner(make_config(), tokenizer)
    runner.tool_parser = None  # type: ignore[assignment]  # nothing is parsed here
    runner = runner.with_environment(example(Environment), example(documented)())
    engine = SimulatedEngine(vocab_size=len(tokenizer))
    sampling = SamplingConfig(n=2, max_tokens=8)
    group = await runner.run_group(engine, Problem("rows:1", ROW), sampling, "example")
    assert [len(trajectory.turns) for trajectory in group.trajectories] == [turns, turns]
    assert all(trajectory.status == "completed" for trajectory in group.trajectories)
