"""Makes everything the example trains on: a warm-started model, problems, held-out problems.

    python -m examples.calculator.prepare [--seed N] [--output DIR]

Writes `model/` (model and tokenizer in Hugging Face's format), `train.jsonl` and
`heldout.jsonl` into the output folder. The same seed gives the same files.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from .model import build_model
from .problems import heldout_problems, train_problems, write_rows
from .tokenizer import build_tokenizer
from .warm_start import Progress, WarmStart, warm_start

BUILD = Path(__file__).parent / "build"


def prepare(
    output: Path = BUILD,
    seed: int = 0,
    options: WarmStart | None = None,
    train: int = 4000,
    heldout: int = 200,
    report: Callable[[Progress], None] = lambda progress: None,
) -> Progress:
    """Writes the model and the problems, and returns the warm start's last check.

    `WarmStart(updates=5)` makes a model that knows nothing, in seconds.
    """
    output.mkdir(parents=True, exist_ok=True)
    write_rows(train_problems(train, seed), output / "train.jsonl")
    write_rows(heldout_problems(heldout, seed), output / "heldout.jsonl")
    tokenizer = build_tokenizer(seed)
    model = build_model(tokenizer, seed)
    last = warm_start(model, tokenizer, seed, options or WarmStart(), report)
    model.save_pretrained(output / "model")
    tokenizer.save_pretrained(output / "model")
    return last


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="examples.calculator.prepare", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=BUILD)
    options = parser.parse_args(arguments)
    torch.set_num_threads(2)

    def report(progress: Progress) -> None:
        if progress.updates % 50 == 0:
            print(_line(progress), flush=True)

    print(_line(prepare(options.output, options.seed, report=report)))
    print(f"wrote {options.output}")


def _line(progress: Progress) -> str:
    return (
        f"update {progress.updates:4d}   loss {progress.loss:.3f}   "
        f"accuracy {progress.accuracy:.2f}   {progress.seconds:.0f} s"
    )


if __name__ == "__main__":
    main()
