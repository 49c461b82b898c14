"""Runs the recipes of Tinker's cookbook, unmodified, and prints a table of what each one did.

    make tinker
    python -m tests.tinker.recipes [--url URL] [--only NAME ...] [--folder DIR] [--seconds S]
                                   [--keys KEY=VALUE ...]

Without --url it starts `turnwise tinker` with the calculator's model, which first learns to give
short answers in a box, so that some rewards are 1, and with importance_sampling in the place of
stable_reinforce, which some recipes ask for: a server at a URL needs that option, too. RECIPE_MODEL
and RECIPE_NAME choose another model and the name by which recipes choose its renderer. A recipe
gets that name and small sizes on its command line. What it would download is made here: `run MODULE
...` gives `datasets.load_dataset` local rows by the data set's name and registers the model's
tokenizer, then runs the recipe's module as it is.
"""

import argparse
import io
import json
import os
import random
import re
import runpy
import shutil
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
ENVS = ROOT / ".venv-envs"
"""TextArena, if `make envs` has brought it."""
TOY = ROOT / "examples" / "calculator" / "warm_started"
NAME = os.environ.get("RECIPE_NAME", "Qwen/Qwen3.6-35B-A3B")
"""Name under which the small model is served: a recipe chooses its renderer by it, and one has this
name in its source."""
_TWENTY = "multiplayer_rl, twenty_questions"
_SEES = "vlm_classifier"
OWN_NAMES = {_TWENTY: "Qwen/Qwen3.5-9B"}
"""Names of the model for recipes that have another one in their source, whose player answers."""
WHY = {
    _TWENTY: f"its source names {OWN_NAMES[_TWENTY]} for the player who answers, and a server has "
    "one name: without --url it gets a server of its own",
    _SEES: "needs a model that sees: without --url it gets a server of its own, with a tiny one",
    "multiplayer_rl, text_arena": "needs TextArena: make envs",
    "search_tool": "needs a Chroma database and Gemini's embeddings: tool_use has a local tool",
}
"""Reasons why recipes cannot run everywhere."""
BUILDERS_ROWS = {"rl_basic": 8, "sl_basic": 256}
"""Rows of the data sets of recipes whose batches of 128 no argument changes; of others 64."""
RENDERER = "renderer_name=qwen3_5_disable_thinking"
STAND_IN = ("--stable-reinforce", "importance_sampling")
"""Arguments of a server for recipes whose loss is stable_reinforce."""
START_SECONDS = 600.0
RESULTS = re.compile(r"loss|nll|reward/total|kl|accuracy|num_sequences|grad_norm")
"""Metrics of a recipe's last step that are worth a cell."""


def recipes(folder: Path, name: str = NAME) -> dict[str, tuple[str, list[str]]]:
    """Return each recipe's module and arguments, for a model of a name."""
    base = "tinker_cookbook.recipes."
    model, log = f"model_name={name}", "behavior_if_log_dir_exists=delete"
    steps, rank = "max_steps=2", "lora_rank=8"
    rows = folder / "conversations.jsonl"
    rows.write_text("".join(json.dumps({"messages": m}) + "\n" for m in conversations(64)))
    rl = ["groups_per_batch=4", "group_size=4", "max_tokens=16", steps, rank, log, model]
    sl = ["batch_size=4", "max_length=1024", steps, log, model]
    loop = [f"{model}", "batch_size=4", rank, steps, "save_every=1"]
    return {
        "rl_loop": (f"{base}rl_loop", [*loop, "group_size=8", "max_tokens=32"]),
        "rl_basic": (f"{base}rl_basic", [model, "max_tokens=32", "max_steps=1", rank]),
        "sl_loop": (f"{base}sl_loop", [*loop, "max_length=1024"]),
        "sl_basic": (f"{base}sl_basic", [model, steps, rank]),
        "chat_sl": (f"{base}chat_sl.train", [*sl, rank, f"dataset={rows}"]),
        "math_rl": (f"{base}math_rl.train", [*rl, "env=gsm8k"]),
        "math_rl, arithmetic, asynchronous": (
            f"{base}math_rl.train",
            [*rl, "max_steps_off_policy=1"],
        ),
        "distillation, on policy": (
            f"{base}distillation.on_policy_distillation",
            [*rl, f"teacher_model={name}"],
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
        _TWENTY: (
            f"{base}multiplayer_rl.twenty_questions.train",
            ["batch_size=2", "group_size=2", "max_tokens=8", steps, log, model, "eval_every=0"],
        ),
        "multiplayer_rl, text_arena": (
            f"{base}multiplayer_rl.text_arena.train",
            [
                *("batch_size=4", "num_train_datapoints=16", "num_test_datapoints=2"),
                *("max_tokens=8", steps, log, model, "eval_every=0"),
            ],
        ),
        _SEES: (
            f"{base}vlm_classifier.train",
            ["batch_size=4", "num_epochs=1", "n_eval=8", steps, rank, log, model],
        ),
        "search_tool": (f"{base}search_tool.train", [steps, log, model]),
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


def problems(count: int) -> list[dict[str, str]]:
    return [
        {"question": f"What is {n} + {n + 1}?", "answer": f"It is\n#### {2 * n + 1}"}
        for n in (number % 4 for number in range(count))
    ]


def rows_of(name: str, count: int) -> dict[str, list[dict[str, Any]]]:
    """Return rows like those of a data set on the Hub, by their splits."""
    talks = conversations(count)
    asked = [(talk[0]["content"], talk[1]["content"]) for talk in talks]
    if name == "openai/gsm8k":
        return {"train": problems(count), "test": problems(4)}
    if name in ("HuggingFaceH4/no_robots", "allenai/tulu-3-sft-mixture"):
        rows = [{"messages": talk} for talk in talks]
        return {"train": rows, "test": rows[: count // 2]}
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
    if name == "dpdl-benchmark/caltech101":
        colours = ("red", "green", "blue")
        pictures: list[dict[str, Any]] = [
            {"image": {"bytes": square(each)}, "label": each} for each in colours * (count // 3)
        ]
        return {"train": pictures, "test": pictures[:8]}
    raise OSError(f"the data set {name} is not made here, and there is no network")


def square(colour: str) -> bytes:
    """Return the file of a picture."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (84, 56), colour).save(buffer, "PNG")
    return buffer.getvalue()


def run(module: str, arguments: list[str]) -> None:
    """Run one recipe in this process."""
    import datasets
    from tinker_cookbook import image_processing_utils, tokenizer_utils
    from transformers import AutoImageProcessor, AutoTokenizer

    place = os.environ["RECIPE_TOKENIZER"]
    tokenizer = AutoTokenizer.from_pretrained(place)

    def load(path: str, *_: object, split: str | None = None, **more: Any) -> object:
        rows = rows_of(path, int(os.environ["RECIPE_ROWS"]))
        made = {key: datasets.Dataset.from_list(own) for key, own in rows.items()}
        if "label" in rows["train"][0]:
            made = {key: own.class_encode_column("label") for key, own in made.items()}
        if split is None:
            return datasets.DatasetDict(made)
        if split not in made:
            raise ValueError(f"{path} has no split {split}")
        return made[split].to_iterable_dataset() if more.get("streaming") else made[split]

    datasets.load_dataset = load
    image_processing_utils.get_image_processor = lambda _: AutoImageProcessor.from_pretrained(place)
    tokenizer_utils.register_tokenizer(NAME, lambda: tokenizer)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def teach(output: str, steps: int = 200) -> None:
    """Train the calculator's model to answer `problems` with one of their four answers in a box,
    and anything else with a word: what never ends would take most of the time."""
    import torch
    from tinker_cookbook import model_info, renderers
    from tinker_cookbook.recipes.math_rl.math_env import MathEnv
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TOY)
    name = model_info.get_recommended_renderer_name(NAME)
    renderer = renderers.get_renderer(name, tokenizer)
    terse = renderers.get_renderer(f"{name}_disable_thinking", tokenizer)
    prompts = [
        renderer.build_generation_prompt(
            [
                *MathEnv.standard_fewshot_prefix(),
                {"role": "user", "content": row["question"] + MathEnv.question_suffix()},
            ]
        )
        for row in problems(4)
    ]
    model, draw = AutoModelForCausalLM.from_pretrained(TOY), random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(steps):
        texts = (tokenizer.decode(draw.choices(range(94), k=draw.randrange(300))) for _ in "1234")
        asked = [[{"role": "user", "content": text}] for text in texts]
        others = [
            each.build_generation_prompt(messages)
            for each, messages in zip((renderer, renderer, terse, terse), asked, strict=True)
        ]
        for number, prompt in enumerate(each.to_ints() for each in (*prompts, *others)):
            answer = str(draw.choice((1, 3, 5, 7)))
            said = f"\\boxed{{{answer}}}" if number < len(prompts) else answer
            ended = number >= len(prompts) + 2  # the prompt has ended the thinking
            answered = said + "<|im_end|>" if ended else f"</think>\n\n{said}<|im_end|>"
            ids = tokenizer.encode(answered, add_special_tokens=False)
            labels = [-100] * len(prompt) + ids
            loss = model(torch.tensor([prompt + ids]), labels=torch.tensor([labels])).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


def in_cookbook(**more: str) -> dict[str, str]:
    """Return the environment of a program that imports the cookbook."""
    offline = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return {**os.environ, "PYTHONPATH": f"{SDK}:{ROOT}:{ENVS}", **offline, **more}


def model_in(folder: Path) -> Path:
    """Return the folder of the model; the calculator's is trained first, once."""
    if own := os.environ.get("RECIPE_MODEL"):
        return Path(own)
    place = folder / "model"
    if not (place / "tokenizer_config.json").exists():
        command = [sys.executable, __file__, "teach", str(place)]
        subprocess.run(command, env=in_cookbook(), check=True)
    return place


def seeing_in(folder: Path) -> Path:
    """Return the folder of a tiny model that sees, with random weights."""
    from tests.vision import make_qwen_vl  # seconds to import

    return Path(make_qwen_vl(folder / "seeing"))


@contextmanager
def server(model: Path, folder: Path, name: str = NAME, *changes: str) -> Iterator[str]:
    """Run `turnwise tinker` with the small model under a name, and yield its URL."""
    log = folder / "server.log"
    keys = [
        "serving.port=0",
        "model.max_length=4096",
        "model.lora.rank=32",
        f"serving.served_model_name={name}",
        f"output_dir={folder / 'runs'}",
        "training.threads=1",
        "engine.kv_cache_gib=0.25",
        *changes,
    ]
    command = [sys.executable, "-m", "turnwise.cli", "tinker", "--model", str(model)]
    with log.open("w") as file:
        started = subprocess.Popen(
            [*command, *keys], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT
        )
    try:
        ends = time.monotonic() + START_SECONDS
        while "TINKER_BASE_URL=" not in log.read_text():
            if started.poll() is not None or time.monotonic() > ends:
                raise SystemExit(f"the server did not start: {log.read_text()[-3000:]}")
            time.sleep(0.05)
        yield log.read_text().partition("TINKER_BASE_URL=")[2].split()[0]
    finally:
        started.terminate()
        try:
            started.wait(60)
        except subprocess.TimeoutExpired:
            started.kill()
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


def attempt(
    name: str, url: str, model: Path, folder: Path, seconds: float
) -> tuple[str, str, float]:
    """Run one recipe; return how it ended, what it printed, and its seconds."""
    own_name = OWN_NAMES.get(name, NAME)
    module, arguments = recipes(folder, own_name)[name]
    place = folder / re.sub(r"\W+", "_", name)
    shutil.rmtree(place, ignore_errors=True)  # else some go on from states of an earlier server
    place.mkdir()
    key = "experiment_dir" if name == _SEES else "log_path"
    own = [] if module.endswith("create_data") else [f"{key}={place / 'log'}"]
    environment = in_cookbook(
        TINKER_BASE_URL=url,
        TINKER_API_KEY=os.environ.get("TINKER_API_KEY", "tml-recipes"),
        TINKER_COOKBOOK_RUNS_DIR=str(place),
        RECIPE_NAME=own_name,
        RECIPE_TOKENIZER=str(model),
        RECIPE_ROWS=str(BUILDERS_ROWS.get(name, 64)),
    )
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
    said = (last_metrics(place) if status == 0 else "") or (lines or [""])[-1]
    if status > 0 and name in WHY:
        ended, said = "cannot run", f"{WHY[name]} ({said})"
    return ended, said[:300], time.monotonic() - began


def main(arguments: list[str]) -> int:
    """Run the command line; return 1 if a recipe failed that could run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "recipes")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--keys", nargs="*", default=[], help="of the servers, as training.ranks=2")
    options = parser.parse_args(arguments)
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    names = options.only or list(recipes(folder))
    text = model_in(folder) if options.url or names != [_SEES] else folder
    failed = 0
    say = partial(print, flush=True)
    say("| recipe | | what it printed | s |\n|---|---|---|---|")

    def each(url: str, names: list[str], model: Path = text) -> None:
        nonlocal failed
        for name in names:
            sys.stderr.write(f"{name} ...\n")
            ended, said, seconds = attempt(name, url, model, folder, options.seconds)
            failed += ended not in ("ran", "cannot run")
            said = said.replace("|", "/")
            say(f"| {name} | {ended} | {said} | {seconds:.0f} |")

    if options.url:
        each(options.url, names)
        return failed
    by_name = dict[str, list[str]]()
    for name in names:
        if name != _SEES:
            by_name.setdefault(OWN_NAMES.get(name, NAME), []).append(name)
    for served, own in by_name.items():
        with server(text, folder, served, *STAND_IN, *options.keys) as url:
            each(url, own)
    if _SEES in names:
        seeing = seeing_in(folder)
        with server(seeing, folder, NAME, "model.max_length=1024", *options.keys) as url:
            each(url, [_SEES], seeing)
    return failed


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        run(sys.argv[2], sys.argv[3:])
    elif sys.argv[1:2] == ["teach"]:
        teach(sys.argv[2])
    else:
        raise SystemExit(main(sys.argv[1:]))
