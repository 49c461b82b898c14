"""What an environment may do during a trajectory, and that it is closed whatever happens.

The engine is simulated: its tokens mean nothing, and every turn is text without a call.
"""

import asyncio
import json
import math
import re
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

import turnwise
from tests.simulated import SimulatedEngine
from turnwise.config import Config, SamplingConfig
from turnwise.core.aio import task_group
from turnwise.engine.protocol import Chunk, Request
from turnwise.errors import TrajectoryError
from turnwise.observe.metrics import StepMetrics
from turnwise.rollouts import Group, GroupProducer, Problem, ProblemStream, Runner
from turnwise.rollouts.episode import Episode
from turnwise.rollouts.problems import Problems
from turnwise.trajectory import Outcome, Trajectory

HERE = "tests.rollouts.test_episode"
CALLS: list[str] = []
"""What environments did, in order."""


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    CALLS.clear()


class Talking(SimulatedEngine):
    """Ends every turn, as a model would, instead of being cut off."""

    async def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        async for chunk in super().stream(request):
            yield replace(chunk, finish_reason=chunk.finish_reason and "stop")


class Guess(turnwise.Environment):
    """Answers twice, and rewards each turn."""

    def __init__(self, row: dict[str, Any]) -> None:
        CALLS.append("init")
        self.row = row
        self.answers = ["higher", [{"role": "user", "content": "lower"}]][: row.get("answers", 2)]
        self.turns: list[float] = []

    async def setup(self) -> None:
        CALLS.append("setup")
        self.problem = "Guess a number."
        self.tools = [self.look]

    def look(self) -> str:
        """Look."""
        return "nothing"

    def step(self, message: dict[str, Any]) -> Any:
        assert message["role"] == "assistant"
        CALLS.append("step")
        self.turns.append(float(len(self.turns)))
        return self.answers.pop(0) if self.answers else None

    async def reward(self, trajectory: Trajectory) -> turnwise.Rewards:
        CALLS.append("reward")
        return turnwise.Rewards(1.0, turns=self.turns, parts={"luck": 0.25})

    def metrics(self, trajectory: Trajectory) -> dict[str, float]:
        CALLS.append("metrics")
        return {"guesses": len(self.turns), "found": True}

    async def close(self) -> None:
        CALLS.append("close")


class PlainGuess(Guess):
    """The same with plain methods where the other's are async, and the reverse."""

    def setup(self) -> None:
        asyncio.run(super().setup())

    async def step(self, message: dict[str, Any]) -> Any:
        return super().step(message)

    def reward(self, trajectory: Trajectory) -> turnwise.Rewards:  # type: ignore[override]
        return asyncio.run(super().reward(trajectory))

    async def metrics(self, trajectory: Trajectory) -> dict[str, float]:  # type: ignore[override]
        return super().metrics(trajectory)

    def close(self) -> None:
        asyncio.run(super().close())


@pytest.fixture
def play(make_config: Callable[..., Config], tokenizer: Any) -> Callable[..., Any]:
    async def play(
        environment: Any, n: int = 1, row: dict[str, Any] | None = None, **rollout: Any
    ) -> Group:
        config = make_config(rollout={"loop": "tool_calling", **rollout})
        runner = Runner(config, tokenizer, environment)
        engine = Talking(vocab_size=256)
        sampling = SamplingConfig(n=n, max_tokens=8)
        return await runner.run_group(engine, Problem("rows:1", row or {}), sampling, "t")

    return play


@pytest.mark.parametrize("environment", [Guess, PlainGuess])
async def test_an_environment_answers_and_rewards_each_turn(
    play: Callable[..., Any], environment: type
) -> None:
    (trajectory,) = (await play(environment)).trajectories
    assert CALLS == ["init", "setup", "step", "step", "step", "reward", "metrics", "close"]
    assert trajectory.status == "completed"
    said = [m["content"] for m in trajectory.messages if m["role"] == "user"]
    assert said == ["Guess a number.", "higher", "lower"]
    assert len(trajectory.turns) == len(trajectory.branches()[0].token_ids) - sum(
        1 - bit for bit in trajectory.branches()[0].response_mask
    ) - sum(len(turn.completion_token_ids) - 1 for turn in trajectory.turns)
    assert trajectory.reward == 1.0 + 0.0 + 1.0 + 2.0 + 0.25
    assert trajectory.turn_rewards == [0.0, 1.0, 2.0]
    assert trajectory.reward_parts == {"environment": 4.25, "luck": 0.25}
    assert trajectory.metrics == {"guesses": 3.0, "found": 1.0}
    again = Trajectory.from_json(trajectory.to_json())
    assert (again.turn_rewards, again.metrics) == (trajectory.turn_rewards, trajectory.metrics)


async def test_the_last_turn_is_stepped_too(play: Callable[..., Any]) -> None:
    (trajectory,) = (await play(Guess, max_turns=2)).trajectories
    assert (trajectory.status, len(trajectory.turns)) == ("max_turns", 2)
    assert trajectory.turn_rewards == [0.0, 1.0]
    assert CALLS.count("step") == 2


class Bare:
    """No base class, no tools, no methods but the reward."""

    problem = "Hello."

    def __init__(self, row: dict[str, Any]) -> None:
        self.row = row

    def reward(self, trajectory: Trajectory) -> Any:
        return self.row.get("reward", 1)


async def test_a_class_without_these_methods_is_played_as_before(play: Callable[..., Any]) -> None:
    (trajectory,) = (await play(Bare)).trajectories
    assert (trajectory.status, len(trajectory.turns)) == ("completed", 1)
    assert (trajectory.reward, trajectory.turn_rewards, trajectory.metrics) == (1.0, [], {})


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (turnwise.Rewards(turns=[0.1, 0.2]), "gave 2 turn rewards for 1 turns"),
        (turnwise.Rewards(turns=[math.nan]), "gave nan as reward, which is not a finite number"),
        (turnwise.Rewards(parts={"a": "x"}), "gave 'x' as reward, which is not a finite number"),  # type: ignore[dict-item]
        (turnwise.Rewards(final=1e9), "beyond the limit"),
    ],
)
async def test_rewards_that_do_not_fit_are_named(
    play: Callable[..., Any], reward: turnwise.Rewards, message: str
) -> None:
    group = await play(Bare, row={"reward": reward})
    assert group.dropped == {"reward_error": 1}
    assert message in group.causes["reward_error"]


async def test_weights_count_for_the_rewards_of_turns_too(play: Callable[..., Any]) -> None:
    rewards = [{"weight": 0.5}, {"function": f"{HERE}:bonus", "name": "bonus", "weight": 2.0}]
    (trajectory,) = (await play(Guess, rewards=rewards)).trajectories
    assert trajectory.turn_rewards == [2.0, 0.5, 1.0]
    assert trajectory.reward == 0.5 * 4.25 + 2.0


def bonus(trajectory: Trajectory, row: dict[str, Any]) -> turnwise.Rewards:
    return turnwise.Rewards(turns=[1.0])


def places(trajectories: Sequence[Trajectory], row: dict[str, Any]) -> list[float]:
    if row.get("fails"):
        raise ValueError("no judge")
    return [float(t.sample_index) for t in trajectories][: row.get("count", 99)]


async def test_a_function_of_the_group_compares_its_trajectories(play: Callable[..., Any]) -> None:
    rewards = [{}, {"group_function": f"{HERE}:places", "name": "place", "weight": 0.1}]
    group = await play(Bare, 3, rewards=rewards)
    assert [t.reward for t in group.trajectories] == [1.0, 1.1, 1.2]
    assert [t.reward_parts["place"] for t in group.trajectories] == [0.0, 1.0, 2.0]
    for row, message in (
        ({"fails": True}, r"the reward group function place gave no reward: ValueError: no judge"),
        ({"count": 2}, r"place must return a list of 3 numbers, .* not \[0\.0, 1\.0\]"),
    ):
        group = await play(Bare, 3, row, rewards=rewards)
        assert (group.trajectories, group.dropped) == ([], {"reward_error": 3})
        assert re.search(message, group.causes["reward_error"])


class Submit(turnwise.Environment):
    """Ends when its tool is called; the tools are of every form."""

    problem = "Submit."

    def __init__(self, row: dict[str, Any]) -> None:
        self.toolset = Clock(row.get("broken", False))
        schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
        described = {"name": "half", "description": "Halve.", "parameters": schema}
        self.tools = [
            self.submit,
            turnwise.Tool("double", "Double.", schema, lambda arguments: 2 * arguments["n"]),
            {"type": "function", "function": described},
            self.toolset,
        ]

    def submit(self) -> str:
        """Submit."""
        self.done = True
        return "thanks"

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> object:
        return {name: arguments["n"] / 2}

    def reward(self, trajectory: Trajectory) -> float:
        return 1.0

    def close(self) -> None:
        CALLS.append("close")


class Clock:
    """A toolset of one tool."""

    def __init__(self, broken: bool) -> None:
        self.broken = broken

    async def open(self) -> list[turnwise.Tool]:
        CALLS.append("open clock")
        if self.broken:
            raise RuntimeError("no clock")
        return [turnwise.Tool("now", "Tell the time.", {"type": "object"}, lambda _: "noon")]

    async def close(self) -> None:
        CALLS.append("close clock")


async def opened(config: Config, environment: Any, row: dict[str, Any] | None = None) -> Episode:
    episode = Episode(environment, Problem("rows:1", row or {}), config.rollout)
    await episode.open()
    return episode


async def test_tools_of_every_form_are_called(make_config: Callable[..., Config]) -> None:
    episode = await opened(make_config(), Submit)
    names = [schema["function"]["name"] for schema in episode.toolbox.schemas]
    assert names == ["submit", "double", "half", "now"]
    results = {
        call: await episode.toolbox.call(*call)
        for call in (("double", '{"n": 4}'), ("half", '{"n": 4}'), ("now", "{}"))
    }
    assert [result.text for result in results.values()] == ["8", '{"half": 2.0}', "noon"]
    for arguments, message in (
        ('{"n": "x"}', 'n: "x" is not of type "integer"'),
        ("{}", 'arguments: "n" is a required property'),
        ("[1]", "arguments: must be a JSON object"),
        ("{", "arguments: not JSON"),
    ):
        refused = await episode.toolbox.call("double", arguments)
        assert refused.outcome == "bad_arguments"
        assert f"double cannot take these arguments: {message}" in refused.text
    assert not await episode.done()
    await episode.toolbox.call("submit", "{}")
    assert await episode.done()


async def test_a_toolset_is_closed_also_when_it_could_not_be_opened(
    play: Callable[..., Any],
) -> None:
    group = await play(Submit, row={"broken": True})
    assert group.dropped == {"environment_error": 1}
    assert "Clock.open failed: RuntimeError: no clock" in group.causes["environment_error"]
    assert sorted(CALLS) == ["close", "close clock", "open clock"]


class Long(turnwise.Environment):
    """Its prompt depends on the row; one with a class method for it is not even built."""

    def __init__(self, row: dict[str, Any]) -> None:
        CALLS.append(f"init {row['words']}")
        self.row = row

    def setup(self) -> None:
        self.problem = "1 " * self.row["words"]

    def reward(self, trajectory: Trajectory) -> float:
        return 1.0


class LongByRow(Long):
    @classmethod
    def prompt(cls, row: dict[str, Any]) -> str:
        return "1 " * row["words"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("environment", [Long, LongByRow])
async def test_too_long_a_prompt_is_left_out_when_it_is_first_played(
    make_config: Callable[..., Config],
    tokenizer: Any,
    caplog: pytest.LogCaptureFixture,
    environment: type,
) -> None:
    config = make_config(
        data={**make_config().data.model_dump(), "max_prompt_tokens": 100},
        rollout={"loop": "single_turn", "prompts_per_step": 3},
        sampling={"n": 2, "max_tokens": 8},
        training={"steps": 2},
    )
    runner = Runner(config, tokenizer, environment)
    engine = Talking(vocab_size=256)
    words = [1, 500, 2, 501, 3, 502]
    stream = ProblemStream(Problems("rows.jsonl", [{"words": n} for n in words]), seed=0)
    assert runner.check(Problem("rows.jsonl:1", {"words": 1}))
    assert runner.check(Problem("rows.jsonl:2", {"words": 500})) is None  # it needs `setup`
    CALLS.clear()

    async def run_group(problem: Problem, tag: str) -> Group:
        return await runner.run_group(engine, problem, config.sampling, tag)

    async def has_signal(_: Group) -> bool:
        return True

    producer = GroupProducer(config, run_group, stream, has_signal)
    batches = []
    async with task_group() as tasks:
        producing = tasks.create_task(producer.run())
        for step in (1, 2):
            batches.append(await producer.next_batch())
            await producer.advance(step)
        producing.cancel()
    played = {g.problem_id for batch in batches for g in batch.groups}
    assert played == {"rows.jsonl:1", "rows.jsonl:3", "rows.jsonl:5"}
    reasons = Counter(reason for batch in batches for reason, _ in batch.discarded)
    assert reasons == {"prompt_too_long": 3}
    assert len(stream.state()["left_out"]) == 3
    again = ProblemStream(Problems("rows.jsonl", [{"words": n} for n in words]), seed=0)
    again.restore(json.loads(json.dumps(stream.state())))
    assert {problem.row["words"] for problem in again.take(30)} == {1, 2, 3}
    assert caplog.text.count("is left out, and so is every such row") == 1
    if environment is LongByRow:
        assert not [call for call in CALLS if int(call.split()[1]) >= 500]


async def test_environments_metrics_are_averaged() -> None:
    from turnwise.rollouts import Batch

    group = Group("rows:1")
    for values in ({"a": 1.0, "b": 4.0}, {"a": 2.0}, {}):
        group.trajectories.append(Trajectory("rows:1", outcome=Outcome(metrics=values)))  # type: ignore[arg-type]
    metrics = StepMetrics(step=1)
    metrics.add_rollouts(Batch([group]), Counter())
    assert metrics.to_json()["env"] == {"a": 1.5, "b": 4.0}


async def test_a_message_part_must_be_text_or_a_readable_image(
    play: Callable[..., Any],
) -> None:
    class Sung(Bare):
        problem: Any = ({"role": "user", "content": [{"type": "audio", "audio": b"la"}]},)

    class Drawn(Bare):
        problem: Any = ({"role": "user", "content": [{"type": "image", "image": "nowhere.png"}]},)

    message = "rows:1: Sung.problem has a part of type audio: it may be text or image"
    (why,) = (await play(Sung)).causes.values()
    assert why.startswith(f"{message} (tests/rollouts/test_episode.py:")
    message = "rows:1: an image of Drawn.problem: nowhere.png cannot be read: "
    (why,) = (await play(Drawn)).causes.values()
    assert why.startswith(message)


def test_rewards_add_up() -> None:
    assert turnwise.Rewards(1.0, turns=[0.5, 0.25], parts={"a": 2.0}).total == 3.75
    assert turnwise.Rewards().total == 0.0


async def test_a_failing_environment_is_an_error_of_the_trajectory(
    make_config: Callable[..., Config],
) -> None:
    class Silent(Guess):
        def step(self, message: dict[str, Any]) -> Any:
            return 3

    episode = await opened(make_config(), Silent)
    with pytest.raises(TrajectoryError, match=r"Silent\.step must be a string, or a list") as error:
        await episode.step({"role": "assistant", "content": "x"})
    assert error.value.reason == "environment_error"
