"""SmolLM2-135M-Instruct learns to answer questions about a database with SQL.

    python -m examples.sqlite.run [--seed N] [KEY=VALUE ...]

Writes the rows, runs `turnwise train` as a user would, and prints two held-out questions in full
before and after, and the accuracy on all held-out questions.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from examples.calculator.demo import free_name, run_turnwise
from examples.smollm2.run import print_results

from .environment import make_rows

HERE = Path(__file__).parent
BUILD = HERE / "build"
RUNS = Path("runs")
_TRAIN, _HELDOUT = 256, 100


def main() -> int:
    """Run the command line; returns the exit code of the training."""
    parser = argparse.ArgumentParser(prog="examples.sqlite.run", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE", help="keys of the configuration")
    options = parser.parse_args()
    began = time.monotonic()
    BUILD.mkdir(exist_ok=True)
    rows = [f"{json.dumps(row)}\n" for row in make_rows(_TRAIN + _HELDOUT, options.seed)]
    (BUILD / "train.jsonl").write_text("".join(rows[:_TRAIN]))
    (BUILD / "heldout.jsonl").write_text("".join(rows[_TRAIN:]))
    name = free_name(f"sqlite-seed{options.seed}", RUNS)
    command = ["train", str(HERE / "config.yaml"), f"seed={options.seed}", f"name={name}"]
    if code := run_turnwise([*command, *options.keys]):
        return code
    print_results(RUNS / name)
    print(f"\n{RUNS / name}   {(time.monotonic() - began) / 60:.1f} minutes in all")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
