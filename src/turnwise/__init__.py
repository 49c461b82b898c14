"""Turnwise: reinforcement learning of tool-calling language models, exact to the token."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turnwise.config import load_config
    from turnwise.engine.vllm_engine import VllmEngine
    from turnwise.rollout.sampler import RolloutSampler

__version__ = "0.1.0"
__all__ = ["RolloutSampler", "VllmEngine", "__version__", "load_config"]

_HOMES = {
    "RolloutSampler": "turnwise.rollout.sampler",
    "VllmEngine": "turnwise.engine.vllm_engine",
    "load_config": "turnwise.config",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for: most take seconds."""
    if name not in _HOMES:
        raise AttributeError(f"turnwise has no {name}")
    return getattr(importlib.import_module(_HOMES[name]), name)
