"""Commands that read files, on systems without what Linux alone has."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import cli_elsewhere
from tests.conftest import ROOT
from turnwise.viewer.run_files import demo_runs


@pytest.mark.parametrize("system", cli_elsewhere.ABSENT)
def test_a_run_folder_of_linux_opens_on_another_system(system: str, tmp_path: Path) -> None:
    with demo_runs() as folders:
        shutil.copytree(folders[0], tmp_path / "demo")
    done = subprocess.run(
        [sys.executable, "-m", "tests.cli_elsewhere", system, tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
