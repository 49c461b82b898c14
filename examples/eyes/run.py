"""Eyes, from nothing to a player that looks before it answers: a warm start, a run, its curve.

    python -m examples.eyes.run [--seed N] [--build DIR] [--updates N] [key.sub=value ...]

Overrides work as in `turnwise train`. It ends with a game before and after, and the share of
held-out games that were won.
"""

import argparse
import sys
import time
from pathlib import Path

import turnwise
from examples.calculator.demo import free_name
from examples.guess.run import curve
from turnwise.chat.messages import said
from turnwise.trajectory import Trajectory, read_jsonl

from . import warm_start

CONFIG = Path(__file__).parent / "config.yaml"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="examples.eyes.run", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--build", type=Path, default=warm_start.BUILD, help="folder of the model")
    parser.add_argument("--updates", type=int, default=warm_start.SETTINGS["training"]["steps"])
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    began = time.monotonic()
    model = options.build / f"model-seed{options.seed}"
    print("1. A small model imitates a hasty player.", flush=True)
    warm_start.make_model(model, options.seed, **{"training.steps": options.updates})
    print(f"   wrote {model}   {time.monotonic() - began:.0f} s", flush=True)

    config = turnwise.load_config(CONFIG, [f"seed={options.seed}", *options.overrides])
    name = free_name(f"eyes-seed{options.seed}", Path(config.output_dir))
    print("\n2. It learns to look before it answers, from the reward of the answer.", flush=True)
    result = turnwise.train(model, config=config, name=name)

    measured = [step for step in result.metrics if step["accuracy_heldout"] is not None]
    print("\n3. A game before, and after:")
    for step in (measured[0], measured[-1]):
        file = result.folder / "trajectories" / f"eval-{step['step']:04d}.jsonl"
        print(f"   {game(next(read_jsonl(file)))}")
    print("\n4. Held-out games that were won:")
    print("\n".join(f"   {line}" for line in curve(result.metrics)))
    print(f"\n   {result.folder}   {time.monotonic() - began:.0f} s in all")


def game(trajectory: Trajectory) -> str:
    """Return a game in one line."""
    return "  ".join(" ".join(said(message).split()) for message in trajectory.messages)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
