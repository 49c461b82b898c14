"""A training run over three machines of a network that is slow, loses packets, and breaks.

    python -m tests.network_run FOLDER

Node 1 has Ray's head, the trainer and the server of the agents, nodes 2 and 3 an engine each, and
node 4 the agents. Node 2 is cut off for a minute, and comes back; node 3 dies in the middle of an
update, and another machine gets its address. One JSON object on standard output says what happened,
and how fast the run was beside what arithmetic says; the run's own lines are in FOLDER/run.txt. It
needs root.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from math import sqrt
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from examples.calculator.prepare import prepare
from tests.conftest import ROOT
from tests.network import MSS, Network, NoNetworkError
from tests.network_agent import PORT
from tests.programs import Mark
from turnwise.trajectory import read_jsonl

PROMPTS, SAMPLES, STEPS = 4, 4, 11
PER_STEP = PROMPTS * SAMPLES
HEAD, FIRST, SECOND, AGENTS = 1, 2, 3, 4
DELAY, LOSS = 0.05, 0.01
"""Seconds that a packet takes in the slow network, and the share of packets that it loses."""
CLEAN, SLOW = (2, 3), (4, 5)
"""Steps that are compared; the first one also warms everything up."""
CUT_SECONDS = 60.0
INTO_UPDATE = 4.0
"""Seconds after a step's last trajectory: then a slow update, of about 16, is in progress."""
_RAY_PORT = 6379
_SECONDS = 400.0  # time for whatever is waited for
_ENVIRONMENT = {
    # A head asks for one where a Ray has been started before, and nodes send none by themselves.
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    # No name server answers here, and torch asks for the names of addresses: for 10 s, without it.
    "RES_OPTIONS": "timeout:1 attempts:1",
}


class Machine:
    """A node of the network that is a node of Ray; `resources` are what it offers."""

    def __init__(self, network: Network, node: int, temp: Path, **resources: int) -> None:
        self.mark = Mark()
        where = f"{network.address(HEAD)}:{_RAY_PORT}"
        first = ["--head", f"--port={_RAY_PORT}", "--include-dashboard=false"]
        self.output = Path(temp, f"machine-{node}-{time.monotonic_ns()}.txt")
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [
                    *network.on(node),
                    str(Path(sys.executable).with_name("ray")),
                    "start",
                    *(first if node == HEAD else [f"--address={where}"]),
                    f"--node-ip-address={network.address(node)}",
                    f"--temp-dir={temp / str(node)}",
                    f"--resources={json.dumps(resources)}",
                    *("--num-cpus=2", "--object-store-memory=134217728"),
                    *("--disable-usage-stats", "--include-log-monitor=false", "--block"),
                ],
                cwd=ROOT,
                env=os.environ
                | self.mark.environment
                | _ENVIRONMENT
                | {
                    "PYTHONPATH": str(ROOT),
                    "RAY_worker_niceness": "0",
                    "RAY_prestart_worker_first_driver": "0",
                    "RAY_memory_monitor_refresh_ms": "0",
                    # A node is given up after 160 s: one that is cut off for a minute is not.
                    "RAY_health_check_timeout_ms": "5000",
                    "RAY_health_check_failure_threshold": "20",
                },
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self) -> None:
        try:
            said = self.output.read_text
            until(lambda: "Ray runtime started" in said(), "Ray's start", self.process)
        except RuntimeError as error:
            raise RuntimeError(f"{error}: {self.output.read_text()}") from error

    def engines(self) -> int:
        """Return the number of engines' actors that run here."""
        lines = [" ".join(process.cmdline()) for process in self.mark.processes()]
        return sum("EngineHost" in line for line in lines)

    def kill(self) -> list[int]:
        """End all processes at once; return those that are left."""
        for _ in range(100):
            if not (alive := self.mark.processes()):
                break
            for process in alive:
                process.kill()
            time.sleep(0.05)
        return [process.pid for process in self.mark.processes()]


def until(done: Callable[[], bool], what: str, process: "subprocess.Popen[Any]") -> None:
    """Wait until something is done, while a process runs."""
    ends = time.monotonic() + _SECONDS
    while not done():
        if time.monotonic() > ends:
            raise TimeoutError(f"{what} took more than {_SECONDS:g} s")
        if process.poll() is not None:
            raise RuntimeError(f"{what} did not come: {process.args!r} ended")
        time.sleep(0.05)


class Run:
    """`turnwise train` on the first node, and the agents on the last; see `network_agent`."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.mark = Mark()
        self._folder = folder
        prepare(folder / "toy", train=64, heldout=1)
        config = {
            "name": "network",
            "environment": "examples.calculator.environment:Calculator",
            "output_dir": str(folder / "runs"),
            "ray_address": f"{network.address(HEAD)}:{_RAY_PORT}",
            "model": {"path": str(folder / "toy" / "model"), "max_length": 512},
            "data": {"path": str(folder / "toy" / "train.jsonl")},
            "rollout": {
                "loop": "agent",
                "agent": f"http://{network.address(AGENTS)}:{PORT}/run",
                "prompts_per_step": PROMPTS,
                "stall_timeout": 900,  # a step waits for this program
            },
            "sampling": {"n": SAMPLES, "max_tokens": 64},
            "engine": {"kv_cache_gib": 0.0625},
            "serving": {
                "workers": 2,
                "resources": {"engines": 1},
                "host": network.address(HEAD),
            },
            "weights": {"transport": "collective"},
            "training": {"steps": STEPS, "resources": {"trainers": 1}, "threads": 1},
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        self.folder = folder / "runs" / "network"
        self.permit(0)
        with (folder / "agents.txt").open("w") as output:
            self.agents = subprocess.Popen(
                [
                    *network.on(AGENTS),
                    *(sys.executable, "-m", "tests.network_agent"),
                    *(network.address(AGENTS), str(folder)),
                ],
                cwd=ROOT,
                env=os.environ | self.mark.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        with (folder / "run.txt").open("w") as output:
            self.process = subprocess.Popen(
                [
                    *network.on(HEAD),
                    *(sys.executable, "-m", "turnwise.cli", "train"),
                    str(folder / "config.yaml"),
                ],
                cwd=ROOT,
                env=os.environ | self.mark.environment | _ENVIRONMENT,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def permit(self, steps: int) -> None:
        """Let the groups of so many steps begin."""
        (self._folder / "permitted.new").write_text(str(steps * PROMPTS))
        (self._folder / "permitted.new").rename(self._folder / "permitted")

    def rows(self) -> list[dict[str, Any]]:
        """Return the metrics of all steps but 0."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [row for row in map(json.loads, lines) if row["step"]]

    def do(self, steps: int) -> None:
        """Let the groups of so many steps begin, and wait until the last is trained."""
        self.permit(steps)
        until(lambda: len(self.rows()) >= steps, f"step {steps}", self.process)

    def begin(self, step: int) -> None:
        """Let the groups of a step begin, and wait until some have."""
        self.permit(step)
        begun = self._folder / "begun"
        wanted = (step - 1) * PER_STEP + 2
        until(lambda: len(begun.read_text().split()) >= wanted, f"step {step}", self.process)

    def returns(self) -> list[str]:
        """Return the lines about engines that came back."""
        lines = (self._folder / "run.txt").read_text().splitlines()
        return [line.strip() for line in lines if " and is back after " in line]

    def seconds(self, step: int) -> list[float]:
        """Return the seconds of a step's trajectories, by the agents' clock."""
        played = map(json.loads, (self._folder / "played.jsonl").read_text().splitlines())
        return [one["seconds"] for one in played if one["group"] // PROMPTS == step - 1]

    def trajectories(self, step: int) -> list[Any]:
        return [*read_jsonl(self.folder / "trajectories" / f"step-{step:04}.jsonl")]

    def kill(self) -> list[int]:
        for process in (self.process, self.agents):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        return [process.pid for process in self.mark.left(10.0)]


def play(network: Network, machines: dict[int, Machine], run: Run, temp: Path) -> dict[str, Any]:
    report: dict[str, Any] = {}
    run.do(CLEAN[-1])
    network.set(delay=DELAY, loss=LOSS)
    run.do(SLOW[-1])
    report["switch"] = network.set(delay=0.0, loss=0.0)

    run.begin(6)
    network.set(cut=[FIRST])
    began = time.monotonic()
    run.do(7)
    report["steps_while_cut_off"] = time.monotonic() - began
    time.sleep(max(0.0, began + CUT_SECONDS - time.monotonic()))
    network.set()
    until(lambda: len(run.returns()) == 1, "the return of the engine", run.process)
    report["engine_back_seconds"] = time.monotonic() - began
    run.do(8)

    network.set(delay=DELAY, loss=LOSS)
    run.permit(9)
    until(lambda: len(run.seconds(9)) == PER_STEP, "the trajectories of step 9", run.process)
    time.sleep(INTO_UPDATE)
    network.set(delay=0.0, loss=0.0, cut=[SECOND])
    assert not machines[SECOND].kill()
    run.do(10)
    network.set()
    machines[SECOND] = Machine(network, SECOND, temp, engines=1)
    until(lambda: len(run.returns()) == 2, "the return of the other engine", run.process)
    report["engines_by_machine"] = {node: machines[node].engines() for node in (FIRST, SECOND)}
    run.permit(STEPS)
    report["code"] = run.process.wait(_SECONDS)
    report["returns"] = run.returns()
    return report


def describe(run: Run) -> dict[str, Any]:
    """Return what the run's folder says, and the rates beside those of arithmetic."""
    rows = run.rows()
    keys = ("step", "engines", "trajectories", "dropped", "step_seconds", "weight_update_seconds")
    report: dict[str, Any] = {
        "rows": [{key: row[key] for key in keys} for row in rows],
        "exactness": json.loads((run.folder / "exactness.json").read_text()),
        "played": [
            [(t.problem_id, t.sample_index) for t in run.trajectories(row["step"])] for row in rows
        ],
    }
    round_trip = 2 * DELAY
    turns = fmean(len(t.turns) for step in SLOW for t in run.trajectories(step))
    clean, slow = (
        fmean(seconds for step in steps for seconds in run.seconds(step)) for steps in (CLEAN, SLOW)
    )
    # A connection, a list of models; each turn goes to the server, and from there to an engine.
    by_arithmetic = clean + (2 + 2 * turns) * round_trip
    model = Path(run.folder, "../../toy/model/model.safetensors").stat().st_size
    reno = MSS * sqrt(1.5 / LOSS) / round_trip  # Mathis et al. 1997, of TCP Reno
    update = {row["step"]: row["weight_update_seconds"] for row in rows}
    report["rates"] = {
        "turns_per_trajectory": turns,
        "trajectory_seconds": {"clean": clean, "slow": slow, "slow_by_arithmetic": by_arithmetic},
        "trajectories_per_s": {
            "clean": PER_STEP / clean,
            "slow": PER_STEP / slow,
            "slow_by_arithmetic": PER_STEP / by_arithmetic,
        },
        "update_seconds": {
            "clean": fmean(update[step] for step in CLEAN),
            "slow": fmean(update[step] for step in SLOW),
            "of_the_bytes_by_arithmetic": model / reno,
        },
        "model_bytes": model,
    }
    return report


def main(folder: Path) -> dict[str, Any]:
    with ExitStack() as stack:
        # Short, for the names of sockets in it.
        temp = Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(prefix="tw-", ignore_cleanup_errors=True)
            )
        )
        network = stack.enter_context(Network(AGENTS))
        machines: dict[int, Machine] = {}
        stack.callback(lambda: [machine.kill() for machine in machines.values()])
        for node, offers in ((HEAD, "trainers"), (FIRST, "engines"), (SECOND, "engines")):
            machines[node] = Machine(network, node, temp, **{offers: 1})
            machines[node].wait()  # each alone: Ray gives a node half a minute to start
        run = Run(network, folder)
        try:
            report = play(network, machines, run, temp)
        finally:
            left = run.kill()
        left += [pid for machine in machines.values() for pid in machine.kill()]
        return report | describe(run) | {"left": left}


if __name__ == "__main__":
    try:
        said = main(Path(sys.argv[1]).absolute())
    except NoNetworkError as error:
        said = {"impossible": str(error)}
    sys.stdout.write(json.dumps(said, indent=1) + "\n")
