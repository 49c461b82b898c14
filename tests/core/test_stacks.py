"""Stacks of a run's processes: of one that is stuck, of its forks, and of nobody else's."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from turnwise.core.stacks import collect, running, stacks_folder

PROGRAM = """
import ctypes, os, sys
from pathlib import Path
from turnwise.core import stacks

def holds_the_interpreter():
    os.write(1, b"ready\\n")
    while True:  # a signal ends a sleep
        ctypes.PyDLL(None).sleep(600)  # without releasing the lock

def waits():
    os.write(1, b"ready\\n")
    sys.stdin.read()

stacks.register(Path(sys.argv[1]), "worker-7")
if os.fork() == 0:
    waits()
else:
    holds_the_interpreter()
"""


@pytest.fixture
def program(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that is stuck, and its fork, which waits."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    for _ in range(2):
        assert process.stdout.readline().startswith("ready")
    yield process
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def test_a_process_that_holds_the_interpreter_shows_its_stack_and_so_does_its_fork(
    program: subprocess.Popen[str], tmp_path: Path
) -> None:
    assert running(tmp_path)
    for _ in range(2):  # they live on
        found = {stacks.pid: stacks for stacks in collect(tmp_path, 60.0)}
        assert len(found) == 2
        main = found.pop(program.pid)
        (fork,) = found.values()
        assert main.name.startswith("worker-7: ")
        assert "in holds_the_interpreter" in main.text()
        assert "in waits" in fork.text()
        assert main.text().startswith(f"== {main.name} (process {program.pid})\n\n1 thread:\n")
    assert program.poll() is None


def test_the_file_of_a_process_that_ended_is_removed(
    program: subprocess.Popen[str], tmp_path: Path
) -> None:
    os.killpg(program.pid, signal.SIGKILL)
    program.wait()
    assert collect(tmp_path, 5.0) == []
    assert not running(tmp_path)
    assert [*stacks_folder(tmp_path).iterdir()] == []


def test_a_process_that_does_not_handle_the_signal_never_gets_it(tmp_path: Path) -> None:
    """As when a number is used again, or a process replaces its program."""
    (folder := stacks_folder(tmp_path)).mkdir(parents=True)
    with subprocess.Popen(["sleep", "600"]) as sleeping:
        started = Path(f"/proc/{sleeping.pid}/stat").read_text().split()[21]
        file = folder / f"{socket.gethostname()}-{sleeping.pid}.txt"
        for text in (f"me\nstarted {started}\n", "me\nstarted 1\n", "", "me\n"):
            file.write_text(text)
            assert collect(tmp_path, 0.2) == []
        assert sleeping.poll() is None
        sleeping.kill()


def test_a_process_of_another_machine_is_named(tmp_path: Path) -> None:
    (folder := stacks_folder(tmp_path)).mkdir(parents=True)
    (folder / "node-2-17.txt").write_text("trainer-1\nstarted 5\n")
    (other,) = collect(tmp_path, 0.2)
    assert (other.pid, other.flaw[:10], other.stacks) == (17, "on node-2:", [])
    assert running(tmp_path)
