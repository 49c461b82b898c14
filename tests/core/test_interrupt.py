"""Signals: a command that runs user code which never ends, in a process without vLLM and Ray."""

import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.conftest import ROOT, command_environment

PROGRAM = """
import asyncio, concurrent.futures, contextlib, subprocess, sys, time
from turnwise.cli import command as running
from turnwise.core import user_code as tasks
from turnwise.core import interrupt
from turnwise.core.user_code import call_user_code, run_abandonable
from turnwise.errors import DeadlineError

def nap():
    print("begun", flush=True)
    time.sleep(600)

async def block():
    nap()

async def swallow():
    print("begun", flush=True)
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.05)

async def to_thread():
    await asyncio.to_thread(nap)

async def command():
    how = sys.argv[1]
    if not how.startswith("thread of a"):
        subprocess.Popen(["sleep", "600"])
    if how == "thread of a tool":
        with contextlib.suppress(DeadlineError):
            await call_user_code(to_thread, name="the tool search", seconds=1)
    elif how == "thread of a loop":
        with contextlib.suppress(DeadlineError):
            await run_abandonable(to_thread, name="the loop of mine", seconds=1)
    elif how == "thread of a library":
        await asyncio.get_running_loop().run_in_executor(None, print, "begun")
        concurrent.futures.ThreadPoolExecutor(1).submit(nap)
    elif how == "thread":
        await call_user_code(nap, name="the tool nap", seconds=600)
    elif how == "loop":
        await call_user_code(block, name="the environment's reward", seconds=600)
    elif how == "swallow":
        await run_abandonable(swallow, name="the loop of mine", seconds=600)
    elif how == "main":
        await block()
    elif how.startswith("saves"):
        interrupt.SAVE_SECONDS = 1.0 if how == "saves late" else 300.0
        with interrupt.Ending(lambda: how != "saves nothing") as ending:
            print("begun", flush=True)
            await ending.asked.wait()
            print("saving", file=sys.stderr, flush=True)
            await asyncio.sleep(0.3 if how == "saves" else 600)
            await ending.finished()
    elif how == "leaves":
        with contextlib.suppress(TimeoutError):
            loop = run_abandonable(swallow, name="the loop of mine", seconds=600)
            await asyncio.wait_for(loop, 1.0)

async def never_ends():
    try:
        await command()
    finally:
        if sys.argv[1] == "stubborn":
            await swallow()

interrupt.PATIENCE_SECONDS = 3.0 if sys.argv[1] == "stubborn" else 300.0
tasks.GRACE_SECONDS = 0.5
running._END_SECONDS = 1.0
running._EXIT_SECONDS = 1.0 if sys.argv[1] == "thread of a library" else 300.0
running.run_to_the_end(
    lambda: sys.exit(asyncio.run(running._exit_code(never_ends(), None)))
)
"""


def command(how: str, *signals: signal.Signals, until_it_ends: bool = False) -> tuple[int, str]:
    """The exit code, and what was said.

    Args:
        until_it_ends: Send the signals again and again: of two of a kind that reach a process
            before it runs again, it sees one.
    """
    running = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, how],
        cwd=ROOT,
        env=command_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stdout is not None
    begun = running.stdout.readline()
    assert begun == "begun\n", running.communicate(timeout=120)
    below = psutil.Process(running.pid).children(recursive=True)
    assert below or how.startswith("thread of a")
    for number in signals:
        running.send_signal(number)
    while until_it_ends and running.poll() is None:
        time.sleep(0.3)
        running.send_signal(signals[0])
    _, said = running.communicate(timeout=120)
    _, alive = psutil.wait_procs(below, timeout=60)
    for process in alive:
        process.kill()
    assert not alive or not signals
    return running.returncode, said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_ends_the_rest_and_names_stuck_calls(
    number: signal.Signals,
) -> None:
    code, said = command("thread", number)
    assert code == 130
    assert said == (
        "turnwise: interrupted; everything it started has ended, but 1 call has not returned: "
        "the tool nap\n"
    )


ENDED = "turnwise: interrupted; everything it started has ended\n"


@pytest.mark.parametrize(
    ("how", "number"),
    [("saves", signal.SIGTERM), ("saves late", signal.SIGINT), ("saves nothing", signal.SIGTERM)],
)
def test_a_cancelled_run_saves_first_if_it_can_in_time(how: str, number: signal.Signals) -> None:
    code, said = command(how, number)
    assert code == 130
    assert said == ("" if how == "saves nothing" else "saving\n") + ENDED


def test_a_second_signal_does_not_wait_for_what_is_being_saved() -> None:
    code, said = command("saves for ever", signal.SIGINT, until_it_ends=True)
    assert code == 130
    assert said == "saving\nturnwise: interrupted twice; everything it started was killed\n"


CALL = """
import asyncio, signal, sys
from turnwise.core.interrupt import Ending, exit_on_sigterm
from turnwise.core.loop_thread import EventLoopThread
from contextlib import nullcontext

async def run():
    with Ending(lambda: True) as ending:
        print("begun", flush=True)
        await ending.asked.wait()
        print("saving", file=sys.stderr, flush=True)
        await asyncio.sleep(600 if "slow" in sys.argv else 0.3)
        print("saved", file=sys.stderr, flush=True)
        await ending.finished()

if "own" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("mine"))
thread = EventLoopThread(nullcontext, "the run")
thread.start(30)
try:
    with exit_on_sigterm():
        thread.call(run, 600, "the run")
except BaseException as error:
    thread.leave(10, error)
    print(type(error).__name__, error, file=sys.stderr, flush=True)
print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, file=sys.stderr)
"""


def call(*arguments: str, signals: tuple[signal.Signals, ...]) -> str:
    """The output of a program that is interrupted in a plain call."""
    running = subprocess.Popen(
        [sys.executable, "-c", CALL, *arguments],
        cwd=ROOT,
        env=command_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stdout is not None
    assert running.stderr is not None
    assert running.stdout.readline() == "begun\n"
    running.send_signal(signals[0])
    said = running.stderr.readline()
    assert said == "saving\n"
    for number in signals[1:]:
        running.send_signal(number)
    _, rest = running.communicate(timeout=60)
    return said + rest


def test_a_programs_call_lets_the_run_save_before_it_raises() -> None:
    assert call(signals=(signal.SIGINT,)) == "saving\nsaved\nKeyboardInterrupt \nTrue\n"
    assert call(signals=(signal.SIGTERM,)) == "saving\nsaved\nSystemExit 143\nTrue\n"
    assert call("own", signals=(signal.SIGTERM,)) == "saving\nsaved\nSystemExit mine\nFalse\n"


def test_a_second_signal_ends_a_programs_call_at_once() -> None:
    said = call("slow", signals=(signal.SIGINT, signal.SIGINT))
    assert said == "saving\nKeyboardInterrupt \nTrue\n"


def test_a_coroutine_that_blocks_is_named_with_its_line() -> None:
    code, said = command("loop", signal.SIGINT)
    assert code == 130
    assert "everything it started has ended, but 1 call has not returned: the env" in said


def test_a_task_that_swallows_its_cancellation_is_left_behind() -> None:
    code, said = command("swallow", signal.SIGTERM)
    assert code == 130
    assert "everything it started has ended, but 1 call has not returned: the loop of mine" in said


def test_what_does_not_end_is_ended_by_force_in_time() -> None:
    code, said = command("stubborn", signal.SIGTERM)
    assert code == 130
    assert said == "turnwise: interrupted; it did not end within 3 s and was killed\n"


def test_a_second_signal_ends_even_a_stuck_event_loop_at_once() -> None:
    code, said = command("main", signal.SIGINT, until_it_ends=True)
    assert code == 130
    assert said == "turnwise: interrupted twice; everything it started was killed\n"


def test_a_finished_command_ends_despite_running_user_code() -> None:
    code, said = command("leaves")
    assert code == 0
    assert said == "turnwise: 1 call has not returned: the loop of mine\n"


@pytest.mark.parametrize(
    ("where", "who"), [("tool", "the tool search"), ("loop", "the loop of mine")]
)
def test_no_end_waits_for_a_thread_that_user_code_began(where: str, who: str) -> None:
    """Neither `asyncio.run` nor `concurrent.futures` joins a thread of `asyncio.to_thread`."""
    code, said = command(f"thread of a {where}")
    assert code == 0
    assert said.startswith(f"turnwise: 1 call has not returned: a thread of {who}")


def test_an_exit_held_up_by_a_librarys_thread_is_forced() -> None:
    code, said = command("thread of a library")
    assert code == 0
    assert said == "turnwise: what it left behind did not end within 1 s and was killed\n"


API = """
import asyncio, contextlib, sys, time
from turnwise.core import loop_thread
from turnwise.core import user_code as tasks
from turnwise.core.user_code import call_user_code, run_abandonable
from turnwise.errors import DeadlineError
from turnwise.run.api import run_command

async def to_thread():
    await asyncio.to_thread(time.sleep, 600)

async def swallow():
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.05)

async def train():
    for hangs in (to_thread, swallow):
        with contextlib.suppress(DeadlineError):
            await run_abandonable(hangs, name="the loop of mine", seconds=0.5)
        with contextlib.suppress(DeadlineError):
            await call_user_code(hangs, name="the tool search", seconds=0.5)
    return "the result"

tasks.GRACE_SECONDS = loop_thread._LEFT_SECONDS = 0.2
print(run_command(train, "the training run"))
"""


def test_a_program_gets_its_result_despite_running_user_code() -> None:
    done = subprocess.run(
        [sys.executable, "-c", API],
        cwd=ROOT,
        env=command_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == "the result\n"
    assert "the training run has ended, but 4 calls have not returned" in done.stderr
