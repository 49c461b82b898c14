"""Features that the soak test has on in turn, each in a program beside the load.

Images, compaction, judges, distillation, deltas of weights, sandboxes and Tinker's clients have the
same part of the time each. The teacher of distillation is the server under load, whose engines are
killed meanwhile. Two clients of Tinker's SDK work at a time; every third is killed in its middle.
"""

import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.soak.programs import END_SECONDS, ROOT, Program
from examples.calculator.prepare import prepare
from examples.eyes import warm_start as eyes
from examples.recall import warm_start as recall
from examples.retool.prepare import prepare as prepare_retool

EXAMPLES = ROOT / "examples"
SDK = ROOT / ".venv-tinker"
PROMPTS, SAMPLES = 4, 4
"""Problems of a step, and trajectories of a problem."""
KEYS = (
    *(f"rollout.prompts_per_step={PROMPTS}", f"sampling.n={SAMPLES}", "sampling.max_tokens=48"),
    *("eval.every=0", "eval.target=null", "serving.port=0", "engine.kv_cache_gib=0.0625"),
    *(
        "engine.max_num_seqs=32",
        "training.steps=1000000",
        "training.learning_rate=1e-6",
        "training.threads=1",
    ),
    *("training.max_staleness=1", "trajectories.keep=2", "engine.threads=1"),
)
UPDATES = 80
"""Updates with which the examples' models begin: enough for answers of the right form."""
CLIENTS = 2
CLIENT_SECONDS = 20.0
"""Age at which every third client of Tinker's SDK is killed."""
LATE_SECONDS = 600.0
"""Longest wait for the first client that finishes, once the feature's time is over."""


@dataclass(frozen=True)
class Feature:
    """A feature, and the program that has it on.

    Args:
        arguments: The command line of `turnwise`, without its folder and name.
        server: A Python command of a server that the program needs.
        clients: Whether clients of Tinker's SDK come and go.
    """

    name: str
    arguments: tuple[object, ...]
    server: tuple[object, ...] = ()
    clients: bool = False


def make_models(folder: Path) -> None:
    """Make the features' models: minutes on a quiet machine, a quarter of an hour under load."""
    made = folder / "features"
    prepare(made / "demo")
    eyes.make_model(made / "eyes", 0, **{"training.steps": UPDATES})
    recall.run(made / "recall", 0, UPDATES)
    prepare_retool(made / "retool", updates=UPDATES, train=400, heldout=10)


def features(folder: Path, teacher: str) -> list[Feature]:
    """Return the features in their order, with the models that `make_models` made there.

    Args:
        teacher: Base URL of a server of the demo's model, with a context of 512 tokens.
    """
    made = folder / "features"
    demo = (
        *("train", EXAMPLES / "calculator/config.yaml", f"model.path={made / 'demo/model'}"),
        *(f"data.path={made / 'demo/train.jsonl'}", "data.eval_path=null", *KEYS),
    )
    retool = made / "retool"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    judge = f"{{url: 'http://127.0.0.1:{port}/v1', model: rule, rubric: R, row_fields: [a, b, c]}}"

    def example(name: str, *keys: object) -> tuple[object, ...]:
        return ("train", EXAMPLES / name / "config.yaml", *KEYS, *keys)

    found = [
        Feature("images", example("eyes", f"model.path={made / 'eyes'}")),
        Feature("compaction", example("recall", f"model.path={made / 'recall'}")),
        Feature(
            "judges",
            example("judge", f"rollout.rewards=[{{judge: {judge}}}]"),
            server=("-m", "examples.judge.rule", port),
        ),
        Feature(
            "distillation",
            (
                *demo,
                "model.max_length=511",
                f"algorithm.teacher={{url: '{teacher}', model: policy}}",
            ),
        ),
        Feature(
            "deltas",
            (
                *(*demo, "model.dtype=bfloat16", "weights.delta=true", "weights.transport=disk"),
                "training.learning_rate=1e-4",
            ),
        ),
        Feature(
            "sandboxes",
            example(
                "retool",
                *(f"model.path={retool / 'model'}", f"data.path={retool / 'train.jsonl'}"),
                "data.eval_path=null",
            ),
        ),
    ]
    if SDK.exists():
        keys = ("model.lora.rank=8", "model.max_length=512", "engine.kv_cache_gib=0.0625")
        model = made / "demo/model"
        found.append(
            Feature("tinker", ("tinker", "--model", model, "--port", 0, *keys), clients=True)
        )
    else:
        print("Tinker's SDK is not installed (make tinker): its clients are not tested")
    return found


class Features:
    """The features' programs, one after the other.

    Args:
        programs: Gets each program when it starts, so that its processes are watched.

    Example:
        features = Features(folder, found, programs)
        features.take_turn(0.5)  # half of the time is over
        features.end()
    """

    def __init__(self, folder: Path, found: Sequence[Feature], programs: list[Program]) -> None:
        self._folder, self._found, self._programs = folder, found, programs
        self._server: subprocess.Popen[bytes] | None = None
        self._clients: list[tuple[subprocess.Popen[bytes], float, bool]] = []
        self._begun = 0
        self.program: Program | None = None
        self.ended: list[tuple[Feature, Program, float]] = []
        """Features whose time is over, with their programs and the seconds that each ran."""
        self.left = 0
        """Processes that were left after their ends."""
        self.outcomes = Counter[str]()
        """Clients of Tinker's SDK: finished, killed, or failed."""
        self._since = 0.0

    def take_turn(self, share: float) -> None:
        """Start the feature whose part of the test this is, `share` of which is over."""
        due = min(len(self._found), int(share * len(self._found)) + 1)
        if due > self._begun and share < 1.0:
            self.end()
            self._start(self._found[self._begun])
            self._begun += 1
        if self.program is not None and self._found[self._begun - 1].clients:
            self._look_after_clients(self.program)

    def _start(self, feature: Feature) -> None:
        if feature.server:
            self._server = subprocess.Popen([sys.executable, *map(str, feature.server)], cwd=ROOT)
        keys = (f"output_dir={self._folder}", f"name={feature.name}")
        self.program = Program(feature.name, self._folder, (*feature.arguments, *keys))
        self._programs.append(self.program)
        self._since = time.monotonic()

    def _look_after_clients(self, program: Program) -> None:
        """Begin clients, count those that ended, and kill every third."""
        url = program.log.read_text().partition("TINKER_BASE_URL=")[2].split()
        if not url:
            return
        for entry in list(self._clients):
            client, killed_at, doomed = entry
            if doomed and time.monotonic() > killed_at:
                client.kill()
            elif client.poll() is None:
                continue
            code = client.wait()
            self.outcomes["killed" if doomed and code else "failed" if code else "finished"] += 1
            self._clients.remove(entry)
        while len(self._clients) < CLIENTS:
            number = self.outcomes.total() + len(self._clients)
            command = [sys.executable, "-m", "examples.tinker.loop", "--url", url[0], "--steps=3"]
            with (self._folder / "tinker-client.log").open("a") as log:
                path = f"{ROOT}:{SDK}"
                model = str(self._folder / "features/demo/model")
                client = subprocess.Popen(
                    [*command, "--model", model],
                    cwd=ROOT,
                    env={**os.environ, "PYTHONPATH": path, "TINKER_API_KEY": f"tml-{number}"},
                    stdout=log,
                    stderr=log,
                )
            doomed = number % 3 == 2
            self._clients.append((client, time.monotonic() + CLIENT_SECONDS, doomed))

    def end(self) -> None:
        """End the program of now, with its server and its clients. Of these one may finish first:
        a start beside the load can take all of the feature's time."""
        until = time.monotonic() + LATE_SECONDS
        if self.program is not None and self._found[self._begun - 1].clients:
            while not self.outcomes["finished"] and time.monotonic() < until:
                self._look_after_clients(self.program)
                time.sleep(1.0)
        for client, _, _ in self._clients:
            client.kill()
            client.wait()
        self._clients.clear()
        if self.program is not None:
            feature, seconds = self._found[self._begun - 1], time.monotonic() - self._since
            self.left += self.program.end()
            self.ended.append((feature, self.program, seconds))
            self.program = None
        if self._server is not None:
            self._server.kill()
            self._server.wait(END_SECONDS)
            self._server = None
