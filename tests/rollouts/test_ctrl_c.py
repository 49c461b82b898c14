"""Ctrl-C in a program whose trajectories are in flight: every environment is closed."""

import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import turnwise
from tests.conftest import ROOT, command_environment, python
from turnwise.config import Config
from turnwise.trajectory import Trajectory

PROGRAM = """
import asyncio, sys
from transformers import AutoTokenizer
from tests.rollouts.test_ctrl_c import Desk
from turnwise.cli import command as running
from turnwise.config import Config
from tests.simulated import SimulatedEngine
from turnwise.rollouts import Problem, Runner

class Thinking(SimulatedEngine):
    waiting = 0

    async def stream(self, request):
        Thinking.waiting += 1
        if Thinking.waiting == 64:
            print("begun", flush=True)
        await asyncio.Event().wait()
        yield

async def command():
    config = Config.model_validate_json(open(sys.argv[1]).read())
    runner = Runner(config, AutoTokenizer.from_pretrained(config.model.path), Desk)
    engine = Thinking(vocab_size=256)
    async with asyncio.TaskGroup() as tasks:
        for number in range(8):
            problem = Problem(f"rows:{number}", {"log": sys.argv[2], "number": number})
            tasks.create_task(runner.run_group(engine, problem, config.sampling, "t"))

sys.exit(asyncio.run(running._exit_code(command(), None)))
"""


class Desk(turnwise.Environment):
    """Writes down that it was set up and closed."""

    problem = "Go."

    def __init__(self, row: dict[str, Any]) -> None:
        self.row = row

    def _log(self, what: str) -> None:
        with open(self.row["log"], "a") as file:
            file.write(f"{what}\n")

    def setup(self) -> None:
        self._log("setup")

    def reward(self, trajectory: Trajectory) -> float:
        return 0.0

    async def close(self) -> None:
        self._log("close")


@pytest.mark.parametrize("process", [False, True], ids=["threads", "processes"])
def test_environments_are_closed(
    make_config: Callable[..., Config], tmp_path: Path, process: bool
) -> None:
    config = make_config(
        rollout={"loop": "tool_calling", "environment_process": process},
        sampling={"n": 8, "max_tokens": 8},
    )
    (tmp_path / "config.json").write_text(config.model_dump_json())
    log = tmp_path / "log"
    running = subprocess.Popen(
        [*python(), "-c", PROGRAM, str(tmp_path / "config.json"), str(log)],
        cwd=ROOT,
        env=command_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert running.stdout is not None
    begun = running.stdout.readline()
    assert begun == "begun\n", running.communicate(timeout=120)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=300)
    assert running.returncode == 130, said
    assert "turnwise: interrupted; everything it started has ended\n" in said
    assert Counter(log.read_text().split()) == {"setup": 64, "close": 64}
