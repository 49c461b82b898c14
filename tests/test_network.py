"""A run over several machines whose network is slow, loses packets, is cut, and loses a machine.

The machines are network namespaces of this one. Where there can be none, the tests say why.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.network import Network, NoNetworkError
from tests.network_run import PER_STEP, STEPS

ECHO = """
import socket, sys
listening = socket.create_server((sys.argv[1], 9000))
print("listens", flush=True)
while True:
    connection, _ = listening.accept()
    while received := connection.recv(1000):
        connection.sendall(received)
"""
ASK = """
import socket, sys, time
started = time.monotonic()
with socket.create_connection((sys.argv[1], 9000), float(sys.argv[2])) as connection:
    connection.sendall(b"x")
    assert connection.recv(1) == b"x"
print(time.monotonic() - started)
"""


@pytest.fixture
def network() -> Iterator[Network]:
    try:
        made = Network(2)
    except NoNetworkError as error:
        pytest.skip(str(error))
    with made:
        yield made


def test_packets_take_their_time_and_none_passes_a_cut(network: Network) -> None:
    address = network.address(2)

    def python(node: int, *arguments: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [*network.on(node), sys.executable, "-c", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ask(seconds: float) -> tuple[str, str]:
        with python(1, ASK, address, str(seconds)) as asking:
            return asking.communicate()

    with python(2, ECHO, address) as echo:
        assert echo.stdout is not None
        assert echo.stdout.readline() == "listens\n"
        network.set(delay=0.05)
        said, failed = ask(60)
        assert float(said) >= 4 * 0.05, failed  # to connect, and to ask
        network.set(delay=0.0, cut=[2])
        assert "TimeoutError: timed out" in ask(0.5)[1]
        assert network.set()["cut"] > 0
        said, failed = ask(60)
        assert said, failed
        network.set(loss=1.0)
        assert "TimeoutError: timed out" in ask(0.5)[1]
        assert network.set()["lost"] > 0
        echo.kill()


@pytest.mark.slow
def test_a_slow_or_cut_network_or_a_dead_machine_loses_nothing(
    tmp_path: Path,
) -> None:
    """Engines on two machines, agents on another, and `weights.transport: collective`."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.network_run", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1500,
    )
    lines = tmp_path / "run.txt"
    assert done.returncode == 0, done.stderr + (lines.read_text() if lines.exists() else "")
    said = json.loads(done.stdout)
    if "impossible" in said:
        pytest.skip(said["impossible"])
    sys.stdout.write(done.stdout)
    assert said["code"] == 0, lines.read_text()
    assert [row["step"] for row in said["rows"]] == [*range(1, STEPS + 1)]
    for row in said["rows"]:
        assert row["trajectories"] + sum(row["dropped"].values()) == PER_STEP, row
    for row, played in zip(said["rows"], said["played"], strict=True):
        assert len({(problem, sample) for problem, sample in played}) == len(played), row
        assert len(played) == row["trajectories"], row
    engines = [row["engines"] for row in said["rows"]]
    assert engines == [2, 2, 2, 2, 2, 1, 1, 2, 1, 1, 2]
    assert said["exactness"]["tokens_trained"] > 0
    assert (said["exactness"]["violations"], said["exactness"]["exact_percent"]) == (0, 100.0)
    assert len(said["returns"]) == 2
    assert said["engines_by_machine"] == {"2": 1, "3": 1}, "an engine of before runs on"
    assert said["left"] == []
