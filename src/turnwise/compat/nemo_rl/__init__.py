"""NeMo-RL's generation worker, environments and training programs, under NeMo-RL's names."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from turnwise.compat.nemo_rl.environments import (
        BatchedDataDict,
        DatumSpec,
        EnvironmentInterface,
        EnvironmentReturn,
        LLMMessageLogType,
    )
    from turnwise.compat.nemo_rl.program import MasterConfig, grpo_train, setup
    from turnwise.compat.nemo_rl.utilities import (
        Timer,
        configure_generation_config,
        get_next_experiment_dir,
        get_tokenizer,
        init_ray,
        load_config,
        log_container_init_timing,
        parse_hydra_overrides,
        register_omegaconf_resolvers,
        set_seed,
    )
    from turnwise.compat.nemo_rl.worker import VllmAsyncGenerationWorker, _replace_prefix_tokens

__all__ = [
    "BatchedDataDict",
    "DatumSpec",
    "EnvironmentInterface",
    "EnvironmentReturn",
    "LLMMessageLogType",
    "MasterConfig",
    "Timer",
    "VllmAsyncGenerationWorker",
    "_replace_prefix_tokens",
    "configure_generation_config",
    "get_next_experiment_dir",
    "get_tokenizer",
    "grpo_train",
    "init_ray",
    "load_config",
    "log_container_init_timing",
    "parse_hydra_overrides",
    "register_omegaconf_resolvers",
    "set_seed",
    "setup",
]
_MODULES = {
    "environments": (
        *("BatchedDataDict", "DatumSpec", "EnvironmentInterface", "EnvironmentReturn"),
        "LLMMessageLogType",
    ),
    "program": ("MasterConfig", "grpo_train", "setup"),
    "worker": ("VllmAsyncGenerationWorker", "_replace_prefix_tokens"),
}
_PLACES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    """Import a name at its first use, because the worker's imports take seconds."""
    if name not in __all__:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    found: object = getattr(import_module(f"{__name__}.{_PLACES.get(name, 'utilities')}"), name)
    return found
