"""Stacks of a run's processes: of one that is stuck, of its forks, and of nobody else's."""

import asyncio
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
from turnwise.core import stacks
from turnwise.core.aio import run_in_thread
from turnwise.core.stacks import collect, register, stacks_folder

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

RELEASES = """
import ctypes, os, sys, time
from pathlib import Path
from turnwise.core import stacks

def never_ends():
    time.sleep(600)

def holds_the_interpreter_until_a_signal():
    os.write(1, b"ready\\n")
    ctypes.PyDLL(None).sleep(600)
    sys.stdin.read()

stacks._stacks_here = never_ends
stacks.register(Path(sys.argv[1]), "worker-9")
holds_the_interpreter_until_a_signal()
"""

MANY = """
import os, sys, threading
from pathlib import Path
from turnwise.core import stacks

def waits(depth):
    sys.stdin.read() if depth == 0 else waits(depth - 1)

stacks.register(Path(sys.argv[1]), "worker-8")
for _ in range(int(sys.argv[2])):
    threading.Thread(target=waits, args=(90,), daemon=True).start()
os.write(1, b"ready\\n")
waits(90)
"""


@contextlib.contextmanager
def started(
    text: str, folder: Path, ready: int, *arguments: str
) -> Iterator[subprocess.Popen[str]]:
    """A program that says several times that it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-c", text, str(folder), *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    for _ in range(ready):
        assert process.stdout.readline().startswith("ready")
    yield process
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@pytest.fixture
def program(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that is stuck, and its fork, which waits."""
    with started(PROGRAM, tmp_path, 2) as process:
        yield process


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that does not answer is not waited for."""
    monkeypatch.setattr(stacks, "_THREAD_SECONDS", 0.5)


@pytest.fixture
def many(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process whose stacks take long to write."""
    with started(MANY, tmp_path, 1, "80") as process:
        yield process


@pytest.mark.usefixtures("_soon")
def test_a_busy_interpreter_and_its_fork_show_their_stacks(
    program: subprocess.Popen[str], tmp_path: Path
) -> None:
    for _ in range(2):  # they live on
        found = {process.pid: process for process in collect(tmp_path, 60.0)}
        assert len(found) == 2
        main = found.pop(program.pid)
        (fork,) = found.values()
        assert main.name.startswith("worker-7: ")
        assert "in holds_the_interpreter" in main.text()
        assert "in waits" in fork.text()
        assert main.text().startswith(f"== {main.name} (process {program.pid})\n\n1 thread:\n")
    assert program.poll() is None


@pytest.mark.usefixtures("_soon")
def test_a_process_that_answers_again_shows_each_thread_once(tmp_path: Path) -> None:
    with started(RELEASES, tmp_path, 1) as process:
        [found] = collect(tmp_path, 8.0)
        [stack] = found.stacks
        assert (found.pid, stack.splitlines()[0], found.flaw) == (process.pid, "1 thread:", "")


async def test_stacks_are_whole_even_if_their_process_pauses_midway(
    many: subprocess.Popen[str], tmp_path: Path
) -> None:
    """More than the socket holds is written, so that it stops in the middle of them."""
    os.kill(many.pid, signal.SIGSTOP)
    collecting = asyncio.create_task(run_in_thread(lambda: collect(tmp_path, 60.0)))
    await asyncio.sleep(0.05)
    assert not collecting.done(), "answered while it was stopped"
    while not collecting.done():
        os.kill(many.pid, signal.SIGCONT)
        await asyncio.sleep(0.0005)
        os.kill(many.pid, signal.SIGSTOP)
        await asyncio.sleep(0.02)
    os.kill(many.pid, signal.SIGCONT)
    [found] = await collecting
    threads = [int(stack.split()[0]) for stack in found.stacks]
    assert (sum(threads), found.flaw) == (81, ""), found.text()[-500:]


def test_the_main_thread_is_shown_beside_hundreds_of_others(tmp_path: Path) -> None:
    with started(MANY, tmp_path, 1, "250"):
        [found] = collect(tmp_path, 60.0)
        threads = [int(stack.split()[0]) for stack in found.stacks]
        assert (sum(threads), found.flaw) == (251, "")
        assert "in <module>" in found.text()


def test_a_process_that_answers_gets_no_signal(tmp_path: Path) -> None:
    register(tmp_path, "turnwise")
    [file] = stacks_folder(tmp_path).iterdir()
    before = file.read_text()
    [found] = collect(tmp_path, 60.0)
    assert "in test_a_process_that_answers_gets_no_signal" in found.text()
    assert file.read_text() == before


def test_a_process_answers_for_the_run_that_it_registered_last(tmp_path: Path) -> None:
    for run in (tmp_path / "first", tmp_path / "second"):
        register(run, "turnwise")
    [found] = collect(tmp_path / "second", 60.0)
    assert "in test_a_process_answers_for_the_run_that_it_registered_last" in found.text()


def test_the_file_of_a_process_that_ended_is_removed(
    program: subprocess.Popen[str], tmp_path: Path
) -> None:
    os.killpg(program.pid, signal.SIGKILL)
    program.wait()
    assert collect(tmp_path, 5.0) == []
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


def test_files_of_a_host_whose_name_begins_with_ours_stay(tmp_path: Path) -> None:
    (folder := stacks_folder(tmp_path)).mkdir(parents=True)
    other, note = folder / f"{socket.gethostname()}-1-123.txt", folder / "notes.txt"
    for file in (other, note):
        file.write_text("worker-0\nstarted 5\n")
    (found,) = collect(tmp_path, 0.2)
    assert found.flaw.startswith(f"on {socket.gethostname()}-1:")
    assert other.exists()
    assert note.exists()
