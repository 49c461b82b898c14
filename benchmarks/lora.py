"""LoRA against full training and TRL with PEFT: `python -m benchmarks.lora [--quick]`.

All do the same work: steps of GRPO on a random model of 100 M parameters, 2 prompts of 8 rollouts
of 64 tokens a step, adapters of rank 16 in all linear layers, float32, two threads. Rewards are the
parity of an answer's length, since a random model solves nothing. Turnwise is `turnwise train`, TRL
its `GRPOTrainer` with `peft_config` (generation by Transformers: its vLLM mode needs a GPU). They
run one at a time; the first step of each warms up and is not counted.

Memory is the peak of the trainer's process. For Turnwise this is the rank, with the two buffers of
the weights in shared memory; its engine is another process. For TRL it is the process that also
generates. Micro-batches are small (512 tokens, or 2 rows), because activations would otherwise hide
the memory that adapters save. The pause of an update is the time from the trainer's publishing to
the engine's check, `weight_update_seconds` in metrics.jsonl; an adapter (`weights.lora: adapter`)
is loaded in that time while requests go on.
"""

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from benchmarks.models import demo_files, make_model
from benchmarks.report import Claim, parser, quotients, report
from examples.calculator.environment import Calculator
from turnwise.trajectory import Trajectory

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "examples" / "calculator" / "config.yaml"
RANK, GROUP, TOKENS = 16, 8, 64
MICRO_TOKENS, MICRO_ROWS = 512, 2
"""Tokens or rows of a micro-batch: few, so that activations do not hide the saved memory."""
DEADLINE = 500.0


def parity(text: str) -> float:
    """Return a reward that a random model gets in about half of its answers."""
    return float(len(text) % 2 == 0)


class Parity(Calculator):
    """The demo's problems with a reward that tells a random model's answers apart."""

    def reward(self, trajectory: Trajectory) -> float:
        return parity(trajectory.final_text)


@dataclass
class Run:
    """Seconds, tokens per second and seconds of an update by counted step; memory and trained
    parameters of the run."""

    seconds: list[float]
    rollout_tokens: list[float]
    updates: list[float]
    memory_gib: float
    trained: int


def parameters(path: Path) -> int:
    """Return the number of values in a file of tensors."""
    with safe_open(path, "pt") as file:
        return sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118


def turnwise(model: Path, data: Path, folder: Path, steps: int, prompts: int, way: str) -> Run:
    """Run `turnwise train`.

    Args:
        way: full, or the value of `weights.lora`.
    """
    changes: dict[str, Any] = {
        "name": way,
        "output_dir": folder,
        "environment": "benchmarks.lora:Parity",
        "model.path": model,
        "data.path": data,
        "rollout.prompts_per_step": prompts,
        "rollout.max_response_tokens": TOKENS,
        "sampling.n": GROUP,
        "sampling.max_tokens": TOKENS,
        "training.steps": steps,
        "training.micro_batch_tokens": MICRO_TOKENS,
        "training.updates_per_step": 1,
        "training.warmup_steps": 0,
        "training.lr_schedule": "constant",
        "eval.every": 0,
        "eval.target": "null",
    }
    if way != "full":
        changes |= {"model.lora.rank": RANK, "weights.lora": way}
    command = [sys.executable, "-m", "turnwise.cli", "train", str(CONFIG)]
    run([*command, *(f"{key}={value}" for key, value in changes.items())])
    lines = (folder / way / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["step"]]
    exact = json.loads((folder / way / "exactness.json").read_text())
    assert exact["violations"] == 0, exact
    (saved,) = (folder / way / "checkpoints").glob("step-*/*model.safetensors")
    trained = parameters(saved)
    shutil.rmtree(folder / way)
    return Run(
        [row["step_seconds"] for row in rows[1:]],
        [row["rollout_tokens_per_s"] for row in rows[1:]],
        [row["weight_update_seconds"] for row in rows[1:]],
        rows[-1]["train_memory_gib"],
        trained,
    )


def trl(model: Path, data: Path, steps: int, prompts: int) -> Run:
    """Run TRL's trainer with PEFT."""
    command = [sys.executable, "-m", "benchmarks.peers.trl_grpo", "--model", str(model)]
    command += ["--problems", str(data), "--prompts", str(prompts), "--steps", str(steps)]
    command += ["--rank", str(RANK), "--tokens", str(TOKENS), "--parity"]
    command += ["--micro-batch", str(MICRO_ROWS)]
    printed = json.loads(run(command).splitlines()[-1])
    return Run(printed["seconds"][1:], [], [], printed["memory_gib"], printed["trained"])


def run(command: list[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:4])} failed: {done.stderr[-2000:]}")
    return done.stdout


def claims(size: str, lora: Run, adapter: Run, full: Run, peer: Run) -> list[Claim]:
    """Return the lines of the table."""
    name = f"LoRA of rank {RANK}, {size} parameters"
    return [
        Claim(
            f"{name}: trained parameters", "M", [lora.trained / 1e6],
            "full training", [full.trained / 1e6], [lora.trained / full.trained],
            at_most=0.05,
        ),
        Claim(
            f"{name}: trained parameters", "M", [lora.trained / 1e6],
            "TRL with PEFT", [peer.trained / 1e6], [lora.trained / peer.trained],
            at_least=1.0, at_most=1.0,
        ),
        Claim(
            f"{name}: memory of the trainer", "GiB", [lora.memory_gib],
            "full training", [full.memory_gib], [lora.memory_gib / full.memory_gib], at_most=0.7,
        ),
        Claim(
            f"{name}: memory of the trainer", "GiB", [lora.memory_gib],
            "TRL with PEFT", [peer.memory_gib], [lora.memory_gib / peer.memory_gib], at_most=2.0,
        ),
        Claim(
            f"{name}: step", "s", lora.seconds,
            "TRL with PEFT", peer.seconds,
            [statistics.median(peer.seconds) / statistics.median(lora.seconds)], "times faster",
            at_least=1.0,
        ),
        Claim(
            f"{name}: step", "s", lora.seconds,
            "full training", full.seconds, quotients(lora.seconds, full.seconds), at_most=1.1,
        ),
        Claim(
            f"{name}: rollouts, merged", "tokens/s", lora.rollout_tokens,
            "full training", full.rollout_tokens,
            quotients(lora.rollout_tokens, full.rollout_tokens), at_least=0.9,
        ),
        Claim(
            f"{name}: pause of an update, merged", "ms", [1e3 * s for s in lora.updates],
            "full training", [1e3 * s for s in full.updates], quotients(lora.updates, full.updates),
            at_most=1.5,
        ),
        Claim(
            f"{name}: rollouts, adapter", "tokens/s", adapter.rollout_tokens,
            "merged", lora.rollout_tokens, quotients(adapter.rollout_tokens, lora.rollout_tokens),
            at_least=0.4,
        ),
        Claim(
            f"{name}: update, adapter, which pauses nothing", "ms",
            [1e3 * s for s in adapter.updates], "merged", [1e3 * s for s in lora.updates],
            quotients(adapter.updates, lora.updates), at_most=1.0,
        ),
    ]  # fmt: skip


def main() -> None:
    """Run the benchmark and print its claims."""
    options = parser("lora", __doc__).parse_args()
    data = demo_files() / "train.jsonl"
    size, steps, prompts = ("3.3 M", 2, 1) if options.quick else ("100 M", 3, 2)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = make_model(size, folder)
        full, lora, adapter = (
            turnwise(model, data, folder, steps, prompts, way)
            for way in ("full", "merged", "adapter")
        )
        report(claims(size, lora, adapter, full, trl(model, data, steps, prompts)), options)


if __name__ == "__main__":
    main()
