"""Turnwise: reinforcement learning of tool-calling language models, exact to the token.

This module holds the public API. Its names are imported on first use, because most of them take
seconds to import.

Example:
    import turnwise

    result = turnwise.train(model="...", environment=Weather, data=rows, steps=100)
    print(turnwise.evaluate(model=result.checkpoint, environment=Weather, data=rows).accuracy)
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from turnwise.compat.bfcl import Bfcl
    from turnwise.compat.gymnasium import Gymnasium
    from turnwise.compat.nemo_gym import NemoGym
    from turnwise.compat.nemo_rl import VllmAsyncGenerationWorker
    from turnwise.compat.openenv import OpenEnv
    from turnwise.compat.reasoning_gym import ReasoningGym
    from turnwise.compat.skyrl_gym import SkyRLGym
    from turnwise.compat.textarena import TextArena
    from turnwise.config import Config, load_config
    from turnwise.engine.vllm_engine import VllmEngine
    from turnwise.errors import (
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
    from turnwise.pipeline import (
        LLMServerManager,
        Pipeline,
        ReferenceModule,
        RewardModule,
        TrainerModule,
        ValueModule,
        VLLMModule,
    )
    from turnwise.rollouts.agent_loop import AgentLoop, RolloutContext
    from turnwise.rollouts.environment import AgentTask, Environment, Rewards
    from turnwise.rollouts.sampler import RolloutSampler
    from turnwise.rollouts.simulated_user import SimulatedUser
    from turnwise.run.api import evaluate, rollout, serve, train
    from turnwise.run.commands import TrainingResult
    from turnwise.serving.chat_scheduler import ChatCompletionScheduler
    from turnwise.tools import Tool
    from turnwise.tools.mcp import MCPServer
    from turnwise.trajectory import (
        ChatTemplate,
        Trajectory,
        audit,
        bridge,
        replace_prefix_tokens,
    )

__version__ = "0.1.0"

_HOMES = {
    # Functions.
    "train": "turnwise.run.api",
    "evaluate": "turnwise.run.api",
    "rollout": "turnwise.run.api",
    "serve": "turnwise.run.api",
    "TrainingResult": "turnwise.run.commands",
    # Configuration.
    "Config": "turnwise.config",
    "load_config": "turnwise.config",
    # Your own environment and your own loop.
    "Environment": "turnwise.rollouts.environment",
    "Rewards": "turnwise.rollouts.environment",
    "AgentTask": "turnwise.rollouts.environment",
    "Bfcl": "turnwise.compat.bfcl",
    "Gymnasium": "turnwise.compat.gymnasium",
    "NemoGym": "turnwise.compat.nemo_gym",
    "OpenEnv": "turnwise.compat.openenv",
    "ReasoningGym": "turnwise.compat.reasoning_gym",
    "SkyRLGym": "turnwise.compat.skyrl_gym",
    "TextArena": "turnwise.compat.textarena",
    "SimulatedUser": "turnwise.rollouts.simulated_user",
    "Tool": "turnwise.tools",
    "MCPServer": "turnwise.tools.mcp",
    "AgentLoop": "turnwise.rollouts.agent_loop",
    "RolloutContext": "turnwise.rollouts.agent_loop",
    # Your own training program.
    "Pipeline": "turnwise.pipeline",
    "VLLMModule": "turnwise.pipeline",
    "ReferenceModule": "turnwise.pipeline",
    "RewardModule": "turnwise.pipeline",
    "TrainerModule": "turnwise.pipeline",
    "ValueModule": "turnwise.pipeline",
    # Engines without training.
    "ChatCompletionScheduler": "turnwise.serving.chat_scheduler",
    "LLMServerManager": "turnwise.compat.verl",
    "RolloutSampler": "turnwise.rollouts.sampler",
    "VllmAsyncGenerationWorker": "turnwise.compat.nemo_rl",
    "VllmEngine": "turnwise.engine.vllm_engine",
    # Exact tokens.
    "ChatTemplate": "turnwise.trajectory",
    "Trajectory": "turnwise.trajectory",
    "audit": "turnwise.trajectory",
    "bridge": "turnwise.trajectory",
    "replace_prefix_tokens": "turnwise.trajectory",
    # Errors.
    "DeadlineError": "turnwise.errors",
    "EngineError": "turnwise.errors",
    "ExactnessError": "turnwise.errors",
    "InputError": "turnwise.errors",
    "StepError": "turnwise.errors",
    "TrainerError": "turnwise.errors",
    "TrajectoryError": "turnwise.errors",
    "TurnwiseError": "turnwise.errors",
    "WeightUpdateError": "turnwise.errors",
}
"""The module of each public name."""

__all__ = [
    "AgentLoop",
    "AgentTask",
    "Bfcl",
    "ChatCompletionScheduler",
    "ChatTemplate",
    "Config",
    "DeadlineError",
    "EngineError",
    "Environment",
    "ExactnessError",
    "Gymnasium",
    "InputError",
    "LLMServerManager",
    "MCPServer",
    "NemoGym",
    "OpenEnv",
    "Pipeline",
    "ReasoningGym",
    "ReferenceModule",
    "RewardModule",
    "Rewards",
    "RolloutContext",
    "RolloutSampler",
    "SimulatedUser",
    "SkyRLGym",
    "StepError",
    "TextArena",
    "Tool",
    "TrainerError",
    "TrainerModule",
    "TrainingResult",
    "Trajectory",
    "TrajectoryError",
    "TurnwiseError",
    "VLLMModule",
    "ValueModule",
    "VllmAsyncGenerationWorker",
    "VllmEngine",
    "WeightUpdateError",
    "__version__",
    "audit",
    "bridge",
    "evaluate",
    "load_config",
    "replace_prefix_tokens",
    "rollout",
    "serve",
    "train",
]


def __getattr__(name: str) -> object:
    """Import a public name on its first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'turnwise' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
