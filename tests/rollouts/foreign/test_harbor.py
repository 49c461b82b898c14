"""The recipe for Harbor, but for the containers: its command is a stand-in that asks the model."""

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.simulated import SimulatedEngine
from turnwise.config import Config
from turnwise.rollouts import Group, Problem, Runner
from turnwise.serving.openai.server import OpenAIServer
from turnwise.trajectory import audit

PROGRAM = str(ROOT / "examples" / "harbor" / "agent.py")
HARBOR = """#!{python}
import json, sys
from pathlib import Path
from urllib.request import Request, urlopen

given = dict(zip(sys.argv, sys.argv[1:]))
assert sys.argv[1] == "run" and given["--agent"] == "terminus-2", sys.argv
task = Path(given["--path"])
if (task / "broken").exists():
    sys.exit("no such image")
base = given["--agent-kwarg"].removeprefix("api_base=")
body = {{
    "model": given["--model"].removeprefix("openai/"),
    "messages": [{{"role": "user", "content": (task / "instruction.md").read_text()}}],
}}
headers = {{"Content-Type": "application/json"}}
with urlopen(Request(base + "/chat/completions", json.dumps(body).encode(), headers)) as answer:
    assert json.load(answer)["choices"]
trial = Path(given["--jobs-dir"]) / "job" / "trial"
trial.mkdir(parents=True)
rewards = json.loads((task / "rewards.json").read_text())
(trial / "result.json").write_text(json.dumps({{"verifier_result": {{"rewards": rewards}}}}))
"""


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two tasks, and a stand-in of `harbor` on the PATH."""
    program = tmp_path / "bin" / "harbor"
    program.parent.mkdir()
    program.write_text(HARBOR.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    for name, reward in (("first", {"reward": 0.5}), ("second", {"tests": 1})):
        folder = tmp_path / "tasks" / name
        folder.mkdir(parents=True)
        (folder / "task.toml").write_text("")
        (folder / "instruction.md").write_text(f"Do the {name}.")
        (folder / "rewards.json").write_text(json.dumps(reward))
    return tmp_path / "tasks"


def read_rows(tasks: Path) -> list[dict[str, str]]:
    target = tasks / "rows.jsonl"
    subprocess.run([sys.executable, PROGRAM, "rows", str(tasks), str(target)], check=True)
    return [json.loads(line) for line in target.read_text().splitlines()]


@pytest.fixture
async def server(make_config: Callable[..., Config], tokenizer: Any) -> AsyncIterator[OpenAIServer]:
    config = make_config(sampling={"max_tokens": 16})
    server = OpenAIServer(config, SimulatedEngine(vocab_size=len(tokenizer)), port=0)
    await server.start()
    yield server
    await server.stop()


async def test_a_task_is_run_and_rewarded(
    tasks: Path, server: OpenAIServer, make_config: Callable[..., Config], tokenizer: Any
) -> None:
    first, second = read_rows(tasks)
    assert first == {"task": str(tasks / "first"), "prompt": "Do the first."}
    config = make_config(
        environment="turnwise:AgentTask",
        rollout={
            "loop": "agent",
            "agent": f"{sys.executable} {PROGRAM} run",
            "agent_rewards": True,
        },
        sampling={"n": 2, "max_tokens": 16},
    )
    runner = Runner(config, tokenizer)
    runner.loops["agent"].server = server

    async def play(row: dict[str, str]) -> Group:
        problem = Problem("rows.jsonl:1", row)
        return await runner.run_group(SimulatedEngine(), problem, config.sampling, row["prompt"])

    group = await play(first)
    assert group.dropped == {}, group.causes
    assert [trajectory.reward for trajectory in group.trajectories] == [0.5, 0.5]
    for trajectory in group.trajectories:
        assert trajectory.messages[0]["content"] == "Do the first."
        assert audit(trajectory).first_violation is None
    group = await play(second)
    assert group.dropped == {"agent_error": 2}
    assert "no reward: the verifier gave {'tests': 1}" in group.causes["agent_error"]
    (tasks / "second" / "broken").write_text("")
    group = await play(second)
    assert "harbor run ended with 1" in group.causes["agent_error"]


def test_a_folder_without_tasks_is_named(tmp_path: Path) -> None:
    command = [sys.executable, PROGRAM, "rows", str(tmp_path), str(tmp_path / "rows.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "has no task.toml in it" in done.stderr
