"""A short run of the soak test, on real engines."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT


@pytest.mark.slow
def test_a_short_soak_loses_nothing(tmp_path: Path) -> None:
    out = tmp_path / "claims.json"
    command = [sys.executable, "-m", "benchmarks.soak", "--minutes", "0.5", "--every", "5"]
    command += ["--json", str(out), "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    claims = {claim["name"]: claim for claim in json.loads(out.read_text())}
    assert claims["kills"]["ours"][0] >= 1
    assert claims["sessions audited"]["ours"][0] >= 1
    assert claims["trajectories asked for"]["ours"][0] >= 32
