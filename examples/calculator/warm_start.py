"""The demo's initial model, which imitates a careless teacher: supervised training on rows.

    python -m examples.calculator.warm_start [--seed N] [--steps N] [--output DIR]

Writes model and tokenizer in Hugging Face's format, by default to `build/warm_started`. The rows
are conversations of a careless teacher (see `problems.demonstrations`), with the tool's
description. The model learns to call the tool and to answer, and copies the teacher's mistakes. It
makes them about as often as the teacher does, so that reinforcement learning also samples better
answers.

Every second row only repeats numbers: a model that copies digits reliably only has to learn which
number goes where, which reinforcement learning teaches well.
"""

import argparse
import itertools
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import turnwise

from .conversations import solved_conversation
from .model import build_model
from .prepare import BUILD
from .problems import demonstrations, number_rows
from .tokenizer import build_tokenizer
from .tool import TOOL_SCHEMA

SETTINGS: dict[str, Any] = {
    "model": {"max_length": 512},
    "rollout": {"prompts_per_step": 64},
    "training": {
        "steps": 2400,
        "learning_rate": 2e-3,
        "warmup_steps": 50,
        "lr_schedule": "linear",
        "weight_decay": 0.01,
    },
    "eval": {"every": 200},
    "samples_every": 200,
}
ROWS, HELD_OUT = 32_768, 256


def rows(seed: int) -> Iterator[dict[str, Any]]:
    """Yield endless rows: a conversation of the teacher, then one that repeats numbers."""
    for solved, numbers in zip(demonstrations(seed), number_rows(seed), strict=False):
        yield {"messages": solved_conversation(solved), "tools": [TOOL_SCHEMA]}
        line = " ".join(map(str, numbers))
        yield {"messages": [{"role": role, "content": line} for role in ("user", "assistant")]}


def make_model(
    output: Path, seed: int, count: int = ROWS, **keys: Any
) -> "turnwise.TrainingResult":
    """Train a model from scratch and write it, with its tokenizer, to a folder.

    Args:
        count: Number of rows to train on, in as many epochs as the steps take.
        **keys: Keys of the configuration, which override `SETTINGS`.
    """
    made, tokenizer = rows(seed), build_tokenizer(seed)
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder, "fresh")
        build_model(tokenizer, seed).save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        train, heldout = Path(folder, "train.jsonl"), Path(folder, "heldout.jsonl")
        for path, number in ((train, count), (heldout, HELD_OUT)):
            with path.open("w") as file:
                file.writelines(json.dumps(row) + "\n" for row in itertools.islice(made, number))
        result = turnwise.sft(
            model=fresh,
            data=train,
            eval_data=heldout,
            config={**SETTINGS, "seed": seed, "output_dir": folder},
            **keys,
        )
        assert result.checkpoint is not None
        ignored = shutil.ignore_patterns("state")
        shutil.copytree(result.checkpoint, output, ignore=ignored, dirs_exist_ok=True)
    return result


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="examples.calculator.warm_start", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=BUILD / "warm_started")
    parser.add_argument("--steps", type=int, default=SETTINGS["training"]["steps"])
    options = parser.parse_args()
    make_model(options.output, options.seed, **{"training.steps": options.steps})
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
