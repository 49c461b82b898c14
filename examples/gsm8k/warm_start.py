"""A small model trained on GSM8K's worked solutions, for machines without a GPU.

    python -m examples.gsm8k.warm_start TRAIN.jsonl [--seed N] [--output DIR]

Its tokenizer and its weights are trained from scratch on the training rows, which takes some
minutes on two cores. It learns the form (a call for each calculation,
`#### N` at the end) and very little arithmetic reasoning: its accuracy is a few percent at best.
"""

import argparse
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from examples.calculator.conversations import Example, encode_texts
from examples.calculator.imitation import WarmStart, imitate
from examples.calculator.model import build_model
from examples.calculator.tokenizer import train_tokenizer

from .solutions import earns, render, solved_conversation

BUILD = Path(__file__).parent / "build"
_VOCABULARY = 2048
_LONGEST = 384
"""Maximum number of tokens of a conversation; longer ones are left out."""
_OPTIONS = WarmStart(updates=800, conversations=8, learning_rate=3e-3)


def make_model(rows: list[dict[str, Any]], output: Path, seed: int, options: WarmStart) -> None:
    """Train a tokenizer and a model on the rows' solutions, and write both to a folder."""
    conversations = [solved_conversation(row) for row in rows]
    right = [c for row, c in zip(rows, conversations, strict=True) if earns(row, c) == 1.0]
    print(f"{len(right):,} of {len(rows):,} worked solutions earn the reward", flush=True)
    tokenizer = train_tokenizer(lambda bare: [render(bare, c) for c in right[:2000]], _VOCABULARY)
    model = build_model(tokenizer, seed, hidden_size=192, layers=4)
    examples = encode_texts(tokenizer, [render(tokenizer, c) for c in right])
    short = [example for example in examples if len(example.ids) <= _LONGEST]
    count = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"{count / 1e6:.1f} M parameters learn from {len(short):,} of them, of at most {_LONGEST} "
        "tokens",
        flush=True,
    )
    began = time.monotonic()

    def report(update: int, loss: float) -> None:
        if update % 50 == 0:
            seconds = time.monotonic() - began
            print(f"update {update:4d}   loss {loss:.3f}   {seconds:.0f} s", flush=True)

    imitate(model, _batches(short, seed, options.conversations), options, report)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


def _batches(examples: list[Example], seed: int, size: int) -> Iterator[list[Example]]:
    """Yield batches of examples of similar length without end."""
    rng = random.Random(seed)
    while True:
        order = sorted(examples, key=lambda example: (len(example.ids) // 16, rng.random()))
        batches = [order[i : i + size] for i in range(0, len(order), size)]
        rng.shuffle(batches)
        yield from batches


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="examples.gsm8k.warm_start", description=__doc__)
    parser.add_argument("train", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=BUILD / "model")
    parser.add_argument("--updates", type=int, default=_OPTIONS.updates)
    options = parser.parse_args()
    torch.set_num_threads(2)
    rows = [json.loads(line) for line in options.train.open()]
    settings = WarmStart(options.updates, _OPTIONS.conversations, _OPTIONS.learning_rate)
    make_model(rows, options.output, options.seed, settings)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
