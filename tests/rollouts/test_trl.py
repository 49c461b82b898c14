"""TRL's environments and reward functions, played by our runner; the engine has a script."""

import json
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.simulated import SimulatedEngine
from tests.trl_maze import CALLS, MADE, PROMPT, Maze, Odd, Quiet, few
from turnwise.compat.trl.environment import TrlEnvironments
from turnwise.config import Config, RewardConfig, SamplingConfig
from turnwise.engine.protocol import Chunk, Request
from turnwise.errors import InputError
from turnwise.rollouts import Problem, Runner, check_failures
from turnwise.rollouts.environment import load_environment
from turnwise.rollouts.rewards import RewardManager
from turnwise.trajectory import audit

HERE = "tests.trl_maze"


@pytest.fixture(autouse=True)
def _nothing_yet() -> None:
    MADE.clear()
    CALLS.clear()


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def extra_columns(config: Config) -> list[dict[str, Any]]:
    file = Path(config.output_dir, config.name, "extra.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


class Saying(SimulatedEngine):
    """Says the given texts, one a turn, and stops."""

    def __init__(self, tokenizer: Any, *texts: str) -> None:
        super().__init__()
        self._tokenizer, self._texts = tokenizer, texts
        self._turns = Counter[str]()
        self.prompts: list[str] = []

    async def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        session = request.route.session
        text = self._texts[min(self._turns[session], len(self._texts) - 1)]
        self._turns[session] += 1
        self.prompts.append(self._tokenizer.decode(request.prompt.tolist()))
        ids = [*self._tokenizer.encode(text, add_special_tokens=False)]
        ids.append(self._tokenizer.eos_token_id)
        yield Chunk(ids, [-0.5] * len(ids), [3] * len(ids), "stop")


Play = Callable[..., Any]


@pytest.fixture
def play(make_config: Callable[..., Config], tokenizer: Any) -> Play:
    async def play(
        *texts: str,
        row: dict[str, Any] | None = None,
        environment: Any = None,
        n: int = 2,
        groups: int = 1,
        **rollout: Any,
    ) -> Any:
        path = environment if isinstance(environment, str) else f"trl:{HERE}:Maze"
        config = make_config(environment=path, rollout=rollout)
        factory = None if isinstance(environment, str | None) else environment
        runner = Runner(config, tokenizer, factory)
        engine, sampling = Saying(tokenizer, *texts), SamplingConfig(n=n, max_tokens=64)
        row = {"prompt": PROMPT, **(row or {})}
        found = [
            await runner.run_group(engine, Problem("rows:1", row), sampling, f"t{number}")
            for number in range(groups)
        ]
        return (found[0], engine, config) if groups == 1 else (found, engine, config)

    return play


async def test_reset_tools_and_get_reward_work_as_in_trl(play: Play) -> None:
    row = {"start": 1, "level": 3}
    texts = (call("move", steps=2), call("look"), call("move", steps=11), "I am there")
    group, engine, _ = await play(*texts, row=row, n=1)
    (trajectory,) = group.trajectories
    (maze,) = MADE
    assert maze.rows == [{"prompt": PROMPT, **row}]
    assert trajectory.messages[0]["content"] == "Go to the goal. You are at 1."
    assert row == {"start": 1, "level": 3}
    assert PROMPT[0]["content"] == "Go to the goal. "
    replies = [m["content"] for m in trajectory.messages if m["role"] == "tool"]
    assert replies[:2] == ["{'place': 3}", "walls everywhere"]
    assert "too far" in replies[2]
    assert trajectory.events["tool_error"] == 1
    assert (trajectory.reward, trajectory.final_text) == (3.0, "I am there")
    assert '"name": "move"' in engine.prompts[0]
    for hidden in ("reset", "get_reward", "_hidden"):
        assert hidden not in engine.prompts[0]
    assert engine.prompts[0].index('"name": "look"') < engine.prompts[0].index('"name": "move"')
    assert audit(trajectory).violations == 0


async def test_only_the_next_group_reuses_instances(play: Play) -> None:
    await play("done", n=3, groups=4)
    assert len(MADE) == 3
    assert sorted(len(maze.rows) for maze in MADE) == [4, 4, 4]


async def test_an_instance_that_failed_is_not_used_again(play: Play) -> None:
    group, _, _ = await play("done", row={"broken": True}, n=2)
    assert group.dropped == {"environment_error": 2}
    assert "no maze" in group.causes["environment_error"]
    factory = TrlEnvironments(Maze)
    first = factory({"prompt": PROMPT, "broken": True})
    with pytest.raises(RuntimeError):
        first.setup()
    second = factory({"prompt": PROMPT})
    second.setup()
    assert second.instance is not first.instance
    second._group_ended()
    third = factory({"prompt": PROMPT})
    third.setup()
    assert third.instance is second.instance


async def test_an_instance_with_a_running_call_is_not_reused() -> None:
    gate, inside = threading.Event(), threading.Event()

    class Slow:
        def reset(self, **row: Any) -> None: ...

        def nap(self) -> None:
            """Nap."""
            inside.set()
            assert gate.wait(300)

    factory = TrlEnvironments(Slow)
    environment = factory({"prompt": PROMPT})
    environment.setup()
    (nap,) = environment.tools
    assert callable(nap)
    thread = threading.Thread(target=nap)
    thread.start()
    assert inside.wait(300)
    environment._group_ended()
    other = factory({"prompt": PROMPT})
    other.setup()
    assert other.instance is not environment.instance
    gate.set()
    thread.join()
    environment._group_ended()
    last = factory({"prompt": PROMPT})
    last.setup()
    assert last.instance is environment.instance


async def test_a_dictionary_of_environments_is_chosen_from_by_the_row(play: Play) -> None:
    row = {"environment": "maze", "start": 7}
    group, engine, _ = await play("done", row=row, environment=f"trl:{HERE}:WORLDS")
    assert [trajectory.reward for trajectory in group.trajectories] == [7.0, 7.0]
    assert "environment" not in MADE[0].rows[0]
    group, engine, _ = await play(
        "done", row={"environment": "quiet"}, environment=f"trl:{HERE}:WORLDS"
    )
    assert [trajectory.reward for trajectory in group.trajectories] == [0.0, 0.0]
    assert '"name": "wait"' in engine.prompts[0]
    assert "move" not in engine.prompts[0]
    with pytest.raises(InputError, match="'mace' is not among the environments 'maze', 'quiet'"):
        load_environment(f"trl:{HERE}:WORLDS")({"environment": "mace"})


def test_what_is_no_environment_is_named() -> None:
    with pytest.raises(InputError, match="Path has no reset, which TRL's environments need"):
        load_environment("trl:pathlib:Path")
    with pytest.raises(InputError, match="environment_factory must be a class, a function or"):
        load_environment(f"trl:{HERE}:PROMPT")
    with pytest.raises(InputError, match=f"environment: {HERE} has no Mace"):
        load_environment(f"trl:{HERE}:Mace")
    with pytest.raises(InputError, match=r"str has no reset"):
        TrlEnvironments(lambda: "text")({"prompt": PROMPT}).setup()
    odd = TrlEnvironments(Odd)({"prompt": PROMPT})
    with pytest.raises(InputError, match=r"Odd\.reset must return a text or None"):
        odd.setup()


async def test_a_reward_function_gets_trls_arguments(play: Play) -> None:
    parts = [{"trl": f"{HERE}:far", "name": "far", "weight": 2.0}, {"weight": 0.25}]
    texts = (call("move", steps=3), "there")
    group, _, config = await play(
        *texts, row={"start": 1, "level": 3, "answer": "x"}, rewards=parts
    )
    (arguments,) = CALLS
    assert {"completion_ids", "log_extra", "log_metric"} <= set(arguments)
    assert {"prompts", "completions", "trainer_state", "start", "level"} <= set(arguments)
    assert not {"prompt", "environment"} & set(arguments)
    expected = [{"role": "user", "content": "Go to the goal. You are at 1."}]
    assert arguments["prompts"] == [expected, expected]
    assert (arguments["level"], arguments["answer"]) == ([3, 3], ["x", "x"])
    assert arguments["trainer_state"].global_step == 3  # the weights' version
    assert arguments["trainer_state"].max_steps == config.training.steps
    (completion, _) = arguments["completions"]
    function = {"name": "move", "arguments": {"steps": 3}}
    assert completion == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": function}],
        },
        {"role": "tool", "name": "move", "content": "{'place': 4}"},
        {"role": "assistant", "content": "there"},
    ]
    (trajectory, _) = group.trajectories
    last = trajectory.turns[-1]
    whole = [*trajectory.prompt_token_ids(1), *last.completion_token_ids]
    first = trajectory.prompt_token_ids(0)
    assert first + arguments["completion_ids"][0] == whole
    assert trajectory.reward_parts == {"far": 1.0, "environment": 4.0}
    assert trajectory.reward == 3.0
    assert trajectory.metrics == {"places": 3.0}
    extra = extra_columns(config)
    assert [(line["sample_index"], line["place"]) for line in extra] == [(0, 4), (1, 4)]


async def test_none_omits_a_part_and_only_nones_drop_the_trajectory(play: Play) -> None:
    parts = [{"trl": f"{HERE}:patient", "name": "patient"}, {"trl": f"{HERE}:not_for_the_first"}]
    group, _, _ = await play("done", row={"level": 2}, rewards=parts)
    assert [trajectory.reward for trajectory in group.trajectories] == [0.5, 1.5]
    group, _, _ = await play("done", row={"level": 1}, rewards=parts)
    (trajectory,) = group.trajectories
    assert (trajectory.sample_index, trajectory.reward) == (1, 1.0)
    assert "patient" not in trajectory.reward_parts
    assert group.dropped == {"no_reward": 1}
    assert group.dropped_tokens["no_reward"] > 0


async def test_a_group_without_any_reward_warns_and_is_no_failure(
    play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    parts = [{"trl": f"{HERE}:patient", "name": "patient"}]
    group, _, _ = await play("done", row={"level": 1}, rewards=parts)
    assert (group.trajectories, group.dropped, group.not_failed) == ([], {"no_reward": 2}, 2)
    expected = "All reward functions returned None for the following kwargs: {'prompt'"
    assert expected in caplog.text
    assert check_failures([group], 0.0, "rollouts") == {"no_reward": 2}


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("few", "TRL function .*few must return a list of 2 numbers"),
        ("log_too_few", "column needs 2 values, one for each completion, not 1"),
    ],
)
async def test_mistakes_of_a_reward_function_are_named(
    play: Play, function: str, message: str
) -> None:
    parts = [{"trl": f"{HERE}:{function}"}]
    group, _, _ = await play("done", rewards=parts)
    assert group.dropped == {"reward_error": 2}
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(group.causes["reward_error"])


async def test_a_reward_function_of_trl_judges_an_environment_of_ours(play: Play) -> None:
    class Desk:
        def __init__(self, row: dict[str, Any]) -> None:
            self.problem = row["question"]

    parts = [{"trl": f"{HERE}:patient", "weight": 3}]
    group, _, _ = await play(
        "fine", row={"question": "How?", "level": 2}, environment=Desk, rewards=parts
    )
    assert [trajectory.reward for trajectory in group.trajectories] == [1.5, 1.5]


@pytest.mark.parametrize(
    ("says", "row", "functions", "rewards"),
    [
        ("<think>5</think><answer>5</answer>", {}, ["tagged"], [1.0, 1.0]),
        ("<answer>5</answer>", {}, ["tagged"], [0.0, 0.0]),
        (r"It is \boxed{5}.", {"ground_truth": "5"}, ["boxed"], [1.0, 1.0]),
        (r"It is \boxed{6}.", {"ground_truth": "5"}, ["boxed", "ones"], [1.0, 1.0]),
        ("5", {"task": "maths"}, ["for_maths", "for_code"], [1.0, 1.0]),
        ("5", {"task": "code"}, ["for_maths", "for_code"], [0.25, 0.25]),
    ],
)
async def test_reward_functions_as_in_trls_documentation(
    play: Play, says: str, row: dict[str, Any], functions: list[str], rewards: list[float]
) -> None:
    group, _, _ = await play(
        says,
        row=row,
        environment=TrlEnvironments(),
        rewards=[{"trl": f"{HERE}:{name}"} for name in functions],
    )
    assert [trajectory.reward for trajectory in group.trajectories] == rewards


async def test_the_environment_of_trls_documentation(play: Play) -> None:
    group, engine, _ = await play(
        call("increment", step=2),
        call("increment", step=3),
        "done",
        environment=f"trl:{HERE}:Counter",
        rewards=[{"trl": f"{HERE}:counted"}],
    )
    assert [trajectory.reward for trajectory in group.trajectories] == [5.0, 5.0]
    assert "The amount to add." in engine.prompts[0]


async def test_a_metric_that_is_no_number_is_counted(play: Play) -> None:
    group, _, _ = await play("done", rewards=[{"trl": f"{HERE}:odd_metric"}])
    assert [trajectory.metrics for trajectory in group.trajectories] == [{"count": 2.0}] * 2
    assert sum(t.events["metrics_error"] for t in group.trajectories) == 1


async def test_a_text_is_continued_without_a_template(play: Play, tokenizer: Any) -> None:
    loop = "turnwise.compat.trl.environment:TextLoop"
    group, engine, _ = await play(
        " blue",
        row={"prompt": "The sky is"},
        environment=TrlEnvironments(),
        loop=loop,
        rewards=[{"trl": f"{HERE}:ones"}],
    )
    assert len(group.trajectories) == 2
    assert [tokenizer.decode(tokenizer.encode("The sky is"))] * 2 == engine.prompts
    (seen,) = CALLS
    assert seen["prompts"] == ["The sky is"] * 2
    assert seen["completions"] == [" blue"] * 2
    assert "environments" not in seen


def test_functions_of_a_program_need_no_import() -> None:
    parts = [RewardConfig(trl="__main__:missing", name="mine")]
    RewardManager(parts, {"__main__:missing": few})
    with pytest.raises(InputError, match=r"rollout\.rewards\.trl: __main__ has no missing"):
        RewardManager(parts)


def test_a_text_prompt_takes_no_tools() -> None:
    with pytest.raises(InputError, match="prompt must be a list of messages where there are tools"):
        TrlEnvironments(Quiet)({"prompt": "The sky is"}).setup()
    with pytest.raises(InputError, match="prompt must be a list of messages if reset returns"):
        TrlEnvironments(Maze)({"prompt": "The sky is", "start": 1}).setup()


async def test_an_environment_in_its_own_process_plays_the_same(play: Play) -> None:
    row = {"start": 1, "level": 3}
    texts = (call("move", steps=2), call("move", steps=11), "I am there")
    here, *_ = await play(*texts, row=row, n=1)
    there, *_ = await play(*texts, row=row, n=1, environment_process=True)
    assert len(MADE) == 1
    assert there.dropped == {}, there.causes
    (first,), (second,) = here.trajectories, there.trajectories
    assert (second.reward, second.messages) == (first.reward, first.messages)
    assert second.events == first.events
