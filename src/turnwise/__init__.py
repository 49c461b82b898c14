"""Turnwise: reinforcement learning of tool-calling language models, exact to the token."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turnwise.config import load_config
    from turnwise.engine.vllm_engine import VllmEngine
    from turnwise.modules import (
        Pipeline,
        ReferenceModule,
        RewardModule,
        TrainerModule,
        ValueModule,
        VLLMModule,
    )
    from turnwise.rollout.sampler import RolloutSampler

__version__ = "0.1.0"
__all__ = [
    "Pipeline",
    "ReferenceModule",
    "RewardModule",
    "RolloutSampler",
    "TrainerModule",
    "VLLMModule",
    "ValueModule",
    "VllmEngine",
    "__version__",
    "load_config",
]

_HOMES = {
    "RolloutSampler": "turnwise.rollout.sampler",
    "VllmEngine": "turnwise.engine.vllm_engine",
    "load_config": "turnwise.config",
}
_MODULES = "turnwise.modules"
"""The home of all others."""


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for: most take seconds."""
    if name not in __all__:
        raise AttributeError(f"turnwise has no {name}")
    return getattr(importlib.import_module(_HOMES.get(name, _MODULES)), name)
