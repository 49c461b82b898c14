"""ChatLearn's section `lora` of a model in a pipeline's file."""

from turnwise.compat.chatlearn.yaml_file import Settings
from turnwise.config.base import Tree

_SCALING = 1.0
"""ChatLearn's default of `lora_scaling`, which it divides by `lora_dim`."""
_DIM = 8
_KEYS = ("enable_lora", "lora_dim", "lora_scaling", "lora_dropout", "lora_layer")


def lora_settings(name: str, section: object) -> tuple[Settings, str]:
    """Return the settings of a model's `lora`, and the mistake in it; "" if there is none.

    Layers other than linear ones never get an adapter, and dropout never applies.

    Args:
        name: The model's name in `models`.
    """
    if section is None:
        return {}, ""
    if not isinstance(section, dict):
        return {}, f"models.{name}.lora must hold keys and values"
    if not section.get("enable_lora"):
        return {}, ""
    given: Tree = {
        key: value
        for key, value in section.items()
        if value is not None and value is not False and value != ""
    }
    if unknown := sorted(given.keys() - {*_KEYS}):
        return {}, f"models.{name}.lora.{unknown[0]} is not supported: remove it"
    if name == "ppo_value":
        return {}, ""  # it shares the policy's backbone, where that has adapters
    if name != "ppo_policy":
        return {}, f"models.{name}.lora: adapters are trained by ppo_policy; set it there"
    if (rank := given.get("lora_dim", _DIM)) == 0:
        return {}, f"models.{name}.lora.lora_dim is 0: set enable_lora to false to train no adapter"
    return {
        "model.lora.rank": rank,
        "model.lora.alpha": float(given.get("lora_scaling", _SCALING)),
    }, ""
