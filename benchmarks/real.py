"""SmolLM2-135M-Instruct on two cores: `python -m benchmarks.real [--quick]`.

Rows of other benchmarks with a published model of 30 layers and a vocabulary of 49,152: rollouts
against the bare engine's replay (`benchmarks.rollouts`), the trainer against a bare PyTorch loop
and against TRL's trainer (`benchmarks.training`), an update of an idle engine's weights against a
plain copy (`benchmarks.updates`). One step of `make real` gives the peak memory of its rank and of
its engine. Each is compared with the memory that `turnwise plan` expects, plus the libraries that
both inherit from the process that forks them.

A step of GRPO with the problems, tool and prompts of `make real` is compared with TRL's as in
`benchmarks.grpo_step`, except that it has only 2 prompts of 8 rollouts, because TRL's step takes
minutes. TRL computes 4 rollouts in a forward pass, about as many tokens as a micro-batch of
Turnwise, and neither side computes activations twice.

The model is the one of `make real`; if it is not installed, there are no rows.
"""

import asyncio
import importlib
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import ray
import torch

from benchmarks import grpo_step, rollouts, training, updates
from benchmarks.loading import in_processes, resident
from benchmarks.models import as_in_a_worker
from benchmarks.report import Claim, digits, parser, quotients, report
from benchmarks.weights import make_tensors, plain_copy
from examples.smollm2.environment import Sums
from examples.smollm2.run import CONFIG
from turnwise.config import Config, load_config, parse_config
from turnwise.core.aio import run as run_loop
from turnwise.core.fork_server import PRELOADED
from turnwise.core.gguf import find_gguf, resolve_model
from turnwise.core.ray import start_ray
from turnwise.engine.vllm_engine import VllmEngine
from turnwise.observe.plan import Machine, make_plan
from turnwise.run.fleet import make_manager
from turnwise.training.memory import GIB
from turnwise.weights import WORKER_EXTENSION

ROOT = Path(__file__).parent.parent
MODEL, NAME, PARAMETERS = "smollm2", "SmolLM2-135M", 134_515_008
BUDGET = 2048
SEQUENCES = 16
CONCURRENCY = 32
PROMPT_TOKENS = 500
"""About the length of a prompt of `make real`."""
PROMPTS, STEPS, ROWS = 2, 2, 4
"""Prompts of a step of GRPO, number of steps (the first warms up), and rows of TRL's forward pass.
"""


def grpo_claim(path: Path) -> Claim:
    """Measure a step of GRPO against TRL's."""
    config, size = load_config(CONFIG), grpo_step.Size(PROMPTS, STEPS, random.randrange(10_000))
    rows = {row["question"]: row for row in Sums.rows("train")}
    chosen = random.sample([*rows.values()], PROMPTS * STEPS)
    with tempfile.TemporaryDirectory() as folder:
        problems = Path(folder) / "problems.jsonl"
        problems.write_text("".join(f"{json.dumps(row)}\n" for row in chosen))
        ours = grpo_step.turnwise(
            CONFIG,
            f"bench-real-{size.seed}",
            problems,
            size,
            training__micro_batch_tokens=ROWS * PROMPT_TOKENS,
            training__activation_checkpointing=False,
        )
        limits = {
            "--turns": config.rollout.max_turns,
            "--turn-tokens": config.sampling.max_tokens,
            "--learning-rate": config.learning_rate,
            "--micro-batch": ROWS,
        }
        more = [word for limit in limits.items() for word in limit]
        theirs = grpo_step.trl(path, problems, size, "--sums", *more)
    name = f"{PROMPTS * grpo_step.GROUP}, {NAME}, instant tools"
    both = ours.seconds[1:], theirs.seconds[1:]
    return grpo_step.step_claim(name, *both, 2.0, ours.note(theirs))


def rollout_config(path: Path) -> Config:
    tree = rollouts.configuration(path, 4).model_dump()
    tree["model"] |= {"max_length": 1024, "chat_template": "hermes"}
    tree["rollout"]["concurrency"] = CONCURRENCY
    tree["engine"] |= {"max_num_seqs": CONCURRENCY, "kv_cache_gib": 1}
    return parse_config(tree)


async def rollout_claim(config: Config, quick: bool) -> Claim:
    """Measure rollouts with tools that answer at once."""
    bare = VllmEngine(config.model, config.engine, worker_extension=WORKER_EXTENSION)._llm
    runs = []
    async with make_manager(config, 0).running() as manager:
        bench = rollouts.Bench(config, manager, bare, None)
        await bench.instant(rollouts.GROUP)  # warms up
        for _ in range(1 if quick else 3):
            runs.append(await bench.instant(rollouts.GROUP if quick else CONCURRENCY))
    bare.shutdown()
    ours, theirs = zip(*runs, strict=True)
    return rollouts.against_bare(
        f"rollouts, {NAME}, {CONCURRENCY} at a time",
        "trajectories/s",
        [run.rate for run in ours],
        [run.rate for run in theirs],
        at_least=0.95,
    )


def update_claim(config: Config, rounds: int) -> Claim:
    """Measure updates of an idle engine."""
    alone = asyncio.run(updates.large_updates(config, rounds))
    tensors = make_tensors(PARAMETERS, torch.float32)
    copied = [plain_copy(tensors, 2) * 1e3 for _ in alone]
    name = f"update of {NAME} by shm, repacking included"
    return Claim(name, "ms", alone, "a plain copy", copied, quotients(alone, copied), at_most=5.0)


def memory_claims() -> list[Claim]:
    """Measure the peak memory of one step of `make real`."""
    with tempfile.TemporaryDirectory() as folder:
        keys = [f"output_dir={folder}", "name=real", "training.steps=1", "eval.every=0"]
        command = [sys.executable, "-m", "turnwise.cli", "train", str(CONFIG), *keys]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as run:
            engine = 0
            while run.poll() is None:
                engine = max(engine, engine_bytes(run.pid))
                time.sleep(0.2)
        if run.returncode:
            raise SystemExit(f"{' '.join(command)} failed")
        lines = Path(folder, "real", "metrics.jsonl").read_text().splitlines()
    rank = json.loads(lines[-1])["train_memory_gib"]
    plan = make_plan(load_config(CONFIG), Machine.here(), PROMPT_TOKENS)
    [[imported]] = in_processes([(libraries,)])
    figures = (
        ("a rank", rank, plan.rank.expected_peak + imported),
        ("an engine", engine / GIB, plan.engine.expected_peak + imported),
    )
    return [
        Claim(
            f"peak memory of {who}, {NAME}",
            "GiB",
            [held],
            "turnwise plan and libraries",
            [planned / GIB],
            [held / planned * GIB],
            at_most=1.3,
            note=f"the libraries have {digits(imported / GIB)} GiB",
        )
        for who, held, planned in figures
    ]


def libraries(reply: Connection) -> None:
    """Import the libraries that the fork server preloads; send the memory of this process."""
    for name in PRELOADED:
        importlib.import_module(name)
    reply.send(resident("VmRSS"))


def engine_bytes(pid: int) -> int:
    """Return the resident bytes of vLLM's engine process below a process, without shared memory:
    the trainer's weight buffers, which the engine maps, count as the rank's memory."""
    found = 0
    try:
        for process in psutil.Process(pid).children(recursive=True):
            if "EngineCor" in process.name():
                status = Path(f"/proc/{process.pid}/status").read_text()
                kinds = dict(re.findall(r"(VmRSS|RssShmem):\s+(\d+) kB", status))
                found = max(found, 1024 * (int(kinds["VmRSS"]) - int(kinds["RssShmem"])))
    except (psutil.NoSuchProcess, FileNotFoundError, KeyError):  # it ended
        pass
    return found


def main() -> None:
    """Run the benchmark and print its claims."""
    options = parser("real", __doc__).parse_args()
    if (file := find_gguf(MODEL)) is None or not file.is_file():
        print("the model is not installed: make real")
        report([], options)
        return
    rounds = 1 if options.quick else 3
    path = Path(resolve_model(MODEL))
    claims = [] if options.quick else [grpo_claim(path)]
    as_in_a_worker()
    start_ray(None)
    claims += [
        run_loop(rollout_claim(rollout_config(path), options.quick)),
        update_claim(updates.configuration(path), rounds),
    ]
    ray.shutdown()
    torch.set_num_threads(2)
    model = NAME, path, SEQUENCES
    if not options.quick:
        claims += [training.measure(*model, rounds, group, BUDGET) for group in (1, training.GROUP)]
        claims.append(training.measure_trl(*model, rounds, BUDGET))
    report([*claims, *memory_claims()], options)


if __name__ == "__main__":
    main()
