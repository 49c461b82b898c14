"""SmolLM2-135M-Instruct learns to use a calculator, by reinforcement learning alone.

    python -m examples.smollm2.run [--seed N] [KEY=VALUE ...]

Runs `turnwise train` as a user would, and prints the results: two held-out problems in full before
and after, and the accuracy on all held-out problems. The problems come from
reasoning-gym, which `make real` installs.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from examples.calculator.demo import (
    as_text,
    evaluation,
    free_name,
    how_to_view,
    newly_solved,
    run_turnwise,
)

CONFIG = Path(__file__).parent / "config.yaml"
RUNS = Path("runs")
SHOWN = 2
"""Number of problems whose conversations are printed, before and after."""


def main() -> int:
    """Run the command line; returns the exit code of the training."""
    parser = argparse.ArgumentParser(prog="examples.smollm2.run", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE", help="keys of the configuration")
    options = parser.parse_args()
    began = time.monotonic()
    name = free_name(f"smollm2-seed{options.seed}", RUNS)
    command = ["train", str(CONFIG), f"seed={options.seed}", f"name={name}", *options.keys]
    print(f"SmolLM2 learns by trying: turnwise {' '.join(command)}", flush=True)
    if code := run_turnwise(command):
        return code
    print_results(RUNS / name)
    print(f"\n{RUNS / name}   {(time.monotonic() - began) / 60:.1f} minutes in all")
    print(f"Look at it: {how_to_view(RUNS / name)}")
    return 0


def print_results(run: Path) -> None:
    """Print conversations before and after, and the accuracy, from a run's files."""
    from examples.guess.run import curve  # imports torch: not during the training

    steps = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    measured = [step for step in steps if step["accuracy_heldout"] is not None]
    before, after = (evaluation(run, step["step"]) for step in (measured[0], measured[-1]))
    for number, (old, new) in enumerate(newly_solved(before, after)[:SHOWN], start=1):
        print(f"\nHeld-out problem {number}, before:\n\n{as_text(old)}")
        print(f"\nand after:\n\n{as_text(new)}")
    print("\nAccuracy on held-out problems:")
    print("\n".join(curve(steps)))
    memory = max(step.get("train_memory_gib") or 0.0 for step in steps)
    print(f"at most {memory:.1f} GiB in the trainer")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
