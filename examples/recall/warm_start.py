"""The initial model of the example: it imitates a reader who is careless with summaries.

    python -m examples.recall.warm_start [--seed N] [--output DIR]

Tokenizer and weights are trained from scratch. With probability `CARE`, the reader's summary has
the digits that it knows; otherwise it only says that a page was read. The reader then continues
from its summary alone.
"""

import argparse
import itertools
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from examples.calculator.conversations import Example, encode_texts
from examples.calculator.imitation import WarmStart, imitate
from examples.calculator.model import build_model
from examples.calculator.tokenizer import train_tokenizer
from turnwise.rollouts.context_window import REQUEST, SUMMARY

from .environment import DIGITS, NEXT, PAGES, PROBLEM, page, pages_of

BUILD = Path(__file__).parent / "build"
OPTIONS = WarmStart(updates=400, conversations=32, learning_rate=4e-3)
CARE = 0.6
"""Probability with which the reader writes down the digits that it knows."""
CARELESS = "I have read a page."
_VOCABULARY = 640


def conversations(seed: int) -> Iterator[list[dict[str, str]]]:
    """Yield endless conversations of the careless reader, each as the messages of one context."""
    rng = random.Random(f"pages {seed}")
    while True:
        pages, known = pages_of(rng.randrange(10 ** (PAGES * DIGITS))), ""
        asked = PROBLEM
        for digits in pages:
            summary = f"{known}{digits}" if rng.random() < CARE else CARELESS
            yield said(asked, NEXT, f"{page(digits)}\n\n{REQUEST}", summary)
            known = summary if summary != CARELESS else ""
            asked = f"{PROBLEM}\n\n{SUMMARY.format(summary)}"
        if len(known) == PAGES * DIGITS:
            yield said(asked, known)


def said(*texts: str) -> list[dict[str, str]]:
    """Return texts of the user and the model, in turn, as messages."""
    roles = itertools.cycle(("user", "assistant"))
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


def make_model(
    output: Path,
    seed: int,
    options: WarmStart = OPTIONS,
    report: Callable[[int, float], None] = lambda update, loss: None,
) -> None:
    """Train a model from scratch and write it, with its tokenizer, to a folder.

    The same seed gives the same model on the same machine.

    Args:
        report: Called after each update with its number and loss.
    """
    made = conversations(seed)
    texts = list(itertools.islice(made, 200))
    tokenizer = train_tokenizer(lambda bare: [render(bare, text) for text in texts], _VOCABULARY)
    model = build_model(tokenizer, seed)
    imitate(model, _batches(tokenizer, made, options.conversations), options, report)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


def render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> str:
    """Render a conversation with the chat template."""
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert isinstance(text, str)
    return text


def _batches(
    tokenizer: PreTrainedTokenizerBase, made: Iterator[list[dict[str, str]]], size: int
) -> Iterator[list[Example]]:
    while True:
        yield encode_texts(tokenizer, [render(tokenizer, c) for c in itertools.islice(made, size)])


def run(output: Path, seed: int, updates: int) -> None:
    """Make a model, and print how its loss falls."""
    torch.set_num_threads(1)  # the matrices are too small for two threads, which would wait
    began = time.monotonic()

    def report(update: int, loss: float) -> None:
        if update % 50 == 0:
            seconds = time.monotonic() - began
            print(f"   update {update:4d}   loss {loss:.3f}   {seconds:.0f} s", flush=True)

    make_model(
        output, seed, WarmStart(updates, OPTIONS.conversations, OPTIONS.learning_rate), report
    )
    print(f"   wrote {output}", flush=True)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="examples.recall.warm_start", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=BUILD / "model-seed0")
    parser.add_argument("--updates", type=int, default=OPTIONS.updates)
    options = parser.parse_args()
    run(options.output, options.seed, options.updates)


if __name__ == "__main__":
    main()
