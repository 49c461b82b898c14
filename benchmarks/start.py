"""Start-up time: `python -m benchmarks.start [--quick]`.

Wall time, and processor time of all processes together, from the command to the first token: of
`turnwise serve`, and of vLLM's own API server with the same model, context, cache and memory.
`turnwise train` is measured until its first trajectory is done, which includes the trainer and the
first weight update. The three take turns; goals are ratios to the same time of vLLM's server in the
same round.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.models import make_model
from benchmarks.report import Claim, parser, quotients, report

MAX_LENGTH = 512
DEADLINE = 180.0
"""Deadline of a start, in seconds."""
POLL = 0.05


class Stamp:
    """An environment that creates a file when a trajectory is done."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.problem = [{"role": "user", "content": row["question"]}]
        self.tools: list[Any] = []

    def reward(self, trajectory: Any) -> float:
        Path(os.environ["BENCHMARK_STAMP"]).touch()
        return float(sum(trajectory.turns[-1].completion_token_ids) % 2)


@dataclass
class Measured:
    """Start-up times of one command in seconds, one value per round."""

    wall: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)


def measure(command: list[str], ready: Callable[[], bool], folder: Path, into: Measured) -> None:
    """Run a command until it is ready, note its times, and end it.

    Raises:
        RuntimeError: when it ends earlier, or is not ready in time; with the end of its output.
    """
    environment = os.environ | {
        "BENCHMARK_STAMP": str(folder / "stamp"),
        "PYTHONDONTWRITEBYTECODE": "",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    environment.pop("TURNWISE_FORK_SERVER", None)  # share nothing with other programs
    log = folder / "log"
    with log.open("w") as output:
        began = time.perf_counter()
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            while not ready():
                if process.poll() is not None or time.perf_counter() - began > DEADLINE:
                    end = log.read_text(errors="replace")[-2000:]
                    raise RuntimeError(f"{' '.join(command)} is not ready: {end}")
                time.sleep(POLL)
            into.wall.append(time.perf_counter() - began)
            into.processor.append(processor_seconds(process.pid))
        finally:
            running = process.poll() is None
            below = psutil.Process(process.pid).children(recursive=True) if running else []
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            for left in [*below, process]:
                with suppress(psutil.NoSuchProcess):
                    left.kill()
            process.wait()


def processor_seconds(pid: int) -> float:
    """Return the processor time of a process and its descendants, ended ones included."""
    total = 0.0
    root = psutil.Process(pid)
    for each in (root, *root.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times = each.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def gives_a_token(port: int, model: Path) -> Callable[[], bool]:
    """Return a function that returns whether the server at this port completes a prompt."""
    body = json.dumps({"model": str(model), "prompt": "1", "max_tokens": 1}).encode()

    def ask() -> bool:
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return json.loads(answer.read())["usage"]["completion_tokens"] == 1
        except (urllib.error.URLError, OSError):
            return False

    return ask


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(rounds: int, folder: Path) -> list[Claim]:
    model = make_model("0.7 M", folder)
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": f"{n}?"}) + "\n" for n in range(64)))
    config = folder / "config.yaml"
    tree = {
        "environment": "benchmarks.start:Stamp",
        "output_dir": str(folder / "runs"),
        "model": {"path": str(model), "max_length": MAX_LENGTH},
        "data": {"path": str(rows)},
        "sampling": {"n": 4, "max_tokens": 16},
        "eval": {"every": 0},
        "engine": {"kv_cache_gib": 1},
    }
    config.write_text(yaml.safe_dump(tree))
    turnwise = [sys.executable, "-m", "turnwise.cli"]
    serve, train, vllm = Measured(), Measured(), Measured()
    for number in range(rounds):
        port = free_port()
        server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        server += ["--model", str(model), "--dtype", "float32", "--port", str(port)]
        server += ["--max-model-len", str(MAX_LENGTH), "--enforce-eager"]
        measure(server, gives_a_token(port, model), folder, vllm)
        port = free_port()
        command = [*turnwise, "serve", str(config), f"serving.port={port}"]
        measure(command, gives_a_token(port, model), folder, serve)
        stamp = folder / "stamp"
        stamp.unlink(missing_ok=True)
        command = [*turnwise, "train", str(config), f"name=round{number}", "training.steps=1000"]
        measure(command, stamp.exists, folder, train)
    against = "vLLM's own server"
    return [
        claim
        for name, goal, processor, ours in (
            ("turnwise serve to its first token", 1.0, 1.3, serve),
            ("turnwise train to its first trajectory", 1.3, 2.0, train),
        )
        for claim in (
            Claim(
                name, "s", ours.wall, against, vllm.wall, quotients(ours.wall, vllm.wall),
                at_most=goal,
            ),
            Claim(
                f"processor time of {name}", "s", ours.processor, against, vllm.processor,
                quotients(ours.processor, vllm.processor), at_most=processor,
            ),
        )
    ]  # fmt: skip


def main() -> None:
    """Run the benchmark and print its claims."""
    made = parser("start", __doc__)
    made.add_argument("--rounds", type=int, default=1)
    options = made.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report(run(1 if options.quick else options.rounds, Path(folder)), options)


if __name__ == "__main__":
    main()
