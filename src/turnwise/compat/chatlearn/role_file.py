"""The files of the models beside the policy: reference, reward, value, and the two trainers."""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path

from turnwise.compat.chatlearn.pipeline_keys import REWARDS
from turnwise.compat.chatlearn.yaml_file import Settings, leaves, load_merged
from turnwise.config import PARTS, ModelConfig, known_keys
from turnwise.errors import InputError

_COMPANIONS = {"load": "model.path", "bf16": "model.dtype", "dtype": "model.dtype"}
_TRAINER = {
    **_COMPANIONS,
    "clip_grad": "training.max_grad_norm",
    "cliprange": "algorithm.loss.clip_low",
    "dpo_weight": "algorithm.loss.beta",
    "gamma": "algorithm.advantage.gamma",
    "init_kl_coef": "algorithm.kl.coef",
    "lam": "algorithm.advantage.lam",
    "lr": "training.learning_rate",
    "lr_decay_style": "training.lr_schedule",
    "lr_warmup_iters": "training.warmup_steps",
    "recompute_activations": "training.activation_checkpointing",
    "seed": "seed",
    "seq_length": "model.max_length",
    "weight_decay": "training.weight_decay",
}
_VALUE_TRAINER = {
    **_COMPANIONS,
    "cliprange_value": "algorithm.advantage.clip",
    "gamma": "algorithm.advantage.gamma",
    "lam": "algorithm.advantage.lam",
    "lr": "training.learning_rate",
}
_FLAT = {
    "ppo_policy": _TRAINER,
    "ppo_value": _VALUE_TRAINER,
    "reference": _COMPANIONS,
    "reward": _COMPANIONS,
    "value": _COMPANIONS,
}
"""ChatLearn's flat keys in each role's file, and the keys that they stand for."""
_READ = {
    "ppo_policy": ("model.", "training.", "algorithm.", "seed"),
    "ppo_value": (*_VALUE_TRAINER.values(),),
    "reference": ("model.path", "model.dtype"),
    "reward": ("model.path", "model.dtype"),
    "value": ("model.path", "model.dtype"),
}
"""Keys that each role takes from its file; other keys of shared sections are for other models."""
_SHARED = ("model", "tokenizer", "sampling", "eval_sampling", "scheduler", "cache", "engine")
"""Sections of the policy's file, which the files of other models may include."""

ROLES = tuple(_FLAT)
"""Roles of the models beside the policy."""


def role_of(name: str) -> str | None:
    """Return a model's role by its name in `models`; None where no model has such a name."""
    if name == "reward" or name.endswith("_reward"):
        return "reward"
    return name if name == "policy" or name in _FLAT else None


def model_settings(name: str, role: str, path: str | Path) -> Settings:
    """Return the values that the file of a model beside the policy sets.

    Args:
        name: The model's name in the pipeline's file.
        role: ppo_policy, ppo_value, reference, reward or value.

    Raises:
        InputError: naming the file, and every key that is unknown.
    """
    settings = _own_settings(path, role)
    if role == "ppo_policy":
        return settings
    if role == "reward":
        keys = {"model.path": "model", "model.dtype": "dtype"}
        return {REWARDS: [{"name": name} | {keys[k]: v for k, v in settings.items()}]}
    section = "algorithm.kl" if role == "reference" else "algorithm.advantage"
    moved = {"training.learning_rate": f"{section}.learning_rate"}
    return {
        f"{section}.{key}" if key.startswith("model.") else moved.get(key, key): value
        for key, value in settings.items()
    }


def _own_settings(path: str | Path, role: str) -> Settings:
    """Return the values that a role takes from a file, by the keys of a policy's file."""
    flat, settings = _FLAT[role], Settings()
    mistakes: list[str] = []
    known = known_keys()
    for key, value in load_merged(Path(path).expanduser(), "file").items():
        if value is None:
            continue
        if key in flat:
            if key == "bf16":
                value = "bfloat16" if value else "float32"
            settings[flat[key]] = value
            if key == "cliprange":
                settings["algorithm.loss.clip_high"] = value
        elif isinstance(value, dict) and key in (*_SHARED, "training", "algorithm"):
            for full, leaf in leaves(str(key), value):
                if _is_read(full, role):
                    bare = full in PARTS and isinstance(leaf, str)
                    settings[f"{full}.name" if bare else full] = leaf
                elif mistake := _mistake(full, role, known):
                    mistakes.append(mistake)
        else:
            names = [*flat, *_SHARED, "training", "algorithm"]
            mistakes.append(f"there is no key {key}{nearest(str(key), names)}")
    if mistakes:
        raise InputError(f"{path}: {'; '.join(mistakes)}")
    return settings


def _mistake(key: str, role: str, known: Mapping[str, str]) -> str:
    """Return the mistake in a key that a role does not read; "" where it is another model's."""
    section, leaf, *_ = [*key.split("."), ""]
    is_known = key in known or any(key.startswith(f"{name}.") for name in known)
    if section not in _SHARED and is_known:
        return f"{key} is no key of a {role}'s file: it goes into ppo_policy's"
    if section not in _SHARED or (section == "model" and leaf not in ModelConfig.model_fields):
        return f"there is no key {key}{nearest(key, [*known])}"
    return ""


def _is_read(key: str, role: str) -> bool:
    return any(key.startswith(name) if name.endswith(".") else key == name for name in _READ[role])


def nearest(name: str, known: Sequence[str]) -> str:
    """Return a question about the known name that was probably meant, or ""."""
    meant = difflib.get_close_matches(name, known, 1, 0.5)
    return f"; did you mean {meant[0]}?" if meant else ""
