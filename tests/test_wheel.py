"""The wheel as a stranger gets it: built, installed in a fresh environment, and run elsewhere."""

import os
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.test_cli import metrics_of
from turnwise.config import Config, dump_config

ENVIRONMENT = """
class Even:
    \"\"\"Rewards an even number of sampled tokens.\"\"\"

    def __init__(self, row):
        self.problem = [{"role": "user", "content": row["question"]}]
        self.tools = []

    def reward(self, trajectory):
        return float(trajectory.sampled_tokens % 2 == 0)
"""


def run(*command: object, cwd: Path) -> str:
    own = {"HOME", "PATH", "TMPDIR"}
    environment = {k: v for k, v in os.environ.items() if k in own or k.startswith("PIP_")}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_built_wheel_trains_in_a_fresh_environment(
    make_config: Callable[..., Config], tmp_path: Path
) -> None:
    build = (sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path)
    run(*build, ROOT, cwd=tmp_path)
    [wheel] = tmp_path.glob("turnwise-*.whl")
    venv.create(tmp_path / "venv", with_pip=True)
    python, turnwise = tmp_path / "venv/bin/python", tmp_path / "venv/bin/turnwise"
    install = (python, "-m", "pip", "install", "-q", f"{wheel}[cpu]")
    try:
        run(*install, cwd=tmp_path)
    except AssertionError:  # torch for CPUs is not on PyPI
        index = ("--extra-index-url", "https://download.pytorch.org/whl/cpu")
        run(*install, *index, cwd=tmp_path)
    assert run(turnwise, "--version", cwd=tmp_path).startswith("turnwise ")
    page = "from turnwise.viewer.server import static_files; print(static_files()['index.html'])"
    assert "<!doctype html>" in run(python, "-c", page, cwd=tmp_path)

    (tmp_path / "even.py").write_text(ENVIRONMENT)
    config = make_config(
        environment="even:Even",
        output_dir=str(tmp_path / "runs"),
        rollout={"prompts_per_step": 4},
        engine={},
    )
    (tmp_path / "config.yaml").write_text(dump_config(config))
    # An index without torchvision for CPUs gives the one for CUDA; the first sentence says so.
    mixed = ("torchvision", "torchaudio", "torchcodec")
    run(python, "-m", "pip", "uninstall", "-q", "-y", *mixed, cwd=tmp_path)
    run(turnwise, "train", "config.yaml", "training.steps=2", "name=wheel", cwd=tmp_path)
    folder = tmp_path / "runs" / "wheel"
    assert [row["step"] for row in metrics_of(folder)][-1] == 2
    assert not (folder / "tensorboard").exists()  # an extra that was not asked for
    assert not (folder / "reward.png").exists()
