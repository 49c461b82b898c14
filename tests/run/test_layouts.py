"""Layouts of GPUs, placed by Ray itself on nodes whose GPUs do not exist."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.conftest import ROOT, command_environment

LAYOUTS: dict[str, tuple[int, int, dict[str, Any], list[float], list[float]]] = {
    "1 GPU, colocated": (
        *(1, 1),
        {"training": {"colocated": True}},
        *([1.0], [0.0]),
    ),
    "1 GPU, shared": (1, 1, {}, [0.5], [0.5]),
    "8 GPUs, colocated": (
        *(1, 8),
        {"training": {"ranks": 8, "colocated": True}, "serving": {"workers": 8}},
        *([8.0], [0.0]),
    ),
    "4 + 4": (
        *(1, 8),
        {"training": {"ranks": 4}, "serving": {"workers": 4}},
        *([4.0], [4.0]),
    ),
    "2 nodes x 8, engines apart": (
        *(2, 8),
        {"training": {"ranks": 8}, "serving": {"workers": 8}},
        *([8.0], [8.0]),
    ),
    "TP 2 x 4 engines, 8 ranks": (
        *(2, 8),
        {
            "training": {"ranks": 8},
            "serving": {"workers": 4},
            "engine": {"tensor_parallel_size": 2},
        },
        *([8.0], [8.0]),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_ray_places_the_actors_of_a_layout(name: str) -> None:
    nodes, gpus, tree, ranks, workers = LAYOUTS[name]
    tree = {"model": {"path": "unused"}, **tree}
    done = subprocess.run(
        [sys.executable, "-m", "tests.run.layouts", str(nodes), str(gpus), json.dumps(tree)],
        cwd=ROOT,
        env=command_environment(),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert [sum(found["placed"][0]), sum(found["placed"][1])] == [sum(ranks), sum(workers)]
    assert found["placed"][0] == ranks  # all ranks on one node
    assert found["left"] == 0
