"""The user's model: a small one that compares each guess with its number."""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

from examples.calculator.conversations import encode_texts
from examples.calculator.imitation import WarmStart, imitate
from examples.calculator.model import build_model
from examples.calculator.tokenizer import train_tokenizer
from examples.guess.environment import LARGEST, SMALLEST
from examples.guess.warm_start import render

from .environment import STOP, instructions

OPTIONS = WarmStart(updates=300, conversations=32, learning_rate=4e-3)


def conversations(seed: int) -> Iterator[list[dict[str, str]]]:
    """Yield endless games as the user's model sees them: its `user` messages are the guesses."""
    rng = random.Random(seed)
    while True:
        number = rng.randint(SMALLEST, LARGEST)
        messages = [{"role": "system", "content": instructions(number)}]
        for _ in range(6):
            near = rng.randint(max(SMALLEST, number - 3), min(LARGEST, number + 3))
            guess = rng.choice([rng.randint(SMALLEST, LARGEST), near])
            answer = STOP if guess == number else ["lower", "higher"][guess < number]
            messages.append({"role": "user", "content": str(guess)})
            messages.append({"role": "assistant", "content": answer})
        yield messages


def make_user(output: Path, options: WarmStart = OPTIONS) -> None:
    """Train the model from scratch, and write it to a folder."""
    played = conversations(0)
    some = list(itertools.islice(played, 200))
    tokenizer = train_tokenizer(lambda bare: [render(bare, m) for m in some], 320)
    model = build_model(tokenizer, 0)
    batches = (
        encode_texts(tokenizer, [render(tokenizer, m) for m in itertools.islice(played, size)])
        for size in itertools.repeat(options.conversations)
    )
    imitate(model, batches, options, lambda update, loss: None)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
