"""The GPU kit on a CPU: lines that fail stop no other, and the page says what was never run."""

import json
import os
import subprocess
import sys
import tarfile
import time
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from benchmarks.gpu import __main__ as kits
from benchmarks.gpu import page as pages
from benchmarks.gpu.lines import LINES, Line, Row
from benchmarks.gpu.pack import COMMIT, LIMIT, files, pack
from benchmarks.gpu.page import page
from benchmarks.gpu.runner import preload, run_line, run_lines
from tests.conftest import ROOT

SHM = "weights by shm, two processes"
CHECKS = "tests.benchmarks.gpu_lines"


def kit(*options: str, path: str = "", seconds: float = 300) -> subprocess.CompletedProcess[str]:
    """Run the kit on the CPU; what is on `path` comes before installed packages."""
    path = f"{path}:{ROOT / 'src'}:{ROOT}"
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path.lstrip(":"), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=seconds,
    )


def test_light_lines_run_on_a_cpu_with_few_packages_and_say_so(tmp_path: Path) -> None:
    for package in ("pydantic", "yaml", "ray", "vllm", "transformers"):
        (tmp_path / f"{package}.py").write_text("raise ImportError('not here')")
    light = [line for line in LINES if line.light]
    assert len(light) > 5
    done = kit("--only", *(line.name for line in light), "--save", path=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NO GPU: every line ran its logic on the CPU" in done.stdout
    assert "not saved" in done.stdout
    rows = sum(len(line.rows) for line in light)
    assert f"{rows} pass, 0 fail, 0 not run" in done.stdout


def test_a_line_of_the_training_plane_gives_its_figure(tmp_path: Path) -> None:
    import torch

    from benchmarks.gpu.device import Place
    from benchmarks.gpu.training import step

    (figure,) = step(Place(torch.device("cpu"), True, tmp_path, tmp_path))
    assert "tokens/s, process's peak" in figure


@pytest.mark.slow
def test_every_line_runs_its_logic_on_a_cpu() -> None:
    done = kit(seconds=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{sum(len(line.rows) for line in LINES)} pass, 0 fail, 0 not run" in done.stdout


def line_of(name: str, *rows: str, seconds: float = 60.0, needs: tuple[str, ...] = ()) -> Line:
    return Line(name, rows or (name,), f"{CHECKS}:{name}", needs, seconds)


def test_a_line_that_fails_dies_or_hangs_stops_no_other(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = [
        line_of("fails", "first", "second", "third"),
        line_of("dies"),
        line_of("hangs", seconds=1.0),
        line_of("has_no_second", "first", "second"),
        line_of("lacks", needs=("surely_not_installed",)),
        line_of("passes"),
    ]
    shown: list[Row] = []
    preload(lines)
    run_line(line_of("passes"), tmp_path, tiny=True)  # the imports are not counted below
    rows = run_lines(lines, tmp_path, tiny=True, at_once=6, show=shown.append)
    assert shown == rows
    assert [(row.line, row.status, row.figure) for row in rows] == [
        ("fails", "pass", "1 of 2"),
        ("fails", "fail", "CheckFailed: 1 is not more than 2"),
        ("fails", "not run", "the line above failed"),
        ("dies", "fail", "its process ended with exit code 7"),
        ("hangs", "fail", "not done within 1 s"),
        ("has_no_second", "pass", "1 GPU"),
        ("has_no_second", "not run", "there is one GPU"),
        ("lacks", "not run", "surely_not_installed is not installed"),
        ("passes", "pass", "cpu"),
    ]
    said = capfd.readouterr()
    assert "not for the table" not in said.out
    assert "CheckFailed: 1 is not more than 2" in said.err
    left = int((tmp_path / "hangs" / "pid").read_text())
    deadline = time.monotonic() + 60
    while not has_ended(left):  # it was killed, and takes a moment to go
        assert time.monotonic() < deadline
        time.sleep(0.01)


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or only waits for its parent to take note."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_the_page_of_the_docs_is_made_of_the_newest_results() -> None:
    assert page() in (ROOT / "docs" / "how-to" / "gpus.md").read_text()


def test_without_results_every_line_was_never_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    text = page()
    assert text.startswith("Never run on a GPU.")
    assert text.count("| never run |") == sum(len(line.rows) for line in LINES)


def test_results_of_a_gpu_show_their_figures() -> None:
    row = asdict(Row("shm", SHM, "pass", "2 GB/s", 1.0))
    facts = {"device": "NVIDIA H200", "gpus": 1, "versions": {"torch": "2.11.0"}}
    text = page({"date": "2026-12-01", "commit": "abc", "rows": [row], **facts})
    assert text.startswith("Run on 2026-12-01 on 1 x NVIDIA H200 with torch 2.11.0, at commit abc")
    assert f"| `shm` | {SHM} | pass | 2 GB/s |" in text
    assert text.count("| never run |") == sum(len(line.rows) for line in LINES) - 1


def test_results_at_the_same_commit_join_the_earlier_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kits, "RESULTS", tmp_path)
    monkeypatch.setattr(kits, "commit", lambda: "abc")
    facts = {"device": "NVIDIA H200", "gpus": 1, "versions": {"torch": "2.11.0"}}
    for figure in ("2 GB/s", "3 GB/s"):
        kits.save(facts, Row("shm", SHM, "pass", figure, 1.0))
    kits.save(facts, Row("in_process", "weights in one process", "pass", "4 GB/s", 1.0))
    (path,) = tmp_path.iterdir()
    rows = json.loads(path.read_text())["rows"]
    assert [row["figure"] for row in rows] == ["3 GB/s", "4 GB/s"]
    monkeypatch.setattr(kits, "commit", lambda: "abd")
    kits.save(facts, Row("shm", SHM, "pass", "5 GB/s", 1.0))
    assert [row["figure"] for row in json.loads(path.read_text())["rows"]] == ["5 GB/s"]


def test_the_pack_fits_and_holds_every_line(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("the pack is made of tracked files")
    path = tmp_path / "kit.tar.gz"
    pack(path)
    assert path.stat().st_size < LIMIT
    with tarfile.open(path) as archive:
        names = set(archive.getnames())
    assert {f"turnwise/{name}" for name in (*files(), COMMIT)} == names
    for name in ("Makefile", "src/turnwise/training/rank.py", "benchmarks/gpu/__main__.py"):
        assert f"turnwise/{name}" in names
