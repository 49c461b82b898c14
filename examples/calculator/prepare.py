"""Prepares everything the demo trains on: the initial model, and the seed's problems.

    python -m examples.calculator.prepare [--seed N] [--output DIR]

Writes `model/` (a copy of the repository's model; `warm_start` trains one), `train.jsonl` and
`heldout.jsonl` into the output folder. The same seed gives the same files.
"""

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .problems import heldout_problems, train_problems, write_rows

if TYPE_CHECKING:
    from .imitation import WarmStart

BUILD = Path(__file__).parent / "build"
MODEL = Path(__file__).parent / "warm_started"
"""Folder of the model in the repository."""


def prepare(
    output: Path = BUILD,
    seed: int = 0,
    options: "WarmStart | None" = None,
    train: int = 4000,
    heldout: int = 200,
) -> None:
    """Write the problems and the model.

    Args:
        options: Train a model from scratch with these settings; None copies the repository's.
        train: Number of problems to train on.
        heldout: Number of problems to evaluate on.
    """
    output.mkdir(parents=True, exist_ok=True)
    write_rows(train_problems(train, seed), output / "train.jsonl")
    write_rows(heldout_problems(heldout, seed), output / "heldout.jsonl")
    if options is None:
        shutil.copytree(MODEL, output / "model", dirs_exist_ok=True)
    else:
        from .imitation import make_model  # with torch, which takes seconds to import

        make_model(output / "model", seed, options)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="examples.calculator.prepare", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=BUILD)
    options = parser.parse_args(arguments)
    prepare(options.output, options.seed)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
