"""Turnwise: reinforcement learning for tool-calling language models, exact to the token.

This module holds the public API. Most names are imported on first use, because importing them takes
seconds.

Example:
    import turnwise

    result = turnwise.train(model="...", environment=Weather, data=rows, steps=100)
    print(turnwise.evaluate(model=result.checkpoint, environment=Weather, data=rows).accuracy)
"""

import importlib
from typing import TYPE_CHECKING

from turnwise.errors import (
    CompleteError,
    DeadlineError,
    EngineError,
    ExactnessError,
    InputError,
    StepError,
    TrainerError,
    TrajectoryError,
    TurnwiseError,
    WeightUpdateError,
)

if TYPE_CHECKING:
    from turnwise.config import Config, load_config
    from turnwise.engine.function_processor import FunctionProcessor
    from turnwise.engine.vllm_engine import VllmEngine
    from turnwise.rollouts.agent_loop import AgentLoop, RolloutContext
    from turnwise.rollouts.batch_sampler import RolloutSampler
    from turnwise.rollouts.environment import AgentTask, Environment, Rewards
    from turnwise.rollouts.sampler import TrajectorySampler
    from turnwise.rollouts.simulated_user import SimulatedUser
    from turnwise.run.api import evaluate, rollout, serve, sft, train
    from turnwise.run.api import open as open
    from turnwise.run.commands import TrainingResult
    from turnwise.run.opened import Run
    from turnwise.run.program import AsyncRun
    from turnwise.serving.colocated.host import WorkerHost
    from turnwise.tools import Tool
    from turnwise.tools.mcp import MCPServer
    from turnwise.trajectory import (
        ChatTemplate,
        Prompt,
        Trajectory,
        audit,
        bridge,
        replace_prefix_tokens,
    )
    from turnwise.weights.transport import refit_sender

__version__ = "0.1.0"

_PUBLIC = {
    "run.api": ("train", "open", "sft", "evaluate", "rollout", "serve"),
    "run.opened": ("Run",),
    "run.program": ("AsyncRun",),
    "run.commands": ("TrainingResult",),
    "config": ("Config", "load_config"),
    # Your own environment and your own loop.
    "rollouts.environment": ("Environment", "Rewards", "AgentTask"),
    "rollouts.simulated_user": ("SimulatedUser",),
    "tools": ("Tool",),
    "tools.mcp": ("MCPServer",),
    "rollouts.agent_loop": ("AgentLoop", "RolloutContext"),
    "rollouts.batch_sampler": ("RolloutSampler",),
    "engine.function_processor": ("FunctionProcessor",),
    # Engines without training, and exact tokens.
    "serving.colocated.host": ("WorkerHost",),
    "rollouts.sampler": ("TrajectorySampler",),
    "weights.transport": ("refit_sender",),
    "engine.vllm_engine": ("VllmEngine",),
    "trajectory": (
        *("ChatTemplate", "Prompt", "Trajectory"),
        *("audit", "bridge", "replace_prefix_tokens"),
    ),
}
_COMPAT = {
    "bfcl": ("Bfcl",),
    "chatlearn": (
        *("Pipeline", "VLLMModule"),
        *("ReferenceModule", "RewardModule", "TrainerModule", "ValueModule"),
    ),
    "gymnasium": ("Gymnasium",),
    "nemo_gym": ("NemoGym",),
    "nemo_rl": ("VllmAsyncGenerationWorker",),
    "openenv": ("OpenEnv",),
    "reasoning_gym": ("ReasoningGym",),
    "skyrl_gym": ("SkyRLGym",),
    "textarena": ("TextArena",),
    "verl": ("ChatCompletionScheduler", "LLMServerManager"),
}
_MOVED = {name: f"turnwise.compat.{system}" for system, names in _COMPAT.items() for name in names}
"""Names of other systems that this module exported earlier, mapped to their current modules."""
_HOMES = {name: f"turnwise.{module}" for module, names in _PUBLIC.items() for name in names}

# `open` is left out, because a star import would replace Python's own `open`.
__all__ = [
    "AgentLoop",
    "AgentTask",
    "AsyncRun",
    "ChatTemplate",
    "CompleteError",
    "Config",
    "DeadlineError",
    "EngineError",
    "Environment",
    "ExactnessError",
    "FunctionProcessor",
    "InputError",
    "MCPServer",
    "Prompt",
    "Rewards",
    "RolloutContext",
    "RolloutSampler",
    "Run",
    "SimulatedUser",
    "StepError",
    "Tool",
    "TrainerError",
    "TrainingResult",
    "Trajectory",
    "TrajectoryError",
    "TrajectorySampler",
    "TurnwiseError",
    "VllmEngine",
    "WeightUpdateError",
    "WorkerHost",
    "__version__",
    "audit",
    "bridge",
    "evaluate",
    "load_config",
    "refit_sender",
    "replace_prefix_tokens",
    "rollout",
    "serve",
    "sft",
    "train",
]


def __getattr__(name: str) -> object:
    """Import a public name at its first use; for a moved name, raise an error with its new
    module."""
    if name in _MOVED:
        raise ImportError(f"turnwise.{name} is {_MOVED[name]}.{name} now")
    if name not in _HOMES:
        raise AttributeError(f"module 'turnwise' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *__all__})
