"""A new project that is ready to train: environment, data, configuration, test and README.

The files are made from the templates in `new_project/`. The model is SmolLM2-135M-Instruct, which
two CPU cores train in minutes, or the user's own.
"""

import re
from pathlib import Path

import yaml

from turnwise.errors import InputError, translate_unwritable

MODEL = "smollm2"  # of a project whose user names no model
_TEMPLATES = Path(__file__).with_name("new_project")
_KEYS = ("model_keys", "max_tokens", "steps", "learning_rate")
"""Values of config.yaml that depend on the size of the model."""
_SMALL = ("  max_length: 1024", "32", "6", "0.00002")
_LARGE = ("  max_length: 2048", "512", "100", "0.000001")
_QWEN = (f"{_LARGE[0]}\n  template_args: {{enable_thinking: false}}", *_LARGE[1:])


def make_project(folder: Path, model: str = MODEL) -> list[Path]:
    """Write a project into a new folder, whose name becomes the run's name; return the files."""
    name = folder.resolve().name
    if not re.fullmatch(r"[\w][\w.-]*", name):
        raise InputError(f"{name!r} cannot name a project: use letters, digits, _, - and .")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} exists and is not an empty folder; choose another name")
    if Path(model).expanduser().is_dir():  # config.yaml is read in the project's folder
        model = str(Path(model).expanduser().resolve())
    settings = _SMALL if model == MODEL else _QWEN if "Qwen3" in model else _LARGE
    values = {"name": name, "model": model} | dict(zip(_KEYS, settings, strict=True))
    files = {}
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
