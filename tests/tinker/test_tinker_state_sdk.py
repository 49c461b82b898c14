"""Tinker's official SDK, unmodified, while `turnwise tinker` is killed and started again."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, own_environment
from tests.tinker.test_tinker_sdk import sdk as sdk
from turnwise.viewer.run_files import ViewedRun

FILES = ["adapter_config.json", "adapter_model.safetensors"]


def start(model_path: str, folder: Path, port: int, log: Path) -> "subprocess.Popen[bytes]":
    """Start the command in a process group of its own; return once it serves."""
    command = [sys.executable, "-m", "turnwise.cli", "tinker", "--model", model_path]
    changes = ["model.max_length=128", f"output_dir={folder}", "training.threads=1"]
    with log.open("w") as file:
        server = subprocess.Popen(
            [*command, "--port", str(port), *changes],
            cwd=ROOT,
            env=own_environment(),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    ends = time.monotonic() + 300
    while "TINKER_BASE_URL=" not in log.read_text():
        assert server.poll() is None, log.read_text()
        assert time.monotonic() < ends, log.read_text()
        time.sleep(0.05)
    return server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tinker_state")


def seen_by_clients(model_path: str, folder: Path, sdk: dict[str, str]) -> list[dict[str, Any]]:
    """Kill a server under eight clients, start another one, and return what each client saw."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = start(model_path, folder, port, folder / "first.log")
    program = ROOT / "tests" / "tinker" / "sdk_state_program.py"
    url = f"http://127.0.0.1:{port}"
    with (folder / "program.log").open("w") as errors:
        running = subprocess.Popen(
            [sys.executable, str(program), url, model_path, str(folder / "downloads")],
            env=sdk,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    assert running.stdout is not None
    try:
        line = running.stdout.readline()
        assert line == "saved\n", (folder / "program.log").read_text()
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(60)
        server = start(model_path, folder, port, folder / "second.log")
        stdout, _ = running.communicate("\n", timeout=600)
        assert running.returncode == 0, (folder / "program.log").read_text()
        found: list[dict[str, Any]] = json.loads(stdout.splitlines()[-1])
        return found
    finally:
        running.kill()
        server.send_signal(signal.SIGINT)
        server.wait(120)


@pytest.fixture(scope="module")
def seen(sdk: dict[str, str], model_path: str, folder: Path) -> list[dict[str, Any]]:
    return seen_by_clients(model_path, folder, sdk)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_samplers_and_saved_training_go_on_after_a_kill(
    seen: list[dict[str, Any]],
) -> None:
    assert len(seen) == 8
    for each in seen:
        assert each["sampled"] == 4
        assert each["passed"] != "no error"
        assert each["after"] == each["before"]
        assert each["lost"].startswith("NotFoundError")
        assert "create_training_client_from_state" in each["lost"]
        assert each["resumed"] == each["expected"]
        assert each["fresh"][0] == each["expected"][0]
        assert each["fresh"][1] != each["expected"][1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_states_are_managed_and_downloaded(seen: list[dict[str, Any]]) -> None:
    states = seen[0]["states"]
    assert states["run"] == [4, {"renderer_name": "r"}, True]
    assert states["kinds"] == ["sampler", "training"]
    assert (states["runs"], states["own"]) == (1, 2)
    assert states["kept"]
    assert states["info"] == [True, 4]
    assert states["deleted"].startswith("NotFoundError")
    assert states["external"] == FILES
    assert "encrypts no files" in states["encrypted"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_viewer_reads_the_run_of_each_model(seen: list[dict[str, Any]], folder: Path) -> None:
    runs = [path.parent for path in folder.glob("tinker/tinker/*/metrics.jsonl")]
    steps = [[row["step"] for row in ViewedRun(run, "client").rows()["rows"]] for run in runs]
    assert sorted(steps) == [[1, 2, 3, 4, 5]] * 8 + [[4, 5]] * 16
