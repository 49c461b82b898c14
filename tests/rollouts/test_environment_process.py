"""Environments in processes of their own: played as in threads, and alone in their failures.

Environments write what they did to the file `log` of their row, since nothing else is shared.
"""

import asyncio
import functools
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

import turnwise
from tests.rollouts.test_episode import Talking
from turnwise.config import Config, SamplingConfig
from turnwise.engine.protocol import Chunk, Request
from turnwise.errors import InputError, TrajectoryError
from turnwise.rollouts import Group, Problem, RolloutContext, Runner
from turnwise.rollouts.episode import Episode
from turnwise.trajectory import ChatTemplate, Trajectory

HERE = "tests.rollouts.test_environment_process"


class Desk(turnwise.Environment):
    """Does as its row says, and writes down what it did."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.row = row
        self.problem = f"Process {os.getpid()}"
        self.tools = [self.look_up, self.fail]
        self._log("init")

    def _log(self, what: str) -> None:
        with open(self.row["log"], "a") as file:
            file.write(f"{what} {os.getpid()}\n")

    async def setup(self) -> None:
        self._log("setup")
        self._do("setup")

    def _do(self, when: str) -> None:
        match self.row.get(when):
            case None:
                pass
            case "die":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "exit":
                os._exit(3)
            case "raise":
                raise KeyError("the drawer is locked")
            case "leak":
                subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            case "hang":
                threading_is_no_help()

    def look_up(self, name: str) -> str:
        """Look a name up.

        Args:
            name: The name.
        """
        self._do("tool")
        return f"{name} is {self.row.get('answer', 'unknown')}"

    def fail(self) -> str:
        """Fail."""
        raise ValueError("the desk is on fire")

    def step(self, message: dict[str, Any]) -> Any:
        self._log("step")
        self._do("step")
        return None

    def reward(self, trajectory: Trajectory) -> turnwise.Rewards:
        self._do("reward")
        assert trajectory.messages[-1]["role"] == "assistant"
        parts = {name: float(draw()) for name, draw in LUCK.items()}
        return turnwise.Rewards(1.0, turns=[0.5], parts=parts)

    def metrics(self, trajectory: Trajectory) -> dict[str, float]:
        return {"turns": len(trajectory.turns)}

    def close(self) -> None:
        self._log("close")


_RANDOM, _NUMPY, _OLD = random.Random(0), np.random.default_rng(0), np.random.RandomState(0)
_TORCH = torch.Generator().manual_seed(0)
LUCK: dict[str, Callable[[], Any]] = {
    "random": random.random,
    "numpy": np.random.random,
    "torch": lambda: torch.rand(()),
    "a Random": _RANDOM.random,
    "a Generator of numpy": _NUMPY.random,
    "a RandomState": _OLD.random,
    "a Generator of torch": lambda: torch.rand((), generator=_TORCH),
}
"""Random numbers, also of generators that this module made when it was imported."""


class Workshop(turnwise.Environment):
    """Runs the model's code in its own process."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.problem = "Run code."
        self.tools = [self.run]

    def run(self, code: str) -> str:
        """Run code.

        Args:
            code: The code.
        """
        exec(code, {})
        return "done"

    def reward(self, trajectory: Trajectory) -> float:
        return 0.5


class Attacking:
    """A model whose only turn runs the code of the row."""

    async def run(self, environment: Any, context: RolloutContext) -> None:
        context.trajectory.add_turn([1], [2], [-0.1], [0], "stop")
        await context.toolbox.call("run", json.dumps({"code": context.row["code"]}))


def threading_is_no_help() -> None:
    """Hold the interpreter's lock for ever, as a library in C may."""
    import ctypes

    ctypes.PyDLL(None).pause()


class Row(turnwise.Environment):
    """Known from its row alone."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.problem = "a" * row["length"]

    @classmethod
    def prompt(cls, row: dict[str, Any]) -> str:
        assert not isinstance(os.environ.get("PYTEST_CURRENT_TEST"), int)
        if "length" not in row:
            os.kill(os.getpid(), signal.SIGSEGV)
        return "a" * int(row["length"])

    def reward(self, trajectory: Trajectory) -> float:
        return 1.0


@pytest.fixture(scope="module")
def runner(make_config: Callable[..., Config], tokenizer: Any) -> Callable[..., Runner]:
    """Makes a runner; those of one environment share the process that has imported it."""

    @functools.cache
    def make(environment: Any = Desk, **rollout: Any) -> Runner:
        config = make_config(
            rollout={"loop": "tool_calling", "environment_process": True, **rollout}
        )
        return Runner(config, tokenizer, environment)

    return make


async def play(runner: Runner, row: dict[str, Any], n: int = 1) -> Group:
    sampling = SamplingConfig(n=n, max_tokens=8)
    return await runner.run_group(Talking(vocab_size=256), Problem("rows:1", row), sampling, "t")


def episode_of(runner: Runner, row: dict[str, Any]) -> Episode:
    return runner._stages[""].episode(Problem("rows:1", row))


def did(log: Path) -> Counter[str]:
    return Counter(line.split()[0] for line in log.read_text().splitlines())


def pids(log: Path) -> set[int]:
    return {int(line.split()[1]) for line in log.read_text().splitlines()}


async def test_each_trajectory_has_a_process(runner: Callable[..., Runner], tmp_path: Path) -> None:
    log = tmp_path / "log"
    group = await play(runner(), {"log": str(log)}, n=3)
    assert group.dropped == {}
    assert did(log) == dict.fromkeys(("init", "setup", "step", "close"), 3)
    assert len(pids(log)) == 3
    assert os.getpid() not in pids(log)
    assert {t.messages[0]["content"] for t in group.trajectories} == {
        f"Process {pid}" for pid in pids(log)
    }
    for trajectory in group.trajectories:
        assert trajectory.turn_rewards == [0.5]
        assert trajectory.metrics == {"turns": 1.0}
        own = sum(trajectory.reward_parts[name] for name in LUCK)
        assert trajectory.reward == pytest.approx(1.5 + own)
    for name in LUCK:
        luck = {trajectory.reward_parts[name] for trajectory in group.trajectories}
        assert len(luck) == 3, f"forks share the state of {name}"
    for pid in pids(log):
        await gone(pid)


async def test_tools_answer_from_there(runner: Callable[..., Runner], tmp_path: Path) -> None:
    made = runner()
    row = {"log": str(tmp_path / "log"), "answer": "blue"}
    episode = episode_of(made, row)
    await episode.open()
    try:
        names = [schema["function"]["name"] for schema in episode.toolbox.schemas]
        assert names == ["look_up", "fail"]
        results = await asyncio.gather(
            *(episode.toolbox.call("look_up", f'{{"name": "{name}"}}') for name in "abc")
        )
        assert [result.text for result in results] == ["a is blue", "b is blue", "c is blue"]
        wrong = await episode.toolbox.call("look_up", '{"title": 3}')
        assert (wrong.outcome, "title" in wrong.text) == ("bad_arguments", True)
        unknown = await episode.toolbox.call("look_down", "{}")
        assert unknown.text == "Error: there is no tool 'look_down'; tools: look_up, fail"
        failed = await episode.toolbox.call("fail", "{}")
        assert failed.text == "Error: fail failed: ValueError: the desk is on fire"
        assert "test_environment_process.py" in str(failed.error)
        with pytest.raises(AttributeError, match=r"Desk.row is in a process of its own"):
            _ = episode.environment.row
    finally:
        await episode.close(lambda *_: pytest.fail("closed badly"))


@pytest.mark.parametrize(
    ("row", "reason", "message"),
    [
        ({"setup": "die"}, "environment_crashed", "rows:1: .* was ended by SIGSEGV"),
        ({"setup": "exit"}, "environment_crashed", "rows:1: .* exited with status 3"),
        ({"setup": "raise"}, "environment_error", "the drawer is locked.*environment_process.py"),
        ({"step": "die"}, "environment_crashed", "was ended by SIGSEGV"),
        ({"step": "raise"}, "environment_error", "the drawer is locked"),
        ({"reward": "raise"}, "reward_error", "gave no reward: KeyError: 'the drawer is locked'"),
        ({"reward": "die"}, "environment_crashed", "was ended by SIGSEGV"),
    ],
)
async def test_a_failure_is_one_counted_trajectory(
    runner: Callable[..., Runner],
    tmp_path: Path,
    row: dict[str, Any],
    reason: str,
    message: str,
) -> None:
    made = runner()
    log = tmp_path / "log"
    failed = await play(made, {"log": str(log), **row})
    assert dict(failed.dropped) == {reason: 1}
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(failed.causes[reason])
    assert did(log)["close"] == ("die" not in row.values() and "exit" not in row.values())
    sound = await play(made, {"log": str(log)})
    assert len(sound.trajectories) == 1


async def test_a_process_that_dies_in_a_tool_crashes_the_environment(
    runner: Callable[..., Runner], template: ChatTemplate, tmp_path: Path
) -> None:
    call = '<tool_call>\n{"name": "look_up", "arguments": {"name": "a"}}\n</tool_call>'
    said = [*template.encode(call), template.tokenizer.eos_token_id]

    class Calling(Talking):
        async def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
            yield Chunk(said, [-1.0] * len(said), [0] * len(said), "stop")

    row = {"log": str(tmp_path / "log"), "tool": "die"}
    sampling = SamplingConfig(n=1, max_tokens=64)
    group = await runner().run_group(Calling(), Problem("rows:1", row), sampling, "t")
    assert dict(group.dropped) == {"environment_crashed": 1}
    assert "was ended by SIGSEGV" in group.causes["environment_crashed"]


async def test_a_call_that_nothing_can_interrupt_is_killed(
    runner: Callable[..., Runner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turnwise.rollouts.remote_episode.GRACE_SECONDS", 0.5)
    log = tmp_path / "log"
    made = runner(environment_timeout=20.0)
    episode = episode_of(made, {"log": str(log), "step": "hang"})
    await episode.open()
    (pid,) = pids(log)
    episode._rollout = made._config.rollout.model_copy(update={"environment_timeout": 0.5})
    with pytest.raises(TrajectoryError, match="did not answer within 1 s; its process was killed"):
        await episode.step({"role": "assistant", "content": "sunny"})
    await gone(pid)
    reported: list[str] = []

    async def report(reason: str, error: Exception) -> None:
        reported.append(reason)

    await episode.close(report)
    assert reported in ([], ["close_error"])


async def test_what_an_environment_started_ends_with_it(
    runner: Callable[..., Runner], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    made = runner()
    row = {"log": str(log), "setup": "leak"}
    episode = episode_of(made, row)
    await episode.open()
    (pid,) = pids(log)
    (leaked,) = psutil.Process(pid).children()
    await episode.close(lambda *_: pytest.fail("closed badly"))
    await gone(pid)
    await gone(leaked.pid)


HOST = "import sys; host = sys.modules['__main__']\n"
WRITER = (
    "import gc, asyncio, json\n"
    "(w,) = (o for o in gc.get_objects() if isinstance(o, asyncio.StreamWriter))\n"
    "def send(b): w._loop.call_soon_threadsafe(w.write, b)\n"
    "def say(o): b = json.dumps(o).encode(); send(len(b).to_bytes(4, 'big') + b)\n"
)
ERROR = {"input": True, "reason": "prompt_too_long", "message": "it ends the run", "cause": ""}
ATTACKS = {
    "a reward for turns that are not": (
        HOST + "async def reward(self, t):\n"
        "    return {'final': 1.0, 'turns': [1.0] * 9, 'parts': {}, 'players': {}}\n"
        "host._Player.reward = reward",
        "reward_error",
    ),
    "a reward that is a text": (
        HOST + "async def reward(self, t): return ['a', ['b'], {}, {}]\n"
        "host._Player.reward = reward",
        "environment_reply",
    ),
    "an error of the user": (
        HOST + f"host._error = lambda e: {ERROR}\n"
        "async def reward(self, t): raise host.InputError('x')\nhost._Player.reward = reward",
        "environment_error",
    ),
    "an answer to the next question": (WRITER + "say({'id': 99, 'value': 1})", "environment_reply"),
    "an answer that is no JSON": (
        WRITER + "send((2).to_bytes(4, 'big') + b'{x')",
        "environment_reply",
    ),
    "an answer without an end": (
        WRITER + "send((1 << 31).to_bytes(4, 'big') + b'x' * (1 << 20))",
        "environment_reply",
    ),
}


@pytest.mark.parametrize(("code", "reason"), ATTACKS.values(), ids=ATTACKS)
async def test_code_in_the_process_costs_its_own_trajectory_only(
    runner: Callable[..., Runner], code: str, reason: str
) -> None:
    before = psutil.Process().memory_info().rss
    group = await play(runner(Workshop, loop=f"{HERE}:Attacking"), {"code": code}, n=2)
    assert dict(group.dropped) == {reason: 2}, group.causes
    assert psutil.Process().memory_info().rss - before < 100 << 20


async def gone(pid: int) -> None:
    """Wait until a process has ended; the kernel may list it as a zombie."""
    async with asyncio.timeout(60.0):
        with suppress(psutil.NoSuchProcess):
            while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                await asyncio.sleep(0.01)


async def test_prompts_are_measured_there(runner: Callable[..., Runner]) -> None:
    made = runner(Row)
    assert await asyncio.to_thread(made.check, Problem("rows:1", {"length": 5})) is not None
    group = await play(made, {"length": 100_000})
    assert group.left_out
    with pytest.raises(InputError, match=r"rows:2: .* KeyError: 'length'.*the row has: breadth"):
        await asyncio.to_thread(made.check, Problem("rows:2", {"breadth": 5}))
    crashed = await play(made, {"breadth": 5})
    assert "SIGSEGV" in "".join(crashed.causes.values())


async def test_the_environment_may_be_defined_in_the_main_program(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import asyncio\n"
        "from turnwise.config import RolloutConfig\n"
        "from turnwise.rollouts.remote_episode import EnvironmentProcesses, RemoteEpisode\n"
        "from turnwise.rollouts.problems import Problem\n"
        "class Mine:\n"
        "    def __init__(self, row): self.problem = row['text']\n"
        "if __name__ == '__main__':\n"
        "    processes = EnvironmentProcesses(Mine, RolloutConfig())\n"
        "    problem = Problem('rows:1', {'text': 'Go.'})\n"
        "    episode = RemoteEpisode(processes, problem, RolloutConfig())\n"
        "    known = asyncio.run(episode.preview(set_up=True))\n"
        "    print(known, episode.problem, episode.toolbox.schemas)\n"
    )
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, str(script)], capture_output=True, text=True, timeout=300
    )
    problem = [{"role": "user", "content": "Go."}]
    assert done.stdout == f"True {problem} []\n", done.stderr


async def test_a_module_that_cannot_be_imported_there_is_named(
    runner: Callable[..., Runner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fragile.py").write_text(
        "import os, sys\n"
        "if 'turnwise.rollouts.environment_host' in sys.orig_argv: os._exit(7)\n"
        "class Desk:\n"
        "    problem = 'Go.'\n"
        "    def __init__(self, row): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import fragile  # type: ignore[import-not-found]

    group = await play(runner(fragile.Desk), {})
    assert "exited with status 7" in group.causes["environment_crashed"]
