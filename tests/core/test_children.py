"""Children: whose fault it is that one does not start, its last words, and the end of its group."""

import asyncio
import errno
import os
import subprocess
import sys
import time

import psutil
import pytest

from turnwise.core.child import (
    TAIL_BYTES,
    Child,
    Requests,
    kill_group,
    lacks_resources,
    start_error,
)
from turnwise.core.untrusted import read_line
from turnwise.errors import InputError, TrajectoryError

LACKS = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)
MISTAKES = (errno.ENOENT, errno.EACCES, errno.ENOEXEC)


@pytest.mark.parametrize("number", LACKS + MISTAKES)
def test_only_a_mistake_ends_the_run_and_only_at_the_first_start(number: int) -> None:
    error = OSError(number, os.strerror(number))
    first = start_error(error, "rollout.agent: x", "agent_error", True)
    later = start_error(error, "rollout.agent: x", "agent_error", False)
    assert type(first) is (InputError if number in MISTAKES else TrajectoryError)
    assert isinstance(later, TrajectoryError)
    assert later.reason == "agent_error"
    assert lacks_resources(error) == (number in LACKS)
    assert os.strerror(number) in str(first)


def test_a_command_line_that_cannot_be_read_is_a_mistake() -> None:
    assert isinstance(start_error(ValueError("no quote"), "x", "agent_error", True), InputError)
    assert lacks_resources(MemoryError())
    assert not lacks_resources(ValueError())


def test_a_group_is_killed_after_its_leader_but_never_anothers() -> None:
    leader = subprocess.Popen(
        ["sh", "-c", "sleep 600 >/dev/null & echo $!"],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert leader.stdout is not None
    left = psutil.Process(int(leader.stdout.readline()))
    leader.wait()
    leader.stdout.close()
    kill_group(leader.pid, reaped=True)
    psutil.wait_procs([left], timeout=60)
    assert not left.is_running() or left.status() == psutil.STATUS_ZOMBIE
    kill_group(leader.pid, reaped=True)  # nothing is left of it
    # Another process that has the number of a child that was waited for.
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1, start_new_session=True)
    kill_group(other.pid, reaped=True)
    assert other.poll() is None
    kill_group(other.pid, reaped=False)
    assert other.wait(60) == -9


async def start(code: str, joined: bool = False) -> Child:
    return await Child.start([sys.executable, "-S", "-c", code], os.environ, joined=joined)


async def test_a_child_says_its_last_words_and_how_it_ended() -> None:
    code = (
        "import sys; print(input()); sys.stderr.write('x' * 10_000_000 + ' the end'); sys.exit(4)"
    )
    for joined in (False, True):
        child = await start(code, joined)
        child.stdin.write(b"a line\n")
        if not joined:
            assert await read_line(child.stdout) == b"a line\n"
        assert await child.exited()
        await child.end(60.0)
        assert child.status == 4
        assert child.last_words.endswith("x the end")
        assert len(child.last_words) == TAIL_BYTES
        await child.end(60.0)


@pytest.mark.parametrize("polite", [True, False])
async def test_a_child_ends_with_all_that_it_started(polite: bool) -> None:
    handler = "lambda *_: sys.exit(7)" if polite else "signal.SIG_IGN"
    code = (
        "import signal, subprocess, sys, time\n"
        f"signal.signal(signal.SIGTERM, {handler})\n"
        "left = subprocess.Popen(['sleep', '600'])\n"
        "print(left.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    child = await start(code)
    left = psutil.Process(int(await read_line(child.stdout)))
    await child.end(60.0, leave=0.1, terminate=60.0 if polite else 0.1)
    assert child.status == (7 if polite else -9)
    psutil.wait_procs([left], timeout=60)
    assert not left.is_running() or left.status() == psutil.STATUS_ZOMBIE


async def test_the_end_does_not_wait_for_those_who_left_the_group() -> None:
    code = (
        "import subprocess\n"
        "print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, flush=True)\n"
    )
    child = await start(code)
    left = psutil.Process(int(await read_line(child.stdout)))
    began = time.monotonic()
    await child.end(0.5, leave=60.0)
    assert time.monotonic() - began < 50
    assert child.status == 0
    left.kill()


def test_children_end_with_the_program_and_not_with_its_forks() -> None:
    code = (
        "import asyncio, os, sys\n"
        "from turnwise.core.child import Child\n"
        "async def main():\n"
        "    child = await Child.start(['sleep', '600'], os.environ)\n"
        "    if (fork := os.fork()) == 0:\n"
        "        sys.exit()\n"
        "    os.waitpid(fork, 0)\n"
        "    os.kill(child.pid, 0)\n"
        "    print(child.pid)\n"
        "    assert child.status is None\n"
        "asyncio.new_event_loop().run_until_complete(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    pid = int(done.stdout)
    ends = time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < ends
        time.sleep(0.01)


async def test_requests_are_answered_once_or_ended() -> None:
    requests = Requests[str]()
    (one, first), (two, second), (three, third) = (requests.begin() for _ in range(3))
    assert requests.resolve(two, "b")
    assert not requests.resolve(two, "again")
    assert requests.resolve(one, TrajectoryError("agent_error", "no"))
    assert not requests.resolve(99, "nobody")
    assert await second == "b"
    with pytest.raises(TrajectoryError, match="no"):
        await first
    assert requests.ended is None
    over = requests.end(TrajectoryError("agent_crashed", "it ended"))
    assert requests.end(TrajectoryError("agent_crashed", "it ended again")) is over
    assert not requests.resolve(three, "late")
    with pytest.raises(TrajectoryError, match=r"it ended$"):
        await asyncio.wait_for(third, 60)
    with pytest.raises(TrajectoryError, match=r"it ended$"):
        requests.begin()
