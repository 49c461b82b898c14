"""How a fleet takes real deaths: the memory monitor's, a node's, and that of Ray's head."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT, command_environment, python


@pytest.mark.slow
def test_a_fleet_outlives_oom_and_a_lost_node_and_ends_with_ray(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [*python(), "-m", "tests.serving.deaths", str(tmp_path)],
        cwd=ROOT,
        env=command_environment(),
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.stdout.startswith("{"), done.stderr  # and nothing of Ray's is printed
    told = json.loads(done.stdout)
    # The monitor may kill more than once while others on the machine take memory.
    assert set(told["memory"]) >= {told["killed"]}
    of_removed = [why for why in told["node"] if f"the process of {told['removed']} died (" in why]
    assert of_removed, told["node"]
    lost = of_removed[0]  # which of the two Ray finds first is chance
    assert lost.endswith(("(its node is gone)", "(it cannot be reached)"))
    assert f"{told['removed']} waits for room in the cluster: its node is gone" in done.stderr
    for why in (told["killed"], lost):
        lines = [line for line in done.stderr.splitlines() if f"failed ({why})" in line]
        assert len(lines) == [*told["memory"], *told["node"]].count(why)
        assert all("and is back after" in line for line in lines)
    # Two workers, then one of them and the other's next life: four numbers, one of them twice.
    assert told["seeds"][:2] == [0, 1], "each worker and each life has its own seed"
    assert told["memory"][1:] or len(set(told["seeds"])) == 3
    assert told["seeds"][2] != told["seeds"][3]
    assert told["wrong"] == []
    assert told["continued"] > 0
    assert "Ray's head process (gcs_server at " in told["head"]
    assert told["head_seconds"] < 20
    assert told["alive"] == []
    assert {p.name for p in tmp_path.rglob("*.log")} == {"worker-0.log", "worker-1.log"}
