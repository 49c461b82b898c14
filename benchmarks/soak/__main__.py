"""The soak test: `make soak MINUTES=60`.

    python -m benchmarks.soak [--minutes N] [--every SECONDS] [--json FILE] [--folder FOLDER]
                              [--no-real] [--no-features]

`turnwise train` and `turnwise serve`, each with two engines and the demo's model, under load for
some minutes: training one step ahead, in two rollout processes, with each environment in a process
of its own; serving two clients, each with three conversations at a time. Every minute one process
is killed by SIGKILL, of one kind after the other:

    training  an engine, a worker, a rollout process, an environment, an environment server
    serving   an engine, a worker
    clients   one, in the middle of its streams

and between two kills `turnwise scale` gives the training a third engine, or takes it away again.

Beside them, a third program trains SmolLM2-135M-Instruct, if `make real` has brought it, with one
engine and short answers. Its engine is killed once, in the beginning, so that its processes can be
watched from then on. A fourth has one feature after another on; `benchmarks/soak/features.py` lists
them.

Of each kind the youngest is killed, so that the others live as long as the programs do. In tests of
five minutes or more the trainer's rank is killed first, once, and the run goes on from its last
checkpoint with other processes: those are watched. The driver is never killed.

Afterwards nothing may be lost: each trajectory of each step is finished or counted by reason, each
request is answered or its error was reported, every token is exact, no request is left in an
engine, and no process after the end. The memory (USS) and the open files of each process that lived
from the warm-up (a sixth of the time) to the end are compared in each half of that time, last
quarter by first (a growth of up to 8 MiB or 2 files does not count), and so is the processor time
of a request and of a trajectory, last sixth by first, in relation to the speed of the machine,
which times a fixed piece of work every five seconds. Both are judged in tests of an hour, because
oneDNN's cache of compiled kernels alone fills an engine's memory for more than ten minutes.
Exits with 1 when a goal is missed.
"""

import argparse
import itertools
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.report import Claim, show
from benchmarks.soak.checks import (
    change_of_cost,
    counts_by_time,
    memory_claims,
    steps_within,
    training_claims,
)
from benchmarks.soak.features import PROMPTS as FEATURE_PROMPTS
from benchmarks.soak.features import SAMPLES as FEATURE_SAMPLES
from benchmarks.soak.features import Feature, Features, features, make_models
from benchmarks.soak.machine import MachineSpeed
from benchmarks.soak.memory import Memory
from benchmarks.soak.programs import TURNWISE, Client, Program
from examples.calculator.prepare import prepare
from examples.smollm2.run import CONFIG
from turnwise.core.gguf import find_gguf
from turnwise.core.interrupt import exit_on_sigterm
from turnwise.trajectory import Trajectory, audit

PROMPTS, SAMPLES = 4, 8
"""Problems of a step, and trajectories of a problem."""
LANES = 3
SAMPLES_EVERY = 5.0
"""Seconds between two samples of memory."""
RANK_MINUTES = 5.0
"""Length of the test from which a rank is killed, too."""
JUDGED_MINUTES = 60.0
"""Length of the test from which memory and rates are judged."""
SUCCESSOR_SECONDS = 120.0
"""Time for a successor of a killed process, before which no other is killed."""
IDLE_SECONDS = 60.0
CHECKPOINT = 10
REAL_MODEL = "SmolLM2-135M"
REAL_PROMPTS, REAL_SAMPLES = 2, 4
REAL_KEYS = (
    *(f"rollout.prompts_per_step={REAL_PROMPTS}", "rollout.max_turns=2", "rollout.retries=1"),
    *(f"sampling.n={REAL_SAMPLES}", "sampling.max_tokens=40", "eval.every=0"),
    *("engine.kv_cache_gib=0.25", "engine.max_num_seqs=16", "engine.threads=1", "serving.port=0"),
    *("training.steps=1000000", "training.learning_rate=1e-9", "training.max_staleness=1"),
    *("training.threads=1", "trajectories.keep=2"),
)
"""Keys in place of those of `make real`: short steps, and weights that stay as they are."""


class Soak:
    """One test in progress."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self.options = folder, options
        self.kills: Counter[str] = Counter()
        self.not_replaced: list[str] = []
        self.died: dict[str, str] = {}
        """The last words of programs that ended by themselves, by name."""
        self.ended: list[Client] = []
        self.begin = self.end = 0.0
        self._replaced: Callable[[], bool] | None = None
        """Whether the process that was killed last has a successor; None once it has."""
        self._killed = ("", 0.0)
        self.programs = list[Program]()
        self.training: Program
        self.serving: Program
        self.real: Program | None = None
        self.features: Features | None = None
        self.clients: list[Client] = []
        self.memory = Memory(self.programs)
        self.machine = MachineSpeed()
        build = folder / "build"
        prepare(build)
        self.problems = build / "train.jsonl"
        common = {
            "model": {"path": str(build / "model"), "max_length": 512},
            "engine": {"kv_cache_gib": 0.0625, "max_num_seqs": 64},
            "serving": {"workers": 2, "port": 0, "session_memory_mb": 4},
        }
        train = {
            **common,
            "environment": "examples.calculator.environment:Calculator",
            "output_dir": str(folder),
            "name": "train",
            "data": {"path": str(self.problems)},
            "rollout": {
                "prompts_per_step": PROMPTS,
                "processes": 2,
                "environment_process": True,
                "retries": 1,
            },
            "sampling": {"n": SAMPLES, "max_tokens": 64},
            "training": {
                "steps": 1_000_000,
                "learning_rate": 1e-9,  # the load stays as it is
                "max_staleness": 1,
                "checkpoint_every": CHECKPOINT,
                "restarts": 1,
                "threads": 1,
            },
            "trajectories": {"keep": 2},
        }
        for name, tree in (("train", train), ("serve", common)):
            (folder / f"{name}.yaml").write_text(json.dumps(tree))

    def _program(self, name: str, *arguments: object) -> Program:
        program = Program(name, self.folder, arguments)
        self.programs.append(program)
        return program

    def _real(self) -> Program | None:
        """Start the training of the real model, if it is there."""
        if self.options.no_real:
            return None
        if (file := find_gguf("smollm2")) is None or not file.is_file():
            print(f"{REAL_MODEL} is not installed (make real): the demo's model is tested alone")
            return None
        keys = (f"output_dir={self.folder}", "name=real", *REAL_KEYS)
        return self._program("real", "train", CONFIG, *keys)

    def rows(self, program: Program) -> list[dict[str, Any]]:
        """Return the metrics of all steps of a training so far."""
        path = self.folder / program.name / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        rows = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [row for row in rows if row["step"]]

    def step(self, program: Program) -> int:
        """Return the last finished step."""
        rows = self.rows(program)
        return int(rows[-1]["step"]) if rows else 0

    def start(self) -> None:
        """Start the programs, wait until they work, and begin the load; the largest model first,
        which would take the longest to start beside the others."""
        if not self.options.no_features:
            make_models(self.folder)
        if (real := self._real()) is not None:
            self.real = real
            real.until("its first step", lambda: self.step(real) >= 1)
            self._kill_only(real, "engine")
        self.training = self._program("train", "train", self.folder / "train.yaml")
        self.serving = self._program("serve", "serve", self.folder / "serve.yaml")
        self.serving.until("the server's address", self._address)
        self.training.until("the first steps", lambda: self.step(self.training) >= 2)
        if self.options.minutes >= RANK_MINUTES:
            self.training.until("a checkpoint", lambda: self.step(self.training) > CHECKPOINT)
            self._kill_only(self.training, "rank")
        for _ in range(2):
            self.clients.append(self._client())
        if not self.options.no_features:
            found = features(self.folder, f"{self._address()}/v1")
            self.features = Features(self.folder, found, self.programs)

    def _kill_only(self, program: Program, role: str) -> None:
        """Kill the only process of a role, and wait for steps with another one."""
        (old,) = program.with_role(role)
        old.kill()
        self.kills[f"{program.name} {role}"] += 1
        before = self.step(program)

        def restarted() -> bool:
            now = program.with_role(role)
            return bool(now) and old not in now and self.step(program) > before + 1

        program.until(f"a restart: {role}", restarted)

    def _address(self) -> str:
        found = re.search(r"http://\S+/v1", self.serving.log.read_text())
        return found[0].removesuffix("/v1") if found else ""

    def _client(self) -> Client:
        return Client(self._address(), self.problems, LANES, self.folder / "client.log")

    def run(self) -> None:
        """Kill and sample until the time is over."""
        self.begin = time.monotonic()
        ends = self.begin + 60 * self.options.minutes
        kinds = itertools.cycle(self._kinds())
        next_kill, next_sample = self.begin + self.options.every, self.begin
        while (now := time.monotonic()) < ends or self._replaced is not None:
            if self._look_for_deaths():
                break
            if self.features is not None:
                self.features.take_turn((now - self.begin) / (ends - self.begin))
            if now >= next_sample:
                self.memory.sample()
                self.machine.sample()
                next_sample += SAMPLES_EVERY
            if self._replaced is not None:
                self._check_successor(now)
            elif now >= next_kill:
                name, kill = next(kinds)
                self._replaced, self._killed = kill(), (name, now)
                self.kills[name] += 1
                step = self.step(self.training)
                print(f"{now - self.begin:5.0f} s: killed {name}; step {step}", flush=True)
                next_kill = max(next_kill + self.options.every, now)
            time.sleep(0.2)
        self.end = time.monotonic()
        self.memory.write(self.folder / "memory.jsonl")

    def _look_for_deaths(self) -> bool:
        """Note programs that ended by themselves; return whether one was needed for all else."""
        over = [program for _, program, _ in self._features_ended()]
        for program in self.programs:
            known = program.name in self.died or program in over
            if not known and program.process.poll() is not None:
                self.died[program.name] = program.log.read_text()[-3000:]
                print(f"{program.name} ended\n{self.died[program.name]}", flush=True)
        return bool(self.died.keys() & {self.training.name, self.serving.name})

    def _check_successor(self, now: float) -> None:
        assert self._replaced is not None
        name, killed = self._killed
        late = now - killed > SUCCESSOR_SECONDS
        if late:
            self.not_replaced.append(name)
        if late or self._replaced():
            self._replaced = None

    def _kinds(self) -> list[tuple[str, Callable[[], Callable[[], bool]]]]:
        """Return what is killed, in this order: each kills one, and returns whether there is
        another in its place."""

        def of(program: Program, role: str) -> Callable[[], Callable[[], bool]]:
            return lambda: self._kill(program, role)

        order = [
            (self.training, "engine"),
            (self.training, "rollout process"),
            (self.serving, "engine"),
            (self.training, "environment"),
            (self.training, "worker"),
            (self.training, "environment server"),
            (self.serving, "worker"),
        ]
        kinds = [(f"{program.name} {role}", of(program, role)) for program, role in order]
        grow, shrink = (
            (f"{self.training.name} scale to {count}", partial(self._scale, count))
            for count in (3, 2)
        )
        return [*kinds[:3], ("client", self._kill_client), grow, *kinds[3:], shrink]

    def _scale(self, workers: int) -> Callable[[], bool]:
        """Give the training another number of engines."""
        folder = str(self.folder / self.training.name)
        command = [str(TURNWISE), "scale", folder, "--workers", str(workers)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"turnwise scale: {done.stderr}")
        return lambda: len(self.training.with_role("engine")) == workers

    def _kill(self, program: Program, role: str) -> Callable[[], bool]:
        """Kill the youngest process of a role, as soon as there are two."""
        before = set[psutil.Process]()

        def killed() -> bool:
            found = program.with_role(role)
            with suppress(psutil.NoSuchProcess):  # it ended by itself meanwhile
                if len(found) > 1:
                    found[-1].kill()
                    before.update(found)
            return bool(before)

        program.until(f"two processes: {role}", killed)

        def replaced() -> bool:
            now = set(program.with_role(role))
            return role == "environment" or (len(now) >= len(before) and now != before)

        return replaced

    def _kill_client(self) -> Callable[[], bool]:
        """Kill the younger client in the middle of its streams."""
        client = self.clients[-1]
        self.serving.until("a client's stream", lambda: client.streaming)
        client.kill()
        self.ended.append(client)
        self.clients[-1] = self._client()
        return lambda: True

    def stop(self) -> list[Claim]:
        """End the load and the programs; returns the claims."""
        for client in self.clients:
            client.end()
        gone = 0 if self.features is None else self.features.left
        clients = [*self.ended, *self.clients]
        outcomes = sum((client.outcomes for client in clients), Counter[str]())
        sessions = sum((client.sessions for client in clients), Counter[bool]())
        whys = Counter(why[:300] for client in clients for why in client.whys)
        idle = float("nan")
        if self.serving.name not in self.died:
            sessions += self._sessions_left()
            idle = self._requests_in_engines()
        if self.features is not None:
            self.features.end()
        left = [program.end() for program in self.programs]
        for why, count in whys.most_common(10):
            print(f"clients, {count} times: {why}")
        answers = [(end, 1.0) for client in clients for end in client.ends]
        answered = counts_by_time(answers, self.begin, self.end)
        minute = (self.end - self.begin) / len(answered)
        judged = self.options.minutes >= JUDGED_MINUTES
        machine = self.machine.change(self.begin, self.end)
        cost = partial(self._cost, machine=machine, judged=judged)
        steps = steps_within(self.rows(self.training), self.end - self.begin)
        trained = [(self.begin + end, trajectories) for end, trajectories, _ in steps]
        return [
            Claim("kills", "count", [sum(self.kills.values())], note=str(dict(self.kills))),
            Claim(
                "killed processes that had no successor",
                "count",
                [len(self.not_replaced)],
                at_most=0,
                note=", ".join(self.not_replaced),
            ),
            Claim(
                "programs that ended by themselves",
                "count",
                [len(self.died)],
                at_most=0,
                note=", ".join(self.died),
            ),
            *memory_claims(self.memory, self.begin, self.end, judged),
            Claim("speed of the machine, last by first sixth", "ratio", [machine]),
            *self._training_claims(self.training, (PROMPTS, SAMPLES)),
            cost("trajectory", counts_by_time(trained, self.begin, self.end), self.training),
            *self._real_claims(),
            *self._feature_claims(),
            Claim(
                "requests answered",
                "1/s",
                [count / minute for count in answered],
                note=str(dict(outcomes)),
            ),
            cost("request", answered, self.serving),
            Claim("requests lost", "count", [outcomes["lost"]], at_most=0),
            Claim("sessions that are not exact", "count", [sessions[False]], at_most=0),
            Claim("sessions audited", "count", [sessions.total()], at_least=1),
            Claim("requests left in the engines", "count", [idle], at_most=0),
            Claim("processes left after the end", "count", [sum(left) + gone], at_most=0),
        ]

    def _training_claims(
        self,
        program: Program,
        asked: tuple[int, int],
        seconds: float | None = None,
    ) -> list[Claim]:
        """Return the claims of a run, which `asked` for so many problems in each step, and for so
        many trajectories of each; of the last `seconds`, or of the whole test."""
        path, violations = self.folder / program.name / "exactness.json", float("nan")
        if path.exists():  # else the program ended before its first step: no goal is met
            violations = json.loads(path.read_text())["violations"]
        rows = self.rows(program)
        seconds = self.end - self.begin if seconds is None else seconds
        return training_claims(rows, violations, *asked, seconds)

    def _cost(
        self, what: str, counts: list[float], program: Program, machine: float, judged: bool
    ) -> Claim:
        spent = self.memory.spent(program.name, self.begin, self.end)
        return change_of_cost(what, counts, spent, machine, judged)

    def _real_claims(self) -> list[Claim]:
        if self.real is None:
            return []
        asked = REAL_PROMPTS, REAL_SAMPLES
        claims = self._training_claims(self.real, asked)
        return [replace(claim, name=f"{REAL_MODEL}: {claim.name}") for claim in claims]

    def _features_ended(self) -> list[tuple[Feature, Program, float]]:
        return [] if self.features is None else self.features.ended

    def _feature_claims(self) -> list[Claim]:
        """Return what the features' programs claim: a run with one takes steps, and loses nothing;
        clients of Tinker's SDK finish."""
        claims = list[Claim]()
        for feature, program, seconds in self._features_ended():
            if feature.clients:
                assert self.features is not None
                outcomes = self.features.outcomes
                note = str(dict(outcomes))
                found = [
                    Claim("clients that finished", "count", [outcomes["finished"]], at_least=1),
                    Claim(
                        "clients that failed", "count", [outcomes["failed"]], at_most=0, note=note
                    ),
                ]
            else:
                asked = FEATURE_PROMPTS, FEATURE_SAMPLES
                steps = Claim("steps", "count", [self.step(program)], at_least=1)
                rest = self._training_claims(program, asked, seconds)
                found = [steps, *rest]
            claims += [replace(claim, name=f"{feature.name}: {claim.name}") for claim in found]
        return claims

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"{self._address()}{path}", timeout=60) as response:
            found: bytes = response.read()
            return found

    def _sessions_left(self) -> Counter[bool]:
        """Audit the sessions that killed clients left; returns their number, by whether exact."""
        found: Counter[bool] = Counter()
        for session in json.loads(self._get("/sessions"))["sessions"]:
            reply = json.loads(self._get(f"/sessions/{session['id']}"))
            trajectory = Trajectory.from_json(json.dumps(reply["trajectory"]))
            found[audit(trajectory).violations == 0] += 1
        return found

    def _requests_in_engines(self) -> float:
        """Return the requests that the engines still have after a while without clients."""
        ends = time.monotonic() + IDLE_SECONDS
        while True:
            text = self._get("/metrics").decode()
            names = r"(?:vllm:num_requests_(?:running|waiting)|turnwise_worker_load)"
            values = re.findall(rf"^{names}{{[^}}]*}} (\S+)", text, re.MULTILINE)
            total = sum(map(float, values))
            if (values and total < 1e-6) or time.monotonic() > ends:
                return total if values else float("nan")
            time.sleep(0.5)


def main() -> int:
    """Run the test; returns the exit code."""
    made = argparse.ArgumentParser(
        prog="benchmarks.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--minutes", type=float, default=60.0)
    made.add_argument("--every", type=float, default=60.0, help="seconds between two kills")
    made.add_argument("--json", type=Path, help="write the claims there, too")
    made.add_argument("--folder", type=Path, help="keep logs and the runs there")
    made.add_argument("--no-real", action="store_true", help=f"without {REAL_MODEL}")
    made.add_argument("--no-features", action="store_true", help="without features in turn")
    options = made.parse_args()
    with exit_on_sigterm(), tempfile.TemporaryDirectory(prefix="turnwise-soak-") as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        soak = Soak(folder.resolve(), options)
        try:
            soak.start()
            soak.run()
            claims = soak.stop()
        finally:
            for client in soak.clients:
                with suppress(ProcessLookupError):
                    client.process.kill()
            if soak.features is not None:
                soak.features.end()
            for program in soak.programs:
                program.end()
    show(claims)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(claim) for claim in claims]))
    missed = [claim.name for claim in claims if not claim.met]
    print(f"missed: {'; '.join(missed)}" if missed else "every goal is met")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
