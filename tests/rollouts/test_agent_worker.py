"""Agents in a long-lived worker: at once, cancelled, crashed and started again."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.pages import write_files
from tests.rollouts.test_agents import keyless
from turnwise.config import Config
from turnwise.core.sources import check_data
from turnwise.errors import InputError
from turnwise.rollouts import Group, Problem, Runner
from turnwise.rollouts.data import load_rows, load_training
from turnwise.serving.openai.server import OpenAIServer
from turnwise.trajectory import audit

__all__ = ["keyless"]

# Without this project's packages: a worker lives in an environment of its own.
COMMAND = f"worker: {sys.executable} -S tests/plain_worker.py"


class Play:
    """Plays two trajectories of a row; all plays share the worker."""

    def __init__(self, server: OpenAIServer, make_config: Callable[..., Config], tokenizer: Any):
        self._server = server
        self._make_config = make_config
        self._tokenizer = tokenizer
        self._runner: Runner | None = None

    async def __call__(self, behaviour: str, agent: str = COMMAND, **rollout: Any) -> Group:
        config = self._make_config(
            rollout={"loop": "agent", "agent": agent, "agent_env": ["BOARD"], **rollout},
            sampling={"n": 2, "max_tokens": 16},
        )
        runner = Runner(config, self._tokenizer)
        if self._runner is not None:
            runner._stages, runner.loops = self._runner._stages, self._runner.loops
        runner.loops["agent"].server, self._runner = self._server, runner
        row = load_training(config)[0].row | {"behaviour": behaviour}
        engine = self._server._generator
        return await runner.run_group(engine, Problem("p", row), config.sampling, behaviour)

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.loops["agent"].close()


@pytest.fixture
async def play(
    keyless: OpenAIServer,
    make_config: Callable[..., Config],
    tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Play]:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("BOARD", str(tmp_path))
    play = Play(keyless, make_config, tokenizer)
    yield play
    await play.close()
    assert len(keyless.sessions) == 0


def count(board: Path, what: str) -> int:
    return len(list(board.glob(f"{what}-*")))


def processes(board: Path) -> set[str]:
    return {path.name.split("-")[1] for path in board.glob("began-*")}


async def test_the_worker_of_the_page_lists_its_tasks_and_plays(play: Play, tmp_path: Path) -> None:
    write_files("docs/how-to/agents.md", tmp_path, {})
    command = f"worker: {sys.executable} {tmp_path / 'my_worker.py'}"
    rows = await asyncio.to_thread(load_rows, command, split="train")
    assert rows == [{"question": "12 plus 30?", "answer": "42"}]
    group = await play("", agent=command)
    assert group.causes == {}
    assert [trajectory.metrics for trajectory in group.trajectories] == [{"turns": 1.0}] * 2


async def test_a_worker_plays_trajectories_at_once_in_one_process(
    play: Play, tmp_path: Path
) -> None:
    group = await play("together")
    assert group.causes == {}
    for trajectory in group.trajectories:
        assert audit(trajectory).first_violation is None
        assert "length" in trajectory.metrics
        assert trajectory.events == {"agent_reward_ignored": 1}
    assert len((await play("", agent_rewards=True)).trajectories) == 2
    (pid,) = processes(tmp_path)
    os.kill(int(pid), 0)  # it lives


async def test_a_plain_function_runs_in_threads(play: Play) -> None:
    group = await play("", f"{COMMAND} plain")
    assert group.causes == {}
    assert [len(trajectory.turns) for trajectory in group.trajectories] == [1, 1]


async def test_after_a_crash_the_next_trajectories_have_a_new_worker(
    play: Play, tmp_path: Path
) -> None:
    group = await play("crash")
    assert group.dropped == {"agent_crashed": 2}
    assert "ended with 7: " in group.causes["agent_crashed"]
    assert "the last words" in group.causes["agent_crashed"]
    crashed = processes(tmp_path)
    assert (await play("")).causes == {}
    assert len(processes(tmp_path) - crashed) == 1


@pytest.mark.parametrize(
    ("behaviour", "agent", "reason", "words"),
    [
        ("fail", COMMAND, "agent_error", "ValueError: no such page"),
        ("never asks", COMMAND, "agent_silent", "sampled nothing"),
        ("bad", COMMAND, "agent_reply", "reward: Input should be"),
        ("", f"{COMMAND} no-start", "agent_crashed", "ended with 1: it needs a key"),
        ("fail", f"{COMMAND} garbage", "agent_error", "no such page"),
    ],
)
async def test_a_workers_failure_is_counted_by_its_reason(
    play: Play, behaviour: str, agent: str, reason: str, words: str
) -> None:
    group = await play(behaviour, agent)
    assert group.dropped == {reason: 2}
    assert words in group.causes[reason]


async def test_a_worker_hears_of_a_trajectory_past_its_deadline(play: Play, tmp_path: Path) -> None:
    group = await play("hang", stall_timeout=0.5)
    assert group.dropped == {"stalled": 2}
    async with asyncio.timeout(60):
        while count(tmp_path, "cancelled") < count(tmp_path, "began"):
            await asyncio.sleep(0.01)


async def test_closing_ends_the_process(play: Play, tmp_path: Path) -> None:
    await play("")
    (pid,) = processes(tmp_path)
    await play.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


async def test_a_worker_that_cannot_start_ends_the_run(play: Play) -> None:
    with pytest.raises(InputError, match=r"rollout\.agent: no-such-command cannot be started"):
        await play("", "worker: no-such-command")


def test_rows_are_the_tasks_that_a_worker_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    check_data(COMMAND)
    rows = load_rows(COMMAND, split="train")
    assert [row["question"] for row in rows] == ["0 plus 1?", "1 plus 1?", "2 plus 1?"]
    assert len(load_rows(COMMAND, split="train", limit=2)) == 2
    for command, words in (
        (f"{COMMAND} taskless", "listed no tasks, and ended with 0: .*this worker has no tasks"),
        (f"{COMMAND} no-start", "listed no tasks, and ended with 1: it needs a key"),
        ("worker: no-such-command", "cannot be started"),
    ):
        with pytest.raises(InputError, match=f"(?s)data.path: the agent worker .* ?{words}"):
            load_rows(command, split="train")
