"""A new project that is ready to train: environment, data, configuration, test and README.

The files are made from the templates in `new_project/`. In a clone of the repository, the project
uses the demo's model, which a CPU trains in a minute; elsewhere it uses a small model of the
Hugging Face Hub.
"""

import json
import random
import re
from pathlib import Path

import yaml

from turnwise.errors import InputError, translate_unwritable

HUB_MODEL = "Qwen/Qwen3-0.6B"  # the model of a project outside a clone
_TEMPLATES = Path(__file__).with_name("new_project")
_DEMO = Path("examples", "calculator", "warm_started")
_KEYS = ("model_keys", "max_tokens", "steps", "learning_rate", "training_keys")
"""Values of config.yaml that depend on the size of the model."""
_SMALL = ("  max_length: 512", "64", "10", "0.0003", "  updates_per_step: 2")
_LARGE = ("  max_length: 2048", "512", "100", "0.000001", "")
_QWEN = (f"{_LARGE[0]}\n  template_args: {{enable_thinking: false}}", *_LARGE[1:])


def make_project(folder: Path, model: str | None = None) -> list[Path]:
    """Write a project into a new folder, whose name becomes the run's name; return the files."""
    name = folder.resolve().name
    if not re.fullmatch(r"[\w][\w.-]*", name):
        raise InputError(f"{name!r} cannot name a project: use letters, digits, _, - and .")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} exists and is not an empty folder; choose another name")
    here = Path.cwd()
    clones = (root / _DEMO for root in (here, *here.parents, Path(__file__).parents[3]))
    demo = next((each.resolve() for each in clones if (each / "config.json").is_file()), None)
    if model is None:
        model = str(demo) if demo is not None else HUB_MODEL
    elif Path(model).expanduser().is_dir():  # config.yaml is read in the project's folder
        model = str(Path(model).expanduser().resolve())
    # The problems have two or three steps; the demo's model solves most of the former and a quarter
    # of the latter. They are the same in every project, and have no negative results.
    draw, rows = random.Random(0), ""
    for number in range(64):
        a, b, c = draw.randint(500, 999), draw.randint(100, 499), draw.randint(10, 999)
        expression, answer = f"(({a} - {b}) + {c})", a - b + c
        if number % 2:
            d = draw.randint(10, 999)
            expression, answer = f"({expression} + {d})", answer + d
        rows += json.dumps({"question": f"Compute {expression}.", "answer": answer}) + "\n"
    files = {"rows.jsonl": rows}
    settings = _SMALL if model == str(demo) else _QWEN if "Qwen3" in model else _LARGE
    values = {"name": name, "model": model} | dict(zip(_KEYS, settings, strict=True))
    for template in sorted(_TEMPLATES.glob("*.txt")):
        text = template.read_text(encoding="utf-8")
        for key, value in values.items():
            if template.stem == "config.yaml" and key in ("name", "model"):
                value = yaml.safe_dump(value, width=1_000_000).removesuffix("\n...\n").strip()
            text = text.replace(f"{{{key}}}", value)
        files[template.stem] = text.rstrip("\n") + "\n"
    with translate_unwritable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (folder / file).write_text(text, encoding="utf-8")
    return [folder / file for file in sorted(files)]
