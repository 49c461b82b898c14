"""Modules: a pipeline written as a program of plain calls, around models that sample and judge.

A module says what its prompts, requests and outputs are; a pipeline runs the engines and the
trainer behind it, and keeps the engines at the trainer's weights. `pipeline_file` has the file
that names several models, which `turnwise pipeline` runs without a program. `LLMServerManager` runs
engines alone, for chats and batches of conversations.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turnwise.modules.companions import (
        ReferenceModule,
        RewardModule,
        TrainerModule,
        ValueModule,
    )
    from turnwise.modules.module import VLLMModule
    from turnwise.modules.outputs import CompletionOutput, RequestOutput
    from turnwise.modules.pipeline import Pipeline
    from turnwise.modules.server_manager import LLMServerManager

__all__ = [
    "CompletionOutput",
    "LLMServerManager",
    "Pipeline",
    "ReferenceModule",
    "RequestOutput",
    "RewardModule",
    "TrainerModule",
    "VLLMModule",
    "ValueModule",
]
_PLACES = {
    "CompletionOutput": "outputs",
    "LLMServerManager": "server_manager",
    "Pipeline": "pipeline",
    "RequestOutput": "outputs",
    "VLLMModule": "module",
}


def __getattr__(name: str) -> Any:
    """Import a class when it is first asked for: a pipeline's imports take seconds."""
    if name not in __all__:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f"{__name__}.{_PLACES.get(name, 'companions')}"), name)
