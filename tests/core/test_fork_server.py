"""Processes that are forked instead of started: as good as `python ARGUMENT...`."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import ray
import torch

from tests.conftest import python
from tests.programs import forks
from turnwise.core import fork_server

SECONDS = 300
"""For what ends by itself: the server has to import vLLM before its first fork."""
SCRIPT = """
import json, os, sys, time
known = [sys.argv[1:], os.getcwd(), os.environ["MARK"], sys.path[0], os.getpid()]
sys.stdout.write(json.dumps(known) + "\\n")
sys.stdout.flush()
if sys.argv[1] == "wait":
    time.sleep(600)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def start(command: list[str], *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*command, *map(str, arguments)],
        cwd="/",
        env={**os.environ, "MARK": "mark"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_fork_is_like_a_program_of_its_own(script: Path) -> None:
    for command in (python(), [sys.executable]):
        process = start(command, script, 3, "an argument")
        said, errors = process.communicate(timeout=SECONDS)
        assert process.returncode == 3, errors
        assert json.loads(said)[:4] == [["3", "an argument"], "/", "mark", str(script.parent)]
    failed = start(python(), script, "no number")
    assert "ValueError: invalid literal" in failed.communicate(timeout=SECONDS)[1]
    assert failed.returncode == 1


def test_signals_reach_a_fork_and_it_ends_with_the_one_who_asked(
    script: Path,
) -> None:
    ended = start(python(), script, "wait")
    assert ended.stdout is not None
    ended.stdout.readline()
    ended.send_signal(signal.SIGTERM)
    ended.communicate(timeout=SECONDS)
    assert ended.returncode == -signal.SIGTERM
    killed = start(python(), script, "wait")
    assert killed.stdout is not None
    fork = json.loads(killed.stdout.readline())[-1]
    assert fork in forks()
    killed.kill()
    killed.communicate(timeout=SECONDS)
    wait_for_the_end_of(fork)


def test_without_a_server_the_program_is_started_plainly(script: Path, tmp_path: Path) -> None:
    command = fork_server.command(str(tmp_path / "nobody"))
    process = start(command, script, 4)
    said, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 4, errors
    assert json.loads(said)[0] == ["4"]


@pytest.mark.slow  # test_cli.py ends a whole program with a server of its own
def test_all_forks_end_with_their_server(script: Path) -> None:
    server = fork_server.ForkServer()
    process = start(fork_server.command(server.address), script, "wait")
    assert process.stdout is not None
    process.stdout.readline()
    below = psutil.Process(server.pid).children()
    assert len(below) == 1
    server.close()
    process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert psutil.wait_procs(below, timeout=60)[1] == []


def test_ray_forks_its_workers_and_starts_no_unused_helpers(ray_started: None) -> None:
    @ray.remote(num_cpus=0)
    class Actor:
        def parent(self) -> int:
            return psutil.Process(psutil.Process().ppid()).pid

    assert ray.get(Actor.remote().parent.remote()) == fork_server._own.pid  # type: ignore[union-attr]
    below = psutil.Process().children(recursive=True)
    commands = []
    for process in below:
        with contextlib.suppress(psutil.Error):  # the actor ends meanwhile
            commands.append(" ".join(process.cmdline()))
    assert any("gcs_server" in command for command in commands)
    for helper in ("dashboard.py", "monitor.py", "setup_worker.py"):
        assert not any(helper in command for command in commands), commands


def test_no_command_line_shows_a_secret(ray_started: None) -> None:
    """Everyone on the machine can read the arguments of a process."""

    @ray.remote(num_cpus=0, runtime_env={"env_vars": {"THEIR_KEY": "key-of-a-users-service"}})
    class Actor:
        def environment(self) -> dict[str, str]:
            return dict(os.environ)

    actor = Actor.remote()
    environment = ray.get(actor.environment.remote())
    words = [environment["TURNWISE_SECRET"], environment["THEIR_KEY"]]
    assert words == [os.environ["TURNWISE_SECRET"], "key-of-a-users-service"]
    shown, clients = [], 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            line = " ".join(process.cmdline())
            shown += [line for word in words if word in line]
            clients += fork_server.CLIENT in line
    assert clients > 0
    assert shown == []


def test_an_engine_compiles_nothing_for_its_first_request() -> None:
    from vllm.model_executor.layers import vocab_parallel_embedding
    from vllm.v1.sample import sampler

    from turnwise.internals import vllm as vllm_names  # noqa: F401

    for function in (
        sampler.batched_count_greater_than,
        vocab_parallel_embedding.get_masked_input_and_mask,
    ):
        assert not hasattr(function, "_torchdynamo_orig_callable")
    counts = sampler.batched_count_greater_than(torch.eye(3), torch.full((3, 1), 0.5))
    assert counts.tolist() == [1, 1, 1]


def wait_for_the_end_of(pid: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(60)
