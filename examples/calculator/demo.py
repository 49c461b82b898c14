"""The demo, from nothing to a trained tool user: build, train, tell.

    python -m examples.calculator.demo [--seed N]

Builds the model and the problems, runs `turnwise train` on them as a person would, and ends
with what changed and where the picture is.
"""

import argparse
import itertools
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from .prepare import BUILD
from .prepare import main as prepare

CONFIG = Path(__file__).parent / "config.yaml"
RUNS = Path("runs")


def main() -> int:
    """Runs the demo; returns the exit code of the training."""
    parser = argparse.ArgumentParser(prog="examples.calculator.demo", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    started = time.monotonic()

    print("1. A small model is built and shown a few worked examples.", flush=True)
    prepare(["--seed", str(seed)])

    name = _free_name(f"calculator-seed{seed}")
    command = ["turnwise", "train", str(CONFIG), f"seed={seed}", f"name={name}"]
    print(f"\n2. It learns the rest by trying: {' '.join(command)}", flush=True)
    with subprocess.Popen([Path(sys.executable).with_name("turnwise"), *command[1:]]) as training:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for it; we wait until it is done
        if code := training.wait():
            return code

    rows = [json.loads(line) for line in (RUNS / name / "metrics.jsonl").open()]
    measured = [row["accuracy_heldout"] for row in rows if row["accuracy_heldout"] is not None]
    heldout = sum(1 for _ in (BUILD / "heldout.jsonl").open())
    tokens = sum(row.get("sampled_tokens", 0) for row in rows)
    print(f"\n3. After {len(rows) - 1} steps and {tokens:,} sampled tokens, on {heldout} held-out")
    print("   problems (numbers never trained on, half in phrasings never shown beforehand):")
    print(f"   accuracy before RL {measured[0]:.3f}, after RL {measured[-1]:.3f}")
    print(f"   trajectories {RUNS / name / 'trajectories'}")
    print(f"   picture      {RUNS / name / 'reward.png'}")
    print(f"   {time.monotonic() - started:.0f} s in all")
    return 0


def _free_name(name: str) -> str:
    candidates = itertools.chain([name], (f"{name}-{i}" for i in itertools.count(2)))
    return next(c for c in candidates if not (RUNS / c).exists())


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
