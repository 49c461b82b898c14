"""The initial model of `make guess`: it imitates an inattentive player.

    python -m examples.guess.warm_start [--seed N] [--output DIR]

Its tokenizer and its weights are trained from scratch, in about a minute on two cores. The player
looks at only some of the answers (`ATTENTION`), and guesses any number that they allow, the middle
no more often than others.
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

from .environment import LARGEST, PROBLEM, SMALLEST, Guess

BUILD = Path(__file__).parent / "build"
OPTIONS = WarmStart(updates=300, conversations=32, learning_rate=4e-3)
TURNS = 6
ATTENTION = 0.8
"""Probability with which the player looks at an answer when it chooses a guess."""
_VOCABULARY = 320


def games(seed: int) -> Iterator[list[dict[str, str]]]:
    """Yield endless games of the inattentive player, each as the messages of a conversation."""
    rng = random.Random(f"games {seed}")
    while True:
        number = rng.randint(SMALLEST, LARGEST)
        environment = Guess({"number": number})
        messages = [{"role": "user", "content": PROBLEM}]
        answers: list[tuple[int, str]] = []
        for _ in range(TURNS):
            guess = inattentive_guess(answers, rng)
            messages.append({"role": "assistant", "content": str(guess)})
            if (answer := environment.step(messages[-1])) is None:
                break
            answers.append((guess, answer))
            messages.append({"role": "user", "content": answer})
        yield messages


def inattentive_guess(answers: list[tuple[int, str]], rng: random.Random) -> int:
    """Return any number that is allowed by the answers at which the player happens to look."""
    low, high = SMALLEST, LARGEST
    for guess, answer in answers:
        if rng.random() >= ATTENTION:
            continue
        if answer == "higher":
            low = max(low, guess + 1)
        else:
            high = min(high, guess - 1)
    return rng.randint(low, high) if low <= high else rng.randint(SMALLEST, LARGEST)


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
    played = games(seed)
    texts = list(itertools.islice(played, 200))
    tokenizer = train_tokenizer(lambda bare: [render(bare, game) for game in texts], _VOCABULARY)
    model = build_model(tokenizer, seed)
    imitate(model, _batches(tokenizer, played, options.conversations), options, report)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


def render(tokenizer: PreTrainedTokenizerBase, game: list[dict[str, str]]) -> str:
    """Render a game with the chat template."""
    text = tokenizer.apply_chat_template(game, tokenize=False)
    assert isinstance(text, str)
    return text


def _batches(
    tokenizer: PreTrainedTokenizerBase, played: Iterator[list[dict[str, str]]], size: int
) -> Iterator[list[Example]]:
    while True:
        yield encode_texts(
            tokenizer, [render(tokenizer, g) for g in itertools.islice(played, size)]
        )


def run(output: Path, seed: int, updates: int) -> None:
    """Make a model, and print how its loss falls."""
    torch.set_num_threads(1)  # the matrices are too small for two threads, which would wait
    began, used = time.monotonic(), time.process_time()

    def report(update: int, loss: float) -> None:
        if update % 50 == 0:
            seconds, processor = time.monotonic() - began, time.process_time() - used
            print(
                f"   update {update:4d}   loss {loss:.3f}   {seconds:.0f} s "
                f"({processor:.0f} s of processor)",
                flush=True,
            )

    options = WarmStart(updates, OPTIONS.conversations, OPTIONS.learning_rate)
    make_model(output, seed, options, report)
    print(f"   wrote {output}", flush=True)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="examples.guess.warm_start", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=BUILD / "model-seed0")
    parser.add_argument("--updates", type=int, default=OPTIONS.updates)
    options = parser.parse_args()
    run(options.output, options.seed, options.updates)


if __name__ == "__main__":
    main()
