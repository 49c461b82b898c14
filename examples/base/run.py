"""A base model, without template and tools, learns to call a tool: by examples, then by trying.

    python -m examples.base.run [--seed N] [KEY=VALUE ...]

Evaluates Gemma 3 270M as it is, trains it on 200 conversations (`turnwise sft`), then on stories
that are longer and in other words, by reinforcement learning (`turnwise train`), and exports the
result, which then answers in Transformers and in vLLM. KEY=VALUE is for `turnwise train`.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from examples.calculator.demo import as_text, evaluation, free_name, newly_solved, run_turnwise
from turnwise.tools.schema import function_schema

from .stories import NEW, TAUGHT, calculate, make_row, solved

HERE = Path(__file__).parent
BUILD = HERE / "build"
RUNS = Path("runs")
_CONVERSATIONS, _ROWS, _HELDOUT = 200, 512, 64


def main() -> int:
    """Run the command line; returns the exit code of the first command that failed, or 0."""
    parser = argparse.ArgumentParser(prog="examples.base.run", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE", help="keys of the configuration")
    options = parser.parse_args()
    began, seed = time.monotonic(), f"seed={options.seed}"
    write_rows(BUILD, options.seed)
    taught = RUNS / free_name(f"base-sft-seed{options.seed}", RUNS)
    trained = RUNS / free_name(f"base-seed{options.seed}", RUNS)
    config = str(HERE / "config.yaml")
    commands = [
        ["eval", config, seed],
        ["sft", str(HERE / "sft.yaml"), seed, f"name={taught.name}"],
        ["export", str(taught), "--merged"],
        ["train", config, seed, f"model.path={taught / 'merged'}", f"name={trained.name}"],
        ["export", str(trained), "--merged"],
    ]
    commands[3] += options.keys
    for command in commands:
        print(f"\n{time.monotonic() - began:4.0f} s   turnwise {' '.join(command)}", flush=True)
        if code := run_turnwise(command):
            return code
    print_results(trained)
    for program in ("transformers", "vllm"):
        print(f"\nThe exported model in {program}:", flush=True)
        answer = [sys.executable, "-m", "examples.base.answer", program, str(trained / "merged")]
        if code := subprocess.call([*answer, str(BUILD / "heldout.jsonl")]):
            return code
    print(f"\n{trained}   {(time.monotonic() - began) / 60:.1f} minutes in all")
    return 0


def write_rows(folder: Path, seed: int) -> None:
    """Write the conversations, and the rows for training and evaluation, which share no story."""
    rng = random.Random(seed)
    tools = [function_schema(calculate).description]
    easy = [make_row(rng, TAUGHT, rng.randint(1, 2)) for _ in range(_CONVERSATIONS)]
    rows = [make_row(rng, TAUGHT + NEW, rng.randint(2, 3)) for _ in range(_ROWS + _HELDOUT)]
    folder.mkdir(exist_ok=True)
    _write(folder / "conversations.jsonl", [{"messages": solved(r), "tools": tools} for r in easy])
    _write(folder / "train.jsonl", rows[_HELDOUT:])
    _write(folder / "heldout.jsonl", rows[:_HELDOUT])


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def print_results(run: Path) -> None:
    """Print a conversation before and after, and the accuracy, from a run's files."""
    steps = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    measured = [step for step in steps if step["accuracy_heldout"] is not None]
    before, after = (evaluation(run, step["step"]) for step in (measured[0], measured[-1]))
    for old, new in newly_solved(before, after)[:1]:
        print(f"\nA held-out story, before:\n\n{as_text(old)}\n\nand after:\n\n{as_text(new)}")
    curve = ", ".join(f"{each['accuracy_heldout']:.3f} ({each['step']})" for each in measured)
    print(f"\nAccuracy on held-out stories (after step): {curve}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
