"""Turnwise: reinforcement learning of tool-calling language models, exact to the token.

This module holds the public API. Its names are imported on first use, because most of them take
seconds to import. `turnwise.rollout` is both a subpackage and a function: both
`turnwise.rollout(model=..., ...)` and `from turnwise.rollout import Environment` work.

Example:
    import turnwise

    result = turnwise.train(model="...", environment=Weather, data=rows, steps=100)
    print(turnwise.evaluate(model=result.checkpoint, environment=Weather, data=rows).accuracy)
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
    from turnwise.rollout.agent_loop import AgentLoop, RolloutContext
    from turnwise.rollout.environment import Environment, Rewards
    from turnwise.rollout.foreign.agent_task import AgentTask
    from turnwise.rollout.foreign.bfcl import Bfcl
    from turnwise.rollout.foreign.gymnasium import Gymnasium
    from turnwise.rollout.foreign.nemo_gym import NemoGym
    from turnwise.rollout.foreign.openenv import OpenEnv
    from turnwise.rollout.foreign.reasoning_gym import ReasoningGym
    from turnwise.rollout.foreign.skyrl_gym import SkyRLGym
    from turnwise.rollout.foreign.textarena import TextArena
    from turnwise.rollout.sampler import RolloutSampler
    from turnwise.rollout.simulated_user import SimulatedUser
    from turnwise.run.api import evaluate, rollout, serve, train
    from turnwise.run.commands import TrainingResult
    from turnwise.serving.chat_scheduler import ChatCompletionScheduler
    from turnwise.serving.worker import VllmAsyncGenerationWorker
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
    "Environment": "turnwise.rollout.environment",
    "Rewards": "turnwise.rollout.environment",
    "AgentTask": "turnwise.rollout.foreign.agent_task",
    "Bfcl": "turnwise.rollout.foreign.bfcl",
    "Gymnasium": "turnwise.rollout.foreign.gymnasium",
    "NemoGym": "turnwise.rollout.foreign.nemo_gym",
    "OpenEnv": "turnwise.rollout.foreign.openenv",
    "ReasoningGym": "turnwise.rollout.foreign.reasoning_gym",
    "SkyRLGym": "turnwise.rollout.foreign.skyrl_gym",
    "TextArena": "turnwise.rollout.foreign.textarena",
    "SimulatedUser": "turnwise.rollout.simulated_user",
    "Tool": "turnwise.tools",
    "MCPServer": "turnwise.tools.mcp",
    "AgentLoop": "turnwise.rollout.agent_loop",
    "RolloutContext": "turnwise.rollout.agent_loop",
    # Your own training program.
    "Pipeline": "turnwise.pipeline",
    "VLLMModule": "turnwise.pipeline",
    "ReferenceModule": "turnwise.pipeline",
    "RewardModule": "turnwise.pipeline",
    "TrainerModule": "turnwise.pipeline",
    "ValueModule": "turnwise.pipeline",
    # Engines without training.
    "ChatCompletionScheduler": "turnwise.serving.chat_scheduler",
    "LLMServerManager": "turnwise.pipeline",
    "RolloutSampler": "turnwise.rollout.sampler",
    "VllmAsyncGenerationWorker": "turnwise.serving.worker",
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
    if name == "rollout":  # the subpackage; `_Package` makes it callable
        return importlib.import_module("turnwise.rollout")
    if name not in _HOMES:
        raise AttributeError(f"module 'turnwise' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _CallableRollout(ModuleType):
    """The subpackage `turnwise.rollout`, callable as `turnwise.run.api.rollout`."""

    def __call__(self, *arguments: object, **keys: object) -> object:
        call = importlib.import_module(_HOMES["rollout"]).rollout
        return call(*arguments, **keys)


class _Package(ModuleType):
    """The package `turnwise`; Python sets each imported subpackage as an attribute of it."""

    def __setattr__(self, name: str, value: object) -> None:
        if name == "rollout" and isinstance(value, ModuleType):
            value.__class__ = _CallableRollout
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
