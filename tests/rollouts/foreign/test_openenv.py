"""Environments of OpenEnv servers: a small server here, and (slow) those of OpenEnv's wheel."""

import asyncio
import json
import subprocess
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.conftest import ROOT, command_environment, python
from tests.rollouts.foreign import plain_openenv
from tests.rollouts.foreign.plain_openenv import plain_server
from tests.simulated import SimulatedEngine
from turnwise.compat import openenv
from turnwise.compat.openenv import OpenEnv
from turnwise.config import Config, RolloutConfig, SamplingConfig
from turnwise.core.deadlines import StallClock
from turnwise.core.user_code import call_user_code
from turnwise.engine.protocol import Chunk, Request
from turnwise.errors import InputError, TrajectoryError
from turnwise.rollouts import Group, Problem, Runner
from turnwise.rollouts.environment import load_environment
from turnwise.rollouts.episode import Episode, playing
from turnwise.serving.openai.address import listen
from turnwise.trajectory import ChatTemplate, Trajectory, audit

VENV = ROOT / ".venv-interop"
SERVERS = "tests/rollouts/foreign/openenv_servers.py"


@asynccontextmanager
async def real_server(kind: str, sessions: int = 8) -> AsyncIterator[str]:
    """Start a server of OpenEnv's wheel, in an environment of its own."""
    stamp = VENV / ".installed"
    make = ["make", "-s", str(stamp.relative_to(ROOT))]
    await asyncio.to_thread(subprocess.run, make, cwd=ROOT, check=True)
    with listen("127.0.0.1", 0) as reserved:
        port = reserved.getsockname()[1]
    command = [str(VENV / "bin" / "python"), SERVERS, str(port), kind, str(sessions)]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT)
    try:
        async with asyncio.timeout(120), aiohttp.ClientSession() as client:
            while True:
                assert process.returncode is None
                try:
                    async with client.get(f"http://127.0.0.1:{port}/health") as response:
                        if response.status == 200:
                            break
                except aiohttp.ClientError:
                    await asyncio.sleep(0.05)
        yield f"ws://127.0.0.1:{port}"
    finally:
        process.terminate()
        await process.wait()


@asynccontextmanager
async def served(which: str, kind: str, sessions: int = 8) -> AsyncIterator[str]:
    if which == "real":
        async with real_server(kind, sessions) as url:
            yield url
    else:
        async with plain_server(kind, sessions) as server:
            yield server.url
            assert server.open == 0, "a session was not closed"


both = pytest.mark.parametrize("which", ["plain", pytest.param("real", marks=pytest.mark.slow)])


def play(url: str, row: dict[str, Any] | None = None, **rollout: Any) -> Any:
    async def report(reason: str, error: Exception) -> None:
        raise error

    environment = load_environment(f"openenv:{url}")
    problem = Problem("rows:1", row or {})
    episode = Episode(environment, problem, RolloutConfig(**rollout))
    return playing(episode, StallClock(60.0), report)


def names(episode: Episode) -> list[str]:
    return [schema["function"]["name"] for schema in episode.toolbox.schemas]


@both
async def test_the_tools_of_a_server_are_the_models(which: str) -> None:
    """As with an `MCPToolClient`, which calls them by `CallToolAction`."""
    row = {"prompt": "Add 1 and 2.", "expected": 3}
    async with served(which, "calculator") as url, play(url, row) as episode:
        assert episode.problem == [{"role": "user", "content": "Add 1 and 2."}]
        assert names(episode) == ["add", "calculate", "answer"]
        add = episode.toolbox.schemas[0]["function"]
        assert add["description"] == "Add two numbers."
        assert add["parameters"]["required"] == ["a", "b"]
        episode.turn_ended(0)
        results = await asyncio.gather(
            *(episode.toolbox.call("add", f'{{"a": 1, "b": {b}}}') for b in (1, 2, 3))
        )
        assert [result.text for result in results] == ["2", "3", "4"]
        assert (await episode.toolbox.call("add", '{"a": "x"}')).outcome == "bad_arguments"
        episode.turn_ended(1)
        assert (await episode.toolbox.call("answer", '{"value": 4}')).text == "wrong"
        assert not await episode.done()
        episode.turn_ended(2)
        assert (await episode.toolbox.call("answer", '{"value": 3}')).text == "right"
        assert await episode.done()
        state = await call_user_code(episode.environment.state, name="state", seconds=60)
        assert state["step_count"] == 5
        trajectory = with_turns(3)
        assert episode.environment.reward(trajectory).turns == [0.75, 0.0, 1.0]
        assert episode.environment.metrics(trajectory) == {"openenv_steps": 5}


def with_turns(count: int) -> Trajectory:
    trajectory, ids = Trajectory("rows:1"), [1]
    for turn in range(count):
        trajectory.add_turn(ids, [2 + turn], [-0.5], [0], "stop")
        ids = [*ids, 2 + turn, 1]
    return trajectory


@both
async def test_typed_actions_are_one_tool(which: str) -> None:
    async with served(which, "echo") as url, play(url) as episode:
        assert episode.problem == [{"role": "user", "content": "Say something."}]
        assert names(episode) == ["act"]
        parameters = episode.toolbox.schemas[0]["function"]["parameters"]
        assert list(parameters["properties"]) == ["message"]
        episode.turn_ended(0)
        assert (await episode.toolbox.call("act", '{"message": "hi"}')).text == "hi"
        assert (await episode.toolbox.call("act", "{}")).outcome == "bad_arguments"
        with pytest.raises(openenv.OpenEnvError, match="Invalid message; message: Field"):
            await call_user_code(episode.environment.act, {}, name="act", seconds=60)
        episode.turn_ended(1)
        assert (await episode.toolbox.call("act", '{"message": "bye"}')).text == "bye"
        assert await episode.done()
        assert episode.environment.reward(with_turns(2)).turns == [0.2, 0.3]


class Scripted(SimulatedEngine):
    """Says the given texts, one a turn, and then the last one again."""

    def __init__(self, texts: Sequence[str], tokenizer: Any) -> None:
        super().__init__(vocab_size=256)
        end = tokenizer.eos_token_id
        self.answers = [[*tokenizer.encode(t, add_special_tokens=False), end] for t in texts]

    async def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        turn = int(request.id.rpartition("-")[2])
        ids = self.answers[min(turn, len(self.answers) - 1)]
        yield Chunk(ids, [-0.5] * len(ids), [0] * len(ids), "stop")


@pytest.fixture
def run(make_config: Callable[..., Config], tokenizer: Any) -> Callable[..., Any]:
    async def run(
        environment: Any, texts: Sequence[str], n: int = 3, row: Any = None, **rollout: Any
    ) -> Group:
        config = make_config(rollout={"loop": "tool_calling", **rollout})
        runner = Runner(config, tokenizer, environment)
        engine, sampling = Scripted(texts, tokenizer), SamplingConfig(n=n, max_tokens=64)
        return await runner.run_group(engine, Problem("rows:1", row or {}), sampling, "t")

    return run


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@both
async def test_each_trajectory_is_a_session_that_rewards_its_turns(
    which: str, run: Callable[..., Any]
) -> None:
    texts = [call("add", '{"a": 1, "b": 2}'), call("answer", '{"value": 3}')]
    row = {"prompt": "Add 1 and 2.", "expected": 3}
    async with served(which, "calculator") as url:
        group = await run(load_environment(f"openenv:{url}"), texts, row=row)
    assert group.dropped == {}
    for trajectory in group.trajectories:
        assert trajectory.status == "completed"
        assert trajectory.turn_rewards == [0.25, 1.0]
        assert trajectory.reward == 1.25
        assert trajectory.metrics == {"openenv_steps": 2}
        assert [m["content"] for m in trajectory.messages if m["role"] == "tool"] == ["3", "right"]
        assert audit(trajectory).first_violation is None


@pytest.mark.parametrize("row", [{"prompt": "Add 1 and 2.", "expected": 3}])
async def test_a_session_from_a_process_of_its_own(run: Callable[..., Any], row: Any) -> None:
    texts = [call("add", '{"a": 1, "b": 2}'), call("answer", '{"value": 3}')]
    async with plain_server("calculator") as server:
        environment = load_environment(f"openenv:{server.url}")
        group = await run(environment, texts, n=1, row=row, environment_process=True)
        assert group.dropped == {}, group.causes
        assert [trajectory.turn_rewards for trajectory in group.trajectories] == [[0.25, 1.0]]
        while server.open:
            await asyncio.sleep(0.01)


class Talk(OpenEnv):
    """Every answer of the model is an action, and the observation the reply."""

    def action(self, message: dict[str, Any]) -> dict[str, Any]:
        return {"message": message["content"]} if message["content"] != "oops" else {}

    def describe(self, observation: dict[str, Any]) -> str:
        return f"You said {observation['echoed']}."


@both
async def test_a_conversation_with_an_environment(which: str, run: Callable[..., Any]) -> None:
    async with served(which, "echo") as url:
        kind = type("Talk", (Talk,), {"url": url})
        group = await run(kind, ["hello", "oops", "bye"])
    assert group.dropped == {}
    for trajectory in group.trajectories:
        assert (trajectory.status, trajectory.turn_rewards) == ("completed", [0.5, 0.0, 0.3])
        said = [m["content"] for m in trajectory.messages if m["role"] == "user"]
        assert said[:2] == ["You said Say something..", "You said hello."]
        assert said[2].startswith("Error: Invalid message; message: Field required")


@both
async def test_more_trajectories_than_places_wait_for_one(
    which: str, run: Callable[..., Any]
) -> None:
    """By `max_concurrent_envs`."""
    async with served(which, "echo", sessions=1) as url:
        group = await run(load_environment(f"openenv:{url}"), [call("act", '{"message": "bye"}')])
    assert group.dropped == {}
    assert [trajectory.reward for trajectory in group.trajectories] == [0.3] * 3


async def test_a_server_that_stays_full_is_named(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openenv, "CAPACITY_SECONDS", 0.1)
    async with plain_server("echo", sessions=0) as server:
        group = await run(load_environment(f"openenv:{server.url}"), ["hi"])
        assert server.begun == 0
    assert group.dropped == {"environment_error": 3}
    assert "raise max_concurrent_envs there, or lower" in group.causes["environment_error"]


async def test_a_late_answer_is_not_taken_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    async with plain_server("calculator") as server:
        async with play(server.url, {"prompt": "?"}, tool_timeout=0.2) as episode:
            server.gate.clear()
            episode.turn_ended(0)
            late = await episode.toolbox.call("add", '{"a": 1, "b": 1}')
            assert (late.outcome, late.text) == (
                "timeout",
                "Error: add did not answer within 0.2 s",
            )
            server.gate.set()
            episode.turn_ended(1)
            result = await call_user_code(
                episode.environment.act,
                {"type": "call_tool", "tool_name": "add", "arguments": {"a": 5, "b": 5}},
                name="act",
                seconds=60,
            )
            assert result == "10"
            # The late step counts too, for the turn that asked for it.
            assert episode.environment.reward(with_turns(2)).turns == [0.25, 0.25]
        assert server.open == 0


async def test_a_server_that_goes_away_fails_its_trajectories_only(
    run: Callable[..., Any],
) -> None:
    async with plain_server("echo") as server:
        environment = load_environment(f"openenv:{server.url}")
    group = await run(environment, ["hi"])
    assert group.dropped == {"environment_error": 3}
    assert "no OpenEnv server answers at http://127.0.0.1" in group.causes["environment_error"]


async def test_a_session_that_breaks_is_named_and_can_be_closed() -> None:
    async with plain_server("echo") as server:
        server.answer = lambda request, state: {"type": "nonsense"}  # type: ignore[method-assign]
        with pytest.raises(TrajectoryError, match="left the session: it sent"):
            async with play(server.url):
                pass
        while server.open:
            await asyncio.sleep(0.01)


def observed(**data: Any) -> dict[str, Any]:
    return {"type": "observation", "data": data}


@pytest.mark.parametrize(
    ("asked", "answer", "words"),
    [
        ("step", observed(reward="1"), "reward: Input should be a valid number"),
        ("step", observed(reward=float("nan")), "reward: Input should be a finite number"),
        ("step", observed(reward=float("-inf")), "reward: Input should be a finite number"),
        ("step", observed(reward=10**400), "reward: Input should be a valid number"),
        ("step", observed(observation=[1]), "observation: Input should be a valid dictionary"),
        ("step", observed(done="yes"), "done"),
        ("step", "[" * 300 + "]" * 300, "not readable JSON"),
        ("step", '{"type": "observation", "data": ', "not readable JSON"),
        ("step", observed(observation={"text": "x" * 9_000_000}), "cannot be read"),
        ("step", {"type": "observation", "data": 3}, "data: Input should be a valid dictionary"),
        ("step", {"type": "state", "data": {}}, "it sent 'state' as the answer to step"),
        ("step", {"type": "error", "data": {"errors": 3}}, "errors: Input should be a valid list"),
        ("step", [1], "wrong answer"),
        ("reset", {"type": "state", "data": {}}, "it sent 'state' as the answer to reset"),
        ("mcp", {"type": "mcp", "data": {"result": 3}}, "wrong answer"),
        ("mcp", {"type": "mcp", "data": {"result": {"tools": [{"name": 3}]}}}, "tools.0.name"),
        ("mcp", {"type": "mcp", "data": {"result": {"tools": [{"name": "a b"}]}}}, "tools.0.name"),
    ],
)
async def test_a_wrong_answer_costs_its_trajectory(asked: str, answer: Any, words: str) -> None:
    async with plain_server("echo") as server:
        sound = server.answer

        def answered(request: dict[str, Any], state: dict[str, Any]) -> Any:
            return answer if request["type"] == asked else sound(request, state)

        server.answer = answered  # type: ignore[method-assign]
        with pytest.raises(TrajectoryError, match=words) as raised:
            async with play(server.url) as episode:
                await episode.toolbox.call("act", '{"message": "hi"}')
        assert raised.value.reason == "environment_reply"
        while server.open:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("door", ["tools", "action"])
@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"$ref": "FILE"}, "its parameters refer to another document, 'file:"),
        ({"type": "numbr"}, "its parameters are not a JSON schema: properties.x.type"),
    ],
)
async def test_a_schema_of_a_server_reads_no_file(
    door: str, schema: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret.json").write_text('{"const": "SECRET"}')
    if "$ref" in schema:
        schema = {"$ref": f"file://{tmp_path}/secret.json"}
    described = {"type": "object", "properties": {"x": schema}}
    async with plain_server("echo") as server:
        if door == "action":
            monkeypatch.setattr(plain_openenv, "ACTION", described)
        else:
            sound = server.answer
            listed = [{"name": "act", "input_schema": described}]
            answer = {"type": "mcp", "data": {"result": {"tools": listed}}}
            server.answer = (  # type: ignore[method-assign]
                lambda request, state: answer if request["type"] == "mcp" else sound(request, state)
            )
        with pytest.raises(TrajectoryError, match=f"lists a tool act: {words}") as raised:
            async with play(server.url):
                pass
        assert raised.value.reason == "environment_reply"


async def test_a_cancelled_trajectory_closes_its_session(run: Callable[..., Any]) -> None:
    async with plain_server("echo") as server:
        server.gate.clear()
        texts = [call("act", '{"message": "hi"}')]
        running = asyncio.create_task(run(load_environment(f"openenv:{server.url}"), texts))
        while server.begun < 3:
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        server.gate.set()
        while server.open:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://x"])
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(InputError, match="must be like ws://host:port"):
        load_environment(f"openenv:{url}")


async def test_a_row_without_a_problem_is_named() -> None:
    async with plain_server("calculator") as server:
        with pytest.raises(TrajectoryError, match="has no prompt, and the environment's reset"):
            async with play(server.url):
                pass


@pytest.mark.slow
async def test_a_run_trains_on_a_server_of_openenvs_wheel(
    tmp_path: Path, template: ChatTemplate
) -> None:
    said = [call("add", '{"a": 1, "b": 2}'), call("answer", '{"value": 14}')]
    script = [token for turn in said for token in [*template.encode(f"{turn}<|im_end|>"), -1]]
    rows = [{"prompt": f"What is {n} plus 12?", "expected": n + 12} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    run = tmp_path / "runs"
    async with real_server("calculator", 32) as url:
        config = {
            "environment": f"openenv:{url}",
            "model": {"path": "examples/calculator/warm_started", "max_length": 1024},
            "data": {"path": f"{tmp_path}/rows.jsonl"},
            "rollout": {"prompts_per_step": 4, "max_turns": 3},
            "engine": {"logits_processors": ["tests.forced_tokens:ForcedTokens"]},
            "sampling": {"n": 4, "max_tokens": 64, "logits_processor_args": {"script": script}},
            "training": {"steps": 2},
            "output_dir": str(run),
            "name": "openenv",
        }
        (tmp_path / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
        process = await asyncio.create_subprocess_exec(
            *python(),
            *("-m", "turnwise.cli", "train", str(tmp_path / "config.yaml")),
            cwd=ROOT,
            env=command_environment(),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        async with asyncio.timeout(900):
            (printed, _) = await process.communicate()
    assert process.returncode == 0, printed.decode()
    steps = [json.loads(line) for line in (run / "openenv" / "metrics.jsonl").open()][-2:]
    for step in steps:
        assert step["trajectories"] == 16
        assert step["dropped"] == {}
        assert step["exact_percent"] == 100.0
        assert step["env"]["openenv_steps"] == 2.0
