"""Prepares the example: the demo's problems, and the demo's model taught to write code.

    python -m examples.retool.prepare [--seed N] [--output DIR] [--updates N]

The demo's model can read its problems already. A minute of supervised training on solutions of the
demo's careless teacher, written as Python, teaches it the form. It copies the teacher's mistakes,
which leaves room for reinforcement learning.
"""

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen3ForCausalLM

from examples.calculator.conversations import IGNORED, Example
from examples.calculator.imitation import WarmStart, imitate
from examples.calculator.prepare import MODEL
from examples.calculator.problems import (
    Row,
    demonstrations,
    heldout_problems,
    train_problems,
    write_rows,
)

BUILD = Path(__file__).parent / "build"


def solution(row: Row) -> tuple[str, str, str]:
    """Return an answer in three parts: the code, its result, and the end.

    Example:
        code, result, end = solution(row)
        print(code + result + end)
    """
    lines = [f"x = {row['steps'][0][0]}", *(f"x = x {o} {n}" for _, o, n in row["steps"]), "x"]
    code = "<code>\n" + "\n".join(lines) + "\n</code>"
    result = f"\n<interpreter>\n{row['answer']}\n</interpreter>\n"
    return code, result, f"The answer is {row['answer']}.<|im_end|>"


def encode(tokenizer: PreTrainedTokenizerBase, row: Row) -> Example:
    """Encode a row's problem and solution; only the code and the end are trained."""
    message = {"role": "user", "content": row["question"]}
    prompt = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    ids: list[int] = []
    labels: list[int] = []
    for text, trained in zip((prompt, *solution(row)), (False, True, False, True), strict=True):
        part = tokenizer.encode(text, add_special_tokens=False)
        ids += part
        labels += part if trained else [IGNORED] * len(part)
    return Example(ids, labels)


def make_model(output: Path, seed: int, options: WarmStart) -> None:
    """Train the demo's model on solutions in code, and write it to a folder."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = Qwen3ForCausalLM.from_pretrained(MODEL, dtype=torch.float32)

    def batches() -> Iterator[list[Example]]:
        rows = demonstrations(seed)
        while True:
            taken = itertools.islice(rows, options.conversations)
            yield [encode(tokenizer, row) for row in taken]

    def report(update: int, loss: float) -> None:
        if update % 25 == 0:
            print(f"update {update:4d}   loss {loss:.3f}", flush=True)

    imitate(model, batches(), options, report)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


def prepare(
    output: Path = BUILD, seed: int = 0, updates: int = 150, train: int = 4000, heldout: int = 100
) -> None:
    """Write the problems and the model."""
    output.mkdir(parents=True, exist_ok=True)
    write_rows(train_problems(train, seed), output / "train.jsonl")
    write_rows(heldout_problems(heldout, seed), output / "heldout.jsonl")
    make_model(output / "model", seed, WarmStart(updates=updates, learning_rate=2e-3, warmup=10))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="examples.retool.prepare", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=BUILD)
    parser.add_argument("--updates", type=int, default=150)
    options = parser.parse_args()
    torch.set_num_threads(2)
    prepare(options.output, options.seed, options.updates)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
