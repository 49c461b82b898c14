"""Stacks of a run's processes: of one that is stuck, of its forks, and of nobody else's."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from turnwise.core.aio import run_in_thread
from turnwise.core.stacks import ProcessStacks, collect, register, running, stacks_folder

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
import ctypes, faulthandler, os, sys, time
from pathlib import Path
from turnwise.core import stacks

write = faulthandler.dump_traceback

def never_ends(file, all_threads):
    write(file, all_threads=all_threads)
    time.sleep(600)

def holds_the_interpreter_until_a_signal():
    os.write(1, b"ready\\n")
    ctypes.PyDLL(None).sleep(600)
    sys.stdin.read()

faulthandler.dump_traceback = never_ends
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
def many(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process whose stacks take long to write."""
    with started(MANY, tmp_path, 1, "80") as process:
        yield process


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


def test_a_process_that_begins_a_second_answer_shows_each_thread_once(tmp_path: Path) -> None:
    with started(RELEASES, tmp_path, 1) as process:
        [found] = collect(tmp_path, 8.0)
        [stack] = found.stacks
        assert (found.pid, stack.splitlines()[0], found.flaw) == (process.pid, "1 thread:", "")


async def collect_while_stopped(folder: Path, pid: int) -> tuple[list[ProcessStacks], bool]:
    """The stacks of a process that is stopped while it writes them, and whether that succeeded."""
    collecting = asyncio.create_task(run_in_thread(lambda: collect(folder, 60.0)))
    while not [*stacks_folder(folder).glob(f"*-{pid}.unfinished")] and not collecting.done():
        await asyncio.sleep(0)
    os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(0.3)  # some of the pauses of `collect`
    stopped = not collecting.done()
    os.kill(pid, signal.SIGCONT)
    return await collecting, stopped


async def test_stacks_are_whole_even_if_the_process_pauses_while_it_writes_them(
    many: subprocess.Popen[str], tmp_path: Path
) -> None:
    due = time.monotonic() + 60
    stopped = False
    while not stopped:
        assert time.monotonic() < due, "never stopped while it wrote"
        [found], stopped = await collect_while_stopped(tmp_path, many.pid)
        threads = [int(stack.split()[0]) for stack in found.stacks]
        assert (sum(threads), found.flaw) == (81, ""), found.text()[-500:]


def test_the_main_thread_is_shown_beside_hundreds_of_others(tmp_path: Path) -> None:
    with started(MANY, tmp_path, 1, "250"):
        [found] = collect(tmp_path, 60.0)
        threads = [int(stack.split()[0]) for stack in found.stacks]
        assert (sum(threads), found.flaw) == (251, "")
        assert "in <module>" in found.text()


def test_a_process_answers_for_the_run_that_it_registered_last(tmp_path: Path) -> None:
    for run in (tmp_path / "first", tmp_path / "second"):
        register(run, "turnwise")
    [found] = collect(tmp_path / "second", 60.0)
    assert "in test_a_process_answers_for_the_run_that_it_registered_last" in found.text()
    assert [*stacks_folder(tmp_path / "second").glob("*.answer")], "the signal answered"


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


def test_files_of_a_host_whose_name_begins_with_ours_stay(tmp_path: Path) -> None:
    (folder := stacks_folder(tmp_path)).mkdir(parents=True)
    other, note = folder / f"{socket.gethostname()}-1-123.txt", folder / "notes.txt"
    for file in (other, note):
        file.write_text("worker-0\nstarted 5\n")
    (found,) = collect(tmp_path, 0.2)
    assert found.flaw.startswith(f"on {socket.gethostname()}-1:")
    assert other.exists()
    assert note.exists()
