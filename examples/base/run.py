"""A base model, without template and tools, learns from 200 conversations to call a tool.

    python -m examples.base.run [--seed N] [KEY=VALUE ...]

Evaluates Gemma 3 270M as it is, trains an adapter on the conversations (`turnwise sft`), adds it to
the model (`turnwise export --merged`), evaluates the result on stories that are longer and in other
words, and lets it answer in Transformers and in vLLM. KEY=VALUE is for `turnwise sft`.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from examples.calculator.demo import free_name, run_turnwise
from turnwise.tools.schema import function_schema

from .stories import NEW, TAUGHT, calculate, make_row, solved

HERE = Path(__file__).parent
BUILD = HERE / "build"
RUNS = Path("runs")
_CONVERSATIONS, _HELDOUT = 200, 64


def main() -> int:
    """Run the command line; returns the exit code of the first command that failed, or 0."""
    parser = argparse.ArgumentParser(prog="examples.base.run", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE", help="keys of the configuration")
    options = parser.parse_args()
    began, seed = time.monotonic(), f"seed={options.seed}"
    write_rows(BUILD, options.seed)
    run = RUNS / free_name(f"base-seed{options.seed}", RUNS)
    model, evaluate = run / "merged", ["eval", str(HERE / "eval.yaml"), seed]
    commands = [
        [*evaluate, f"name={run.name}-before"],
        ["sft", str(HERE / "sft.yaml"), seed, f"name={run.name}", *options.keys],
        ["export", str(run), "--merged"],
        [*evaluate, f"model.path={model}", f"name={run.name}-after"],
    ]
    for command in commands:
        print(f"\n{time.monotonic() - began:4.0f} s   turnwise {' '.join(command)}", flush=True)
        if code := run_turnwise(command):
            return code
    for program in ("transformers", "vllm"):
        print(f"\nThe exported model in {program}:", flush=True)
        answer = [sys.executable, "-m", "examples.base.answer", program, str(model)]
        if code := subprocess.call([*answer, str(BUILD / "heldout.jsonl")]):
            return code
    print(f"\n{run}   {(time.monotonic() - began) / 60:.1f} minutes in all")
    return 0


def write_rows(folder: Path, seed: int) -> None:
    """Write the conversations, and the rows for evaluation."""
    rng = random.Random(seed)
    tools = [function_schema(calculate).description]
    easy = [make_row(rng, TAUGHT, rng.randint(1, 2)) for _ in range(_CONVERSATIONS)]
    rows = [make_row(rng, TAUGHT + NEW, rng.randint(2, 3)) for _ in range(_HELDOUT)]
    folder.mkdir(exist_ok=True)
    _write(folder / "conversations.jsonl", [{"messages": solved(r), "tools": tools} for r in easy])
    _write(folder / "heldout.jsonl", rows)


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
