"""Agents of their own as rollouts: a function, a command, openai-agents; and what can go wrong."""

import asyncio
import json
import re
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from openai import AsyncOpenAI

from examples.calculator.tool import calculate
from tests import plain_agents
from tests.blocking import new_gate, tick
from tests.simulated import SimulatedEngine
from turnwise.config import Config, RolloutConfig
from turnwise.errors import InputError
from turnwise.rollouts import Group, Problem, Runner
from turnwise.rollouts.agents import HttpAgentLoop
from turnwise.rollouts.data import load_training
from turnwise.serving.openai.server import OpenAIServer
from turnwise.serving.worker_handle import WorkerHandle
from turnwise.training.batching import plan_micro_batches
from turnwise.training.rank import TrainerRank
from turnwise.training.reports import merge
from turnwise.training.samples import make_samples
from turnwise.trajectory import Distribution, Trajectory, audit, status_after

COMMAND = f"{sys.executable} -m tests.plain_agents"


@pytest.fixture(scope="module")
async def server(
    engine: WorkerHandle, make_config: Callable[..., Config]
) -> AsyncIterator[OpenAIServer]:
    server = OpenAIServer(make_config(serving={"port": 0}, sampling={"max_tokens": 32}), engine)
    await server.start()
    yield server
    await server.stop()


async def run(
    agent: str,
    server: OpenAIServer,
    engine: WorkerHandle,
    make_config: Callable[..., Config],
    tokenizer: Any,
) -> Group:
    config = make_config(
        rollout={"loop": "agent", "agent": agent},
        sampling={"n": 4, "max_tokens": 32},
    )
    runner = Runner(config, tokenizer)
    runner.loops["agent"].server = server
    return await runner.run_group(engine, load_training(config)[0], config.sampling, agent[-6:])


def check_times(group: Group, trajectory: Trajectory) -> None:
    """Each turn has its times, though a client asked for it; the engine keeps no statistics."""
    calls = group.calls[trajectory.sample_index]
    assert [call.turn for call in calls] == [*range(len(trajectory.turns))]
    for call in calls:
        assert call.first_token is not None
        assert call.asked < call.first_token <= call.ended
        assert (call.queued, call.tools) == (None, None)


@pytest.mark.parametrize(
    "agent", ["tests.plain_agents:calculator", COMMAND], ids=["function", "command"]
)
async def test_an_agent_unaware_of_turnwise_makes_exact_trajectories(
    agent: str,
    server: OpenAIServer,
    engine: WorkerHandle,
    make_config: Callable[..., Config],
    tokenizer: Any,
) -> None:
    group = await run(agent, server, engine, make_config, tokenizer)
    assert group.dropped == {}
    assert len(group.trajectories) == 4
    for index, trajectory in enumerate(group.trajectories):
        assert trajectory.sample_index == index
        assert trajectory.status == status_after(trajectory.turns[-1].finish_reason)
        assert trajectory.reward in (0.0, 1.0)
        assert trajectory.messages[0]["role"] == "user"
        assert trajectory.messages[-1]["role"] == "assistant"
        assert audit(trajectory).first_violation is None
        assert len(trajectory.branches()) == 1
        check_times(group, trajectory)
    assert len(server.sessions) == 0


async def test_sub_agents_turns_are_exact_branches_of_one_trajectory(
    server: OpenAIServer, engine: WorkerHandle, make_config: Callable[..., Config], tokenizer: Any
) -> None:
    group = await run("tests.plain_agents:team", server, engine, make_config, tokenizer)
    assert group.causes == {}
    for trajectory in group.trajectories:
        assert audit(trajectory).first_violation is None
        assert len(trajectory.turns) == 5
        reasons = [turn.fork_reason for turn in trajectory.turns]
        assert reasons[0] is None
        assert len(trajectory.branches()) == 3
        assert "Which?" in trajectory.messages[-2]["content"]
        assert trajectory.reward in (0.0, 1.0)
        trained = sum(sum(sample.response_mask) for sample in trajectory.samples())
        assert trained == trajectory.sampled_tokens
        check_times(group, trajectory)
    assert len(server.sessions) == 0


@pytest.mark.parametrize(
    ("agent", "reason", "words"),
    [
        (f"{COMMAND} fail", "agent_error", "exited with 1: the agent's own trouble"),
        ("tests.plain_agents:silent", "agent_silent", "sampled nothing"),
    ],
)
async def test_an_agents_trouble_is_counted_with_what_it_said(
    agent: str,
    reason: str,
    words: str,
    server: OpenAIServer,
    engine: WorkerHandle,
    make_config: Callable[..., Config],
    tokenizer: Any,
) -> None:
    group = await run(agent, server, engine, make_config, tokenizer)
    assert group.dropped == {reason: 4}
    assert re.search(words, group.causes[reason]), group.causes
    assert len(server.sessions) == 0


async def test_an_agents_temperatures_are_trained_as_it_asked_for_them(
    server: OpenAIServer, engine: WorkerHandle, make_config: Callable[..., Config], tokenizer: Any
) -> None:
    """The engine's log-probs of turns at five distributions are the trainer's."""
    config = make_config(
        rollout={"loop": "agent", "agent": "tests.plain_agents:moody"},
        sampling={"n": 4, "max_tokens": 24},
        model={"path": make_config().model.path, "max_length": 512, "dtype": "float32"},
    )
    runner = Runner(config, tokenizer)
    runner.loops["agent"].server = server
    group = await runner.run_group(engine, load_training(config)[0], config.sampling, "moody")
    assert group.causes == {}
    for number, trajectory in enumerate(group.trajectories):
        assert audit(trajectory).first_violation is None
        (branch,) = trajectory.samples()
        assert sum(branch.response_mask) == trajectory.sampled_tokens
        drawn = [turn.distribution for turn in trajectory.turns]
        assert drawn == [
            Distribution(0.3),
            None,
            Distribution(1.7, 0.9),
            Distribution(1.0, 1.0, 7, 0.02),
            None,
            Distribution(0.6),
        ]
        assert trajectory.events == {
            "own_sampling": 4,
            "override_temperature": 1,
            "own_grammar": 1,
            "override_presence_penalty": 1,
        }
        trajectory.set_outcome(reward=float(number % 2))
    batch = make_samples([group], config, 0)
    (shares,) = plan_micro_batches(batch.samples, 1, 1, 2048, "padded")
    report = merge([TrainerRank(config).train(shares)])
    assert report["logprob_diff_max"] < 2e-5
    assert report["logprob_diff_mean"] < 2e-6


@pytest.fixture(scope="module")
async def simulated(
    make_config: Callable[..., Config], tokenizer: Any
) -> AsyncIterator[OpenAIServer]:
    """A server that wants a key, before a simulated engine."""
    config = make_config(serving={"api_key": "hush"}, sampling={"max_tokens": 16})
    server = OpenAIServer(config, SimulatedEngine(vocab_size=len(tokenizer)), port=0)
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def keyless(
    make_config: Callable[..., Config], tokenizer: Any
) -> AsyncIterator[OpenAIServer]:
    config = make_config(sampling={"max_tokens": 16})
    server = OpenAIServer(config, SimulatedEngine(vocab_size=len(tokenizer)), port=0)
    await server.start()
    yield server
    await server.stop()


async def try_agent(
    agent: str,
    server: OpenAIServer,
    make_config: Callable[..., Config],
    tokenizer: Any,
    row: dict[str, Any] | None = None,
    name: str = "rows.jsonl:1",
    **rollout: Any,
) -> Group:
    """Two trajectories of an agent about one problem."""
    rollout = {"loop": "agent", "agent": agent, **rollout}
    config = make_config(rollout=rollout, sampling={"n": 2, "max_tokens": 16})
    runner = Runner(config, tokenizer)
    runner.loops["agent"].server = server
    problem = Problem(name, load_training(config)[0].row | (row or {}))
    try:
        return await runner.run_group(SimulatedEngine(), problem, config.sampling, "rollout")
    finally:
        await runner.loops["agent"].close()


@pytest.mark.parametrize("gives_up", [False, True])
async def test_an_agent_with_a_full_context_keeps_its_turns(
    gives_up: bool, simulated: OpenAIServer, make_config: Callable[..., Config], tokenizer: Any
) -> None:
    agent, row = "tests.plain_agents:endless", {"gives_up": gives_up, "question": "1 2 3 4 " * 12}
    group = await try_agent(agent, simulated, make_config, tokenizer, row, max_turns=100)
    assert group.causes == {}
    for trajectory in group.trajectories:
        assert trajectory.status == "context_full"
        assert 1 < len(trajectory.turns) < 40
        assert audit(trajectory).first_violation is None


async def test_mask_truncated_leaves_out_an_agents_cut_answer(
    make_config: Callable[..., Config], tokenizer: Any
) -> None:
    """As with any other loop."""
    config = make_config(sampling={"max_tokens": 8}, algorithm={"mask_truncated": True})
    engine = SimulatedEngine(vocab_size=len(tokenizer), mean_tokens=8)
    server = OpenAIServer(config, engine, port=0)
    await server.start()
    agent, found = "tests.plain_agents:once", Counter[str]()
    try:
        for number in range(8):
            row = {"question": f"What is {number}?"}
            group = await try_agent(agent, server, make_config, tokenizer, row)
            for index, trajectory in enumerate(group.trajectories):
                found[trajectory.status] += 1
                cut = trajectory.turns[-1].finish_reason == "length"
                assert trajectory.status == ("length" if cut else "completed")
                trajectory.set_outcome(reward=float(index))
            made = make_samples([group], config, 0)
            statuses = [trajectory.status for trajectory in group.trajectories]
            assert made.truncated == statuses.count("length")
    finally:
        await server.stop()
    assert set(found) == {"length", "completed"}


async def test_words_an_agent_adds_for_the_model_are_never_trained(
    keyless: OpenAIServer, make_config: Callable[..., Config], tokenizer: Any
) -> None:
    group = await try_agent("tests.plain_agents:storyteller", keyless, make_config, tokenizer)
    assert group.causes == {}
    for trajectory in group.trajectories:
        assert audit(trajectory).first_violation is None
        assert len(trajectory.turns) == 4
        trained = [
            id_
            for sample in trajectory.samples()
            for id_, mask in zip(sample.token_ids, sample.response_mask, strict=True)
            if mask
        ]
        sampled = [id_ for turn in trajectory.turns for id_ in turn.completion_token_ids]
        assert sorted(trained) == sorted(sampled)
        read = "".join(tokenizer.decode(b.token_ids) for b in trajectory.branches())
        for words in (plain_agents.APOLOGY, plain_agents.SUMMARY):
            assert words in read  # as context
            assert words not in tokenizer.decode(trained)


@pytest.mark.parametrize("agent_rewards", [False, True])
async def test_an_agent_reaches_only_its_own_reward_and_if_allowed(
    agent_rewards: bool,
    keyless: OpenAIServer,
    make_config: Callable[..., Config],
    tokenizer: Any,
) -> None:
    plain_agents.ANSWERED.clear()
    users = keyless.sessions.open("a user's")
    group = await try_agent(
        "tests.plain_agents:greedy", keyless, make_config, tokenizer, agent_rewards=agent_rewards
    )
    assert group.dropped == {}
    answered = dict(plain_agents.ANSWERED)
    if agent_rewards:
        assert [t.reward for t in group.trajectories] == [0.5, 0.5]
        assert answered["POST OWN/reward"] == answered["GET OWN"] == 200
    else:
        assert not {0.5} & {t.reward for t in group.trajectories}
        assert answered["POST OWN/reward"] == answered["GET OWN"] == 403
    assert answered["POST OWN/v1/reward"] == 404
    assert all(len(trajectory.turns) == 1 for trajectory in group.trajectories)
    listed = {key for key in answered if key.startswith("DELETE")}
    assert listed <= {"DELETE a user's", "DELETE rollout-train.jsonl:1-0"}
    assert users.closed  # a server without a key is its clients' own


@pytest.mark.parametrize("gives_up", [True, False])
async def test_an_agent_gets_no_more_turns_than_a_trajectory_may_have(
    gives_up: bool, simulated: OpenAIServer, make_config: Callable[..., Config], tokenizer: Any
) -> None:
    """It may end or fail then: the turns that it has are trained."""
    agent, row = "tests.plain_agents:endless", {"gives_up": gives_up}
    group = await try_agent(agent, simulated, make_config, tokenizer, row, max_turns=3)
    assert group.dropped == {}
    for trajectory in group.trajectories:
        assert (trajectory.status, len(trajectory.turns)) == ("max_turns", 3)
        assert trajectory.events == {"turn_refused": 1}
        assert trajectory.reward is not None
        assert len(trajectory.branches()) == 1


@pytest.mark.parametrize(
    "name", ["my rows #1.jsonl:1", "rows?.jsonl:1", "rows%41.jsonl:1", "a/b\n.jsonl:1"]
)
async def test_an_agents_url_holds_nothing_of_its_row(
    name: str, simulated: OpenAIServer, make_config: Callable[..., Config], tokenizer: Any
) -> None:
    agent = "tests.plain_agents:synchronous"
    group = await try_agent(agent, simulated, make_config, tokenizer, name=name)
    assert group.dropped == {}  # though the agent spoiled its copy of the row
    assert all(len(trajectory.turns) == 1 for trajectory in group.trajectories)


@pytest.mark.parametrize("padding", [0, 200_000])
async def test_a_command_has_what_it_needs_and_no_secrets(
    padding: int,
    simulated: OpenAIServer,
    make_config: Callable[..., Config],
    tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("TURNWISE_API_KEY", "WANDB_API_KEY", "MY_SECRET", "WANTED"):
        monkeypatch.setenv(name, "yes")
    group = await try_agent(
        f"{COMMAND} clean",
        simulated,
        make_config,
        tokenizer,
        row={"padding": "x" * padding},
        agent_env=["WANTED"],
    )
    assert group.causes == {}
    assert [len(trajectory.turns) for trajectory in group.trajectories] == [1, 1]


async def test_a_blocking_agent_stalls_no_run(
    simulated: OpenAIServer, make_config: Callable[..., Config], tokenizer: Any
) -> None:
    ticks: list[None] = []
    ticking, gate = asyncio.create_task(tick(ticks)), new_gate()
    try:
        group = await try_agent(
            "tests.plain_agents:blocking", simulated, make_config, tokenizer, stall_timeout=0.5
        )
        assert group.dropped == {"stalled": 2}
        assert len(ticks) > 1, "the event loop went on while the agent blocked its own"
    finally:
        gate.set()
        ticking.cancel()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("sh -c 'sleep 600 & echo it fails; exit 3'", "exited with 3: it fails"),
        ("sh -c 'yes no | head -c 50000000; echo; echo the end; exit 4'", "no\nno\nthe end"),
        ("sh -c 'echo Traceback; echo KeyError: 7; exit 5'", "exited with 5: KeyError: 7\n"),
    ],
    ids=["a child holds its output", "50 MB of output", "a traceback"],
)
async def test_a_failed_command_ends_at_once_with_its_last_output(
    command: str,
    words: str,
    simulated: OpenAIServer,
    make_config: Callable[..., Config],
    tokenizer: Any,
) -> None:
    group = await try_agent(command, simulated, make_config, tokenizer)
    assert group.dropped == {"agent_error": 2}
    assert words in group.causes["agent_error"]
    assert len(group.causes["agent_error"]) < 1_000


@pytest.mark.parametrize(
    ("agent", "words"),
    [
        ("no_such_module:f", "rollout.agent: no_such_module cannot be imported"),
        ("tests.plain_agents:functio", "has no functio"),
        ("no-such-command --x", "cannot be started: there is no program no-such-command"),
        ("worker: no-such-command", "there is no program no-such-command"),
        ("worker:", "it names no program"),
        ("echo 'x", "cannot be started: No closing quotation"),
    ],
)
def test_a_missing_agent_is_found_before_a_start(agent: str, words: str) -> None:
    with pytest.raises(InputError, match=re.escape(words)):
        HttpAgentLoop().load(RolloutConfig(loop="agent", agent=agent))
    for there in ("https://host/agent", "echo hello", f"worker: {sys.executable} -m there"):
        HttpAgentLoop().load(RolloutConfig(loop="agent", agent=there))


@pytest.mark.parametrize(
    ("agent", "rollout", "words"),
    [
        ("no-such-command --x", {}, "rollout.agent: no-such-command --x cannot be started"),
        ("echo 'x", {}, "cannot be started: No closing quotation"),
        (COMMAND, {"agent_env": ["NOT_SET"]}, "rollout.agent_env names NOT_SET, which is not set"),
    ],
)
async def test_a_command_that_cannot_start_ends_the_run(
    agent: str,
    rollout: dict[str, Any],
    words: str,
    simulated: OpenAIServer,
    make_config: Callable[..., Config],
    tokenizer: Any,
) -> None:
    with pytest.raises(InputError, match=re.escape(words)):
        await try_agent(agent, simulated, make_config, tokenizer, **rollout)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_openai_agents_runs_unchanged(server: OpenAIServer, api: str, stream: bool) -> None:
    import agents  # seconds

    agents.set_tracing_disabled(True)
    name = f"agents-{api}-{stream}"
    async with AsyncOpenAI(base_url=server.session_url(name), api_key="none") as client:
        model = (await client.models.list()).data[0].id
        kinds: Any = {
            "chat": agents.OpenAIChatCompletionsModel,
            "responses": agents.OpenAIResponsesModel,
        }
        agent = agents.Agent(
            name="calculator",
            tools=[agents.function_tool(calculate)],
            model=kinds[api](model=model, openai_client=client),
            model_settings=agents.ModelSettings(temperature=0, max_tokens=40),
        )
        question = "What is 12 plus 30, then times 2?"
        try:
            if stream:
                result = agents.Runner.run_streamed(agent, question, max_turns=4)
                async for _ in result.stream_events():
                    pass
            else:
                await agents.Runner.run(agent, question, max_turns=4)
        except (agents.MaxTurnsExceeded, agents.ModelBehaviorError):
            pass  # the model is hardly trained: it may call for ever, or never end
    session = server.sessions.get(name)
    assert session is not None
    trajectory = Trajectory.from_json(json.dumps(session.describe()["trajectory"]))
    assert trajectory.turns
    assert audit(trajectory).first_violation is None
    assert [turn.fork_reason for turn in trajectory.turns if turn.fork_reason] == []
