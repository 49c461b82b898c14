"""Runs the recipes of Tinker's cookbook, unmodified, and prints a table of what each one did.

    make .venv-tinker/.installed
    python -m tests.tinker.recipes [--url URL] [--only NAME ...] [--folder DIR] [--seconds S]

Without --url it starts `turnwise tinker` with the calculator's model. A recipe gets the name of the
model and small sizes on its command line. What it would download is made here: `run MODULE ...`
gives `datasets.load_dataset` local rows by the data set's name and registers the model's tokenizer,
then runs the recipe's module as it is.
"""

import argparse
import json
import os
import re
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
SDK = ROOT / ".venv-tinker"
TOY = ROOT / "examples" / "calculator" / "warm_started"
NAME = "Qwen/Qwen3.6-35B-A3B"
"""Name under which the small model is served: a recipe chooses its renderer by it, and one has this
name in its source."""
RENDERER = "renderer_name=qwen3_5_disable_thinking"
RESULTS = re.compile(r"loss|nll|reward/total|kl|accuracy|num_sequences|grad_norm")
"""Metrics of a recipe's last step that are worth a cell."""


def recipes(folder: Path) -> dict[str, tuple[str, list[str]]]:
    """Return each recipe's module and arguments."""
    base = "tinker_cookbook.recipes."
    model, log = f"model_name={NAME}", "behavior_if_log_dir_exists=delete"
    steps, rank = "max_steps=2", "lora_rank=8"
    rows = folder / "conversations.jsonl"
    rows.write_text("".join(json.dumps({"messages": m}) + "\n" for m in conversations(64)))
    rl = ["groups_per_batch=4", "group_size=4", "max_tokens=16", steps, rank, log, model]
    sl = ["batch_size=4", "max_length=1024", steps, log, model]
    loop = [f"{model}", "batch_size=4", rank, steps, "save_every=1"]
    builder = "dataset_builder.common_config."
    return {
        "rl_loop": (
            f"{base}rl_loop",
            [*loop, "group_size=4", "max_tokens=16", "loss_fn=importance_sampling"],
        ),
        "rl_basic": (
            f"{base}rl_basic",
            [
                *(model, "max_tokens=16", steps, rank),
                *("dataset_builder.batch_size=4", "dataset_builder.group_size=4"),
            ],
        ),
        "sl_loop": (f"{base}sl_loop", [*loop, "max_length=1024"]),
        "sl_basic": (
            f"{base}sl_basic",
            [model, steps, rank, f"{builder}batch_size=4", f"{builder}max_length=1024"],
        ),
        "chat_sl": (f"{base}chat_sl.train", [*sl, rank, f"dataset={rows}"]),
        "math_rl": (f"{base}math_rl.train", [*rl, "env=gsm8k", "loss_fn=importance_sampling"]),
        "math_rl, arithmetic, asynchronous": (
            f"{base}math_rl.train",
            [*rl, "loss_fn=importance_sampling", "max_steps_off_policy=1"],
        ),
        "distillation, on policy": (
            f"{base}distillation.on_policy_distillation",
            [*rl, f"teacher_model={NAME}"],
        ),
        "distillation, off policy": (
            f"{base}distillation.off_policy_reasoning",
            [*sl, rank, "buffer_size=32", "max_prompts=16", RENDERER],
        ),
        "preference, DPO": (f"{base}preference.dpo.train", [*sl]),
        "preference, shorter": (
            f"{base}preference.shorter.train",
            ["batch_size=2", "group_size=4", "max_tokens=16", steps, log, model],
        ),
        "prompt_distillation, data": (
            f"{base}prompt_distillation.create_data",
            [f"output_file={folder / 'languages.jsonl'}"],
        ),
        "prompt_distillation": (
            f"{base}prompt_distillation.train",
            [*sl, rank, f"file_path={rows}"],
        ),
        "multiplayer_rl, guess_number": (
            f"{base}multiplayer_rl.guess_number.train",
            ["batch_size=2", "group_size=2", "max_tokens=8", steps, log, model, "eval_every=0"],
        ),
        "multiplayer_rl, twenty_questions": (
            f"{base}multiplayer_rl.twenty_questions.train",
            ["batch_size=2", "group_size=2", "max_tokens=8", steps, log, model, "eval_every=0"],
        ),
        "multiplayer_rl, text_arena": (f"{base}multiplayer_rl.text_arena.train", [steps, model]),
        "search_tool": (f"{base}search_tool.train", [steps, model]),
        "tool_use": ("tests.tinker.tool_recipe", [model, RENDERER]),
        "rl_numerics_check": (
            f"{base}rl_numerics_check.train",
            [
                *(*rl, "task.num_pages_min=1", "task.num_pages_max=2", "task.page_chars=200"),
                "max_trajectory_tokens=3500",
            ],
        ),
    }


def conversations(count: int) -> list[list[dict[str, str]]]:
    return [
        [
            {"role": "user", "content": f"What is {number} + {number + 1}?"},
            {"role": "assistant", "content": f"It is {2 * number + 1}."},
        ]
        for number in range(count)
    ]


def rows_of(name: str, count: int = 64) -> dict[str, list[dict[str, Any]]]:
    """Return rows like those of a data set on the Hub, by their splits."""
    talks = conversations(count)
    asked = [(talk[0]["content"], talk[1]["content"]) for talk in talks]
    numbers = [2 * number + 1 for number in range(count)]
    if name == "openai/gsm8k":
        rows = [
            {"question": q, "answer": f"{a}\n#### {n}"}
            for (q, a), n in zip(asked, numbers, strict=True)
        ]
        return {"train": rows, "test": rows[:4]}
    if name == "HuggingFaceH4/no_robots":
        rows = [{"messages": talk} for talk in talks]
        return {"train": rows, "test": rows[:8]}
    if name == "zwhe99/DeepMath-103K":
        return {"train": [{"question": q, "final_answer": a} for q, a in asked]}
    if name == "open-thoughts/OpenThoughts3-1.2M":
        speakers = ("human", "gpt")
        return {
            "train": [
                {
                    "conversations": [
                        {"from": s, "value": v} for s, v in zip(speakers, p, strict=True)
                    ]
                }
                for p in asked
            ]
        }
    if name == "Anthropic/hh-rlhf":
        rows = [
            {
                "chosen": f"\n\nHuman: {q}\n\nAssistant: {a}",
                "rejected": f"\n\nHuman: {q}\n\nAssistant: No idea.",
            }
            for q, a in asked
        ]
        return {"train": rows, "test": rows[:8]}
    if name == "Salesforce/wikitext":
        line = "After the long day many people could only wait until the time when it was over ."
        return {"train": [{"text": line} for _ in range(4000)]}
    raise OSError(f"the data set {name} is not made here, and there is no network")


def run(module: str, arguments: list[str]) -> None:
    """Run one recipe in this process."""
    import datasets
    from tinker_cookbook import tokenizer_utils
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(os.environ["RECIPE_TOKENIZER"])

    def load(path: str, *_: object, split: str | None = None, **more: Any) -> object:
        made = {key: datasets.Dataset.from_list(rows) for key, rows in rows_of(path).items()}
        if split is None:
            return datasets.DatasetDict(made)
        if split not in made:
            raise ValueError(f"{path} has no split {split}")
        return made[split].to_iterable_dataset() if more.get("streaming") else made[split]

    datasets.load_dataset = load
    tokenizer_utils.register_tokenizer(NAME, lambda: tokenizer)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """Run `turnwise tinker` with the small model, and yield its URL."""
    log = folder / "server.log"
    changes = [
        "model.max_length=4096",
        "model.lora.rank=8",
        f"serving.served_model_name={NAME}",
        f"output_dir={folder / 'runs'}",
        "training.threads=1",
        "engine.kv_cache_gib=0.25",
    ]
    command = [sys.executable, "-m", "turnwise.cli", "tinker", "--model", str(TOY), "--port", "0"]
    with log.open("w") as file:
        started = subprocess.Popen(
            [*command, *changes], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT
        )
    try:
        while "TINKER_BASE_URL=" not in log.read_text():
            if started.poll() is not None:
                raise SystemExit(log.read_text())
            time.sleep(0.5)
        yield log.read_text().partition("TINKER_BASE_URL=")[2].split()[0]
    finally:
        started.terminate()
        started.wait(60)


def last_metrics(folder: Path) -> str:
    """Return what a recipe's last line of metrics.jsonl says, in short."""
    lines = [
        json.loads(line)
        for file in folder.rglob("metrics.jsonl")
        for line in file.read_text().splitlines()
    ]
    found: dict[str, float] = {}
    for line in lines:
        found |= {k: v for k, v in line.items() if RESULTS.search(k) and isinstance(v, int | float)}
    shown = [f"{key} {value:.4g}" for key, value in sorted(found.items())]
    return f"{len(lines)} steps; {', '.join(shown[:4])}" if lines else ""


def attempt(name: str, url: str, folder: Path, seconds: float) -> tuple[str, str, float]:
    """Run one recipe; return how it ended, what it printed, and its seconds."""
    module, arguments = recipes(folder)[name]
    place = folder / re.sub(r"\W+", "_", name)
    place.mkdir(exist_ok=True)
    own = [] if module.endswith("create_data") else [f"log_path={place / 'log'}"]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{SDK}:{ROOT}",
        "TINKER_BASE_URL": url,
        "TINKER_API_KEY": os.environ.get("TINKER_API_KEY", "tml-recipes"),
        "RECIPE_TOKENIZER": str(TOY),
        "TINKER_COOKBOOK_RUNS_DIR": str(place),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    began = time.monotonic()
    with (place / "output").open("w") as output:
        try:
            status = subprocess.run(
                [sys.executable, __file__, "run", module, *arguments, *own],
                cwd=SDK,  # one reads a file of the cookbook by its path from there
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=seconds,
            ).returncode
        except subprocess.TimeoutExpired:
            status = -1
    lines = [line for line in (place / "output").read_text().splitlines() if line.strip()]
    ended = {0: "ran", -1: f"not done in {seconds:.0f} s"}.get(status, "failed")
    said = last_metrics(place) if status == 0 else ""
    return ended, (said or (lines or [""])[-1])[:240], time.monotonic() - began


def main(arguments: list[str]) -> int:
    """Run the command line; return 1 if a recipe failed that could run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "recipes")
    parser.add_argument("--seconds", type=float, default=600.0)
    options = parser.parse_args(arguments)
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    names = options.only or list(recipes(folder))
    failed = 0
    say = partial(print, flush=True)
    say("| recipe | | what it printed | s |\n|---|---|---|---|")

    def each(url: str) -> None:
        nonlocal failed
        for name in names:
            ended, said, seconds = attempt(name, url, folder, options.seconds)
            failed += ended != "ran"
            said = said.replace("|", "/")
            say(f"| {name} | {ended} | {said} | {seconds:.0f} |")

    if options.url:
        each(options.url)
    else:
        with server(folder) as url:
            each(url)
    return failed


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        run(sys.argv[2], sys.argv[3:])
    else:
        raise SystemExit(main(sys.argv[1:]))
