"""The wheel and the sdist as a stranger gets them: built, installed in a fresh environment, and run
outside of a clone."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.test_cli import metrics_of


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
@pytest.mark.parametrize(("kind", "pattern"), [("wheel", "*.whl"), ("sdist", "*.tar.gz")])
def test_a_release_trains_a_new_project_in_a_fresh_environment(
    kind: str, pattern: str, model_path: str, tmp_path: Path
) -> None:
    build = (sys.executable, "-m", "build", "--no-isolation", f"--{kind}", "--outdir", tmp_path)
    run(*build, ROOT, cwd=tmp_path)
    [release] = tmp_path.glob(f"turnwise-{pattern}")
    venv.create(tmp_path / "venv", with_pip=True)
    python, turnwise = tmp_path / "venv/bin/python", tmp_path / "venv/bin/turnwise"
    install = (python, "-m", "pip", "install", "-q", f"{release}[cpu]")
    try:
        run(*install, cwd=tmp_path)
    except AssertionError:  # torch for CPUs is not on PyPI
        index = ("--extra-index-url", "https://download.pytorch.org/whl/cpu")
        run(*install, *index, cwd=tmp_path)
    assert run(turnwise, "--version", cwd=tmp_path).startswith("turnwise ")
    assert "docs/how-to/stuck-run.md" in run(turnwise, "docs", "the", "run", "hangs", cwd=tmp_path)
    page = "from turnwise.viewer.server import static_files; print(static_files()['index.html'])"
    assert "<!doctype html>" in run(python, "-c", page, cwd=tmp_path)

    # An index without torchvision for CPUs gives the one for CUDA; the first sentence says so.
    mixed = ("torchvision", "torchaudio", "torchcodec")
    run(python, "-m", "pip", "uninstall", "-q", "-y", *mixed, cwd=tmp_path)
    run(turnwise, "init", "project", "--model", model_path, cwd=tmp_path)
    project = tmp_path / "project"
    small = ("model.max_length=512", "sampling.max_tokens=16", "rollout.prompts_per_step=4")
    run(turnwise, "train", "config.yaml", "training.steps=2", *small, cwd=project)
    folder = project / "runs" / "project"
    assert [row["step"] for row in metrics_of(folder)][-1] == 2
    assert not (folder / "tensorboard").exists()  # an extra that was not asked for
    assert not (folder / "reward.png").exists()
