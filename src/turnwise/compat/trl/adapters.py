"""The keys of `model.lora` from the `peft_config` of TRL's trainers."""

import logging
from collections.abc import Mapping
from typing import NoReturn

from turnwise.core.gguf import resolve_model
from turnwise.core.optional import optional
from turnwise.errors import InputError

logger = logging.getLogger(__name__)

_MAPPED = {"r", "lora_alpha", "target_modules", "use_rslora"}
_UNUSED = {"lora_dropout"}
"""Fields without effect: a trainer with dropout would not compute what the engine does."""
_ANY = {
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "peft_type",
    "peft_version",
    "revision",
    "task_type",
}
"""Fields about the file and the library."""


def lora_settings(peft_config: object, model: str, *, trust_remote_code: bool) -> dict[str, object]:
    """Return values of `model.lora` for a `LoraConfig` of PEFT.

    Args:
        model: The model's folder or name: without `target_modules`, PEFT chooses by its kind.

    Raises:
        InputError: naming a field that Turnwise cannot honour.

    Example:
        >>> made = lora_settings(LoraConfig(r=16), "Qwen/Qwen3-0.6B", trust_remote_code=False)
        >>> made["model.lora.rank"], made["model.lora.target_modules"]
        (16, ['q_proj', 'v_proj'])
    """
    peft = optional("peft", "lora", "peft_config")
    if not isinstance(peft_config, peft.LoraConfig):
        _refuse("", peft_config, "it must be a peft.LoraConfig")
    fields, defaults = peft_config.to_dict(), peft.LoraConfig().to_dict()
    for name, value in fields.items():
        if name in _MAPPED | _ANY or value == defaults.get(name):
            continue
        if name not in _UNUSED:
            _refuse(f".{name}", value, f"PEFT's default is {defaults.get(name)!r}")
        logger.warning("peft_config.%s: without effect in Turnwise", name)
    return {
        "model.lora.rank": fields["r"],
        "model.lora.alpha": float(fields["lora_alpha"]),
        "model.lora.target_modules": _targets(fields, model, trust_remote_code),
        "model.lora.rslora": fields["use_rslora"],
    }


def _targets(fields: Mapping[str, object], model: str, trust_remote_code: bool) -> object:
    given = fields["target_modules"]
    if given is None:
        from transformers import AutoConfig

        kind = AutoConfig.from_pretrained(
            resolve_model(model), trust_remote_code=trust_remote_code
        ).model_type
        table = optional("peft.utils.constants", "lora", "peft_config")
        given = table.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(kind)
        if given is None:
            _refuse(".target_modules", None, f"PEFT knows no default for {kind}; name the layers")
    if isinstance(given, str):
        if given.lower() == "all-linear":
            return "all-linear"
        _refuse(".target_modules", given, "it must be all-linear or a list of names")
    assert isinstance(given, list | tuple | set)
    return sorted(given)


def _refuse(field: str, value: object, why: str) -> NoReturn:
    raise InputError(f"GRPOTrainer: peft_config{field}={str(value)[:80]!r} is not supported: {why}")
