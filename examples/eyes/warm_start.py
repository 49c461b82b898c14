"""The initial model of the example: it imitates a hasty player, by supervised training on rows.

    python -m examples.eyes.warm_start [--seed N] [--steps N] [--output DIR]

The rows are conversations with images (`turnwise sft`). Every fourth row is a game: the player
mostly guesses, and if it looks, it sometimes looks at a wrong card, or misreads the digit. The
three rows after a game are exercises in seeing, without mistakes, with the same cards. Two ask
which of some cards has a colour, one asks which digit is on a card. So the model sees well, and
copies the haste.
"""

import argparse
import base64
import io
import itertools
import json
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image

import turnwise
from turnwise.tools.schema import function_schema

from .environment import COLOURS, Eyes, card_of, from_near, make_row, question, table

BUILD = Path(__file__).parent / "build"
LOOKS, FINDS, READS = 0.4, 0.85, 0.9
"""Probabilities that the player looks at a card, that it then looks at the right card, and that it
says the digit that it sees."""
ROWS = 8000
SETTINGS: dict[str, Any] = {
    "name": "eyes-warm-start",
    "model": {"max_length": 256},
    "rollout": {"prompts_per_step": 48},
    "training": {
        "steps": 300,
        "optimizer": "muon",
        "learning_rate": 8e-3,
        "warmup_steps": 20,
        "lr_schedule": "linear",
    },
    "samples_every": 100,
}
ZOOM = function_schema(Eyes.zoom).description
"""The tool as prompts describe it."""


def rows(seed: int) -> Iterator[dict[str, Any]]:
    """Yield endless rows: a game of the hasty player, then three exercises with its cards."""
    rng = random.Random(f"hasty {seed}")
    while True:
        game = make_row(rng)
        said, seen = rng.randrange(10), rng.randint(1, len(COLOURS))
        messages = [question(game)]
        if rng.random() < LOOKS:
            seen = card_of(game) if rng.random() < FINDS else seen
            said = game["cards"][seen - 1][1] if rng.random() < READS else said
            messages += looked(game, seen)
        messages.append({"role": "assistant", "content": str(said)})
        yield {"messages": [with_urls(message) for message in messages], "tools": [ZOOM]}
        for _ in range(2):
            left = rng.sample(game["cards"], rng.randint(1, len(COLOURS)))
            some = [card if card in left else ["", 0] for card in game["cards"]]
            asked = {**game, "cards": some, "asked": left[0][0]}
            which = f"Which card is {asked['asked']}?"
            yield exercise(table(asked, digits=False), which, card_of(asked))
        yield exercise(from_near(game, seen), "Which digit is it?", game["cards"][seen - 1][1])


def exercise(picture: Image.Image, text: str, answer: int) -> dict[str, Any]:
    """Return a row with one question about a picture."""
    content = [{"type": "text", "text": text}, {"type": "image", "image": picture}]
    asked = with_urls({"role": "user", "content": content})
    return {"messages": [asked, {"role": "assistant", "content": str(answer)}]}


def looked(game: dict[str, Any], card: int) -> list[dict[str, Any]]:
    """Return a call of the tool, and its result."""
    call = {"type": "function", "function": {"name": "zoom", "arguments": {"card": card}}}
    shown = [{"type": "image", "image": from_near(game, card)}]
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "zoom", "content": shown},
    ]


def with_urls(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as JSON can hold it: with images as data URLs."""
    if isinstance(message["content"], str):
        return message
    parts = [
        {**part, "image": data_url(part["image"])} if "image" in part else part
        for part in message["content"]
    ]
    return {**message, "content": parts}


def data_url(picture: Image.Image) -> str:
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def make_model(output: Path, seed: int, **keys: Any) -> "turnwise.TrainingResult":
    """Train a model from scratch and write it, with tokenizer and processor, to a folder.

    Args:
        **keys: Keys of the configuration, which override `SETTINGS`.
    """
    from .model import build_model, build_tokenizer, save  # with torch

    made = list(itertools.islice(rows(seed), ROWS))
    tokenizer = build_tokenizer(made[:200])
    with tempfile.TemporaryDirectory() as folder:
        fresh, data = Path(folder, "fresh"), Path(folder, "rows.jsonl")
        save(build_model(tokenizer, seed), tokenizer, fresh)
        data.write_text("".join(json.dumps(row) + "\n" for row in made))
        config = {**SETTINGS, "seed": seed, "output_dir": folder}
        result = turnwise.sft(model=fresh, data=data, config=config, **keys)
        assert result.checkpoint is not None
        ignored = shutil.ignore_patterns("state")
        shutil.copytree(result.checkpoint, output, ignore=ignored, dirs_exist_ok=True)
    return result


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="examples.eyes.warm_start", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=SETTINGS["training"]["steps"])
    parser.add_argument("--output", type=Path, default=BUILD / "model-seed0")
    options = parser.parse_args()
    make_model(options.output, options.seed, **{"training.steps": options.steps})
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
