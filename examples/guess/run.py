"""Find the number, from nothing to a player that halves: a warm start, a training run, its curve.

    python -m examples.guess.run [--seed N] [--build DIR] [--updates N] [key.sub=value ...]

Overrides work as in `turnwise train`.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import turnwise
from examples.calculator.demo import free_name
from turnwise.trajectory import Trajectory, read_jsonl

from . import warm_start

CONFIG = Path(__file__).parent / "config.yaml"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="examples.guess.run", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--build", type=Path, default=warm_start.BUILD, help="folder of the model")
    parser.add_argument("--updates", type=int, default=warm_start.OPTIONS.updates)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    began = time.monotonic()
    model = options.build / f"model-seed{options.seed}"
    print("1. A small model imitates an inattentive player.", flush=True)
    warm_start.run(model, options.seed, options.updates)

    config = turnwise.load_config(CONFIG, [f"seed={options.seed}", *options.overrides])
    name = free_name(f"guess-seed{options.seed}", Path(config.output_dir))
    print("\n2. It learns to search by playing.", flush=True)
    result = turnwise.train(model, config=config, name=name)

    measured = [step for step in result.metrics if step["accuracy_heldout"] is not None]
    print("\n3. A game before, and after:")
    for step in (measured[0], measured[-1]):
        print(f"   {game(longest(result.folder, step['step']))}")
    print("\n4. Games in which the number was found within six guesses:")
    print("\n".join(f"   {line}" for line in curve(result.metrics)))
    print(f"\n   {result.folder}   {time.monotonic() - began:.0f} s in all")


def curve(steps: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each evaluation: step, share of games won, and a bar of that length."""
    measured = [(step["step"], step["accuracy_heldout"]) for step in steps]
    return [
        f"step {step:3d}   {won:.3f}  {'#' * round(40 * won)}"
        for step, won in measured
        if won is not None
    ]


def longest(run: Path, step: int) -> Trajectory:
    """Return the longest game of an evaluation."""
    games = read_jsonl(run / "trajectories" / f"eval-{step:04d}.jsonl")
    return max(games, key=lambda trajectory: len(trajectory.messages))


def game(trajectory: Trajectory) -> str:
    """Return a game in one line."""
    return ", ".join(message["content"] for message in trajectory.messages[1:])


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
