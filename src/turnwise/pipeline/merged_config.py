"""The configuration that all modules of a pipeline share: its file, their settings, overrides."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from turnwise.compat.chatlearn.model_file import REWARDS, Settings
from turnwise.compat.chatlearn.pipeline_file import (
    CONVERSATION,
    is_pipeline_file,
    read_pipeline_file,
)
from turnwise.config import Config, load_config, make_config
from turnwise.errors import InputError

_DEFAULTS: Settings = {"environment": CONVERSATION}
_OPTIONAL = ("data.path",)
"""Keys that a configuration may omit, because the program provides the prompts."""


class ConfiguredModule(Protocol):
    """A module with values for the configuration."""

    name: str

    @property
    def settings(self) -> Settings: ...


def merge_config(
    given: str | Path | Config, modules: Sequence[ConfiguredModule], overrides: Sequence[str]
) -> Config:
    """Return the configuration that all modules share.

    In increasing precedence: `given`, the modules' settings, the overrides.

    Args:
        given: A pipeline's file, a configuration's file, or a `Config`.

    Raises:
        InputError: when any of it cannot be used, or two modules disagree on a key that no
            override decides.
    """
    settings = merge_settings(modules)
    config = resolve_config(given, settings, overrides)
    for module in modules:
        for key, value in module.settings.items():
            if key == REWARDS or value == settings[key]:
                continue
            # Different values may mean the same (top_k -1 and 0), or an override decides.
            if resolve_config(given, settings | {key: value}, overrides) != config:
                raise InputError(
                    f"the model file of {module.name} contradicts that of a module after it: "
                    f"{key} is {value!r} and {settings[key]!r}; the modules of a pipeline share "
                    "one model and its engines"
                )
    return config


def merge_settings(modules: Sequence[ConfiguredModule]) -> Settings:
    """Return all modules' settings, a later module's over an earlier one's; rewards add up."""
    settings: Settings = {}
    rewards: list[object] = []
    for module in modules:
        settings |= module.settings
        rewards += [r for r in module.settings.get(REWARDS, []) if r not in rewards]
    return settings | {REWARDS: rewards} if rewards else settings


def resolve_config(
    given: str | Path | Config, settings: Mapping[str, object], overrides: Sequence[str]
) -> Config:
    """Return the configuration of a file or `Config` under settings under overrides."""
    if isinstance(given, Config):
        return make_config(given.model_dump(), overrides, _DEFAULTS, settings, _OPTIONAL)
    if is_pipeline_file(given):
        return read_pipeline_file(given, overrides, settings).config
    return load_config(given, overrides, _DEFAULTS, settings, _OPTIONAL)
