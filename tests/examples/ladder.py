"""The programs of the pages and of the examples' ladder, one after another in one process.

    python -m tests.examples.ladder FOLDER first|rest

Shortened: one or two steps of a few short trajectories, with the demo's small model. Prints the
name of each program before it runs; FOLDER/runs has what they left.
"""

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import turnwise
from examples.calculator.imitation import WarmStart
from examples.guess.warm_start import make_model
from examples.step05_pipeline import pipeline
from examples.step06_simulated_user import train as simulated_user
from examples.step06_simulated_user.user import make_user
from tests.conftest import ROOT
from tests.pages import write_files

MODEL = ROOT / "examples" / "calculator" / "warm_started"
SHORTER = {
    "{path: Qwen/Qwen3-0.6B}": f"{{path: {MODEL}, max_length: 512}}",
    "{path: Qwen/Qwen3-0.6B, dtype: bfloat16}": f"{{path: {MODEL}, max_length: 512}}",
    "n: 8, max_tokens: 512": "n: 2, max_tokens: 16",
    "range(100)": "range(2)",
    "problems(16)": "problems(2)",
}
"""Texts of the pages' files, and what a test runs in their place."""
ROWS = [
    {"question": f"How warm is it in city {n}?", "celsius": 21, "answer": "21"} for n in range(16)
]
WARM_START = WarmStart(updates=30, conversations=8)
PAGES = (
    ("README.md", "train.py"),
    ("docs/how-to/pipelines.md", "pipeline.py"),
    ("docs/how-to/own-loop.md", "loop.py"),
)
"""Programs of pages; those of other pages are the same, which a test checks."""


def announce(program: str) -> None:
    """Print the name of the program that runs next."""
    sys.stdout.write(f"--- {program}\n")
    sys.stdout.flush()


def run_page(page: str, program: str, folder: Path) -> None:
    """Run a program that a page spells out, among the page's other files."""
    folder = folder / Path(page).stem
    folder.mkdir(parents=True)
    write_files(page, folder, SHORTER)
    for name in ("rows.jsonl", "heldout.jsonl"):
        (folder / name).write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    try:
        runpy.run_path(program, run_name="__main__")
    finally:
        os.chdir(ROOT)
        sys.path.remove(str(folder))
        for name in ("my_env", "environment"):
            sys.modules.pop(name, None)


def main(folder: Path, part: str) -> None:
    train = turnwise.train

    def short(**arguments: Any) -> Any:
        """`turnwise.train` as the programs call it, shortened."""
        if arguments.get("model") == "smollm2" or "Qwen" in str(arguments.get("model")):
            sampling = {"n": 2, "max_tokens": 16}
            arguments |= {"model": MODEL, "model.max_length": 512, "sampling": sampling}
        arguments.get("rollout", {}).pop("prompts_per_step", None)
        shorter = {"steps": 2, "rollout.prompts_per_step": 4, "output_dir": str(folder / "runs")}
        shorter |= {"training.threads": 1, "engine.kv_cache_gib": 0.0625}
        return train(**arguments | shorter)

    turnwise.train = short
    (run_first if part == "first" else run_rest)(folder)


def run_first(folder: Path) -> None:
    """The pages' programs, and the rungs that train by a call and by a configuration."""
    for page, program in PAGES:
        announce(f"{page} {program}")
        run_page(page, program, folder)
    announce("step01")
    runpy.run_module("examples.step01_environment.train", run_name="__main__")
    announce("step03")
    turnwise.train(config="examples/step03_own_loss/config.yaml")


def run_rest(folder: Path) -> None:
    """Rungs whose parts have tests of their own."""
    announce("step07")
    turnwise.train(config="examples/step07_self_play/config.yaml")
    announce("step08")
    turnwise.train(config="examples/step08_two_policies/config.yaml", steps=2)
    announce("step05")
    pipeline.main(
        ["training.steps=2", "rollout.prompts_per_step=4", f"output_dir={folder / 'runs'}"]
    )
    announce("step06")
    make_model(folder / "player", 0, WARM_START)
    make_user(folder / "user", WARM_START)
    simulated_user.main(folder / "player", folder / "user")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
