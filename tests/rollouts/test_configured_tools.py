"""Tools of `rollout.tools`, beside an environment's own."""

from collections.abc import Callable
from typing import Any

import pytest

import turnwise
from tests.rollouts.test_trl import Saying, call
from turnwise.config import Config, SamplingConfig, ToolConfig
from turnwise.errors import InputError, TrajectoryError
from turnwise.rollouts import Problem, Runner
from turnwise.rollouts.configured_tools import load_tools
from turnwise.rollouts.episode import Episode
from turnwise.tools import Toolset

HERE = __name__
SCHEMA = {"type": "object", "properties": {}}
noon = turnwise.Tool("noon", "Tell the time.", SCHEMA, lambda _: "noon")


def double(n: int) -> int:
    """Double a number.

    Args:
        n: The number.
    """
    return 2 * n


def untyped(n):  # type: ignore[no-untyped-def]
    """Has no types."""


class Counter:
    """A toolset that counts its calls, from zero for each trajectory."""

    made = 0
    closed = 0

    def __init__(self) -> None:
        Counter.made += 1
        self.calls = 0

    async def open(self) -> list[turnwise.Tool]:
        return [turnwise.Tool("count", "Count.", SCHEMA, self.count)]

    def count(self, arguments: object) -> int:
        self.calls += 1
        return self.calls

    def close(self) -> None:
        Counter.closed += 1


class Counters:
    """Makes toolsets."""

    def toolset(self) -> Counter:
        return Counter()


def make_counter() -> Counter:
    return Counter()


def make_toolset() -> Toolset:
    return Counter()  # type: ignore[return-value]


def make_counters() -> Counters:
    return Counters()


def make_nothing() -> Toolset:
    return None  # type: ignore[return-value]


counter, counters = Counter(), Counters()
number = 3


class Desk(turnwise.Environment):
    problem = "Work."

    def __init__(self, row: dict[str, Any]) -> None:
        self.tools = [self.work] if row.get("own", True) else []

    def work(self) -> str:
        """Work."""
        return "done"

    def reward(self, trajectory: Any) -> float:
        return 1.0


async def opened(config: Config, *uses: str, environment: type = Desk) -> Episode:
    tools = load_tools([ToolConfig(use=f"{HERE}:{use}") for use in uses])
    episode = Episode(environment, Problem("rows:1", {}), config.rollout, tools)
    await episode.open()
    return episode


def names(episode: Episode) -> list[str]:
    return [schema["function"]["name"] for schema in episode.toolbox.schemas]


async def test_configured_tools_come_after_the_environments_own(
    make_config: Callable[..., Config],
) -> None:
    episode = await opened(make_config(), "double", "noon")
    assert names(episode) == ["work", "double", "noon"]
    calls = [("work", "{}"), ("double", '{"n": 4}'), ("noon", "{}")]
    texts = [(await episode.toolbox.call(*call)).text for call in calls]
    assert texts == ["done", "8", "noon"]


@pytest.mark.parametrize(
    "use",
    [
        *("Counter", "Counters", "make_counter", "make_toolset", "make_counters"),
        *("counter", "counters"),
    ],
)
async def test_a_toolset_is_opened_and_closed_by_each_trajectory(
    make_config: Callable[..., Config], use: str
) -> None:
    Counter.made = Counter.closed = counter.calls = 0
    first = await opened(make_config(), "double", use)
    second = await opened(make_config(), use)
    assert names(first) == ["work", "double", "count"]
    counts = [(await e.toolbox.call("count", "{}")).text for e in (first, first, second)]
    assert counts == ["1", "2", "3" if use == "counter" else "1"]
    assert Counter.made == (0 if use == "counter" else 2)
    for episode in (first, second):
        await episode.close(never)
    assert Counter.closed == 2


async def never(reason: str, error: Exception) -> None:
    raise error


async def test_an_environments_own_tools_may_make_toolsets_too(
    make_config: Callable[..., Config],
) -> None:
    class Counting(Desk):
        def __init__(self, row: dict[str, Any]) -> None:
            self.tools = [counters, self.work]

    episode = await opened(make_config(), environment=Counting)
    assert names(episode) == ["work", "count"]


async def test_a_name_that_is_taken_fails_the_trajectory(
    make_config: Callable[..., Config],
) -> None:
    for uses in (["double", "double"], ["Counter", "counters"]):
        with pytest.raises(TrajectoryError, match=r"rows:1: two tools are named (double|count)"):
            await opened(make_config(), *uses)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        ("number", "must be a function, a turnwise.Tool, a toolset, or a class or .*, not 3"),
        ("Desk", "must be a function, .* not <class"),
        ("nothing", f"{HERE} has no nothing"),
    ],
)
def test_an_object_that_is_no_tool_is_refused(use: str, message: str) -> None:
    with pytest.raises(InputError, match=rf"rollout\.tools\.use: .*{message}"):
        load_tools([ToolConfig(use=f"{HERE}:{use}")])


async def test_a_function_that_makes_no_toolset_is_named(
    make_config: Callable[..., Config],
) -> None:
    with pytest.raises(TrajectoryError, match=r"make_nothing made None, which is no toolset"):
        await opened(make_config(), "make_nothing")


def test_an_entry_has_one_key(make_config: Callable[..., Config]) -> None:
    with pytest.raises(InputError, match=r"rollout\.tools\.0: an entry .* exactly one of the keys"):
        make_config(rollout={"tools": [{}]})
    with pytest.raises(InputError, match=r"rollout\.tools\.0\.used"):
        make_config(rollout={"tools": [{"used": "a:b"}]})


def test_a_runner_checks_the_tools_with_the_first_row(
    make_config: Callable[..., Config], tokenizer: Any
) -> None:
    def runner(*uses: str) -> Runner:
        tools = [{"use": f"{HERE}:{use}"} for use in uses]
        return Runner(make_config(rollout={"tools": tools}), tokenizer, Desk)

    problem = Problem("rows:1", {})
    plain, more = runner().check(problem), runner("double").check(problem)
    assert plain is not None
    assert more is not None
    assert more > plain
    assert runner("Counter").check(problem) is None
    refused = r"^rows:1: tool untyped \(tests/rollouts/.*:\d+\) cannot be offered"
    with pytest.raises(InputError, match=refused):
        runner("untyped").check(problem)
    with pytest.raises(InputError, match=r"rollout\.tools\.use: .* has no missing"):
        runner("missing")


@pytest.mark.parametrize("process", [False, True], ids=["thread", "process"])
async def test_an_environment_anywhere_has_the_configured_tools(
    make_config: Callable[..., Config], tokenizer: Any, process: bool
) -> None:
    uses = [{"use": f"{HERE}:double"}, {"use": f"{HERE}:Counter"}]
    config = make_config(rollout={"tools": uses, "environment_process": process})
    said = [call("double", n=4), call("count"), call("work"), call("count"), "Done."]
    runner, engine = Runner(config, tokenizer, Desk), Saying(tokenizer, *said)
    sampling = SamplingConfig(n=2, max_tokens=64)
    group = await runner.run_group(engine, Problem("rows:1", {}), sampling, "t")
    assert group.dropped == {}, group.causes
    for trajectory in group.trajectories:
        results = [m["content"] for m in trajectory.messages if m["role"] == "tool"]
        assert results == ["8", "1", "done", "2"]
