"""Functions that NeMo-RL's programs call around training: configuration files, tokenizer, timer."""

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from turnwise.core.optional import Foreign, required
from turnwise.errors import InputError

_PASSTHROUGH = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
_Generation = TypeVar("_Generation")


def _omega() -> Foreign:
    return required("omegaconf", "omegaconf", "a configuration file of NeMo-RL").OmegaConf


def register_omegaconf_resolvers() -> None:
    """Let configuration files compute with `add`, `mul`, `div` and `max`."""
    for name, function in {
        "add": lambda a, b: a + b,
        "mul": lambda a, b: a * b,
        "div": lambda a, b: a / b,
        "max": lambda a, b: max(a, b),
    }.items():
        _omega().register_new_resolver(name, function, replace=True)


def load_config(config_path: str | Path) -> Foreign:
    """Return the `DictConfig` of a YAML file, merged over the files that its `defaults` name. A
    section with `_override_: true` replaces the section of those files."""
    path, omega = Path(config_path), _omega()
    own, merged = omega.load(path), omega.create({})
    defaults = own.pop("defaults", ())
    for name in [defaults] if isinstance(defaults, str) else defaults:
        merged = omega.merge(merged, load_config(path.parent / name))
    for key in list(own):
        section: Foreign = None if omega.is_missing(own, key) else own[key]
        if omega.is_dict(section) and section.pop("_override_", False):
            merged.pop(key, None)
    return omega.merge(merged, own)


def parse_hydra_overrides(cfg: Foreign, overrides: Sequence[str]) -> Foreign:
    """Return a configuration with changes in Hydra's form: `key.sub=value`, `+key=value`, `~key`.

    Raises:
        InputError: when a change has another form, or names a key that is not there without `+`.
    """
    omega = _omega()
    for override in overrides:
        key, equals, _ = override.lstrip("+").partition("=")
        missing = object()
        known = omega.select(cfg, key.removeprefix("~"), default=missing) is not missing
        if override.startswith("~"):
            section, _, name = key[1:].rpartition(".")
            (omega.select(cfg, section) if section else cfg).pop(name, None)
        elif not equals or not (known or override.startswith("+")):
            raise InputError(f"{override} changes no key of the configuration: write +key=value")
        else:
            cfg = omega.merge(cfg, omega.from_dotlist([override.lstrip("+")]))
    return cfg


def get_tokenizer(tokenizer_config: Mapping[str, Foreign]) -> Foreign:
    """Return the tokenizer `name`. `chat_template` is `default`, a .jinja file, a template, or None
    for a template that only joins the messages' texts; `chat_template_kwargs` are its arguments."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_config["name"])
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    template = tokenizer_config.get("chat_template", "default")
    if template is None:
        template = _PASSTHROUGH
    if template != "default":
        given = template.endswith(".jinja")
        tokenizer.chat_template = Path(template).read_text() if given else template
    if arguments := tokenizer_config.get("chat_template_kwargs"):
        render = tokenizer.apply_chat_template
        tokenizer.apply_chat_template = lambda *args, **more: render(*args, **arguments | more)
    return tokenizer


def configure_generation_config(
    config: _Generation, tokenizer: Foreign, is_eval: bool = False
) -> _Generation:
    """Return the section unchanged: the engines read the tokenizer themselves."""
    return config


def set_seed(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch in this process."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def init_ray(log_dir: str | None = None) -> None:
    """Join the cluster that RAY_ADDRESS names, or start Ray on this machine."""
    import ray

    if not ray.is_initialized():
        ray.init(log_to_driver=False)


def get_next_experiment_dir(base_log_dir: str) -> str:
    """Make and return the folder exp_NNN with the next free number."""
    numbers = [int(each.name[4:]) for each in Path(base_log_dir).glob("exp_[0-9]*")]
    folder = Path(base_log_dir) / f"exp_{max(numbers, default=0) + 1:03d}"
    folder.mkdir(parents=True)
    return str(folder)


def log_container_init_timing() -> None:
    """Do nothing: there are no containers."""


class Timer:
    """Seconds by label."""

    def __init__(self, context: Mapping[str, str] | None = None) -> None:
        self._seconds: dict[str, list[float]] = {}

    @contextmanager
    def time(self, label: str) -> Iterator[None]:
        """Measure a `with` block."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.record(label, time.perf_counter() - started)

    def record(self, label: str, seconds: float) -> None:
        self._seconds.setdefault(label, []).append(seconds)

    def get_timing_metrics(self, reduction_op: str = "mean") -> dict[str, float]:
        """Return the seconds of each label, reduced by `mean`, `sum`, `min` or `max`."""
        reduce = getattr(np, reduction_op)
        return {label: float(reduce(seconds)) for label, seconds in self._seconds.items()}
