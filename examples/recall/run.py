"""Recall, from nothing to summaries that keep the digits: a warm start, a run, its curve.

    python -m examples.recall.run [--seed N] [--build DIR] [--updates N] [key.sub=value ...]

Overrides work as in `turnwise train`. It ends with an attempt before and after, and the share of
held-out attempts in which all digits were said.
"""

import argparse
import sys
import time
from pathlib import Path

import turnwise
from examples.calculator.demo import free_name
from examples.guess.run import curve
from turnwise.trajectory import Trajectory, read_jsonl

from . import warm_start
from .environment import REST

CONFIG = Path(__file__).parent / "config.yaml"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="examples.recall.run", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--build", type=Path, default=warm_start.BUILD, help="folder of the model")
    parser.add_argument("--updates", type=int, default=warm_start.OPTIONS.updates)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    began = time.monotonic()
    model = options.build / f"model-seed{options.seed}"
    print("1. A small model imitates a reader who is careless with summaries.", flush=True)
    warm_start.run(model, options.seed, options.updates)

    config = turnwise.load_config(CONFIG, [f"seed={options.seed}", *options.overrides])
    name = free_name(f"recall-seed{options.seed}", Path(config.output_dir))
    print("\n2. It learns to summarise, from the reward of the answer alone.", flush=True)
    result = turnwise.train(model, config=config, name=name)

    measured = [step for step in result.metrics if step["accuracy_heldout"] is not None]
    print("\n3. An attempt before, and after:")
    for step in (measured[0], measured[-1]):
        file = result.folder / "trajectories" / f"eval-{step['step']:04d}.jsonl"
        print(f"   {attempt(next(read_jsonl(file)))}")
    print("\n4. Held-out attempts in which the digits of both pages were said:")
    print("\n".join(f"   {line}" for line in curve(result.metrics)))
    print(f"\n   {result.folder}   {time.monotonic() - began:.0f} s in all")


def attempt(trajectory: Trajectory) -> str:
    """Return an attempt in one line, with only the digits of each page."""
    texts = [message["content"].replace(REST, "") for message in trajectory.messages[1:]]
    return ", ".join(" ".join(text.split()) for text in texts)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
