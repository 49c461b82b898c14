"""How a fleet follows the nodes of a real Ray cluster."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT, command_environment, python


@pytest.mark.slow
def test_engines_come_and_go_with_joining_and_leaving_nodes(tmp_path: Path) -> None:
    """`serving.workers: 1-3`, with one Ray resource for each node."""
    done = subprocess.run(
        [*python(), "-m", "tests.serving.joins", str(tmp_path)],
        cwd=ROOT,
        env=command_environment(),
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.stdout.startswith("{"), done.stderr  # and nothing of Ray's is printed
    told = json.loads(done.stdout)
    assert told["wrong"] == [], "not one token"
    assert told["versions"] == {
        "one node": [1],
        "a node has joined": [1, 1],
        "and an update": [2, 2],
        "it has left": [2],
        "two have joined": [2, 2, 2],
        "scaled to one": [2],
    }
    assert told["free"] == 0
    assert told["given_back"] == 2
    events = told["events"]
    assert events.get("continued", 0) + events.get("moved", 0) > 0, "turns of the node that left"
    assert told["alive"] == []
    assert "could not be restarted" not in done.stderr, "to wait for room is no failure"
