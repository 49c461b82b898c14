"""Children: whose fault it is that one does not start, and the end of its process group."""

import errno
import os
import subprocess
import sys

import psutil
import pytest

from turnwise.core.children import kill_group, lacks_resources, start_error
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
