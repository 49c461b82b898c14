"""Agents of other frameworks, in a virtual environment of their own, before the demo's model.

`make agents` makes the environment; the tests do, where it is missing.
"""

import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tests.conftest import ROOT
from turnwise.config import Config
from turnwise.rollouts import Problem, Runner
from turnwise.rollouts.data import load_training
from turnwise.serving.openai.server import OpenAIServer
from turnwise.serving.worker_handle import WorkerHandle
from turnwise.trajectory import ChatTemplate, audit

pytestmark = pytest.mark.slow
BIN = ".venv-agents/bin"
AGENTS = {
    **{
        f"openai-agents {way}": f"{BIN}/python -m examples.agents.openai_agents {way}"
        for way in ("chat", "stream", "responses", "stored")
    },
    **{
        f"langgraph {way}": f"{BIN}/python -m examples.agents.langgraph_agent {way}"
        for way in ("chat", "stream", "responses", "stored")
    },
    "anthropic whole": f"{BIN}/python -m examples.agents.anthropic_agent whole",
    "anthropic stream": f"{BIN}/python -m examples.agents.anthropic_agent stream",
    **{
        f"pydantic-ai {way}": f"{BIN}/python -m examples.agents.pydantic_agent {way}"
        for way in ("text", "typed")
    },
    "llm": f"sh examples/agents/llm_cli.sh {BIN}",
}


@pytest.fixture(scope="module")
def clients() -> None:
    subprocess.run(["make", "agents"], cwd=ROOT, check=True, timeout=1_000)


@pytest.fixture(scope="module")
def config(make_config: Callable[..., Config]) -> Config:
    return make_config(
        model={"path": str(ROOT / "examples/calculator/warm_started"), "max_length": 2_048},
        serving={"port": 0},
        sampling={"n": 4, "max_tokens": 64},
    )


@pytest.fixture(scope="module")
async def server(
    ray_started: None, config: Config
) -> AsyncIterator[tuple[OpenAIServer, WorkerHandle]]:
    engine = await WorkerHandle.start(config)
    server = OpenAIServer(config, engine)
    await server.start()
    yield server, engine
    await server.stop()
    await engine.shutdown()


@pytest.fixture(scope="module")
def script(template: ChatTemplate) -> dict[str, Any]:
    """Two calls, in a spelling that no JSON printer has, and an answer."""
    turns = [
        '<tool_call>\n{"name":"calculate",  "arguments": {"operation":"+","a":12, "b": 30}}\n'
        "</tool_call><|im_end|>",
        '<tool_call>\n{"name": "calculate", "arguments": {"a": 42,"operation": "*","b":2}}\n'
        "</tool_call><|im_end|>",
        "The answer is 84.<|im_end|>",
    ]
    flat = [token for turn in turns for token in [*template.encode(turn), -1]]
    return {"script": flat}


@pytest.mark.parametrize("name", AGENTS)
async def test_an_agent_of_another_framework_makes_exact_trajectories(
    name: str,
    clients: None,
    config: Config,
    server: tuple[OpenAIServer, WorkerHandle],
    script: dict[str, Any],
    tokenizer: Any,
    template: ChatTemplate,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    rollout = {"loop": "agent", "agent": AGENTS[name]}
    own = Config.model_validate({**config.model_dump(), "rollout": rollout})
    runner = Runner(own, tokenizer)
    runner.loops["agent"].server, engine = server
    row = next(one.row for one in load_training(own) if len(one.row["steps"]) > 1)
    problem = Problem("rows:1", row)
    # As the model samples them: malformed calls, unknown tools and long answers among them.
    group = await runner.run_group(engine, problem, own.sampling, name)
    assert group.causes == {}
    assert len(group.trajectories) == 4
    forked = Counter[str]()
    for trajectory in group.trajectories:
        assert audit(trajectory).first_violation is None
        forked.update(turn.fork_reason for turn in trajectory.turns if turn.fork_reason)
    assert forked == {}
    turns = sum(len(trajectory.turns) for trajectory in group.trajectories)
    if name.endswith("typed"):  # it asks again where the script ends with a text
        return
    # With the tool called twice.
    scripted = own.sampling.model_copy(update={"n": 2, "logits_processor_args": script})
    group = await runner.run_group(engine, problem, scripted, f"{name} scripted")
    assert group.causes == {}
    for trajectory in group.trajectories:
        assert audit(trajectory).first_violation is None
        assert [turn.fork_reason for turn in trajectory.turns] == [None] * 3
        (branch,) = trajectory.branches()
        assert trajectory.final_text == "The answer is 84."
        said = template.decode_all(branch.token_ids)
        assert '{"name":"calculate",  "arguments"' in said  # as sampled, not as sent
        assert "<tool_response>\n42\n</tool_response>" in said
    assert len(server[0].sessions) == 0
    print(f"{name}: exact; {turns} turns of 4 trajectories, no forks")  # noqa: T201
