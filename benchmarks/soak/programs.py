"""The programs of the soak test, their processes by role, and clients that are started again."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parent.parent.parent
TURNWISE = Path(sys.executable).with_name("turnwise")
START_SECONDS = 600.0
END_SECONDS = 120.0
ROLES = {
    "ray::FrontProcess": "rollout process",
    "EngineCore": "engine",
    "ray::TrainerActor": "rank",
    "ray::EngineHost": "worker",
    "ray::ServingHost": "worker",
    "ray::": "actor",
    "environment_host": "environment",
    "turnwise.core.fork_server": "fork server",
    "raylet": "raylet",
    "gcs_server": "gcs",
    "turnwise": "driver",
}
"""Roles of processes, by a part of their command line; the first match counts."""


def role_of(process: psutil.Process) -> str:
    """Return the role of a process."""
    line = " ".join(process.cmdline())
    role = next((role for part, role in ROLES.items() if part in line), "other")
    if role == "environment" and "environment_host" not in " ".join(process.parent().cmdline()):
        return "environment server"
    return role


class Program:
    """A running program, with its output in a file.

    Args:
        name: Its name in the report.
        folder: Folder of its log.
        arguments: Those of `turnwise`.

    Example:
        program = Program("serve", folder, ["serve", config])
        program.until("the server's address", lambda: "http://" in program.log.read_text())
        left = program.end()
    """

    def __init__(self, name: str, folder: Path, arguments: Sequence[object]) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                [TURNWISE, *map(str, arguments)],
                cwd=ROOT,
                env={**os.environ, "RAY_raylet_start_wait_time_s": "600"},  # two cores for all
                stdout=output,
                stderr=output,
            )
        self._own = psutil.Process(self.process.pid)

    def processes(self) -> list[tuple[str, psutil.Process]]:
        """Return all its processes with their roles, the oldest first."""
        found: list[tuple[float, str, psutil.Process]] = []
        try:
            running = [self._own, *self._own.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []
        for each in running:
            with suppress(psutil.Error, AttributeError):  # it ended meanwhile
                if each.status() != psutil.STATUS_ZOMBIE:
                    found.append((each.create_time(), role_of(each), each))
        return [(role, each) for _, role, each in sorted(found, key=lambda item: item[0])]

    def with_role(self, role: str) -> list[psutil.Process]:
        """Return its processes with a role, the oldest first."""
        return [process for each, process in self.processes() if each == role]

    def until(self, what: str, condition: Callable[[], object]) -> None:
        """Wait until a condition holds.

        Raises:
            SystemExit: when the program ends, or it does not within `START_SECONDS`.
        """
        ends = time.monotonic() + START_SECONDS
        while not condition():
            late = time.monotonic() > ends
            if late or self.process.poll() is not None:
                why = f"not within {START_SECONDS:g} s" if late else "it ended"
                raise SystemExit(f"{self.name}, {what}: {why}\n{self.log.read_text()[-3000:]}")
            time.sleep(0.2)

    def end(self) -> int:
        """End it by SIGINT; returns the number of its processes that are left, and kills them."""
        processes = [process for _, process in self.processes()]
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_SECONDS)
        _, left = psutil.wait_procs(processes, timeout=30)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        return len(left)


class Client:
    """A client in a process of its own; see `benchmarks.soak.client`."""

    def __init__(self, url: str, problems: Path, lanes: int, log: Path) -> None:
        command = [sys.executable, "-m", "benchmarks.soak.client", url, problems, lanes]
        with log.open("a") as output:
            self.process = subprocess.Popen(
                [*map(str, command)], cwd=ROOT, stdout=subprocess.PIPE, stderr=output, text=True
            )
        self.open: dict[str, bool] = {}
        """Requests without an end, and whether each has begun to stream."""
        self.outcomes: Counter[str] = Counter()
        self.ends: list[float] = []
        """Times of all answers, by `time.monotonic`."""
        self.sessions: Counter[bool] = Counter()
        """Audited sessions, by whether they are exact."""
        self.whys: list[str] = []
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with suppress(json.JSONDecodeError):  # a line that the kill cut off
                self._take(json.loads(line))

    def _take(self, event: dict[str, Any]) -> None:
        if event["event"] in ("begin", "streaming"):
            self.open[event["request"]] = event["event"] == "streaming"
        elif event["event"] == "end":
            del self.open[event["request"]]
            self.outcomes[event["outcome"]] += 1
            if event["outcome"] == "answered":
                self.ends.append(time.monotonic())
        else:
            self.sessions[event["exact"]] += 1
        if event.get("why"):
            self.whys.append(event["why"])

    @property
    def streaming(self) -> bool:
        """Whether it is in the middle of a stream."""
        return any(list(self.open.values()))

    def kill(self) -> None:
        """Kill it; requests that are open then are counted as killed."""
        self.process.kill()
        self._reading.join(END_SECONDS)
        self.process.wait(END_SECONDS)
        self.outcomes["killed"] += len(self.open)

    def end(self) -> None:
        """End it after the conversations in progress; requests that are then open are lost."""
        self.process.terminate()
        try:
            self.process.wait(2 * END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self._reading.join(END_SECONDS)
        self.outcomes["lost"] += len(self.open)
